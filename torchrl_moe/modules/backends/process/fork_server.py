"""A process that imports vLLM once and forks engine processes, as the driver sees it; see ``fork_server_process.py``.

Importing vLLM takes ten seconds, and each engine process would do it again. The standard library's fork server is not
used: its processes have the environment of its own start, and what it imports prints to the driver's terminal.
"""

from __future__ import annotations

import array
import contextlib
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import IO

from torchrl_moe.modules.backends.process.engine_program import kill_group
from torchrl_moe.modules.backends.process.fork_server_process import DISMISSED, Request, readable

MODULE = "torchrl_moe.modules.backends.process.fork_server_process"
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
        """The id of its process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it runs."""
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
