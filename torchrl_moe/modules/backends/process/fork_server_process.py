"""The process that imports an engine's module once, and forks an engine process for each request of its driver.

Started by :class:`~torchrl_moe.modules.backends.process.fork_server.ForkServer` as
``python -m torchrl_moe.modules.backends.process.fork_server_process MODULE CONTROL_FD DRIVER_PIDFD``. The module has
``preload() -> str``, which imports what is slow and returns why forking would be unsafe, or "", and
``run(connection, driver_is_gone)``, which is what a forked process does. This process stays single-threaded, answers no
engine's messages and touches no device. It ends with its driver, or when the driver closes the control socket, in
either case after the processes that it forked.

For requests see ``fork_request.py``. Replies, on a request's status socket: ``("refused", reason)``, or from the forked
process ``("forked", pid)`` as soon as it is ready to run, and ``("ended", exit code)`` when it has ended.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import resource
import select
import selectors
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import TypeAlias

from torchrl_moe._imports import without_collections
from torchrl_moe.modules.backends.process.fork_request import Arrived, receive, remove_folders, withdraw
from torchrl_moe.modules.backends.process.parent_watch import kill_group

__all__ = ["main"]

ORPHAN_SECONDS = 15.0  # that engine processes get to end by themselves once their driver is gone
LOOK_SECONDS = 0.5  # between two checks of the driver while this process imports
THREAD_SECONDS = 2.0  # that a thread which has been joined takes to leave /proc

Run: TypeAlias = "Callable[[Connection, Callable[[], bool]], None]"


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    pidfd: int
    status: Connection


class _Server:
    """Forks on request and reports how each process ended.

    Args:
        run: what a forked process does.
        control: requests come in here.
        driver: a pidfd of the driver.
        unsafe: why nothing may be forked; "" if it may.
        started_in: the entry of ``sys.path`` for the working directory, if there is one.
    """

    def __init__(self, run: Run, control: socket.socket, driver: int, unsafe: str, started_in: str | None) -> None:
        self._run = run
        self._control = control
        self._driver = driver
        self._unsafe = unsafe
        self._started_in = started_in
        self._children: dict[int, _Child] = {}
        self._leftovers: set[bytes] = set()  # folders that the driver removes, or this process if the driver is gone
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
        if self._orphaned_at is not None:
            remove_folders(self._leftovers)

    def _listens(self) -> bool:
        return self._control.fileno() >= 0

    def _stop_listening(self) -> None:
        if self._listens():
            self._selector.unregister(self._control)
            self._control.close()

    def _driver_ended(self) -> None:
        self._selector.unregister(self._driver)
        self._orphaned_at = time.monotonic()
        if self._listens():
            self._leftovers |= withdraw(self._control)
        self._stop_listening()

    def _take_request(self) -> None:
        try:
            arrived = receive(self._control)
        except (EOFError, OSError):
            self._stop_listening()
            return
        if arrived.request.folder is not None:
            self._leftovers.add(arrived.request.folder)
        try:
            if not _hung_up(arrived.status.fileno()):  # else it was cancelled while this process was importing
                self._fork(arrived)
        finally:
            arrived.close()

    def _fork(self, arrived: Arrived) -> None:
        reason = self._unsafe
        pid = 0
        if not reason:
            _flush()  # or each process would print it
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"fork failed: {error}"
        if reason:
            _tell(arrived.status, "refused", reason)
            return
        if pid == 0:
            self._become(arrived)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        child = _Child(pid, os.pidfd_open(pid), arrived.status)
        self._children[pid] = child
        self._selector.register(child.pidfd, selectors.EVENT_READ, partial(self._reap, child))

    def _become(self, arrived: Arrived) -> None:
        """Turn the forked process into an engine process; never returns."""
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for file, number in ((nothing, 0), (arrived.log, 1), (arrived.log, 2)):
                os.dup2(file, number)
            os.fchdir(arrived.folder)
            self._close_what_is_not_its_own(arrived, nothing)
            request = arrived.request
            os.sched_setaffinity(0, request.processors)
            for number, limits in request.limits.items():
                resource.setrlimit(number, limits)
            os.environ.clear()
            os.environb.update(request.environment)
            _set_title("Replica")
            tempfile.tempdir = None  # the new environment may have another
            if self._started_in in sys.path:  # Python would have put another there
                sys.path[sys.path.index(self._started_in)] = _current_folder()
            # said by this process: if the server said it and were killed before, the driver would start a second one at
            # this socket
            if not _tell(arrived.status, "forked", os.getpid()):
                return  # cancelled meanwhile
            arrived.status.close()
            self._run(Connection(arrived.engine), partial(_is_readable, self._driver))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)

    def _close_what_is_not_its_own(self, arrived: Arrived, nothing: int) -> None:
        self._control.close()
        for other in self._children.values():
            other.status.close()
            os.close(other.pidfd)
        for descriptor in (nothing, arrived.folder, arrived.log):
            os.close(descriptor)

    def _reap(self, child: _Child) -> None:
        if self._orphaned_at is not None:  # what it started may still use its folder
            kill_group(child.pid)
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        del self._children[child.pid]
        _tell(child.status, "ended", os.waitstatus_to_exitcode(status))
        child.status.close()


def _current_folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return ""


def _flush() -> None:
    sys.stdout.flush()
    sys.stderr.flush()


def _tell(answers: Connection, *message: object) -> bool:
    """Send a reply; false if its reader is gone."""
    try:
        answers.send(message)
    except OSError:
        return False
    return True


def _hung_up(descriptor: int) -> bool:
    return _polls(descriptor, 0)


def _is_readable(descriptor: int) -> bool:
    return _polls(descriptor, select.POLLIN)


def _polls(descriptor: int, events: int) -> bool:
    poll = select.poll()
    poll.register(descriptor, events)
    return bool(poll.poll(0))


def _set_title(title: str) -> None:
    """Name the process for ``ps``, if ``setproctitle`` is installed; vLLM requires it.

    The package locates the memory of the title by the environment that the process began with. So it must be called
    once before the environment is replaced, or vLLM could not name its processes.
    """
    with contextlib.suppress(ImportError):
        import setproctitle

        setproctitle.setproctitle(f"torchrl_moe::{title}")


def _threads() -> str:
    """Return why this process may not fork, if it has more threads: a lock of theirs would stay locked in the child.

    A library that handles forks ends its threads before one, and starts them again when it needs them: OpenBLAS does,
    whose threads come with NumPy unless it is limited to one. So the threads are counted after a fork.
    """
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    deadline = time.monotonic() + THREAD_SECONDS
    while (count := len(os.listdir("/proc/self/task"))) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    return f"importing left {count - 1} threads running" if count > 1 else ""


@contextlib.contextmanager
def _ends_with_driver(control: socket.socket, driver: int) -> Iterator[None]:
    """End this process if the driver ends within the block. A timer checks that: a thread would forbid forking."""

    def look(*_: object) -> None:
        if _is_readable(driver):
            remove_folders(withdraw(control))
            os._exit(1)

    signal.signal(signal.SIGALRM, look)
    signal.siginterrupt(signal.SIGALRM, False)
    signal.setitimer(signal.ITIMER_REAL, LOOK_SECONDS, LOOK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)


def main() -> None:
    """Import, then serve to the end."""
    # the driver may be the last of the session: see ``engine_program.run_engine``
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would cost us the exit codes
    _set_title("ForkServer")
    name, descriptor, driver = sys.argv[1], *map(int, sys.argv[2:])
    started_in = None if sys.flags.safe_path else sys.path[0]
    os.set_inheritable(driver, False)
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    with _ends_with_driver(control, driver), without_collections():
        module = importlib.import_module(name)
        unsafe = module.preload() or _threads()
        gc.freeze()  # a collection in a forked process would copy all pages that objects lie on
    # vLLM's processes undo that just before they end, to collect what ends with them: it took them most of a second
    gc.unfreeze = lambda: None
    _Server(module.run, control, driver, unsafe, started_in).serve()


if __name__ == "__main__":
    main()
