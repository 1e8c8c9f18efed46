"""An engine process never outlives its driver, and reports its stats by itself."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.processes import group
from support.waiting import until
from torchrl_moe.modules.backends.process import engine_program as engine_program
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process.engine_program import Inbox, Load, StatsFeed
from torchrl_moe.modules.backends.replica import ReplicaStats


class Line:
    """Both ends of a driver's socket, and how often the group would have been ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends = 0
        self.gone = threading.Event()
        monkeypatch.setattr(engine_program, "end_group", self.count)
        monkeypatch.setattr(engine_program, "EXIT_SECONDS", 0.5)
        monkeypatch.setattr(engine_program, "WATCH_SECONDS", 0.01)
        self.driver, self.process = (Connection(end.detach()) for end in socket.socketpair())

    def count(self) -> None:
        self.ends += 1

    def send(self, *message: Any) -> None:
        for frame in wire.encode(message):
            self.driver.send_bytes(frame)

    def end(self, how: str) -> None:
        """The driver's end, in each of the ways in which it shows."""
        if how == "message":
            self.send("shutdown")
        elif how == "end of file":
            self.driver.close()
        else:
            self.gone.set()

    def run(self, script: Callable[[Inbox], Awaitable[Any]]) -> Any:
        async def main() -> Any:
            inbox = Inbox(self.process, self.gone.is_set, asyncio.get_running_loop())
            return await asyncio.wait_for(script(inbox), 60.0)

        return asyncio.run(main())

    def close(self) -> None:
        """Before the real ``end_group`` is back in place, nobody may be left who would call it."""
        self.driver.close()
        for thread in threading.enumerate():
            if thread.name == "inbox" or isinstance(thread, threading.Timer):
                thread.join(60.0)
                assert not thread.is_alive()


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    line = Line(monkeypatch)
    yield line
    line.close()


async def served(inbox: Inbox, count: int) -> list[tuple[Any, ...]]:
    inbox.serving = True
    return [await inbox.messages.get() for _ in range(count)]


WAYS = pytest.mark.parametrize("how", ["message", "end of file", "no driver"])


@WAYS
def test_a_serving_process_is_told_to_end_and_made_to_if_it_does_not(line: Line, how: str) -> None:
    async def script(inbox: Inbox) -> None:
        inbox.serving = True
        line.end(how)
        assert await inbox.messages.get() == ("shutdown",)
        assert line.ends == 0
        until(lambda: line.ends == 1)

    line.run(script)


@WAYS
def test_a_process_that_still_starts_ends_at_once(line: Line, how: str) -> None:
    async def script(_inbox: Inbox) -> None:
        time.sleep(0.1)  # the loop is the engine's
        assert line.ends == 0
        line.end(how)
        until(lambda: line.ends == 1)

    line.run(script)


def test_what_is_not_a_message_ends_the_process_and_is_reported(line: Line, caplog: pytest.LogCaptureFixture) -> None:
    line.driver.send_bytes(bytes(4) + b"\x80\x05cno_such_module\nname\n.")  # a pickle, say
    assert line.run(lambda inbox: served(inbox, 1)) == [("shutdown",)]
    assert "what arrived is no message" in caplog.text


# -- groups -----------------------------------------------------------------------------------------------------------


def leader(code: str) -> subprocess.Popen[bytes]:
    """A process that leads a group of three: a child of its own and Python's resource tracker are in it."""
    start = (
        "import subprocess, sys; from multiprocessing import resource_tracker;"
        "from torchrl_moe.modules.backends.process import engine_program as engine_program;"
        "subprocess.Popen(['sleep', '600']); resource_tracker.ensure_running(); print('up', end='');"
    )
    arguments = [sys.executable, "-c", f"{start} sys.stdin.read(); {code}"]
    process = subprocess.Popen(arguments, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    until(lambda: len(group(process.pid)) == 3 and trackers(process.pid))
    return process


def trackers(leader: int) -> list[int]:
    return [member.pid for member in group(leader) if "multiprocessing.resource_tracker" in " ".join(member.cmdline())]


def test_ending_the_group_ends_all_of_it_and_flushes_first() -> None:
    process = leader("engine_program.end_group(7)")
    output, _ = process.communicate(timeout=60.0)
    assert output == b"up"
    assert process.returncode == 7
    until(lambda: not group(process.pid))


def test_a_group_that_is_killed_loses_all_but_the_tracker_which_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid) or kill(pid, number))
    process = leader("")
    members, (tracker,) = {member.pid for member in group(process.pid)}, trackers(process.pid)
    engine_program.kill_group(process.pid)
    assert set(killed) == members - {tracker}
    until(lambda: not group(process.pid))
    process.communicate(timeout=60.0)


