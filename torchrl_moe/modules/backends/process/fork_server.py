"""A process that imports an engine's module once (vLLM's takes ten seconds), and forks its engine processes.

The driver's side is :func:`fork_server`, :class:`ForkServer` and what they return; :class:`_Server` is the process,
started as ``python -m torchrl_moe.modules.backends.process.fork_server MODULE CONTROL_FD DRIVER_PIDFD``. The module has
``preload() -> str``, which imports what is slow and returns why forking would be unsafe, or "", and
``run(stream, driver_is_gone)``, which is what a forked process does. The process stays single-threaded, answers no
engine's messages and touches no device. It ends with its driver, or when the driver closes the control socket, in
either case after its import and after the processes that it forked. A driver that closes it says so before.

A request is a packet with descriptors: of a file, the working directory, the engine's socket, its log, and the status
socket. The file holds, pickled, what the process takes over from its driver: environment, processors, and limits by
resource number. On the status socket come the replies: ``("refused", reason)``, or from the forked process
``("forked", pid)`` as soon as it is ready to run, and ``("ended", exit code)`` when it has ended.

The standard library's fork server is not used: its processes have the environment of its own start, and what it imports
prints to the driver's terminal.
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
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import IO, NoReturn, TypeAlias

from torchrl_moe._lazy import without_collections
from torchrl_moe.modules.backends.process.engine_program import FOLDER_VARIABLE, kill_group
from torchrl_moe.modules.backends.process.link import SocketStream

MODULE = "torchrl_moe.modules.backends.process.fork_server"
# Read when Python starts, when a library is loaded, or when a module is imported. All others are read later, and a
# forked process has its own.
READ_AT_IMPORT = (
    "ATEN_", "CC", "CUDA_HOME", "CUDA_MODULE_LOADING", "CUDA_PATH", "CXX", "FLASHINFER_", "GLIBC_", "GOMP_", "GOTO_",
    "HF_", "HIP_", "HOME", "HUGGINGFACE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_", "MKL_", "NUMBA_", "NUMEXPR_",
    "OMP_", "OPENBLAS_", "PATH", "PYTHON", "PYTORCH_", "RAY_", "ROCR_", "SAFETENSORS_", "TCMALLOC_", "TENSORDICT_",
    "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_", "XDG_",
)  # fmt: skip
READ_LATER = ("TORCHRL_",)  # although they begin with one of these
LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))
KEPT = 2  # servers per driver: each holds 0.7 GB
IMPORT_SECONDS = 180.0
ANSWER_SECONDS = 30.0  # of a server that has imported; it takes milliseconds
IDLE_SECONDS = 0.5  # that a server without children takes to end
CODE_SECONDS = 2.0  # between the end of a process and the report of its exit code
POLL_SECONDS = 0.01
UNKNOWN_CODE = 255  # as ``multiprocessing`` has it for a process whose fork server is gone
SHOWN_BYTES = 2000
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


class CannotFork(Exception):
    """No process was forked; the message says why."""


class ForkedProcess:
    """A process that a server forked: the part of ``subprocess.Popen`` that its owner needs.

    The driver is not its parent. A pidfd shows whether it has ended, the server says how.
    """

    def __init__(self, pid: int, status: Connection, server: ForkServer | None = None) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._server = server  # which lives as long as anyone may ask for a code
        self._lock = threading.Lock()
        self._pidfd = os.pidfd_open(pid)  # open until the code is known

    def poll(self) -> int | None:
        """Return its exit code; ``None`` while it runs; 255 if it ended and the server that knew the code is gone."""
        with self._lock:
            if self.returncode is None and readable(self._pidfd):
                self.returncode = UNKNOWN_CODE
                with contextlib.suppress(EOFError, OSError):
                    if self._status.poll(CODE_SECONDS):
                        self.returncode = int(self._status.recv()[1])
                self._status.close()
                os.close(self._pidfd)
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return the exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        with self._lock:
            if self.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class Launch:
    """A pending request to a server, and the socket that its replies come on."""

    def __init__(self, server: ForkServer, status: socket.socket) -> None:
        self._server = server
        self._socket = status

    def wait(self) -> ForkedProcess:
        """Wait for the process. A server that does not answer is killed, so that the next start gets another."""
        server, status, pid = self._server, Connection(os.dup(self._socket.fileno())), 0
        patience = ANSWER_SECONDS if server.has_answered else IMPORT_SECONDS
        try:
            # the first answer comes after the import, later ones at once
            if not status.poll(patience):
                server.kill()
                raise CannotFork(f"the fork server did not answer within {patience:.0f} s{server.how_it_ended()}")
            kind, value = status.recv()
            server.has_answered = True
            if kind == "refused":
                raise CannotFork(value)
            if kind == "ended":
                raise CannotFork(f"the forked process ended with exit code {value} before it ran")
            pid = value
            return ForkedProcess(pid, status, server)
        except BaseException as error:
            status.close()
            if pid:  # nobody could watch it
                kill_group(pid)
            if isinstance(error, EOFError):
                raise CannotFork(f"the fork server ended{server.how_it_ended()}") from error
            if isinstance(error, OSError):
                raise CannotFork(f"the fork server's reply cannot be read: {error}") from error
            raise
        finally:
            self._socket.close()

    def cancel(self) -> None:
        """Withdraw the request: no process is forked, or one that was just forked exits."""
        with contextlib.suppress(OSError):  # it is closed, since it was answered
            self._socket.shutdown(socket.SHUT_RDWR)


class ForkServer:
    """One server: a child of this process that imports ``module`` with ``environment`` and forks on request.

    It ends when nothing refers to it: neither a :class:`Launch` nor a :class:`ForkedProcess`.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.has_answered = False  # then it has imported, too
        with contextlib.ExitStack() as stack:
            self._log: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            stack.enter_context(self._control)
            watched = os.pidfd_open(os.getpid())
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, module, str(theirs.fileno()), str(watched)],
                    pass_fds=[theirs.fileno(), watched],
                    env=dict(environment),
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=subprocess.STDOUT,
                    process_group=0,  # Ctrl-C at the terminal is for the driver
                )
            finally:
                theirs.close()
                os.close(watched)
            stack.pop_all()
        # at interpreter exit, too: after the finalizers of replicas, which are made later
        self.end = weakref.finalize(self, _end, self._control, self._log, self._process, os.getpid())

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        """Kill it; the processes that it forked continue."""
        self._process.kill()

    def fork(self, engine: int, log: int, environment: Mapping[str, str]) -> Launch:
        """Ask for a process; returns at once."""
        request: Request = (
            {os.fsencode(name): os.fsencode(value) for name, value in environment.items()},
            frozenset(os.sched_getaffinity(0)),
            {number: resource.getrlimit(number) for number in LIMITS},
        )
        with contextlib.ExitStack() as stack:
            try:
                ours, theirs = socket.socketpair()
                stack.callback(theirs.close)
                failed = stack.enter_context(contextlib.ExitStack())
                failed.callback(ours.close)
                folder = os.open(".", os.O_PATH)  # its name may lead elsewhere by then, or nowhere
                stack.callback(os.close, folder)
                file = stack.enter_context(os.fdopen(os.memfd_create("request"), "wb"))
                pickle.dump(request, file)
                file.flush()
                # one packet arrives whole or not at all; ``socket.send_fds`` would ignore the flag
                files = array.array("i", [file.fileno(), folder, engine, log, theirs.fileno()])
                self._control.sendmsg([b"fork"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, files)], socket.MSG_DONTWAIT)
                failed.pop_all()
            except OSError as error:
                raise CannotFork(f"the fork server cannot be reached: {error}{self.how_it_ended()}") from error
        return Launch(self, ours)

    def how_it_ended(self) -> str:
        """Return what the server printed last, after a colon; "" if nothing."""
        if self._log.closed:
            return ""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, SHOWN_BYTES, max(size - SHOWN_BYTES, 0)).decode(errors="replace").strip()
        return f": {text}" if text else ""


