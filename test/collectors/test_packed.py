"""What is unpacked is what was packed, in memory of its own, and a view is sent without what lies around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from support.collecting import Questions, chat, plain, policy_of
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.collector_host import pack, unpack
from torchrl_moe.testing import FakeAsyncVLLM

DTYPES = [torch.float32, torch.float64, torch.float16, torch.int8, torch.int64, torch.bool, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 2)])
def test_tensors_of_every_kind_come_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    before = torch.arange(6)[: torch.Size(shape).numel()].reshape(shape).to(dtype)
    after = unpack(pack(before))
    assert (after.dtype, after.shape) == (dtype, before.shape)
    assert torch.equal(after, before)
    after.fill_(1)  # it may be written, and is not the first one
    assert torch.equal(before, torch.arange(6)[: before.numel()].reshape(shape).to(dtype))


def test_gradients_strides_and_what_is_no_tensor_come_back() -> None:
    value = [torch.ones(2, requires_grad=True), torch.arange(6).reshape(2, 3).T, "text", None, lambda: 3]
    leaf, turned, text, nothing, function = unpack(pack(value))
    assert leaf.requires_grad
    assert turned.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (text, nothing, function()) == ("text", None, 3)


def test_a_view_is_sent_without_what_lies_around_it() -> None:
    row = torch.zeros(1 << 16)[:4]
    assert len(pack(row)) < 1000


def test_ragged_rows_keep_their_lengths() -> None:
    rows = lazy_stack([TensorDict(ids=torch.arange(n)) for n in (1, 3)])
    assert [row["ids"].tolist() for row in unpack(pack(rows)).unbind(0)] == [[0], [0, 1, 2]]


def test_a_collected_batch_comes_back() -> None:
    with FakeAsyncVLLM() as engine:
        collector = AsyncLLMCollector(chat(2), policy=policy_of(engine), dataloader=Questions(), group_size=2)
        batch: Any = next(iter(collector))
        collector.shutdown()
    found = unpack(pack(batch))
    assert type(found) is type(batch)
    assert type(found[0]["routed_experts"]) is type(batch[0]["routed_experts"])
    assert list(map(plain, found.unbind(0))) == list(map(plain, batch.unbind(0)))