LOOK_ON = """
import os, time
from torchrl_moe.modules.backends.process.engine_program import end_with_leader
while {wait} and os.getppid() == os.getpgrp():
    time.sleep(0.01)
end_with_leader()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A driver, the leader of a group that it started, and the folder of the two; a member of the group looks on."""
    folder = tmp_path / "replica"
    folder.mkdir()
    member = [sys.executable, "-c", LOOK_ON.format(wait=False)]
    leader = f"import subprocess, time; subprocess.Popen(['sleep', '600']); subprocess.Popen({member}); time.sleep(600)"
    driver = (
        "import os, subprocess, sys, time;"
        f"os.environ.update({engine_program.FOLDER_VARIABLE}={str(folder)!r},"
        f" {engine_program.DRIVER_VARIABLE}=str(os.getpid()));"
        f"print(subprocess.Popen([sys.executable, '-c', {leader!r}], process_group=0).pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        assert process.stdout.readline() == "up\n"
        yield process, pid, folder
    finally:
        process.kill()
        engine_program.kill_group(pid)
        process.communicate()


def test_a_group_ends_when_its_leader_and_its_driver_are_killed_at_once(
    orphans: tuple[subprocess.Popen[str], int, Path],
) -> None:
    driver, leader, folder = orphans
    assert len(group(leader)) == 3
    driver.send_signal(signal.SIGSTOP)
    os.kill(leader, signal.SIGKILL)  # now a zombie: nobody asks
    driver.kill()
    driver.wait(60.0)
    until(lambda: not group(leader))
    until(lambda: not folder.exists())


@pytest.mark.parametrize("who", ["leader", "driver"])
def test_a_group_is_left_to_the_process_that_is_still_alive(
    orphans: tuple[subprocess.Popen[str], int, Path], who: str
) -> None:
    driver, leader, folder = orphans
    if who == "leader":
        os.kill(leader, signal.SIGKILL)
    else:
        driver.kill()
        driver.wait(60.0)
    time.sleep(2 * engine_program.WATCH_SECONDS + 0.2)
    assert len(group(leader)) == (2 if who == "leader" else 3)
    assert folder.exists()


def test_a_process_that_cannot_be_inspected_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_program._is_gone(os.getpid()) is False

    def fail(pid: int) -> psutil.Process:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil, "Process", fail)
    assert engine_program._is_gone(1 << 30) is False
    monkeypatch.undo()
    assert engine_program._is_gone(1 << 30) is True


def test_nobody_looks_on_where_processes_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(engine_program.FOLDER_VARIABLE, "/nowhere")
    monkeypatch.setenv(engine_program.DRIVER_VARIABLE, "1")
    monkeypatch.setattr(os, "getpgrp", lambda: 1)
    monkeypatch.setattr(engine_program, "_is_gone", lambda pid: True)
    engine_program.end_with_leader()
    assert "engine_program" not in {thread.name for thread in threading.enumerate()}


# -- stats -------------------------------------------------------------------------------------------------------------


class Bench:
    """A feed, its clock, and what it sent."""

    def __init__(self) -> None:
        self.now = 100.0
        self.load = Load()
        self.requests = 0
        self.sent: list[ReplicaStats] = []
        self.feed = StatsFeed(
            self.load, lambda: ReplicaStats(requests=self.requests), self._send, clock=lambda: self.now
        )

    def _send(self, message: tuple[str, ReplicaStats]) -> None:
        kind, stats = message
        assert kind == "stats"
        self.sent.append(stats)

    def tick(self, tokens: int = 0) -> None:
        self.now += 0.25
        self.load.tokens += tokens
        self.feed.tick()


def test_only_what_changed_is_sent() -> None:
    bench = Bench()
    for requests in (0, 0, 3, 3, 3, 4):
        bench.requests = requests
        bench.tick()
    assert [stats.requests for stats in bench.sent] == [0, 3, 4]


def test_the_pace_is_that_of_the_last_second_and_falls_to_0_when_nothing_is_made() -> None:
    bench = Bench()
    rates = []
    for tokens in (10, 10, 10, 10, 30, 0, 0, 0, 0):
        bench.tick(tokens)
        rates.append(bench.feed.stats().tokens_per_second)
    assert rates == [40.0, 40.0, 40.0, 40.0, 60.0, 50.0, 40.0, 30.0, 0.0]
    sent = len(bench.sent)
    assert bench.sent[-1].tokens_per_second == 0.0
    for _ in range(5):
        bench.tick()
    assert len(bench.sent) == sent  # an idle engine is silent


def test_two_readings_at_one_time_are_no_error() -> None:
    bench = Bench()
    bench.feed.tick()
    assert bench.sent == [ReplicaStats()]
