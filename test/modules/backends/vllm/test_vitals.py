"""Vital signs: a ping to the core, and what the processes of the group do."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from modules.backends.vllm.processes import until
from torchrl_moe.modules.backends.vllm import vitals as vitals_module
from torchrl_moe.modules.backends.vllm.lifeline import group_members
from torchrl_moe.modules.backends.vllm.vitals import VitalSigns

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
def leader(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[bytes]]:
    """A busy process in a group of its own, taken for that of the engine."""
    process = subprocess.Popen([sys.executable, "-c", SPIN], start_new_session=True)
    monkeypatch.setattr(os, "getpgrp", lambda: process.pid)
    yield process
    process.kill()
    process.wait()


def test_a_core_that_answers_is_well_even_if_its_answer_is_an_error(leader: subprocess.Popen[bytes]) -> None:
    async def main() -> list[bool]:
        core = Core()
        core.free.set()
        signs = VitalSigns(core)
        first = await signs.read(5.0)
        core.error = RuntimeError("no such call")
        second = await signs.read(5.0)
        assert core.pings == 2
        return [first.core_answered, second.core_answered]

    assert asyncio.run(main()) == [True, True]


def test_a_core_that_does_not_answer_is_pinged_once_until_it_does(leader: subprocess.Popen[bytes]) -> None:
    async def main() -> None:
        core = Core()
        signs = VitalSigns(core)
        assert [(await signs.read(0.01)).core_answered for _ in range(3)] == [False] * 3
        assert core.pings == 1
        core.free.set()
        assert (await signs.read(5.0)).core_answered
        assert (await signs.read(5.0)).core_answered
        assert core.pings == 2

    asyncio.run(main())


def test_what_the_group_computes_and_whether_it_is_stopped(leader: subprocess.Popen[bytes]) -> None:
    async def read() -> vitals_module.Vitals:
        core = Core()
        core.free.set()
        return await VitalSigns(core).read(5.0)

    first = asyncio.run(read())
    until(lambda: asyncio.run(read()).cpu_seconds >= first.cpu_seconds + 0.1, 20)
    assert not asyncio.run(read()).stopped
    leader.send_signal(signal.SIGSTOP)
    until(lambda: asyncio.run(read()).stopped, 5)
    still = asyncio.run(read()).cpu_seconds
    assert asyncio.run(read()).cpu_seconds == still
    leader.send_signal(signal.SIGCONT)
    until(lambda: not asyncio.run(read()).stopped, 5)


def test_the_members_of_a_group_are_its_living_processes_without_the_caller(leader: subprocess.Popen[bytes]) -> None:
    (member,) = group_members(leader.pid)
    assert member.pid == leader.pid
    assert os.getpid() not in [m.pid for m in group_members(os.getpgid(0))]
    leader.kill()
    until(lambda: group_members(leader.pid) == [], 5)  # though nobody has waited for it yet
