"""Faults on purpose do what they say; that checks notice them is shown where a run is checked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict, lazy_stack

from torchrl_moe.testing.fake_engine import shift_routes, shuffle_advantages, wrong_ids

ROUTES = torch.tensor([[[0, 1]], [[2, 3]], [[3, 0]], [[-1, -1]]], dtype=torch.int8)


def batch_of(count: int) -> Any:
    rows = [{"routed_experts": {"full": ROUTES}, "advantage": torch.full((1, 1), float(i))} for i in range(count)]
    return lazy_stack([TensorDict(row) for row in rows])


def spoiled(fault: Any) -> Any:
    trainer = SimpleNamespace(collector=SimpleNamespace(postproc=None))
    fault(trainer)
    return trainer.collector.postproc(batch_of(2))[1]["routed_experts", "full"].tolist()


def test_each_token_has_the_experts_of_the_one_before() -> None:
    assert spoiled(shift_routes) == [[[-1, -1]], [[0, 1]], [[2, 3]], [[3, 0]]]


def test_each_token_has_the_next_experts() -> None:
    assert spoiled(wrong_ids) == [[[1, 2]], [[3, 0]], [[0, 1]], [[-1, -1]]]


def test_advantages_change_places() -> None:
    torch.manual_seed(0)
    found: list[Any] = []
    trainer = SimpleNamespace(register_op=lambda stage, hook: found.append((stage, hook)))
    shuffle_advantages(trainer)
    ((stage, hook),) = found
    values = [float(row["advantage"]) for row in hook(batch_of(20)).unbind(0)]
    assert stage == "batch_process"
    assert sorted(values) == list(range(20)) != values
