"""What the runs train on, and the models that they begin with: sums of one digit, and Countdown with its steps."""

from __future__ import annotations

import itertools
import operator
import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.arithmetic import (
    ArithmeticTask,
    CharacterTokenizer,
    WarmUp,
    answer_log_probs,
    encode,
    warm_up,
)

SIZES: Mapping[str, Any] = {"hidden_size": 64, "num_experts": 16, "num_experts_per_tok": 4}
STARTS = Path("runs/evidence")
Problem = tuple[str, Sequence[str]]
"""A question, and all answers that are right."""
OPERATIONS: Mapping[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
GREATEST, PRACTISED, KEPT = 99, 600, 64
"""Of Countdown: the largest number of a step, supervised steps, and the problems that a run trains on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Problems, and the policy that a run begins with."""

    problems: Sequence[Problem]
    practise: Callable[[Any, Any], object]
    layers: int
    new_tokens: int
    lr: float

    def start(self, name: str, seed: int) -> tuple[Any, Any]:
        """The model that all arms of a seed begin with, and its tokenizer; practised once, then read from a file."""
        tokenizer = CharacterTokenizer()
        ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id, "bos_token_id": None}
        # every layer has a router
        sizes = {**SIZES, "num_hidden_layers": self.layers, "mlp_only_layers": [], "vocab_size": len(tokenizer)}
        model = make_tiny_moe("qwen3_moe", seed=seed, **sizes, **ids)
        file = STARTS / f"start-{name}-{seed}.pt"
        if file.exists():
            model.load_state_dict(torch.load(file))
        else:
            self.practise(model, tokenizer)
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), part := file.with_suffix(f".{os.getpid()}"))
            part.replace(file)
        return model.eval(), tokenizer


def sums(seed: int) -> Task:
    """``"3+4="`` asks for ``"7"``; a seventh of the start's answers is right."""
    task = ArithmeticTask(operation="sum", digits=1, held_out=20, seed=seed)
    options = WarmUp(mistake="random", noise=0.8, noisy_lr=1e-3, noisy_target=0.15, batch_size=128, max_steps=400)
    return Task(
        problems=[(query, (answer,)) for query, answer in task.train],
        practise=lambda model, tokenizer: warm_up(model, task.train, tokenizer, options, seed),
        layers=3,
        new_tokens=4,
        lr=1e-4,
    )


def countdown(seed: int) -> Task:
    """``"3,7,9=42"`` asks for ``"9-3=6,6*7=42"``: the three numbers, each once, in two steps that are right.

    The second step begins with what the first one gave, and no number is below 0 or above 99.

    The start has learned to compute, and in a tenth of its answers reaches the target: it practised on answers of which
    four in five have the right numbers and steps, and any result. A run trains on 64 of the problems.
    """
    problems, ways = countdown_problems()
    chooser = random.Random(seed)
    chooser.shuffle(problems)

    def practise(model: Any, tokenizer: Any) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
        rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=PRACTISED, pct_start=0.1)
        model.train()
        for _ in range(PRACTISED):
            batch = [
                (query, chooser.choice(right if chooser.random() < 0.2 else ways[query.split("=")[0]]))
                for query, right in chooser.sample(problems, 128)
            ]
            optimizer.zero_grad()
            (-answer_log_probs(model, *encode(batch, tokenizer)).mean()).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            rates.step()

    return Task(problems=problems[:KEPT], practise=practise, layers=4, new_tokens=16, lr=3e-4)


def countdown_problems() -> tuple[list[Problem], dict[str, list[str]]]:
    """All questions with their right answers, and by numbers all answers whose steps are right."""
    problems: list[Problem] = []
    ways: dict[str, list[str]] = {}
    for numbers in itertools.combinations_with_replacement(range(1, 10), 3):
        found: dict[int, list[str]] = {}
        for (a, b, c), (f, g) in itertools.product(
            sorted(set(itertools.permutations(numbers))), itertools.product(OPERATIONS, OPERATIONS)
        ):
            first = OPERATIONS[f](a, b)
            last = OPERATIONS[g](first, c)
            if 0 <= first <= GREATEST and 0 <= last <= GREATEST:
                found.setdefault(last, []).append(f"{a}{f}{b}={first},{first}{g}{c}={last}")
        name = ",".join(map(str, numbers))
        problems += [(f"{name}={result:02}", tuple(right)) for result, right in found.items()]
        ways[name] = [one for right in found.values() for one in right]
    return problems, ways


TASKS: Mapping[str, Callable[[int], Task]] = {"sums": sums, "countdown": countdown}
