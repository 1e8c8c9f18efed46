"""One call: its requests are placed, sent, awaited, aborted if it ends early; nothing of them stays behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from support.clock import Clock
from support.completions import assert_same_answers, cut
from support.interrupts import Interrupt, interrupts
from support.replicas import ScriptedReplica
from support.services import waiting_request
from support.strategies import Says
from support.waiting import HOUR, PATIENCE, in_thread, until
from torchrl_moe.errors import (
    EngineError,
    GenerationTimeout,
    NoReplicaError,
    ReplicaDiedError,
    RequestRefusedError,
    StaleReplicaError,
)
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving import dispatch as dispatch_module
from torchrl_moe.modules.serving.dispatch import PRIORITY_SECONDS, Admission
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.replica_table import FaultPolicy, Recovery, ReplicaState
from torchrl_moe.modules.serving.service import GenerationService

pytestmark = pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")


class Scripted(GenerationService):
    """Serves with scripted replicas from the start, and watches over none of them."""

    def __init__(self, num_replicas: int, attempts: int, places: int | None, **kwargs: Any) -> None:
        made = [ScriptedReplica(index, **kwargs) for index in range(num_replicas)]
        super().__init__(made, faults=FaultPolicy(attempts=attempts), max_concurrent_requests=places)
        for replica in made:
            self.infos.append(replica.wait_ready(0.0))
            replica.log.clear()
            self.replica_table.set_state(replica.index, ReplicaState.SERVING)
        self._running = True

    @property
    def unplaced(self) -> int:
        """Requests that wait for a replica."""
        return len(self._dispatcher._unplaced)

    @property
    def in_use(self) -> list[str]:
        """Ids of the requests that are not over."""
        return list(self._dispatcher._open)

    @property
    def places(self) -> tuple[int, int]:
        """How many are taken, and how many requests wait for one."""
        return self.admission.taken, self.admission.waiting

    @property
    def inflight(self) -> list[int]:
        return [entry.inflight for entry in self.replica_table]

    def set_states(self, state: ReplicaState, *indices: int) -> None:
        for index in indices or range(self.num_replicas):
            self.replica_table.set_state(index, state)


@pytest.fixture
def serve() -> Iterator[Callable[..., Scripted]]:
    """Makes services. Whatever a test did: at its end all leases and places are back, no request runs."""
    made: list[Scripted] = []

    def make(num_replicas: int = 1, attempts: int = 2, places: int | None = None, **kwargs: Any) -> Scripted:
        made.append(Scripted(num_replicas, attempts, places, **kwargs))
        return made[-1]

    yield make
    try:
        for service in made:
            until(lambda service=service: not any(service.inflight) and service.places == (0, 0))
            assert all(r.call(Engine.stats, 1.0).running == 0 for r in replicas(service) if r.is_alive())
    finally:
        for service in made:
            service.shutdown()


def later(when: Callable[[], Any], function: Callable[..., None], *args: Any) -> Future[Any]:
    """Calls a function once a condition holds."""
    return in_thread(lambda: (until(when), function(*args)))


@pytest.fixture
def interrupt() -> Iterator[Interrupt]:
    with interrupts() as once:
        yield once


def asked(service: Scripted, *names: str) -> Callable[[], bool]:
    """Whether replicas were sent these requests."""
    return lambda: set(names) <= {name for r in replicas(service) for batch in r.asked("submit") for name in batch}


def poison(lb: Scripted, *names: str) -> None:
    """These kill each replica that gets them."""
    for replica in replicas(lb):
        replica.die_under = lambda request: request.request_id in names


def run(
    service: Scripted, names: Sequence[str], timeout: float | None = None, max_tokens: int = 4, **kwargs: Any
) -> list[Completion]:
    """Answers to requests whose ids are also their prompts."""
    ids = [list(name.encode()) for name in names]
    kwargs |= {"request_ids": list(names), "timeout_seconds": timeout, "use_tqdm": False}
    completions: Any = service.generate(ids, {"max_tokens": max_tokens, "logprobs": 0}, **kwargs)
    return completions  # type: ignore[no-any-return]


async def run_async(service: Scripted, name: str = "a", timeout: float | None = None, **kwargs: Any) -> Completion:
    params = {"max_tokens": 4, "logprobs": 0}
    return await service.agenerate(list(name.encode()), params, request_id=name, timeout_seconds=timeout, **kwargs)


def start(service: Scripted, names: Sequence[str], *args: Any, **kwargs: Any) -> Future[list[Completion]]:
    """:func:`run` in a thread."""
    return in_thread(lambda: run(service, names, *args, **kwargs))


def let_pass(service: Scripted, turns: int = 5) -> None:
    """Wait until the service's loop has had its next turns."""
    for _ in range(turns):
        passed = threading.Event()
        service._loop.call(passed.set)
        assert passed.wait(PATIENCE)


