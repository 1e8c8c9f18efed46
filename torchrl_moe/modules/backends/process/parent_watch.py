"""What ties an engine process to its driver: messages arrive here, and the whole process group ends when no more can.

Nothing here knows an engine. The process must be the leader of its process group, as :class:`LocalReplica` starts it.
vLLM's own processes, which are in the group too, watch both the leader and the driver (:func:`end_with_leader`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import psutil

from torchrl_moe.modules.backends.process import wire

__all__ = [
    "DRIVER_VARIABLE",
    "FOLDER_VARIABLE",
    "Inbox",
    "end_group",
    "end_group_later",
    "end_with_leader",
    "kill_group",
]

WATCH_SECONDS = 0.5
EXIT_SECONDS = 8.0  # that the process gets to end by itself; less than the driver's patience
KILL_ROUNDS, KILL_SECONDS = 100, 0.01
ORPHANED_SECONDS = 0.05
FOLDER_VARIABLE = "TORCHRL_MOE_REPLICA_FOLDER"  # of log and sockets
DRIVER_VARIABLE = "TORCHRL_MOE_DRIVER"  # its process id
ENDED = (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)  # only its exit code is still to be read
TRACKER = "multiprocessing.resource_tracker"


class Inbox:
    """Reads the driver's messages in its own thread, and ends the group when the driver ends.

    A driver is gone at end of file, or when ``driver_is_gone`` says so: a process that it forked may hold its end of
    the socket open. While the engine starts, it occupies the event loop, so the group is then ended at once.

    Args:
        connection: the socket to the driver.
        driver_is_gone: whether the driver's process has ended; asked twice a second.
        loop: the event loop that reads ``messages``.
    """

    def __init__(
        self, connection: Connection, driver_is_gone: Callable[[], bool], loop: asyncio.AbstractEventLoop
    ) -> None:
        self.messages: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        self.serving = False
        self._connection = connection
        self._driver_is_gone = driver_is_gone
        self._loop = loop
        self._ended = threading.Event()
        for task in (self._read, self._watch_driver):
            threading.Thread(target=task, name="inbox", daemon=True).start()

    def put(self, *message: Any) -> None:
        """Add a message from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, and with it the reader
            self._loop.call_soon_threadsafe(self.messages.put_nowait, message)

    def _read(self) -> None:
        try:
            while (message := wire.receive(self._connection))[0] != "shutdown":
                self.put(*message)
        except (EOFError, OSError):
            time.sleep(ORPHANED_SECONDS)  # a dying driver's socket closes before its process is gone
            return
        finally:
            self._end()

    def _watch_driver(self) -> None:
        while not self._driver_is_gone():
            if self._ended.wait(WATCH_SECONDS):
                return
        self._end()

    def _end(self) -> None:
        self._ended.set()
        if not self.serving:
            end_group()
        end_group_later()
        self.put("shutdown")


def end_group(code: int = 1) -> None:
    """Kill this process and everything that it started, at once."""
    sys.stdout.flush()
    sys.stderr.flush()
    if os.getpgrp() == os.getpid():  # else it was run by hand, in a shell's group
        kill_group(os.getpid())
    folder, driver = os.environ.get(FOLDER_VARIABLE), os.environ.get(DRIVER_VARIABLE)
    if folder and driver and not _is_gone(os.getpid()) and _is_gone(int(driver)):  # else the driver removes it
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(code)


def end_group_later() -> None:
    """End the group in a few seconds, unless it ends by itself before: with a stuck event loop it does not."""
    timer = threading.Timer(EXIT_SECONDS, end_group)
    timer.daemon = True
    timer.start()


def kill_group(leader: int) -> None:
    """Kill a process group, except the caller and Python's resource tracker.

    The tracker ends by itself when the others are gone, and removes the shared memory that they left behind: vLLM's
    processes leave some even after a clean exit.
    """
    for _ in range(KILL_ROUNDS):  # a member may fork while it is killed; one that waits for a disk dies later
        members = _members(leader)
        if not members:
            return
        for member in members:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        time.sleep(KILL_SECONDS)


def end_with_leader() -> None:
    """Have this process, which is not the leader, end the group once both the leader and its driver are gone.

    The leader ends the group when the driver dies, and the driver when the leader does; but both may be killed at once,
    and vLLM's engine core would run on forever. Does nothing in a process that no driver started, or where processes
    cannot be inspected.
    """
    leader, folder, driver = os.getpgrp(), os.environ.get(FOLDER_VARIABLE), os.environ.get(DRIVER_VARIABLE)
    if _is_gone(os.getpid()):  # there is no /proc
        return
    if folder and driver and leader not in (0, os.getpid()):  # 0: it is outside this process's namespace
        threading.Thread(target=_watch, args=({leader, int(driver)}, folder), name="parent_watch", daemon=True).start()


def _watch(keepers: set[int], folder: str) -> None:
    while keepers := {pid for pid in keepers if not _is_gone(pid)}:
        time.sleep(WATCH_SECONDS)
    try:
        kill_group(os.getpgrp())
    except OSError:  # no file can be opened any more
        os.killpg(0, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in ENDED
    except psutil.NoSuchProcess:
        return True
    except (psutil.Error, OSError):  # unknown: too many files are open, for example
        return False


def _members(leader: int) -> list[psutil.Process]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, OSError):  # it is gone
            if pid == os.getpid() or os.getpgid(pid) != leader:
                continue
            process = psutil.Process(pid)
            if process.status() not in ENDED and TRACKER not in " ".join(process.cmdline()):
                found.append(process)
    return found
