"""A supervised warm-up: the policy first learns the answers, then is made uncertain of them.

Stopping clean training early instead leaves a policy that GRPO can hardly improve: it is confident in its wrong
answers.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

__all__ = ["MISTAKES", "WarmUp", "answer_log_probs", "encode", "forget_carry", "warm_up"]

Problems: TypeAlias = Sequence[tuple[str, str]]
"""Questions with their answers."""
MISTAKES = ("random", "forget_carry")
RAMP = 10
"""Steps over which the learning rate of either half rises to its value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmUp:
    """Options of :func:`warm_up`.

    Args:
        clean_lr: learning rate of the first half, which learns correct answers.
        clean_target: probability of the exact answer at which the first half ends.
        noisy_lr: learning rate of the second half, which makes the policy uncertain.
        noise: share of carries forgotten, or of random labels, in the second half.
        noisy_target: probability of the exact answer at which the second half ends.
        mistake: ``"forget_carry"``, which is a rule, so that unlearning it generalises to new problems; ``"random"``,
            answers of other problems.
        batch_size: problems per step.
        max_steps: greatest number of steps of either half.

    >>> WarmUp(noise=0.7).noise
    0.7
    """

    clean_lr: float = 3e-3
    clean_target: float = 0.9
    noisy_lr: float = 3e-4
    noise: float = 0.6
    noisy_target: float = 0.25
    mistake: Literal["random", "forget_carry"] = "forget_carry"
    batch_size: int = 128
    max_steps: int = 400

    def check(self) -> None:
        """Refuse invalid options.

        Raises:
            ValueError: a rate that is not positive, a share or probability outside 0..1, a number of problems or steps
                that is not a positive integer, or an unknown mistake.

        >>> WarmUp(noise=2).check()
        Traceback (most recent call last):
        ValueError: noise must be in 0..1, got 2
        """
        for name in ("clean_lr", "noisy_lr"):
            rate = getattr(self, name)
            if not 0 < rate < math.inf:
                raise ValueError(f"{name} must be positive, got {rate}")
        for name in ("clean_target", "noise", "noisy_target"):
            share = getattr(self, name)
            if not 0 <= share <= 1:
                raise ValueError(f"{name} must be in 0..1, got {share}")
        for name in ("batch_size", "max_steps"):
            count = getattr(self, name)
            if not isinstance(count, int) or count < 1:
                raise ValueError(f"{name} must be a positive whole number, got {count}")
        if self.mistake not in MISTAKES:
            raise ValueError(f"mistake must be one of {', '.join(MISTAKES)}, got {self.mistake!r}")


def encode(problems: Problems, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return ids and labels, int64 ``[B, T]`` (-100 outside the answer and its end), padded on the right."""
    rows, labels = [], []
    for query, answer in problems:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": query}], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        reply = [*tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        rows.append(prompt + reply)
        labels.append([-100] * len(prompt) + reply)
    length = max(map(len, rows))
    ids = torch.tensor([row + [tokenizer.pad_token_id] * (length - len(row)) for row in rows])
    return ids, torch.tensor([row + [-100] * (length - len(row)) for row in labels])


def answer_log_probs(model: PreTrainedModel, ids: Tensor, labels: Tensor) -> Tensor:
    """Return the log-probability of each whole answer, float32 ``[B]``, of :func:`encode`'s ids and labels."""
    logits = model(ids).logits[:, :-1]
    target = labels[:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return (log_probs * (target != -100)).sum(-1)


def forget_carry(query: str, forgets: Callable[[], bool] = lambda: True) -> str:
    """Return an answer in which carries are forgotten: ``"47+38="`` gives ``"75"``, ``"2*4817="`` gives ``"08624"``.

    Args:
        query: a sum, or a number to double, as :class:`~torchrl_moe.testing.arithmetic.ArithmeticTask` writes them.
        forgets: called once for every carry to a next digit, returns whether it is forgotten; by default all are.
    """
    doubled = query.startswith("2*")
    first, second = [query[2:-1]] * 2 if doubled else query.rstrip("=").split("+")
    a, b = int(first), int(second)
    total, place, carry = 0, 1, 0
    while max(a, b) >= 10:
        digit = a % 10 + b % 10 + carry
        carry = int(digit >= 10 and not forgets())
        total += digit % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return str(total + (a + b + carry) * place).zfill(len(first) + 1 if doubled else 0)


def warm_up(model: PreTrainedModel, problems: Problems, tokenizer: Any, options: WarmUp, seed: int) -> float:
    """Train until exact answers have the target probability; return the mean probability at the end.

    Uncertainty is taught with wrong labels. With ``options.mistake="random"``, a share ``options.noise`` of the labels
    are answers of other problems; with ``"forget_carry"``, that share of all carries is forgotten. The second is a
    rule, so it also gives wrong answers to unseen problems, and a policy that unlearns it is right on those too.

    Args:
        model: trained in place, and left in eval mode.
        problems: questions, each asked as one user message, with their answers.
        tokenizer: with a chat template, a pad and an eos token.
        options: rates, targets and limits.
        seed: of the choice of problems and mistakes; torch's generators are neither read nor set.

    Raises:
        ValueError: invalid options, or no problems.
    """
    options.check()
    if not problems:
        raise ValueError("there are no problems to warm up on")
    chooser = random.Random(seed)
    answers = [answer for _, answer in problems]

    def errs() -> bool:
        return chooser.random() < options.noise

    def doubtful(query: str, answer: str) -> str:
        if options.mistake == "forget_carry":
            return forget_carry(query, errs)
        return chooser.choice(answers) if errs() else answer

    model.train()
    probability = 0.0
    for name, lr, noisy in (
        ("warm-up: learn", options.clean_lr, False),
        ("warm-up: doubt", options.noisy_lr, True),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        # Adam's first steps are as large as any later one: without warm-up they would damage a trained model
        ramp = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / RAMP, total_iters=RAMP - 1)
        with tqdm(desc=name, unit="step", leave=False, disable=None) as bar:
            for _ in range(options.max_steps):
                batch = chooser.sample(problems, min(options.batch_size, len(problems)))
                labelled = [(query, doubtful(query, answer)) for query, answer in batch] if noisy else batch
                log_probs = answer_log_probs(model, *encode(labelled, tokenizer))
                optimizer.zero_grad()
                (-log_probs.mean()).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                ramp.step()
                if noisy:
                    with torch.no_grad():
                        log_probs = answer_log_probs(model, *encode(batch, tokenizer))
                probability = log_probs.detach().exp().mean().item()
                bar.set_postfix_str(f"P(answer)={probability:.2f}")
                bar.update()
                if probability <= options.noisy_target if noisy else probability >= options.clean_target:
                    break
    model.eval()
    return probability
