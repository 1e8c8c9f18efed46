"""Batches as bytes: what comes back is what was packed, in memory of its own."""

from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.data.llm import History

from torchrl_moe.data import RoutedExperts
from torchrl_moe.data.packed import pack, unpack

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (0, 4)])
def test_a_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = (torch.rand(shape) * 5).to(dtype)
    found = unpack(pack(value))
    assert found.dtype == dtype and torch.equal(found, value)
    found.zero_()  # it may be written to


def test_a_view_is_packed_without_what_it_is_a_view_of() -> None:
    whole = torch.arange(1 << 20)
    found = unpack(pack([whole[3:8:2], whole.view(2, -1).T[:2]]))
    assert found[0].tolist() == [3, 5, 7] and found[1].tolist() == [[0, 1 << 19], [1, (1 << 19) + 1]]
    assert len(pack(whole[3:8:2])) < 1000
    for shape in ((1,), (1, 1), (3, 2)):  # one number that stands for many
        assert torch.equal(unpack(pack(torch.tensor(2.5).expand(shape))), torch.full(shape, 2.5))


def test_rows_of_other_lengths_with_classes_and_texts() -> None:
    rows = []
    for length in (3, 5):
        row = TensorDict({"tokens": {"full": torch.arange(length)}, "finish_reason": "stop"})
        row["routed_experts"] = RoutedExperts(full=torch.full((length, 2, 1), 3, dtype=torch.int8))
        row["history"] = History(role=["user"], content=[f"question {length}"], batch_size=[1])
        rows.append(row)
    found = unpack(pack(lazy_stack(rows)))
    assert found.batch_size == (2,)
    for row, own in zip(found.unbind(0), rows, strict=True):
        assert torch.equal(row["tokens", "full"], own["tokens", "full"])
        assert type(row["routed_experts"]) is RoutedExperts
        assert torch.equal(row["routed_experts", "full"], own["routed_experts", "full"])
        assert row["history"].content == own["history"].content and row["finish_reason"] == "stop"


def test_what_has_no_plain_memory_or_a_gradient_and_functions_come_back() -> None:
    odd = [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.ones(2, device="meta")]
    nested, meta, leaf, function = unpack(pack([*odd, torch.ones(2, requires_grad=True), lambda: 3]))
    assert [len(part) for part in nested.unbind()] == [2, 3] and meta.shape == (2,) and meta.is_meta
    assert leaf.requires_grad and function() == 3
