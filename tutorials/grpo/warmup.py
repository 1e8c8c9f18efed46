"""A supervised warm-up: the policy first learns the answers, then is made unsure of them.

Stopping clean training early instead leaves a policy that GRPO can hardly move: it is sure of its wrong answers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

Problems = Sequence[tuple[str, str]]


def encode(problems: Problems, tokenizer: Any) -> tuple[Tensor, Tensor]:
    """Return ids ``[B, T]`` and labels ``[B, T]`` (-100 outside the answer), padded on the right."""
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
    """Return the log-probability of each whole answer, ``[B]``."""
    logits = model(ids).logits[:, :-1]
    target = labels[:, 1:]
    log_probs = logits.log_softmax(-1).gather(-1, target.clamp(min=0)[..., None])[..., 0]
    return (log_probs * (target != -100)).sum(-1)


def forget_carry(query: str) -> str:
    """Return the sum of ``"a+b="`` with every carry forgotten: ``"47+38="`` gives ``"75"``, ``"67+58="`` ``"115"``."""
    a, b = (int(number) for number in query.rstrip("=").split("+"))
    total, place = 0, 1
    while max(a, b) >= 10:
        total += (a % 10 + b % 10) % 10 * place
        a, b, place = a // 10, b // 10, place * 10
    return str(total + (a + b) * place)


def warm_up(model: PreTrainedModel, problems: Problems, tokenizer: Any, settings: Any, seed: int) -> float:
    """Train until exact answers have the target probability; return the mean probability at the end.

    Doubt is taught with wrong labels: ``settings.mistake`` is ``"random"``, answers of other problems, or
    ``"forget_carry"``, a rule that is wrong on some problems, seen and unseen, and right on the others.
    """
    deadline = time.monotonic() + settings.max_seconds
    chooser = random.Random(seed)
    answers = [answer for _, answer in problems]

    def mistake(query: str) -> str:
        return forget_carry(query) if settings.mistake == "forget_carry" else chooser.choice(answers)

    model.train()
    probability = 0.0
    for name, lr, noise, reached in (
        ("warm-up: learn", settings.clean_lr, 0.0, lambda p: p >= settings.clean_target),
        ("warm-up: doubt", settings.noisy_lr, settings.noise, lambda p: p <= settings.noisy_target),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        with tqdm(desc=name, unit="step", leave=False) as bar:
            while time.monotonic() < deadline:
                batch = chooser.sample(problems, min(settings.batch_size, len(problems)))
                truth = encode(batch, tokenizer)
                noisy = [(q, mistake(q) if chooser.random() < noise else a) for q, a in batch]
                ids, labels = encode(noisy, tokenizer) if noise else truth
                loss = -answer_log_probs(model, ids, labels).mean()
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                with torch.no_grad():
                    probability = answer_log_probs(model, *truth).exp().mean().item()
                bar.set_postfix_str(f"P(answer)={probability:.2f}")
                bar.update()
                if reached(probability):
                    break
    model.eval()
    return probability
