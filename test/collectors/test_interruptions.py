"""A collector that is interrupted, shut down by another thread, forgotten or forked loses no prompt."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from typing import Any

import pytest
from torchrl.data import LazyStackStorage, ReplayBuffer

from support.collecting import Questions, chat, new_weights, policy_of, queries
from support.interrupts import Interrupt
from support.processes import exit_code_of
from support.services import submitted
from support.waiting import HOUR, in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector, environments
from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.testing import FakeAsyncVLLM

Collect = Callable[..., AsyncLLMCollector]


@pytest.fixture
def collect(collect: Collect) -> Collect:
    """Makes collectors of two groups of 2 a batch, in order."""
    return partial(collect, groups_per_batch=2, order="fifo")


def prompts(batch: Any) -> list[str]:
    return queries(batch)[::2]


def waiting(state: dict[str, Any]) -> list[str]:
    """The prompts that a state brings back."""
    data = [*state["prompts"]["again"].values(), *(entry["data"] for entry in state["ready"])]
    return sorted(one["query"] for one in data)


# -- interrupted ------------------------------------------------------------------------------------------------------


def test_a_batch_that_a_ctrl_c_kept_from_the_trainer_is_in_the_state_and_comes_next(
    collect: Collect, engine: FakeAsyncVLLM, interrupt: Interrupt
) -> None:
    collector, after = collect(max_staleness=0), collect()
    engine.pause()
    interrupt(lambda: len(submitted(engine)) == 4)
    with pytest.raises(KeyboardInterrupt):
        collector.next()
    engine.resume()
    until(lambda: "inference/staleness_max" in collector.stats())  # the batch is made
    state = collector.state_dict()
    assert (state["frames"], waiting(state)) == (0, ["q0", "q1"])
    after.load_state_dict(state)
    assert prompts(next(iter(after))) == prompts(collector.next()) == ["q0", "q1"]
    assert waiting(collector.state_dict()) == []
    assert prompts(next(iter(collector))) == ["q2", "q3"]


def test_a_batch_that_its_postproc_fails_at_is_in_the_state_and_the_error_is_raised_again(collect: Collect) -> None:
    def fail(batch: Any) -> Any:
        raise ArithmeticError("no")

    collector = collect(max_staleness=0, postproc=fail)
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            next(iter(collector))
    state = collector.state_dict()
    assert (state["frames"], waiting(state)) == (0, ["q0", "q1"])


def test_what_is_on_its_way_to_the_buffer_is_in_the_state(collect: Collect) -> None:
    """A state that is saved with a buffer has what that has not, also while it is written to."""
    states: list[tuple[dict[str, Any], int]] = []

    class Watched(ReplayBuffer):
        def extend(self, data: Any, **kwargs: Any) -> Any:
            states.append((collector.state_dict(), self.write_count))
            return super().extend(data, **kwargs)

    buffer = Watched(storage=LazyStackStorage(64))
    collector = collect(replay_buffer=buffer, max_staleness=0, total_dialog_turns=10)  # and ends after so many
    assert (list(islice(collector, 9)), [count for _, count in states]) == ([None] * 3, [0, 4, 8])
    assert collector.stats()["completed"]
    for state, count in states:
        assert (state["frames"], 2 * (state["prompts"]["position"] - len(waiting(state)))) == (count, count)


def test_two_threads_share_the_batches(collect: Collect) -> None:
    collector = collect()
    threads = [in_thread(lambda: [prompts(batch) for batch in islice(collector, 5)]) for _ in range(2)]
    seen = [query for thread in threads for batch in thread.result(60) for query in batch]
    assert sorted(seen) == sorted(f"q{i}" for i in range(20))


def test_a_group_that_is_dropped_while_it_is_judged_leaves_the_environment_to_the_others(
    collect: Collect, engine: FakeAsyncVLLM
) -> None:
    judged, over = threading.Event(), threading.Event()

    def judge(query: str) -> float:
        if query == "q0":
            judged.set()
            over.wait(60)
        return 1.0

    collector = collect(chat(1, reward=judge), max_staleness=0, on_stale="drop")
    trainer = in_thread(lambda: prompts(next(iter(collector))))
    assert judged.wait(60)
    new_weights(engine, 1)
    collector.increment_version()
    until(lambda: collector.stats()["collector/refills"] == 2)
    over.set()
    assert trainer.result(60) == ["q2", "q3"]


# -- ends -------------------------------------------------------------------------------------------------------------
def test_a_shutdown_by_another_thread_ends_the_iteration(collect: Collect, engine: FakeAsyncVLLM) -> None:
    engine.pause()
    collector = collect()
    trainer = in_thread(lambda: [prompts(batch) for batch in collector])
    until(lambda: submitted(engine))
    collector.shutdown()
    assert trainer.result(60) == []
    with pytest.raises(RuntimeError, match="before the first batch"):
        collector.load_state_dict(collector.state_dict())


def test_data_that_exits_ends_the_collection(collect: Collect) -> None:
    def rows() -> Iterator[dict[str, list[str]]]:
        yield {"query": ["a", "b", "c"]}
        raise SystemExit(3)

    batches = iter(collect(dataloader=rows()))
    assert prompts(next(batches)) == ["a", "b"]
    with pytest.raises(CollectionError, match=r"the data raised SystemExit\(3\)"):
        next(batches)


def test_after_data_that_failed_the_rest_is_in_the_state(collect: Collect) -> None:
    class Rows:
        fails = True

        def __iter__(self) -> Iterator[dict[str, list[str]]]:
            for i in range(4):
                if i == 2 and self.fails:
                    raise OSError("disk")
                yield {"query": [f"q{3 * i + k}" for k in range(3)]}

    rows = Rows()
    collector, seen = collect(dataloader=rows, groups_per_batch=4, max_staleness=1), []
    with pytest.raises(OSError, match="disk"):
        for batch in collector:
            seen += prompts(batch)
    rows.fails = False
    after = collect(dataloader=rows, groups_per_batch=4)
    after.load_state_dict(collector.state_dict())
    seen += [query for batch in islice(after, 2) for query in prompts(batch)]
    assert seen == [f"q{i}" for i in range(12)]


def test_an_engine_that_was_shut_down_uses_up_no_prompts(collect: Collect, engine: FakeAsyncVLLM) -> None:
    collector = collect(max_failures=1000)
    batches = iter(collector)
    next(batches)
    engine.shutdown()
    with pytest.raises(RuntimeError, match="the service is not running"):
        for _ in range(10):
            next(batches)
    assert collector.stats()["collector/failures"] <= 6  # those in line as it ended


def test_one_that_was_forgotten_leaves_no_thread(engine: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "IDLE_SECONDS", 0.05)  # after which a thread of environments ends
    before = set(threading.enumerate())
    collector = AsyncLLMCollector(chat(2), policy=policy_of(engine), dataloader=Questions(), group_size=2)
    next(iter(collector))
    assert {thread.name for thread in set(threading.enumerate()) - before} >= {"torchrl_moe-collector"}
    reference = weakref.ref(collector)
    del collector
    gc.collect()
    assert reference() is None
    until(lambda: set(threading.enumerate()) <= before | {t for t in threading.enumerate() if "service" in t.name})


def test_a_forked_process_is_refused_and_its_parent_continues(collect: Collect) -> None:
    collector = collect()
    batches = iter(collector)
    next(batches)

    def child() -> None:
        with pytest.raises(RuntimeError, match="forked"):
            next(batches)
        collector.shutdown()

    assert (exit_code_of(child), prompts(next(batches))) == (0, ["q2", "q3"])


# -- sizes ------------------------------------------------------------------------------------------------------------
def test_a_group_may_be_large(collect: Collect) -> None:
    batch = next(iter(collect(group_size=80, groups_per_batch=1, max_staleness=0)))
    assert queries(batch) == ["q0"] * 80


# -- continuing -------------------------------------------------------------------------------------------------------


def test_fewer_may_be_in_line_after_a_restore(collect: Collect) -> None:
    collector, after = collect(max_staleness=3), collect(max_staleness=0)
    next(iter(collector))
    until(lambda: len(collector.state_dict()["ready"]) == 6)
    after.load_state_dict(collector.state_dict())
    batches = iter(after)
    assert (prompts(next(batches)), waiting(after.state_dict())) == (["q2", "q3"], ["q4", "q5", "q6", "q7"])
    assert [prompts(next(batches)) for _ in range(3)] == [["q4", "q5"], ["q6", "q7"], ["q8", "q9"]]


def test_a_restored_line_is_in_the_order_of_the_data(collect: Collect, engine: FakeAsyncVLLM) -> None:
    """A complete group does not overtake one that was under way: an epoch of fifo ends with its last prompt."""

    def token_seconds(request: Request) -> float:
        assert request.prompt_token_ids is not None
        return HOUR if b"q2" in bytes(token for token in request.prompt_token_ids.tolist() if token < 256) else 0.0

    for replica in engine.replicas:
        replica.token_seconds = token_seconds
    collector = collect(dataloader=Questions(4), max_staleness=2)
    assert prompts(next(iter(collector))) == ["q0", "q1"]
    until(lambda: len(collector.state_dict()["ready"]) >= 1)
    state = collector.state_dict()
    collector.shutdown()
    for replica in engine.replicas:
        replica.token_seconds = 0.0
    after = collect(dataloader=Questions(4), max_staleness=2)
    after.load_state_dict(state)
    assert waiting(after.state_dict()) == waiting(state)
    assert [prompts(batch) for batch in islice(after, 3)] == [["q2", "q3"], ["q0", "q1"], ["q2", "q3"]]


@pytest.mark.parametrize("loads_first", [True, False])
def test_weights_that_a_restored_trainer_pushes_make_nothing_older_and_numbers_continue(
    collect: Collect, engine: FakeAsyncVLLM, loads_first: bool
) -> None:
    collector, after = collect(max_staleness=1), collect(max_staleness=1, on_stale="drop")
    groups = next(iter(collector)).get("group_id").tolist()
    until(lambda: len(collector.state_dict()["ready"]) == 2)
    state = collector.state_dict()
    if loads_first:
        after.load_state_dict(state)
    new_weights(engine, 7)
    after.increment_version()
    if not loads_first:
        with after.pause():
            after.state_dict()
        after.load_state_dict(state)
    batch = next(iter(after))
    assert (prompts(batch), after.stats()["inference/staleness_max"]) == (["q2", "q3"], 0)
    assert after.stats()["inference/queue_age"] < 60
    assert min(batch.get("group_id").tolist()) > max(groups)
