"""Bells: what rings wakes the waiter, whichever came first."""

from __future__ import annotations

import asyncio
import threading
import time

from torchrl_moe.modules.serving.bells import LoopBell, ThreadBell


def test_a_ring_wakes_a_thread() -> None:
    bell = ThreadBell()
    timer = threading.Timer(0.05, bell.ring)
    timer.start()
    bell.wait(None)
    timer.join()


def test_a_ring_before_the_wait_counts_once() -> None:
    bell = ThreadBell()
    bell.ring()
    bell.ring("whatever a callback passes")
    bell.wait(None)
    started = time.monotonic()
    bell.wait(0.05)
    assert time.monotonic() - started >= 0.05


def test_a_ring_from_another_thread_wakes_a_task() -> None:
    async def main() -> None:
        bell = LoopBell()
        await asyncio.gather(bell.wait(None), asyncio.to_thread(bell.ring))

    asyncio.run(main())


def test_a_ring_before_the_wait_of_a_task_counts_once() -> None:
    async def main() -> None:
        bell = LoopBell()
        bell.ring()
        await bell.wait(None)
        started = time.monotonic()
        await bell.wait(0.05)
        assert time.monotonic() - started >= 0.04

    asyncio.run(main())


def test_a_bell_of_a_closed_loop_rings_for_nobody() -> None:
    async def main() -> LoopBell:
        return LoopBell()

    asyncio.run(main()).ring()
