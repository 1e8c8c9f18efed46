"""The process that imports an engine's module once, and forks an engine process for each request of its driver.

Started by :class:`~torchrl_moe.modules.backends.process.fork_server.ForkServer` as
``python -m torchrl_moe.modules.backends.process.fork_server_process MODULE CONTROL_FD DRIVER_PIDFD``. The module has
``preload() -> str``, which imports what is slow and returns why forking would be unsafe, or "", and
``run(stream, driver_is_gone)``, which is what a forked process does. This process stays single-threaded, answers no
engine's messages and touches no device. It ends with its driver, or when the driver closes the control socket, in
either case after its import and after the processes that it forked. A driver that closes it says so before.

A request is a packet with descriptors: of a file, the working directory, the engine's socket, its log, and the status
socket. The file holds, pickled, what the process takes over from its driver: environment, processors, and limits by
resource number. On the status socket come the replies: ``("refused", reason)``, or from the forked process
``("forked", pid)`` as soon as it is ready to run, and ``("ended", exit code)`` when it has ended.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import os
import pickle
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import NoReturn, TypeAlias

from torchrl_moe._lazy import without_collections
from torchrl_moe.modules.backends.process.engine_program import FOLDER_VARIABLE, kill_group
from torchrl_moe.modules.backends.process.link import SocketStream

DISMISSED = b"end"  # a driver's last packet
FILES = 5  # that come with a request
ORPHAN_SECONDS = 15.0  # that engine processes get to end by themselves once their driver is gone
THREAD_SECONDS = 2.0  # that a thread which has been joined takes to leave /proc

Run: TypeAlias = "Callable[[SocketStream, Callable[[], bool]], None]"
Request: TypeAlias = "tuple[dict[bytes, bytes], frozenset[int], dict[int, tuple[int, int]]]"


def readable(*descriptors: int, seconds: float | None = 0, events: int = select.POLLIN) -> list[int]:
    """Return the descriptors with such an event within some seconds; ``None``: wait for one."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, events)
    return [descriptor for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000)]


