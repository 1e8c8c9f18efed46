"""A host passes calls on to its collector, and tells an end from an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.collecting import Questions, chat, policy_of, queries
from torchrl_moe.collectors.collector_host import CollectorHost, unpack
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


def failing(query: str) -> float:
    raise ZeroDivisionError(query)


def test_batches_come_in_a_tuple_and_the_end_is_an_empty_one(host: Callable[..., CollectorHost]) -> None:
    made = host(total_dialog_turns=4)
    assert [queries(*unpack(made.next())) for _ in range(2)] == [["q0", "q0"], ["q1", "q1"]]
    assert [unpack(made.next()) for _ in range(2)] == [(), ()]


def test_an_error_is_raised_again_and_is_no_end(host: Callable[..., CollectorHost]) -> None:
    made = host(chat(2, reward=failing))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="q0"):
            made.next()


def test_what_the_collectors_constructor_refuses_is_raised() -> None:
    with pytest.raises(ValueError, match="either policy= or policy_factory="):
        CollectorHost().make("AsyncLLMCollector", {"env": chat(2)})


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
    assert made.read("policy_version") == 7
    assert [entry.version for entry in engine.replica_table] == [6, 7]
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


def test_held_out_prompts_are_answered(host: Callable[..., CollectorHost]) -> None:
    found = host().evaluate(chat(1), 3, Questions(8), {"max_new_tokens": 2})
    assert queries(found) == ["q0", "q1", "q2"]
    assert {len(row["tokens", "response"]) for row in found.unbind(0)} == {2}
