"""A probe of an engine: a ping to the core, and what the processes of the group do."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from support.waiting import until
from torchrl_moe.modules.backends.replica import ProbeReport
from torchrl_moe.modules.backends.vllm.probe import EngineProbe

SPIN = "while True: pass"


class Core:
    """Answers a ping when it is let; counts them."""

    def __init__(self) -> None:
        self.pings = 0
        self.free = asyncio.Event()
        self.error: Exception | None = None

    async def is_paused(self) -> bool:
        self.pings += 1
        await self.free.wait()
        if self.error is not None:
            raise self.error
        return False


@pytest.fixture
def leader() -> Iterator[subprocess.Popen[bytes]]:
    """A busy process, taken for that of the engine."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def test_a_core_that_answers_is_well_even_if_its_answer_is_an_error(leader: subprocess.Popen[bytes]) -> None:
    async def main() -> list[bool]:
        core = Core()
        core.free.set()
        signs = EngineProbe(core)
        first = await signs.read(5.0)
        core.error = RuntimeError("no such call")
        second = await signs.read(5.0)
        assert core.pings == 2
        return [first.core_answered, second.core_answered]

    assert asyncio.run(main()) == [True, True]


def test_a_core_that_does_not_answer_is_pinged_once_until_it_does(leader: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        core = Core()
        signs = EngineProbe(core)
        assert [(await signs.read(0.01)).core_answered for _ in range(3)] == [False] * 3
        assert core.pings == 1
        core.free.set()
        assert (await signs.read(5.0)).core_answered
        assert (await signs.read(5.0)).core_answered
        assert core.pings == 2

    asyncio.run(main())


def test_those_who_ask_at_the_same_time_share_a_ping() -> None:
    async def main() -> None:
        core = Core()
        signs = EngineProbe(core)
        readers = [asyncio.ensure_future(signs.read(5.0)) for _ in range(3)]
        while not core.pings:
            await asyncio.sleep(0)
        core.free.set()
        assert [probe_report.core_answered for probe_report in await asyncio.gather(*readers)] == [True] * 3
        assert core.pings == 1

    asyncio.run(main())


def test_what_the_group_computes_and_whether_it_is_stopped(leader: subprocess.Popen[bytes]) -> None:
    async def read() -> ProbeReport:
        core = Core()
        core.free.set()
        return await EngineProbe(core).read(5.0)

    first = asyncio.run(read())
    until(lambda: asyncio.run(read()).cpu_seconds >= first.cpu_seconds + 0.1)
    assert not asyncio.run(read()).stopped
    leader.send_signal(signal.SIGSTOP)
    until(lambda: asyncio.run(read()).stopped)
    still = asyncio.run(read()).cpu_seconds
    assert asyncio.run(read()).cpu_seconds == still
    leader.send_signal(signal.SIGCONT)
    until(lambda: not asyncio.run(read()).stopped)


def test_grandchildren_count_and_strangers_do_not() -> None:
    stranger = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], start_new_session=True)
    shell = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    ids = {shell.pid, stranger.pid}
    try:
        (child,) = until(lambda: psutil.Process(shell.pid).children())

        async def read() -> ProbeReport:
            core = Core()
            core.free.set()
            return await EngineProbe(core).read(5.0)

        assert not asyncio.run(read()).stopped
        child.suspend()
        until(lambda: asyncio.run(read()).stopped)
        child.kill()
        until(lambda: not asyncio.run(read()).stopped)
    finally:
        for process in (shell, stranger):
            for one in psutil.Process(process.pid).children():
                one.kill()
            process.kill()
            process.wait()
    assert not any(psutil.pid_exists(pid) for pid in ids)
