"""A host passes calls on to its collector, and tells an end from an error; what it packs is unpacked as it was."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from support.collecting import Questions, chat, plain, policy_of, queries
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.collector_host import CollectorHost, pack, unpack
from torchrl_moe.errors import CollectionError
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def host(engine: FakeAsyncVLLM) -> Iterator[CollectorHost]:
    """Of a collector of groups of 2."""
    made, arguments = CollectorHost(), {"policy": policy_of(engine), "dataloader": Questions(), "group_size": 2}
    assert made.make("AsyncLLMCollector", {"env": chat(2), "order": "fifo", **arguments}) == 2
    yield made
    made.shutdown(None, True)


def test_a_host_without_a_collector_was_restarted() -> None:
    host = CollectorHost()
    for ask in (host.next, host.increment_version, lambda: host.call("stats"), lambda: host.read("policy_version")):
        with pytest.raises(CollectionError, match="Ray has restarted"):
            ask()
    host.shutdown(None, True)


def test_a_weight_update_counts_at_once_though_the_table_has_not_heard_of_it(
    host: CollectorHost, engine: FakeAsyncVLLM
) -> None:
    engine.replicas[0].version, engine.replicas[1].version = 6, 7  # as another driver brings them
    assert host.read("policy_version") == 0
    host.increment_version()
    assert (host.read("policy_version"), [entry.version for entry in engine.replica_table]) == (7, [6, 7])
    engine.replicas[0].die()
    engine.replicas[1].version = 8
    host.increment_version()
    assert host.read("policy_version") == 8


def test_a_postproc_is_set_once(host: CollectorHost) -> None:
    host.set_postproc(lambda batch: batch[:1])
    assert queries(*unpack(host.next())) == ["q0"]
    with pytest.raises(RuntimeError, match="postproc is set already"):
        host.set_postproc(lambda batch: batch)


def test_pauses_are_left_in_turn(host: CollectorHost) -> None:
    for resume in (True, True, False):
        host.pause(resume)
    assert host._made._rollouts.pauses == 3
    host.end_pause()
    assert host._made._rollouts.pauses == 3  # it was to stay
    host.end_pause()
    host.end_pause()
    assert host._made._rollouts.pauses == 1


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


def test_gradients_strides_rows_and_what_is_no_tensor_come_back() -> None:
    value = [torch.ones(2, requires_grad=True), torch.arange(6).reshape(2, 3).T, "text", None, lambda: 3]
    leaf, turned, text, nothing, function = unpack(pack(value))
    assert leaf.requires_grad
    assert (turned.tolist(), text, nothing, function()) == ([[0, 3], [1, 4], [2, 5]], "text", None, 3)
    rows = lazy_stack([TensorDict(ids=torch.arange(n)) for n in (1, 3)])
    assert [row["ids"].tolist() for row in unpack(pack(rows)).unbind(0)] == [[0], [0, 1, 2]]  # their lengths are kept
    assert len(pack(torch.zeros(1 << 16)[:4])) < 1000  # a view goes without what lies around it


def test_a_collected_batch_comes_back(collect: Callable[..., AsyncLLMCollector]) -> None:
    batch: Any = next(iter(collect()))
    found = unpack(pack(batch))
    assert type(found) is type(batch)
    assert type(found[0]["routed_experts"]) is type(batch[0]["routed_experts"])
    assert list(map(plain, found.unbind(0))) == list(map(plain, batch.unbind(0)))