class _Server:
    """Forks on request and reports how each process ended."""

    def __init__(self, run: Run, control: socket.socket, driver: int, unsafe: str) -> None:
        self._run = run
        self._control = control
        self._driver = driver
        self._unsafe = unsafe
        self._listens = True
        self._driver_lives = False
        self._children: dict[int, tuple[int, Connection]] = {}  # pidfd -> process id, status socket
        self._folders: set[bytes] = set()  # of replicas; the driver removes them, or this process if the driver is gone

    def serve(self) -> None:
        """Handle requests and ends until there are none to come."""
        orphaned_at = 0.0
        while self._listens or self._children:
            sources = [self._driver] if self._listens or not orphaned_at else []
            sources += [self._control.fileno()] if self._listens else []
            for source in readable(*sources, *self._children, seconds=1.0 if orphaned_at else None):
                if source == self._driver:
                    orphaned_at = orphaned_at or time.monotonic()
                if source in self._children:
                    self._reap(source)
                elif self._listens:
                    self._take_request()
            if orphaned_at and time.monotonic() - orphaned_at > ORPHAN_SECONDS:
                for pid, _ in self._children.values():
                    kill_group(pid)
        # a driver that ends without a message has closed its sockets a moment before it is gone
        if readable(self._driver, seconds=0 if self._driver_lives else ORPHAN_SECONDS):
            for folder in self._folders:
                shutil.rmtree(folder, ignore_errors=True)

    def _take_request(self) -> None:
        files = array.array("i")
        flags = socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT  # which ``socket.recv_fds`` would ignore
        with contextlib.suppress(OSError):  # the driver is gone, and nothing is left to read
            packet, messages, _, _ = self._control.recvmsg(16, socket.CMSG_SPACE(FILES * files.itemsize), flags)
            self._driver_lives = bool(packet)  # else end of file, without a word
            for _, _, content in messages:
                files.frombytes(content)
        if len(files) < FILES:  # the driver has closed the socket, or this process can open no more files
            self._listens = False
            self._control.close()
            return
        status = Connection(files.pop())
        with os.fdopen(files.pop(0), "rb") as file:
            file.seek(0)  # the driver's descriptor has the same position
            request: Request = pickle.load(file)
        if name := request[0].get(FOLDER_VARIABLE.encode()):
            self._folders.add(name)
        # while this process was importing, a request may have been cancelled, which hangs up, or its driver have ended
        if readable(status.fileno(), events=0) or readable(self._driver):
            status.close()
        else:
            folder, engine, log = files
            self._fork(request, folder, engine, log, status)
        for descriptor in files:
            os.close(descriptor)

    def _fork(self, request: Request, folder: int, engine: int, log: int, status: Connection) -> None:
        reason, pid = self._unsafe, -1
        if not reason:
            sys.stdout.flush()  # or each process would print it
            sys.stderr.flush()
            try:
                pid = os.fork()
            except OSError as error:
                reason = f"fork failed: {error}"
        if reason:
            _tell(status, "refused", reason)
            status.close()
            return
        if pid == 0:
            self._become(request, folder, engine, log, status)
        with contextlib.suppress(OSError):  # it has done so itself, or has ended
            os.setpgid(pid, pid)
        self._children[os.pidfd_open(pid)] = pid, status

    def _become(self, request: Request, folder: int, engine: int, log: int, status: Connection) -> NoReturn:
        """Turn the forked process into an engine process."""
        try:
            os.setpgid(0, 0)
            nothing = os.open(os.devnull, os.O_RDONLY)
            for file, number in ((nothing, 0), (log, 1), (log, 2)):
                os.dup2(file, number)
            os.fchdir(folder)
            # what is not its own
            self._control.close()
            for other in (nothing, folder, log, *self._children):
                os.close(other)
            for _, its_status in self._children.values():
                its_status.close()
            environment, processors, limits = request
            os.sched_setaffinity(0, processors)
            for number, soft_and_hard in limits.items():
                resource.setrlimit(number, soft_and_hard)
            os.environ.clear()
            os.environb.update(environment)
            tempfile.tempdir = None  # the new environment may have another
            _set_title("Replica")
            # sent by this process: if the server sent it and were killed before, the driver would start a second one at
            # this socket
            if _tell(status, "forked", os.getpid()):  # else it was cancelled meanwhile
                status.close()
                self._run(SocketStream(socket.socket(fileno=engine)), lambda: bool(readable(self._driver)))
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(1)

    def _reap(self, pidfd: int) -> None:
        pid, status = self._children.pop(pidfd)
        if readable(self._driver):  # what it started may still use its folder
            kill_group(pid)
        _, code = os.waitpid(pid, 0)
        os.close(pidfd)
        _tell(status, "ended", os.waitstatus_to_exitcode(code))
        status.close()


def _tell(status: Connection, *message: object) -> bool:
    """Send a reply; false if its reader is gone."""
    try:
        status.send(message)
    except OSError:
        return False
    return True


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


def main() -> None:
    """Import, then serve to the end."""
    # the driver may be the last of the session: see ``engine_program.run_engine``
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # inherited as ignored, it would cost us the exit codes
    _set_title("ForkServer")
    name, descriptor, driver = sys.argv[1], *map(int, sys.argv[2:])
    if not sys.flags.safe_path:
        sys.path[0] = ""  # the working directory, whatever it will be
    os.set_inheritable(driver, False)
    control = socket.socket(fileno=descriptor)
    control.set_inheritable(False)
    with without_collections():
        module = importlib.import_module(name)
        unsafe = module.preload() or _threads()
        gc.freeze()  # a collection in a forked process would copy all pages that objects lie on
    # vLLM's processes undo that just before they end, to collect what ends with them: it took them most of a second
    gc.unfreeze = lambda: None
    _Server(module.run, control, driver, unsafe).serve()


if __name__ == "__main__":
    main()
