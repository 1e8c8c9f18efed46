"""An engine process never outlives its driver: by messages, by the socket's end, by the end of the driver's process."""

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
from torchrl_moe.modules.backends.process import engine_program as parent_watch
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process.engine_program import Inbox


class Line:
    """Both ends of a driver's socket, and how often the group would have been ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends = 0
        self.gone = threading.Event()
        monkeypatch.setattr(parent_watch, "end_group", self.count)
        monkeypatch.setattr(parent_watch, "EXIT_SECONDS", 0.5)
        monkeypatch.setattr(parent_watch, "WATCH_SECONDS", 0.01)
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


def test_messages_come_in_order_from_the_driver_and_from_within(line: Line) -> None:
    for number in range(3):
        line.send("message", number)

    async def script(inbox: Inbox) -> list[tuple[Any, ...]]:
        found = await served(inbox, 3)
        inbox.put("own", "words")
        return found + await served(inbox, 1)

    assert line.run(script) == [("message", 0), ("message", 1), ("message", 2), ("own", "words")]
    assert line.ends == 0


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


def test_what_is_said_after_the_loop_has_ended_is_dropped(line: Line) -> None:
    async def script(inbox: Inbox) -> Inbox:
        return inbox

    line.run(script).put("nobody", "hears")


# -- groups -----------------------------------------------------------------------------------------------------------


def leader(code: str) -> subprocess.Popen[bytes]:
    """A process that leads a group of three: a child of its own and Python's resource tracker are in it."""
    start = (
        "import subprocess, sys; from multiprocessing import resource_tracker;"
        "from torchrl_moe.modules.backends.process import engine_program as parent_watch;"
        "subprocess.Popen(['sleep', '600']); resource_tracker.ensure_running(); print('up', end='');"
    )
    arguments = [sys.executable, "-c", f"{start} sys.stdin.read(); {code}"]
    process = subprocess.Popen(arguments, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    until(lambda: len(group(process.pid)) == 3 and trackers(process.pid))
    return process


def trackers(leader: int) -> list[int]:
    return [member.pid for member in group(leader) if "multiprocessing.resource_tracker" in " ".join(member.cmdline())]


def test_ending_the_group_ends_all_of_it_and_flushes_first() -> None:
    process = leader("parent_watch.end_group(7)")
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
    parent_watch.kill_group(process.pid)
    assert set(killed) == members - {tracker}
    until(lambda: not group(process.pid))
    process.communicate(timeout=60.0)


def test_killing_a_group_that_is_gone_kills_nobody() -> None:
    process = subprocess.Popen(["true"], start_new_session=True)
    process.wait(60.0)
    parent_watch.kill_group(process.pid)


def test_a_member_that_is_stopped_is_killed_too() -> None:
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    os.kill(process.pid, signal.SIGSTOP)
    parent_watch.kill_group(process.pid)
    assert process.wait(60.0) == -signal.SIGKILL


def test_ending_without_a_group_of_ones_own_ends_oneself_only() -> None:
    code = "from torchrl_moe.modules.backends.process.engine_program import end_group; end_group()"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 1


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
        f"os.environ.update({parent_watch.FOLDER_VARIABLE}={str(folder)!r},"
        f" {parent_watch.DRIVER_VARIABLE}=str(os.getpid()));"
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
        parent_watch.kill_group(pid)
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
    time.sleep(2 * parent_watch.WATCH_SECONDS + 0.2)
    assert len(group(leader)) == (2 if who == "leader" else 3)
    assert folder.exists()


def test_a_member_that_comes_when_both_are_gone_ends_the_group(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait(60.0)
    member = [sys.executable, "-c", LOOK_ON.format(wait=True)]
    environment = {
        **os.environ,
        parent_watch.FOLDER_VARIABLE: str(tmp_path),
        parent_watch.DRIVER_VARIABLE: str(gone.pid),
    }
    code = f"import subprocess; subprocess.Popen(['sleep', '600']); subprocess.Popen({member})"
    leader = subprocess.Popen([sys.executable, "-c", code], env=environment, process_group=0)
    leader.wait(60.0)
    assert group(leader.pid)
    until(lambda: not group(leader.pid))


def test_a_process_that_cannot_be_inspected_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parent_watch._is_gone(os.getpid()) is False

    def fail(pid: int) -> psutil.Process:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(psutil, "Process", fail)
    assert parent_watch._is_gone(1 << 30) is False
    monkeypatch.undo()
    assert parent_watch._is_gone(1 << 30) is True


def test_a_process_whose_name_is_cut_within_a_character_disturbs_nobody(tmp_path: Path) -> None:
    program = tmp_path / ("x" * 14 + "é")  # the kernel keeps 15 bytes
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as process:
        until(lambda: b"xx" in Path(f"/proc/{process.pid}/comm").read_bytes())
        parent_watch.kill_group(1 << 30)
        process.kill()


def test_nobody_looks_on_where_no_driver_started_the_process() -> None:
    environment = {name: value for name, value in os.environ.items() if name != parent_watch.FOLDER_VARIABLE}
    code = (
        "import os, threading; from torchrl_moe.modules.backends.process.engine_program import end_with_leader;"
        "assert os.getpgrp() != os.getpid(); end_with_leader(); print(threading.active_count())"
    )
    assert subprocess.check_output([sys.executable, "-c", code], env=environment) == b"1\n"


def test_nobody_looks_on_where_processes_cannot_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(parent_watch.FOLDER_VARIABLE, "/nowhere")
    monkeypatch.setenv(parent_watch.DRIVER_VARIABLE, "1")
    monkeypatch.setattr(os, "getpgrp", lambda: 1)
    monkeypatch.setattr(parent_watch, "_is_gone", lambda pid: True)
    parent_watch.end_with_leader()
    assert "parent_watch" not in {thread.name for thread in threading.enumerate()}
