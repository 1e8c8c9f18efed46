"""What a batch says of its requests, in every form in which a TensorDict holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from torchrl_moe.modules.policies.wrapper_arguments import request_arguments


def batch(key: str, value: Any) -> list[TensorDictBase]:
    td = TensorDict({"x": torch.zeros(2)}, batch_size=[2])
    td.set(key, value)
    return list(td.unbind(0))


def lazy(key: str, *values: Any) -> list[TensorDictBase]:
    return list(lazy_stack([TensorDict({key: value}) for value in values]).unbind(0))


def test_absent_keys_are_no_arguments() -> None:
    assert request_arguments([TensorDict({"text": "a"}), TensorDict()]) == {}
    assert request_arguments([]) == {}


@pytest.mark.parametrize(
    "samples",
    [
        batch("group_id", torch.tensor([3, 4])),
        batch("group_id", torch.tensor([[3], [4]], dtype=torch.int8)),
        batch("group_id", [3, 4]),
        batch("group_id", NonTensorStack(3, 4)),
        batch("group_id", NonTensorStack(NonTensorStack(3), NonTensorStack(4))),
        lazy("group_id", 3, torch.tensor([4])),
    ],
    ids=["tensor", "column", "list", "stack", "stack of stacks", "lazy"],
)
def test_numbers(samples: list[TensorDictBase]) -> None:
    assert request_arguments(samples) == {"group_ids": [3, 4]}


@pytest.mark.parametrize(
    "samples",
    [
        batch("session_id", ["a", "b"]),
        batch("session_id", NonTensorStack("a", "b")),
        lazy("session_id", "a", "b"),
        lazy("session_id", NonTensorData("a"), NonTensorData("b")),
    ],
    ids=["list", "stack", "lazy", "lazy data"],
)
def test_text(samples: list[TensorDictBase]) -> None:
    assert request_arguments(samples) == {"session_ids": ["a", "b"]}


@pytest.mark.parametrize(
    "samples",
    [
        batch("request_context", [{"k": 1}, {"k": 2}]),
        batch("request_context", NonTensorStack({"k": 1}, {"k": 2})),
        batch("request_context", TensorDict(k=torch.tensor([1, 2]), batch_size=[2])),
        lazy("request_context", NonTensorData({"k": 1}), NonTensorData({"k": 2})),
        lazy("request_context", {"k": 1}, {"k": 2}),
    ],
    ids=["list", "stack", "tensordict", "lazy", "lazy tensordicts"],
)
def test_contexts(samples: list[TensorDictBase]) -> None:
    assert request_arguments(samples) == {"request_context": [{"k": 1}, {"k": 2}]}


def test_one_value_for_all() -> None:
    td = TensorDict({"min_version": NonTensorData(4, batch_size=[2])}, batch_size=[2])
    assert request_arguments(list(td.unbind(0))) == {"min_version": [4, 4]}


@pytest.mark.parametrize("key", ["session_id", "group_id", "min_version"])
def test_minus_one_and_nothing_are_unset(key: str) -> None:
    name = {"session_id": "session_ids", "group_id": "group_ids"}.get(key, key)
    assert request_arguments(batch(key, torch.tensor([-1, 0]))) == {name: [None, 0]}
    assert request_arguments(batch(key, NonTensorStack(None, 0))) == {name: [None, 0]}


def test_a_priority_of_minus_one_is_one_and_the_default_is_zero() -> None:
    assert request_arguments(batch("priority", torch.tensor([-1, 2]))) == {"priority": [-1, 2]}
    assert request_arguments(batch("priority", NonTensorStack(None, 2))) == {"priority": [0, 2]}


def test_samples_of_a_lazy_stack_may_lack_keys() -> None:
    samples = [TensorDict({"priority": 2}), TensorDict({"group_id": "g"}), TensorDict()]
    stack = lazy_stack(samples)
    assert request_arguments(list(stack.unbind(0))) == {"priority": [2, 0, 0], "group_ids": [None, "g", None]}


def test_a_sample_has_one_value() -> None:
    with pytest.raises(ValueError, match=r"sample 1: 'session_id' is \['c', 'd'\]; give each sample one value"):
        request_arguments([TensorDict({"session_id": "a"}), TensorDict({"session_id": NonTensorStack("c", "d")})])