def whole(error: Any) -> list[str | None]:
    """The ids of the requests that had finished as a call ended with an error."""
    return [None if completion.aborted else completion.request_id for completion in error.partial]


def replicas(service: Scripted) -> list[ScriptedReplica]:
    return [entry.replica for entry in service.replica_table]  # type: ignore[misc]


def slow_if(*names: str) -> Callable[[Request], float]:
    return lambda request: HOUR if request.request_id in names else 0.0


def test_an_error_of_a_strategy_is_that_of_its_request_and_the_others_finish(serve: Any) -> None:
    class Warns(Says):
        def placed(self, entry: Any, context: Any) -> None:
            if context.prompt.tolist() == [ord("b")]:
                warnings.warn("odd", stacklevel=1)

    lb = serve(2)
    lb.create_load_balancer(Warns(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning):
            run(lb, "abc")
    assert [replica.asked("submit") for replica in replicas(lb)] == [[["a", "c"]], []]
    run(lb, "abc")  # the names are free again


def test_a_message_that_was_half_sent_is_taken_back_and_the_others_finish(serve: Any) -> None:
    lb = serve(3, token_seconds=slow_if("b", "e"))
    replicas(lb)[1].script["submit"] = TypeError("cannot pickle")
    with pytest.raises(TypeError, match="cannot pickle"):
        run(lb, "abcdef")
    assert [replica.asked("submit") for replica in replicas(lb)] == [[["a", "d"]], [["b", "e"]], [["c", "f"]]]
    assert [replica.asked("abort") for replica in replicas(lb)] == [[], ["b", "e"], []]
    assert lb.inflight == [0, 0, 0]
    for replica in replicas(lb):
        until(lambda replica=replica: replica.call(Engine.stats, 1.0).running == 0)
        replica.script, replica.token_seconds = {}, 0.0
    assert len(run(lb, "abcdef")) == 6


def test_a_name_in_flight_is_refused_until_its_request_is_over(serve: Any) -> None:
    lb = serve(2, token_seconds=slow_if("slow"))
    first = start(lb, ["slow"])
    until(lambda: lb.replica_table[0].inflight == 1)
    with pytest.raises(ValueError, match="request ids are in flight already: slow"):
        run(lb, ["other", "slow"])
    assert lb.inflight == [1, 0]
    run(lb, ["other"])
    lb.abort(["slow"])
    lb.abort(["slow"])
    assert first.result(60.0)[0].aborted
    for replica in replicas(lb):
        replica.token_seconds = 0.0
    run(lb, ["slow"])


# -- waiting for a replica --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.SYNCING])
@pytest.mark.parametrize("placement", [{}, {"actor_index": 1}], ids=["any", "named"])
def test_requests_wait_for_a_replica_that_is_coming_back(
    serve: Any, state: ReplicaState, placement: dict[str, Any]
) -> None:
    lb = serve(2)
    lb.replica_table[0].state, lb.replica_table[1].state = ReplicaState.DEAD, state
    timer = later(lambda: lb.unplaced, lb.replica_table.set_state, 1, ReplicaState.SERVING)
    assert [completion.metrics.replica for completion in run(lb, "ab", **placement)] == [1, 1]
    timer.result(PATIENCE)


def test_a_request_that_must_wait_does_not_hold_up_the_others_of_its_call(serve: Any) -> None:
    lb = serve(2)
    lb.replica_table.set_version(1, 1)
    lb.load_balancer.acquire(group_id="old").release()
    lb.replica_table.set_state(1, ReplicaState.DRAINING)
    with pytest.raises(StaleReplicaError, match="which group 'old' began on") as caught:
        run(lb, "ab", timeout=0.1, group_ids=["new", "old"])
    assert whole(caught.value) == ["a", None]
    assert lb.load_balancer.groups.version("new") == 0
    lb.set_states(ReplicaState.SERVING, 1)
    assert [c.metrics.replica for c in run(lb, "ab", group_ids=["new", "old"])] == [0, 1]


def test_a_group_whose_version_no_replica_will_ever_hold_again_is_reported_at_once(serve: Any) -> None:
    lb = serve(2)
    lb.load_balancer.acquire(group_id="g").release()
    for index in range(2):
        lb.replica_table.set_state(index, ReplicaState.SYNCING)
        lb.replica_table.set_version(index, 1)
    lb.set_states(ReplicaState.SERVING, 0)
    with pytest.raises(StaleReplicaError, match="Begin the group again"):  # the other is in sync, but on version 1
        run(lb, "a", group_ids=["g"])


def test_a_group_of_which_a_request_was_refused_begins_again(serve: Any) -> None:
    lb = serve(refuse=lambda request: "no" if request.request_id == "bad" else None)
    with pytest.raises(RequestRefusedError):
        run(lb, ["bad"], group_ids=["g"])
    lb.replica_table.set_state(0, ReplicaState.SYNCING)
    lb.replica_table.set_version(0, 1)
    lb.set_states(ReplicaState.SERVING, 0)
    assert len(run(lb, "a", timeout=60.0, group_ids=["g"])) == 1
    assert lb.load_balancer.groups.version("g") == 1


def test_groups_that_settle_one_by_one_have_only_their_own_requests_tried(serve: Any, monkeypatch: Any) -> None:
    lb, count = serve(1, token_seconds=HOUR), 30
    groups = [f"g{i}" for i in range(count)]
    first = start(lb, [f"a{i}" for i in range(count)], group_ids=groups)
    until(lambda: lb.replica_table[0].inflight == count)
    lb.replica_table.set_version(0, 1)  # from here on the others wait to see what becomes of the first of their group
    second = start(lb, [f"b{i}" for i in range(count)], group_ids=groups)
    until(lambda: lb.unplaced == count)
    tried: list[str] = []
    acquire = lb.load_balancer.acquire

    def count_and_acquire(prompt: Any, *how: Any) -> Any:
        tried.append(bytes(prompt.tolist()).decode())
        return acquire(prompt, *how)

    monkeypatch.setattr(lb.load_balancer, "acquire", count_and_acquire)
    for number in range(count):
        lb.abort([f"a{number}"])  # that counts as an answer
        until(lambda number=number: lb.unplaced == count - 1 - number)
    with pytest.raises(StaleReplicaError, match="no serving replica holds version 0, which group 'g0' began on"):
        second.result(PATIENCE)
    assert tried == [f"b{i}" for i in range(count)]
    assert all(completion.aborted for completion in first.result(PATIENCE))


def test_a_newer_version_ends_the_wait_of_a_group_for_an_older_one(serve: Any) -> None:
    lb = serve(2)
    assert run(lb, "a", group_ids=["g"])[0].request_id == "a"
    lb.set_states(ReplicaState.SYNCING)
    lb.replica_table.set_version(0, 1)
    call = start(lb, "b", group_ids=["g"])
    until(lambda: lb.unplaced == 1)
    lb.replica_table.note_version(2)  # an update of another driver's: replica 1 may come with that
    let_pass(lb)
    assert not call.done()
    lb.replica_table.set_version(1, 2)
    with pytest.raises(NoReplicaError, match="no replica is serving"):
        call.result(PATIENCE)


@pytest.mark.parametrize(
    ("states", "placement", "error"),
    [
        ([ReplicaState.DEAD, ReplicaState.QUARANTINED], {}, NoReplicaError),
        ([ReplicaState.SERVING, ReplicaState.QUARANTINED], {"actor_index": 1}, NoReplicaError),
        ([ReplicaState.SYNCING, ReplicaState.DEAD], {"actor_index": 1}, ReplicaDiedError),
        ([ReplicaState.SERVING, ReplicaState.SERVING], {"min_version": 1}, StaleReplicaError),
        ([ReplicaState.SYNCING, ReplicaState.SERVING], {"actor_index": 1, "min_version": 1}, StaleReplicaError),
    ],
)
def test_nothing_waits_for_a_replica_that_does_not_come(
    serve: Any, states: list[ReplicaState], placement: dict[str, Any], error: type[Exception]
) -> None:
    lb = serve(2)
    for entry, state in zip(lb.replica_table, states, strict=True):
        entry.state = state
    with pytest.raises(error):
        run(lb, "ab", **placement)


# -- ends that come early ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [GenerationTimeout, KeyboardInterrupt])
def test_an_early_end_aborts_what_runs_and_brings_what_there_is(serve: Any, interrupt: Any, error: type) -> None:
    lb = serve(2, token_seconds=slow_if("b", "c"))
    if error is KeyboardInterrupt:
        interrupt(lambda: lb.inflight == [1, 1] and lb.in_use == ["b", "c"])
    with pytest.raises(error, match="2 of 3 requests were not" if error is GenerationTimeout else None) as caught:
        run(lb, "abc", timeout=0.5 if error is GenerationTimeout else None)
    assert whole(caught.value) == ["a", None, None]
    assert caught.value.__context__ is None
    assert [replica.asked("abort") for replica in replicas(lb)] == [["c"], ["b"]]


def test_requests_that_finish_before_the_service_looks_at_the_deadline_are_not_late(serve: Any) -> None:
    lb = serve()
    (replica,) = replicas(lb)
    replica.script["submit"] = lambda: until(lambda: not replica.call(Engine.stats, PATIENCE).running)
    lb.create_load_balancer(Says(lambda: time.sleep(0.1)))
    assert len(run(lb, "ab", timeout=0.15)) == 2  # sent after 0.2 s


def test_an_abort_that_a_replica_does_not_answer_or_accept_holds_up_no_call(
    serve: Any, interrupt: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch_module, "ABORT_GRACE_SECONDS", 0.1)
    lb = serve(3, token_seconds=HOUR)
    replicas(lb)[0].script["abort"] = OSError("gone")
    monkeypatch.setattr(replicas(lb)[1], "abort", lambda ids: None)
    interrupt(asked(lb, *"abc"))
    with pytest.raises(KeyboardInterrupt):
        run(lb, "abc")
    until(lambda: replicas(lb)[2].asked("abort") == ["c"])
    until(lambda: lb.inflight == [1, 1, 0])  # those are still there: so they count
    for replica in replicas(lb)[:2]:
        replica.die()


def test_the_event_loop_continues_and_no_thread_is_held(serve: Any) -> None:
    lb = serve(1)
    lb.set_states(ReplicaState.SYNCING, 0)

    async def main() -> list[Completion]:
        tasks = [asyncio.create_task(run_async(lb, f"{i}")) for i in range(100)]
        before = threading.active_count()
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert threading.active_count() <= before + 1  # the service's own; those of earlier tests may end
        assert not any(task.done() for task in tasks)
        await asyncio.to_thread(lb.replica_table.set_state, 0, ReplicaState.SERVING)
        return await asyncio.gather(*tasks)

    assert [completion.request_id for completion in asyncio.run(main())] == [f"{i}" for i in range(100)]


def test_a_task_cancelled_while_it_waits_for_a_replica_sends_nothing_later(serve: Any) -> None:
    lb = serve()
    lb.set_states(ReplicaState.SYNCING, 0)

    async def main() -> None:
        task = asyncio.create_task(run_async(lb))
        await asyncio.to_thread(until, lambda: lb.unplaced == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    lb.set_states(ReplicaState.SERVING, 0)
    let_pass(lb)
    assert replicas(lb)[0].asked("submit") == []
    run(lb, "a")


def test_an_event_loop_that_is_gone_does_not_disturb_the_replica(serve: Any) -> None:
    lb = serve(1, token_seconds=0.05)
    loop = asyncio.new_event_loop()
    task = loop.create_task(run_async(lb, "a"))
    while not lb.replica_table[0].inflight:  # on a busy machine the service's thread may come late
        loop.run_until_complete(asyncio.sleep(0.001))
    loop.close()
    until(lambda: lb.replica_table[0].inflight == 0)
    task._log_destroy_pending = False  # type: ignore[attr-defined] # asyncio's own word for: on purpose


def test_n_calls_that_time_out_together_cost_n_wake_ups(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lb, count, turns, call = serve(1, token_seconds=HOUR), 300, [], EventLoop.call

    def counted(loop: EventLoop, *what: Any) -> bool:
        turns.extend([what] if loop._name != "torchrl_moe-fakes" else [])  # what dispatchers are given from outside
        return call(loop, *what)

    async def main() -> list[Any]:
        calls = [run_async(lb, f"{i}", timeout=0.5) for i in range(count)]
        return await asyncio.gather(*calls, return_exceptions=True)

    monkeypatch.setattr(EventLoop, "call", counted)
    assert {type(result) for result in asyncio.run(main())} == {GenerationTimeout}
    assert len(turns) <= 2 * count  # a beginning and an answer each


def test_a_service_that_is_dropped_drops_what_it_runs_in_silence(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch_module, "ABORT_GRACE_SECONDS", 0.1)
    service = Scripted(1, 2, None)
    monkeypatch.setattr(replicas(service)[0], "submit", lambda requests: [Future() for _ in requests])  # never ended
    monkeypatch.setattr(replicas(service)[0], "abort", lambda ids: None)
    with pytest.raises(GenerationTimeout):
        run(service, "a", timeout=0.1)
    dropped = weakref.ref(service)
    del service

    def is_gone() -> bool:
        gc.collect()
        return dropped() is None

    until(is_gone)
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []


@pytest.mark.parametrize("way", ["answer", "message"])
def test_an_error_that_its_caller_keeps_keeps_no_answer_of_another_call(serve: Any, way: str) -> None:
    lb = serve(2, refuse=lambda request: "no" if way == "answer" and request.request_id == "b" else None)
    if way == "message":
        replicas(lb)[1].script["submit"] = EngineError("no")

    async def both() -> list[Any]:
        go_on = threading.Event()
        lb._loop.call(go_on.wait)  # so that both are sent, and answered, in one turn
        calls = [asyncio.create_task(run_async(lb, name)) for name in "ab"]
        await asyncio.sleep(0)
        go_on.set()
        return await asyncio.gather(*calls, return_exceptions=True)

    completion, error = asyncio.run(both())
    tokens = weakref.ref(completion.outputs[0].token_ids)
    del completion
    gc.collect()
    assert tokens() is None and "no" in str(error)


# -- a replica dies under requests ------------------------------------------------------------------------------------


def test_what_is_resumed_begins_again_from_what_it_resumed(serve: Any) -> None:
    (full,) = run(serve(), "a", max_tokens=8)
    lb = serve(2)
    replicas(lb)[0].die_under = lambda request: True
    first = cut(full, 3)
    done: Any = lb.generate(resume=first, sampling_params={"max_tokens": 8, "logprobs": 0}, use_tqdm=False)
    assert_same_answers(done, full)
    assert done.metrics.replica == 1
    assert [[request.resume is first for request in replica.submitted] for replica in replicas(lb)] == [[True]] * 2


def test_the_second_try_keeps_to_version_and_group(serve: Any) -> None:
    lb = serve(4)
    for index, version in enumerate((2, 1, 2, 1)):
        lb.replica_table.set_version(index, version)
    for replica in replicas(lb)[:2]:
        replica.die_under = lambda request: True
    assert run(lb, "a", min_version=2)[0].metrics.replica == 2
    lb.load_balancer.acquire_at(3, group_id="g").release()
    assert [c.metrics.replica for c in run(lb, "ab", group_ids=["g", "g"])] == [3, 3]
    assert [len(replica.submitted) for replica in replicas(lb)] == [1, 1, 1, 2]


def test_a_group_of_several_calls_moves_too_whichever_of_them_hears_of_the_death_first(serve: Any) -> None:
    for _ in range(20):
        lb = serve(2, token_seconds=HOUR)
        lb.replica_table.set_version(0, 1)
        calls = [start(lb, name, group_ids=["g"]) for name in "abc"]
        until(lambda lb=lb: lb.replica_table[0].inflight == 3)
        replicas(lb)[1].token_seconds = 0.0
        replicas(lb)[0].die()
        assert [call.result(60.0)[0].metrics.replica for call in calls] == [1, 1, 1]


def test_a_group_of_which_one_was_answered_does_not_move(serve: Any) -> None:
    lb = serve(2)
    lb.replica_table.set_version(0, 1)
    replicas(lb)[0].die_under = lambda request: request.request_id == "b"
    with pytest.raises(
        StaleReplicaError, match=r"which group 'g' began on.*It had started on another replica: .*under 'b'"
    ) as e:
        run(lb, "ab", group_ids=["g"] * 2)
    assert whole(e.value) == ["a", None]


def test_a_request_that_was_too_late_is_no_answer_and_its_group_begins_again(serve: Any) -> None:
    lb = serve(1, token_seconds=HOUR)
    with pytest.raises(GenerationTimeout):
        run(lb, "a", timeout=0.05, group_ids=["g"])
    lb.replica_table.set_version(0, 1)
    replicas(lb)[0].token_seconds = 0.0
    assert run(lb, "a", group_ids=["g"])[0].outputs[0].finish_reason == "length"
    assert lb.load_balancer.groups.version("g") == 1


@pytest.mark.parametrize("attempts", [1, 3])
def test_a_request_that_kills_its_replicas_is_given_up_by_name(serve: Any, attempts: int) -> None:
    lb = serve(5, attempts)
    poison(lb, "poison")
    words = rf"request 1 \('poison'\) was given up: {attempts} replicas died under it\. The last one: replica"
    with pytest.raises(ReplicaDiedError, match=words) as caught:
        run(lb, ["a", "poison", "b"])
    assert sum(not replica.is_alive() for replica in replicas(lb)) == attempts
    assert whole(caught.value) == ["a", None, "b"]


def all_on_the_first(lb: Scripted, names: Sequence[str]) -> Future[list[Completion]]:
    """A call whose requests all begin on one replica, which dies under them; then the others serve."""
    others = range(1, lb.num_replicas)
    lb.set_states(ReplicaState.SYNCING, *others)
    result = start(lb, names)
    until(lambda: lb.replica_table[0].state is ReplicaState.DEAD)
    lb.set_states(ReplicaState.SERVING, *others)
    return result


@pytest.mark.parametrize("place", [0, 7])
def test_a_request_that_kills_is_tried_once_more_alone_and_the_others_are_answered(serve: Any, place: int) -> None:
    names, lb = [str(i) for i in range(8)], serve(3)
    poison(lb, names[place])
    with pytest.raises(ReplicaDiedError, match=r"2 replicas died under it\. The last one: replica .* died: under"):
        all_on_the_first(lb, names).result(PATIENCE)
    assert [request.request_id for r in replicas(lb) for request in r.submitted].count(names[place]) == 2
    assert sum(not replica.is_alive() for replica in replicas(lb)) == 2
    assert not any(entry.reserved for entry in lb.replica_table)


def test_a_suspect_has_its_replica_to_itself(serve: Any) -> None:
    lb = serve(2, token_seconds=slow_if("old", "late"))
    old, suspect = start(lb, ["old"], actor_index=1), start(lb, ["late"])
    until(lambda: lb.inflight == [1, 1])
    replicas(lb)[0].die("once")
    until(lambda: lb.replica_table[1].reserved)  # for the one whose replica died
    new = start(lb, ["new"])  # waits, too
    until(lambda: lb.unplaced == 1)
    assert replicas(lb)[1].asked("submit") == [["old"]]
    lb.abort(["old"])
    assert old.result(PATIENCE)[0].aborted
    until(lambda: replicas(lb)[1].asked("submit") == [["old"], ["late"]])
    lb.abort(["late"])
    assert suspect.result(PATIENCE)[0].aborted
    assert new.result(PATIENCE)[0].outputs[0].finish_reason == "length"
    assert not lb.replica_table[1].reserved


def test_of_many_only_the_last_sent_are_suspects_until_a_second_replica_dies(serve: Any) -> None:
    names, lb = [str(i) for i in range(40)], serve(4)
    poison(lb, "3")  # long before the last
    with pytest.raises(ReplicaDiedError, match=r"request 3 \('3'\) was given up: 3 replicas died under it") as caught:
        all_on_the_first(lb, names).result(PATIENCE)
    assert whole(caught.value) == [None if name == "3" else name for name in names]
    assert [replica.is_alive() for replica in replicas(lb)].count(True) == 1


def test_after_a_while_the_next_suspect_joins_and_then_neither_is_known_to_have_killed(
    serve: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(dispatch_module, "ALONE_SECONDS", 0.01)
    lb = serve(4, token_seconds=slow_if("a", "b"))
    lb.set_states(ReplicaState.SYNCING, 1, 2, 3)
    result = start(lb, "ab")
    for index in (0, 1):  # twice in company
        until(lambda index=index: lb.replica_table[index].inflight == 2)
        lb.replica_table.set_state(index + 1, ReplicaState.SERVING)
        replicas(lb)[index].die("by accident")
    until(lambda: lb.replica_table[2].inflight == 1)  # and now alone to its end
    let_pass(lb)
    assert lb.replica_table[2].inflight == 1
    (alone,) = [request.request_id for request in replicas(lb)[2].submitted]
    lb.abort([alone])
    until(lambda: len(replicas(lb)[2].submitted) == 2)
    lb.abort(["a", "b"])
    assert [completion.aborted for completion in result.result(PATIENCE)] == [True, True]


def test_the_deadline_is_the_calls_whatever_died_meanwhile(serve: Any) -> None:
    lb = serve(2, attempts=3, token_seconds=slow_if("b", "c"))
    timer = later(asked(lb, "a", "b", "c"), replicas(lb)[0].die)
    started = time.monotonic()
    with pytest.raises(GenerationTimeout, match=r"2 of 3 requests were not finished within 0\.8 s") as late:
        run(lb, "abc", timeout=0.8)
    timer.result(PATIENCE)
    assert replicas(lb)[1].asked("abort") == ["b"]  # the other one was not to disturb it
    assert lb.replica_table.doubts == {1}
    lb.replica_table.set_recovery(0, Recovery.SUPERVISOR)  # it may come back
    timer = later(asked(lb, "d"), replicas(lb)[1].die)
    lb.replica_table.set_recovery(1, Recovery.SUPERVISOR)
    replicas(lb)[1].token_seconds = HOUR
    with pytest.raises(NoReplicaError, match="It had started on another replica") as nowhere:
        run(lb, "d", timeout=0.8)
    timer.result(PATIENCE)
    assert 1.6 <= time.monotonic() - started < PATIENCE
    assert (whole(late.value), whole(nowhere.value)) == (["a", None, None], [None])


def test_a_named_replica_that_dies_is_an_error_with_its_words(serve: Any) -> None:
    lb = serve(2)
    replicas(lb)[0].die_under = lambda request: request.request_id == "b"
    with pytest.raises(ReplicaDiedError, match=r"replica 0, which actor_index names, is dead: .*under 'b'"):
        run(lb, "ab", actor_index=0)
    assert replicas(lb)[1].asked("submit") == []


def test_neither_a_refusal_nor_an_engines_error_is_tried_again_and_only_the_latter_counts_against_it(
    serve: Any,
) -> None:
    lb = serve(3, refuse=lambda r: "too long" if r.request_id == "long" else None)
    with pytest.raises(RequestRefusedError, match=r"^request 0 was refused: too long$") as refused:
        run(lb, ["long"])
    assert isinstance(refused.value, ValueError)
    assert sum(len(replica.submitted) for replica in replicas(lb)) == 1
    failed, odd = Future[Completion](), Future[Completion]()
    failed.set_exception(EngineError("a bug"))
    odd.cancel()
    replicas(lb)[2].submit = lambda requests: [odd]
    with pytest.raises(EngineError, match="the replica gave up the request"):
        run(lb, "a", actor_index=2)
    del replicas(lb)[2].submit
    for number in range(5):
        replicas(lb)[1].submit = lambda requests: [failed]
        with pytest.raises(EngineError, match="a bug"):
            run(lb, [f"{number}"], actor_index=1)
    assert [entry.breaker.blocks for entry in lb.replica_table] == [False, True, False]
    assert lb.replica_table[1].last_error == "a bug"
    assert {c.metrics.replica for c in run(lb, "abcd")} == {0, 2}


@pytest.mark.parametrize("where", ["waits for a replica", "runs on one that dies"])
def test_a_request_that_is_cut_has_an_answer_without_tokens_and_is_not_tried_elsewhere(serve: Any, where: str) -> None:
    lb = serve(2, token_seconds=HOUR)
    first = replicas(lb)[0]
    first.abort = lambda ids: first.die()  # type: ignore[method-assign]
    if where == "waits for a replica":
        lb.set_states(ReplicaState.SYNCING)
    call = start(lb, "a")
    until(lambda: lb.unplaced or lb.inflight[0])
    lb.abort("a")
    (completion,) = call.result(60.0)
    (output,) = completion.outputs
    assert (output.finish_reason, len(output.token_ids), len(output.logprobs)) == ("abort", 0, 0)
    assert (completion.request_id, completion.prompt_token_ids.tolist()) == ("a", [97])
    assert replicas(lb)[1].asked("submit") == []


def test_a_cut_that_comes_as_its_request_is_handed_over_is_not_lost(serve: Any) -> None:
    lb = serve(1, token_seconds=HOUR)
    submit = replicas(lb)[0].submit

    def late(requests: Sequence[Request]) -> list[Future[Completion]]:
        lb.abort(["a"])
        return submit(requests)

    replicas(lb)[0].submit = late
    timer = later(asked(lb, "b"), lb.abort, ["b"])
    assert [completion.aborted for completion in run(lb, "ab")] == [True, True]
    assert replicas(lb)[0].asked("abort") == ["a", "b"]
    timer.result(PATIENCE)


# -- places -----------------------------------------------------------------------------------------------------------


def test_there_are_never_more_requests_in_the_engines_than_places(serve: Any) -> None:
    lb, most = serve(2, places=5, token_seconds=0.001), [0]

    def count() -> None:
        most[0] = max(most[0], sum(entry.replica.call(Engine.stats, 1.0).running for entry in lb.replica_table))

    for replica in replicas(lb):
        replica.script["submit"] = count
    names = [[f"{call} {i}" for i in range(20)] for call in range(3)]
    calls = [start(lb, batch) for batch in names]
    for batch, call in zip(names, calls, strict=True):
        assert [completion.request_id for completion in call.result(60.0)] == batch
    assert most == [5]


def test_ctrl_c_again_and_again_leaves_all_counts_right(serve: Any, interrupt: Any) -> None:
    lb = serve(2, places=3, token_seconds=0.0005)
    for number in range(15):
        with pytest.raises(KeyboardInterrupt):
            interrupt(lambda number=number: time.sleep(0.001 + 0.0007 * number) or True)
            while True:
                run(lb, [f"{i}" for i in range(9)])
        until(lambda: (lb.inflight, lb.places, lb.in_use) == ([0, 0], (0, 0), []))
    assert len(run(lb, "abc")) == 3


def test_where_the_first_of_its_needs_is_cut_as_it_waits_for_a_place_the_next_takes_its_turn(serve: Any) -> None:
    lb = serve(2, places=1, token_seconds=slow_if("holder"))
    lb.set_states(ReplicaState.SYNCING, 0)
    first = start(lb, ["a"], actor_index=0)
    until(lambda: lb.unplaced == 1)
    second = start(lb, ["b"], actor_index=0)
    until(lambda: lb.unplaced == 2)
    holder = start(lb, ["holder"], actor_index=1)
    until(lambda: lb.inflight == [0, 1])
    lb.set_states(ReplicaState.SERVING, 0)
    until(lambda: (lb.unplaced, lb.admission.waiting) == (1, 1))
    lb.abort("a")
    assert first.result(PATIENCE)[0].aborted
    until(lambda: (lb.unplaced, lb.admission.waiting) == (0, 1))
    lb.abort("holder")
    assert holder.result(PATIENCE)[0].aborted
    assert second.result(PATIENCE)[0].metrics.replica == 0


def test_an_urgent_request_does_not_wait_for_the_turn_of_another_of_its_needs(serve: Any) -> None:
    lb = serve(2, places=1, token_seconds=slow_if("holder"))
    lb.set_states(ReplicaState.SYNCING, 0)
    calls = [start(lb, ["low"], priority=5, actor_index=0)]
    until(lambda: lb.unplaced == 1)
    calls.append(start(lb, ["holder"], actor_index=1))
    until(lambda: lb.replica_table[1].inflight == 1)
    lb.set_states(ReplicaState.SERVING, 0)
    until(lambda: lb.admission.waiting == 1)
    calls.append(start(lb, ["urgent"], priority=-5, actor_index=0))
    until(lambda: lb.admission.waiting == 2)
    lb.abort(["holder"])
    for call in calls:
        call.result(60.0)
    assert replicas(lb)[0].asked("submit") == [["urgent"], ["low"]]


# -- admission --------------------------------------------------------------------------------------------------------


def test_no_request_starves_a_priority_is_worth_so_many_seconds() -> None:
    clock = Clock()
    admission = Admission(2, clock)
    low, early, late = waiting_request(1), waiting_request(0), waiting_request(0)
    for request, now in ((low, 0.0), (early, PRIORITY_SECONDS - 1), (late, PRIORITY_SECONDS + 1)):
        clock.now = now
        admission.put(request)
    assert [admission.next() for _ in range(3)] == [early, low, None]
    admission.give_back()
    admission.put(early)  # it keeps its old turn
    assert [admission.next() for _ in range(2)] == [early, None]
    assert (admission.taken, admission.waiting) == (2, 1)


def test_what_is_taken_out_leaves_nothing_behind() -> None:
    admission, requests = Admission(1), [waiting_request() for _ in range(1000)]
    for request in requests:
        admission.put(request)
    first = admission.next()
    assert first is not None and not admission.remove(first)
    assert all(admission.remove(request) for request in requests[1:900])
    assert (admission.taken, admission.waiting) == (1, 100)
    prompts = [weakref.ref(request.request.prompt_token_ids) for request in requests[1:900]]
    del requests, request
    gc.collect()  # a request and its call hold each other
    assert [prompt() for prompt in prompts] == [None] * 899
    assert len(admission._turns) <= 2 * 100 + 64
