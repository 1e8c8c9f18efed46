"""A loop in a thread: it starts when it is first used, and ends when it is stopped or forgotten."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import wait

import pytest

from support.waiting import HOUR, PATIENCE, until
from torchrl_moe.modules.serving.event_loop import EventLoop, in_thread

NAME = "of-this-test"


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == NAME]


@pytest.fixture
def loop() -> Iterator[EventLoop]:
    """A loop that was not used; at the end it stops, and its thread is gone."""
    made = EventLoop(NAME)
    yield made
    made.stop()
    until(lambda: threads() == [])


def test_it_starts_at_its_first_call_and_calls_in_order_in_one_thread(loop: EventLoop) -> None:
    seen, over = [], threading.Event()
    assert threads() == []
    for number in range(100):
        assert loop.call(lambda number=number: seen.append((number, threading.current_thread().name)))
    loop.call(over.set)
    assert over.wait(PATIENCE)
    assert seen == [(number, NAME) for number in range(100)]


def test_what_was_called_before_the_stop_is_done_and_nothing_after(loop: EventLoop) -> None:
    seen: list[int] = []
    loop.call(seen.append, 1)
    loop.stop()
    loop.stop()
    until(lambda: not loop.call(seen.append, 2) or len(seen) > 1)
    until(lambda: threads() == [])
    assert not loop.call(seen.append, 3)
    assert seen[0] == 1 and 3 not in seen
    unused = EventLoop(NAME)
    unused.stop()
    assert not unused.call(print)


def test_what_a_function_returns_or_raises_in_the_loop_comes_back(loop: EventLoop) -> None:
    def where(suffix: str) -> str:
        return threading.current_thread().name + suffix

    assert loop.run(where, "!", patience=PATIENCE) == f"{NAME}!"
    assert loop.run(lambda: loop.is_here, patience=PATIENCE)
    assert not loop.is_here
    with pytest.raises(ZeroDivisionError):
        loop.run(lambda: 1 // 0, patience=PATIENCE)
    loop.stop()
    until(lambda: threads() == [])
    assert loop.run(where, "!", patience=PATIENCE) == threading.current_thread().name + "!"


def test_one_that_is_forgotten_ends() -> None:
    loop = EventLoop(NAME)
    loop.call(lambda: None)
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    until(lambda: threads() == [])


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("can't start new thread")], ids=repr)
def test_an_error_as_its_thread_starts_leaves_a_loop_that_works_and_ends(
    loop: EventLoop, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    seen: list[int] = []
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        if isinstance(error, KeyboardInterrupt):
            start(thread)
        raise error

    with monkeypatch.context() as patch, pytest.raises(type(error)):
        patch.setattr(threading.Thread, "start", interrupted)
        loop.call(seen.append, 1)
    assert loop.call(seen.append, 2)
    until(lambda: seen == [2])  # the first call was never made


def test_a_task_runs_until_the_loop_stops(loop: EventLoop) -> None:
    seen: list[str] = []

    async def work() -> None:
        try:
            seen.append("begun")
            await asyncio.sleep(HOUR)
        finally:
            seen.append("ended")

    running = loop.spawn(work())
    until(lambda: seen == ["begun"])
    gc.collect()
    loop.stop()
    until(lambda: seen == ["begun", "ended"])
    until(lambda: threads() == [])
    late = loop.spawn(work())  # of a loop that was stopped: nothing happens
    assert wait([running, late], PATIENCE).not_done == set()  # who waits for them is woken
    assert running.cancelled() and late.cancelled()
    assert len(seen) == 2


def test_blocking_calls_run_side_by_side_in_threads_of_their_own_and_do_not_hold_up_the_loop(loop: EventLoop) -> None:
    barrier = threading.Barrier(65, timeout=PATIENCE)

    def meet(number: int) -> tuple[int, bool]:
        barrier.wait()
        return number, threading.current_thread().daemon

    futures = [loop.spawn(in_thread("blocking", meet, number)) for number in range(64)]
    assert loop.run(lambda: "free", patience=PATIENCE) == "free"
    barrier.wait()
    assert [future.result(PATIENCE) for future in futures] == [(number, True) for number in range(64)]


@pytest.mark.parametrize("error", [KeyError("k"), StopIteration(), SystemExit(1), KeyboardInterrupt()], ids=repr)
def test_what_a_blocking_call_raises_is_its_callers_and_does_not_end_the_loop(
    loop: EventLoop, error: BaseException
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(KeyError if isinstance(error, KeyError) else RuntimeError):
        loop.spawn(in_thread("blocking", fail)).result(PATIENCE)
    assert loop.run(lambda: "runs", patience=PATIENCE) == "runs"


FORKED = """
import os, sys
from concurrent.futures import Future
from torchrl_moe.modules.serving.event_loop import EventLoop

loop = EventLoop("unused so far")
if not (child := os.fork()):
    sys.exit(0)  # whose finalizers run
os.waitpid(child, 0)
loop.call(lambda: None)
loop.join(0.2)  # it has nothing to do, and waits
answer = Future()
loop.call(answer.set_result, "answered")
print(answer.result(60), flush=True)
os._exit(0)
"""


def test_a_fork_that_ends_leaves_its_parents_loop_as_it_was() -> None:
    run = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=PATIENCE)
    assert run.stdout == "answered\n", run.stderr
