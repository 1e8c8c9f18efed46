"""A loop in a thread: it starts when it is first used, and ends when it is stopped or forgotten."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from support.waiting import PATIENCE, until
from torchrl_moe.modules.serving.event_loop import EventLoop, wake


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_it_starts_at_its_first_call_and_calls_in_order_in_one_thread() -> None:
    loop, seen, over = EventLoop("of-this-test"), [], threading.Event()
    assert threads("of-this-test") == []
    for number in range(100):
        assert loop.call(lambda number=number: seen.append((number, threading.current_thread().name)))
    loop.call(over.set)
    assert over.wait(PATIENCE)
    assert seen == [(number, "of-this-test") for number in range(100)]
    loop.stop()
    until(lambda: threads("of-this-test") == [])


def test_what_was_called_before_the_stop_is_done_and_nothing_after() -> None:
    loop, seen = EventLoop("of-this-test"), []
    loop.call(seen.append, 1)
    loop.stop()
    loop.stop()
    until(lambda: not loop.call(seen.append, 2) or len(seen) > 1)
    until(lambda: threads("of-this-test") == [])
    assert not loop.call(seen.append, 3)
    assert seen[0] == 1 and 3 not in seen


def test_one_that_was_never_used_stops_too() -> None:
    loop = EventLoop("of-this-test")
    loop.stop()
    assert not loop.call(print)


def test_one_that_is_forgotten_ends() -> None:
    loop = EventLoop("of-this-test")
    loop.call(lambda: None)
    gone = weakref.ref(loop)
    del loop
    gc.collect()
    assert gone() is None
    until(lambda: threads("of-this-test") == [])


def test_a_wait_in_another_loop_is_ended_once_and_a_closed_loop_is_left_alone() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        waiting = loop.create_future()
        thread = threading.Thread(target=lambda: [wake(loop, waiting) for _ in range(2)])
        thread.start()
        await waiting
        thread.join()
        await asyncio.sleep(0)

    asyncio.run(main())
    closed = asyncio.new_event_loop()
    waiting = closed.create_future()
    closed.close()
    wake(closed, waiting)
    assert not waiting.done()


def test_a_ctrl_c_as_its_thread_starts_leaves_a_loop_that_can_be_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, heard = EventLoop("interrupted"), threading.Event()
    start = threading.Thread.start

    def interrupted(thread: threading.Thread) -> None:
        start(thread)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "start", interrupted)
        loop.call(heard.set)
    assert loop.call(heard.set)
    assert heard.wait(PATIENCE)
    loop.stop()
    loop.join(PATIENCE)
    assert not loop.call(heard.set)


def test_a_thread_that_cannot_start_is_tried_again_at_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, heard = EventLoop("refused"), threading.Event()

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="can't start new thread"):
        patch.setattr(threading.Thread, "start", refused)
        loop.call(heard.set)
    assert loop.call(heard.set)
    assert heard.wait(PATIENCE)
    loop.stop()
