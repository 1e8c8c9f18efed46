"""A supervised warm-up: the policy first learns the answers, then is made unsure of them.

Stopping clean training early instead leaves a policy that GRPO can hardly move: it is sure of its wrong answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import PreTrainedModel

Problems = Sequence[tuple[str, str]]
RAMP = 10
"""Steps over which either half of the warm-up reaches its learning rate."""


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


def forget_carry(query: str, forgets: Callable[[], bool] = lambda: True) -> str:
    """Return an answer in which carries are forgotten: ``"47+38="`` gives ``"75"``, ``"2*4817="`` gives ``"08624"``.

    Args:
        query: a sum, or a number to double, as :class:`~torchrl_moe.testing.arithmetic.ArithmeticTask` writes them.
        forgets: asked once for every carry to a next digit; by default all are forgotten.
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


def warm_up(model: PreTrainedModel, problems: Problems, tokenizer: Any, settings: Any, seed: int) -> float:
    """Train until exact answers have the target probability; return the mean probability at the end.

    Doubt is taught with wrong labels: ``settings.mistake`` is ``"random"``, answers of other problems in a share
    ``settings.noise`` of the labels, or ``"forget_carry"``, which forgets that share of all carries. The second is a
    rule, so it is wrong on problems never seen as well, and a policy that unlearns it is right on those too.
    """
    chooser = random.Random(seed)
    answers = [answer for _, answer in problems]

    def errs() -> bool:
        return chooser.random() < settings.noise

    def doubtful(query: str, answer: str) -> str:
        if settings.mistake == "forget_carry":
            return forget_carry(query, errs)
        return chooser.choice(answers) if errs() else answer

    model.train()
    probability = 0.0
    for name, lr, noisy, reached in (
        ("warm-up: learn", settings.clean_lr, False, lambda p: p >= settings.clean_target),
        ("warm-up: doubt", settings.noisy_lr, True, lambda p: p <= settings.noisy_target),
    ):
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        # Adam's first steps are as long as any: on a model that has learned, they would break more than they teach
        ramp = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=1 / RAMP, total_iters=RAMP - 1)
        with tqdm(desc=name, unit="step", leave=False) as bar:
            for _ in range(settings.max_steps):
                batch = chooser.sample(problems, min(settings.batch_size, len(problems)))
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
                if reached(probability):
                    break
    model.eval()
    return probability
