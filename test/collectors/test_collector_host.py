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
def engine() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        yield engine


@pytest.fixture
def host(engine: FakeAsyncVLLM) -> Iterator[Callable[..., CollectorHost]]:
    """Makes hosts of a collector of groups of 2, and shuts them down."""
    made: list[CollectorHost] = []

    def make(env: Any = None, **kwargs: Any) -> CollectorHost:
        made.append(CollectorHost())
        arguments = {"policy": policy_of(engine), "dataloader": Questions(), "group_size": 2, "order": "fifo", **kwargs}
        assert made[-1].make("AsyncLLMCollector", {"env": env or chat(2), **arguments}) == 2 * (
            kwargs.get("groups_per_batch") or 1
        )
        return made[-1]

    yield make
    for one in made:
        one.shutdown(None, True)


def test_a_host_without_a_collector_was_restarted() -> None:
    host = CollectorHost()
    for ask in (host.next, host.increment_version, lambda: host.call("stats"), lambda: host.read("policy_version")):
        with pytest.raises(CollectionError, match="Ray has restarted"):
            ask()
    host.shutdown(None, True)


def test_a_weight_update_counts_at_once_though_the_table_has_not_heard_of_it(
    host: Callable[..., CollectorHost], engine: FakeAsyncVLLM
) -> None:
    made = host()
    engine.replicas[0].version, engine.replicas[1].version = 6, 7  # as another driver brings them
    assert made.read("policy_version") == 0
    made.increment_version()
    assert (made.read("policy_version"), [entry.version for entry in engine.replica_table]) == (7, [6, 7])
    engine.replicas[0].die()
    engine.replicas[1].version = 8
    made.increment_version()
    assert made.read("policy_version") == 8


def test_a_postproc_is_set_once(host: Callable[..., CollectorHost]) -> None:
    made = host()
    made.set_postproc(lambda batch: batch[:1])
    assert queries(*unpack(made.next())) == ["q0"]
    with pytest.raises(RuntimeError, match="postproc is set already"):
        made.set_postproc(lambda batch: batch)


def test_pauses_are_left_in_turn(host: Callable[..., CollectorHost]) -> None:
    made = host()
    for resume in (True, True, False):
        made.pause(resume)
    assert made._made._rollouts.pauses == 3
    made.end_pause()
    assert made._made._rollouts.pauses == 3  # it was to stay
    made.end_pause()
    made.end_pause()
    assert made._made._rollouts.pauses == 1


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
