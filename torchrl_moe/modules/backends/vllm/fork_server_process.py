"""The process that imports an engine's module once, and forks an engine process for each request of its driver.

Started by :class:`~torchrl_moe.modules.backends.vllm.fork_server.ForkServer` as
``python -m torchrl_moe.modules.backends.vllm.fork_server_process MODULE CONTROL_FD DRIVER_PIDFD``. The module has
``preload() -> str``, which imports what is slow and returns why forking would be unsafe, or "", and
``run(connection, driver_is_gone)``, which is what a forked process does. This process stays single-threaded, answers no
engine's messages and touches no device. It ends with its driver, or when the driver closes the control socket, in
either case after the processes that it forked.

Request, on the control socket: a length with three descriptors (the engine's socket, its log, a status socket), then a
pickled :class:`ForkRequest`. Answers, on the status socket: ``("forked", pid)`` or ``("refused", reason)``, and when
the process has ended ``("ended", exit code)``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import select
import selectors
import signal
import socket
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

from torchrl_moe.modules.backends.vllm.lifeline import kill_group

__all__ = ["HEADER", "ForkRequest", "main"]

HEADER = struct.Struct("<Q")
DESCRIPTORS = 3
ORPHAN_SECONDS = 15.0  # that engine processes get to end by themselves once their driver is gone

Run: TypeAlias = "Callable[[Connection, Callable[[], bool]], None]"


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkRequest:
    """What a forked process takes over from its driver, as a child of the driver would.

    Args:
        environment: all of it.
        folder: the working directory.
        processors: that it may run on.
    """

    environment: Mapping[str, str]
    folder: str
    processors: frozenset[int]


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    pidfd: int
    status: Connection


class _Server:
    """Forks on request and says how each process ended.

    Args:
        run: what a forked process does.
        control: requests come in here.
        driver: a pidfd of the driver.
        unsafe: why nothing may be forked; "" if it may.
    """

    def __init__(self, run: Run, control: socket.socket, driver: int, unsafe: str) -> None:
        self._run = run
        self._control = control
        self._driver = driver
        self._unsafe = unsafe
        self._children: dict[int, _Child] = {}
        self._orphaned_at: float | None = None
        self._selector = selectors.PollSelector()  # unlike epoll it has no descriptor that a child would share
        self._selector.register(control, selectors.EVENT_READ, self._take_request)
        self._selector.register(driver, selectors.EVENT_READ, self._driver_ended)

    def serve(self) -> None:
        """Handle requests and ends until there are none to come."""
        while self._children or self._listens():
            for key, _ in self._selector.select(None if self._orphaned_at is None else 1.0):
                key.data()
            if self._orphaned_at is not None and time.monotonic() - self._orphaned_at > ORPHAN_SECONDS:
                for child in self._children.values():
                    kill_group(child.pid)

    def _listens(self) -> bool:
        return self._control.fileno() >= 0

    def _stop_listening(self) -> None:
        if self._listens():
            self._selector.unregister(self._control)
            self._control.close()

    def _driver_ended(self) -> None:
        self._selector.unregister(self._driver)
        self._orphaned_at = time.monotonic()
        self._stop_listening()

    def _take_request(self) -> None:
        try:
            request, descriptors = _receive(self._control)
        except (EOFError, OSError):  # closed, or the driver died while it wrote
            self._stop_listening()
            return
        engine, log, status = descriptors
        answers = Connection(status)
        try:
            if not _hung_up(status):  # else it was cancelled while this process was importing
                self._fork(request, engine, log, answers)
        finally:
            os.close(engine)
            os.close(log)

    def _fork(self, request: ForkRequest, engine: int, log: int, answers: Connection) -> None:
        reason = self._unsafe
        pid = 0
        if not reason:
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"fork failed: {error}"
        if reason:
            _tell(answers, "refused", reason)
            return
        if pid == 0:
            self._become(request, engine, log, answers)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        child = _Child(pid, os.pidfd_open(pid), answers)
        self._children[pid] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, partial(self._reap, child))
        if not _tell(answers, "forked", pid):
            kill_group(pid)  # cancelled meanwhile

    def _become(self, request: ForkRequest, engine: int, log: int, answers: Connection) -> None:
        """Turn the forked process into an engine process; never returns."""
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for file, number in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(file, number)
            os.close(nothing)
            os.close(log)
            answers.close()
            self._control.close()
            for other in self._children.values():
                other.status.close()
                os.close(other.pidfd)
            os.chdir(request.folder)
            os.sched_setaffinity(0, request.processors)
            os.environ.clear()
            os.environ.update(request.environment)
            _set_title("Replica")
            tempfile.tempdir = None  # asked for anew, from the new environment
            self._run(Connection(engine), partial(_is_readable, self._driver))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)

    def _reap(self, child: _Child) -> None:
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pid]
        _tell(child.status, "ended", os.waitstatus_to_exitcode(status))
        child.status.close()


def _receive(control: socket.socket) -> tuple[ForkRequest, list[int]]:
    header, descriptors, _, _ = socket.recv_fds(control, HEADER.size, DESCRIPTORS)
    if len(header) < HEADER.size or len(descriptors) < DESCRIPTORS:
        raise EOFError
    (length,) = HEADER.unpack(header)
    text = bytearray()
    while len(text) < length:
        if not (part := control.recv(length - len(text))):
            raise EOFError
        text += part
    request: ForkRequest = pickle.loads(text)
    return request, descriptors


def _tell(answers: Connection, *message: object) -> bool:
    """Send an answer; false if nobody is there to read it."""
    try:
        answers.send(message)
    except OSError:
        return False
    return True


def _hung_up(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, 0)
    return bool(poll.poll(0))


def _is_readable(descriptor: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(0))


def _set_title(title: str) -> None:
    """Name the process for ``ps``, if the package is there; vLLM requires it.

    The package finds its memory by the environment that the process began with. So it must be called once before that
    is exchanged, or vLLM could not name its processes.
    """
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"torchrl_moe::{title}")


def _threads() -> str:
    """Return why this process may not fork for its threads' sake: the locks that they hold would stay locked."""
    count = len(os.listdir("/proc/self/task"))
    return f"importing left {count - 1} threads running" if count > 1 else ""


def main() -> None:
    """Import, then serve to the end."""
    # the driver may be the last of the session: see ``engine_process.main``
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    _set_title("ForkServer")
    name, control, driver = sys.argv[1], *map(int, sys.argv[2:])
    module = importlib.import_module(name)
    unsafe = module.preload() or _threads()
    gc.collect()
    gc.freeze()  # a collection in a forked process would copy all pages that objects lie on
    _Server(module.run, socket.socket(fileno=control), driver, unsafe).serve()


if __name__ == "__main__":
    main()
