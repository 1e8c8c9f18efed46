"""The losses in plain loops over float64 scalars, straight from the papers' equations: what tests compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from support.rollouts import CURRENT_VERSION, BigramActor, dense, ragged, samples, total

SHAPES = [(2, 3), (1, 4), (3, 1)]


@dataclass
class Answer:
    """The tokens of one response."""

    pi: list[Tensor]  # log-probs
    mu: list[Tensor]
    prox: list[Tensor]
    ref: list[Tensor]
    entropy: list[Tensor]
    age: list[int]
    advantage: list[float]


def answers(actor: BigramActor, rollouts: Sequence[TensorDict]) -> list[Answer]:
    out = []
    for rollout in rollouts:
        ids, prompt = rollout["tokens", "full"].tolist(), len(rollout["tokens", "prompt"])
        places, given = range(prompt, len(ids)), rollout["advantage"][:, 0].tolist()
        rows = [actor.logits[ids[t - 1]].log_softmax(-1) for t in places]
        answer = Answer(
            pi=[row[ids[t]] for row, t in zip(rows, places, strict=True)],
            mu=[rollout["log_probs", "full"][t] for t in places],
            prox=[rollout["prox_log_prob"][t] for t in places],
            ref=[rollout["next", "ref_log_probs", "full"][t] for t in places],
            entropy=[-(row.exp() * row).sum() for row in rows],
            age=[CURRENT_VERSION - int(rollout["policy_versions", "full"][t]) for t in places],
            advantage=[given[0 if len(given) == 1 else t] for t in places],
        )
        out.append(answer)
    return out


def clip(ratio: Tensor, low: float, high: float) -> Tensor | float:
    return low if ratio < low else high if ratio > high else ratio


def token_mean(losses: Sequence[Sequence[Tensor]]) -> Tensor:
    every = [loss for row in losses for loss in row]
    return sum(every) / len(every)  # type: ignore[return-value]


def prompt_mean(losses: Sequence[Sequence[Tensor]]) -> Tensor:
    return sum(sum(row) / len(row) for row in losses) / len(losses)  # type: ignore[return-value]


def fixed_length(losses: Sequence[Sequence[Tensor]]) -> Tensor:
    """Of 5 tokens."""
    return sum(sum(row) for row in losses) / (5 * len(losses))  # type: ignore[return-value]


def check_against(
    build: Callable[[BigramActor], Any],
    loss_of: Callable[[Answer], Sequence[Tensor]],
    mean: Callable[[Sequence[Sequence[Tensor]]], Tensor],
    per_token_advantages: bool = False,
    seeds: Sequence[int] = (0, 1),
) -> None:
    """Assert that the objective of a loss and its gradient, are those of the loops."""
    for seed in seeds:
        rollouts, actor = samples(SHAPES, seed), BigramActor(seed)
        if per_token_advantages:
            for rollout in rollouts:
                rollout["advantage"] = torch.randn(len(rollout["tokens", "full"]), 1, dtype=torch.float64)
        expected = mean([loss_of(answer) for answer in answers(actor, rollouts)])
        for layout in (ragged, dense):
            got = total(build(actor)(layout(rollouts)))
            torch.testing.assert_close(got, expected)
            gradients = [torch.autograd.grad(value, actor.logits, retain_graph=True)[0] for value in (got, expected)]
            torch.testing.assert_close(*gradients)
            assert gradients[0].abs().max() > 1e-4