def _end(control: socket.socket, log: IO[bytes], process: subprocess.Popen[bytes], driver: int) -> None:
    """Close a server and wait for its end; it is killed if it is still importing."""
    if driver != os.getpid():  # a process that the driver forked runs its finalizers, too
        return
    with contextlib.suppress(OSError):  # the server is gone
        control.send(DISMISSED, socket.MSG_DONTWAIT)
    with contextlib.suppress(OSError):
        control.shutdown(socket.SHUT_RDWR)  # closing alone does nothing while a forked process holds the socket
    control.close()
    log.close()
    try:
        process.wait(IDLE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_servers: OrderedDict[tuple[object, ...], ForkServer] = OrderedDict()
_servers_lock = threading.Lock()


def key_of(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the part of an environment that takes effect at import, and so must be equal to share a server.

    >>> key_of({"OMP_NUM_THREADS": "2", "TMPDIR": "/tmp/x", "CUDA_VISIBLE_DEVICES": "1"})
    (('OMP_NUM_THREADS', '2'),)
    """
    read = (item for item in environment.items() if item[0].startswith(READ_AT_IMPORT))
    return tuple(sorted(item for item in read if not item[0].startswith(READ_LATER)))


def fork_server(module: str, environment: Mapping[str, str]) -> ForkServer:
    """Return this process's server for a module and an environment, or start one; it may still be importing.

    A driver keeps two of them; a third replaces the one that was asked for least recently.
    """
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError) as error:  # another platform, an old kernel, or a sandbox
        raise CannotFork(f"process descriptors are not available: {error}") from error
    # with the process id: a forked driver must not use the servers of its parent
    key = (os.getpid(), module, key_of(environment))
    with _servers_lock:
        server = _servers.pop(key, None)
        if server is None or not server.is_alive():
            server = ForkServer(module, environment)
        _servers[key] = server
        replaced = [_servers.popitem(last=False) for _ in range(len(_servers) - KEPT)]
    del replaced  # outside of the lock: one that forked nothing ends here
    return server


# -- the process -------------------------------------------------------------------------------------------------------


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
