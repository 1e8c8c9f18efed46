"""A process that a fork server made for its driver, as the driver sees it: part of what ``subprocess.Popen`` has.

The driver is not its parent. The server says how it ended; a pidfd shows, without the server, whether it has ended.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from multiprocessing.connection import Connection

__all__ = ["ForkedProcess"]

CODE_SECONDS = 2.0  # between the end of a process and the report of its exit code
UNKNOWN_CODE = 255  # as ``multiprocessing`` has it for a process whose fork server is gone


class ForkedProcess:
    """A process that a fork server forked.

    Args:
        pid: its id.
        status: where the server says how it ended.
    """

    def __init__(self, pid: int, status: Connection) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()  # a closed descriptor's number may soon belong to another file
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it ended, and the server has noticed
            self._pidfd = -1
        self._gone_at: float | None = None

    def poll(self) -> int | None:
        """Return its exit code; ``None`` while it runs; 255 if it ended and the server that knew the code is gone."""
        with self._lock:
            if self.returncode is None:
                self.returncode = self._ask()
                if self.returncode is not None:
                    self._close()
            return self.returncode

    def _ask(self) -> int | None:
        orphaned = False
        try:
            if self._status.poll(0):
                return int(self._status.recv()[1])
        except (EOFError, OSError):
            orphaned = True
        if self._pidfd >= 0 and not _readable([self._pidfd], 0):
            return None
        self._gone_at = self._gone_at or time.monotonic()
        return UNKNOWN_CODE if orphaned or time.monotonic() - self._gone_at > CODE_SECONDS else None

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code.

        Raises:
            subprocess.TimeoutExpired: it still runs.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left = 1.0 if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            with self._lock:
                if self.returncode is not None:  # another thread asked
                    continue
                ended = self._gone_at is not None  # then only the exit code is missing
                waits_for = [self._status.fileno()] if ended else [self._status.fileno(), self._pidfd]
            _readable(waits_for, min(left, 0.1 if ended else 1.0))
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is not None:
            return
        with self._lock:
            if self.returncode is None and self._pidfd >= 0:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _close(self) -> None:
        self._status.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


def _readable(descriptors: list[int], seconds: float) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))
