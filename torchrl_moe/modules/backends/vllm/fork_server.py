"""The driver's end of a process that imports vLLM once and forks engine processes; see ``fork_server_process.py``.

Importing vLLM takes ten seconds, and each engine process would do it again. The standard library's fork server is not
used: it imports the user's script again, and shares its list of modules to preload with the user.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
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

from torchrl_moe.modules.backends.vllm.fork_server_process import HEADER, ForkRequest

__all__ = ["CannotFork", "ForkServer", "ForkedProcess", "Launch", "fork_server", "key_of"]

MODULE = "torchrl_moe.modules.backends.vllm.fork_server_process"
METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
# Read when Python starts, when a library is loaded, or when a module is imported. All others are read later, and a
# forked process has its own.
READ_AT_IMPORT = (
    "CUDA_MODULE_LOADING", "CXX", "CC", "GOMP_", "GOTO_", "HF_", "HIP_", "HOME", "HUGGINGFACE_", "KMP_", "LANG", "LC_",
    "LD_", "MALLOC_", "MKL_", "NUMBA_", "NUMEXPR_", "OMP_", "OPENBLAS_", "PATH", "PYTHON", "PYTORCH_", "RAY_", "ROCR_",
    "SAFETENSORS_", "TCMALLOC_", "TENSORDICT_", "TOKENIZERS_", "TORCH", "TRANSFORMERS_", "TRITON_", "VLLM_", "XDG_",
)  # fmt: skip
KEPT = 2  # servers per driver: each holds 0.7 GB
IMPORT_SECONDS = 180.0
IDLE_SECONDS = 0.5  # that a server without children takes to end
CODE_SECONDS = 2.0  # between the end of a process and word of its exit code
UNKNOWN_CODE = 255  # as ``multiprocessing`` says it: whoever could have asked is gone
SHOWN_BYTES = 2000


class CannotFork(Exception):
    """No process was forked; the words say why."""


def _why_not(environment: Mapping[str, str]) -> str:
    """Return why an engine process with this environment is not to be forked; "" if it is."""
    if environment.get(METHOD_VARIABLE) == "spawn":
        return f"{METHOD_VARIABLE}=spawn is set"
    if sys.platform != "linux" or not hasattr(os, "pidfd_open"):
        return f"this platform ({sys.platform}) has no process descriptors"
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:  # an old kernel, or a sandbox
        return f"process descriptors are not available: {error}"
    return ""


def key_of(environment: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    """Return the part of an environment that takes effect at import, and so must be equal to share a server.

    >>> key_of({"OMP_NUM_THREADS": "2", "TMPDIR": "/tmp/x", "CUDA_VISIBLE_DEVICES": "1"})
    (('OMP_NUM_THREADS', '2'),)
    """
    return tuple(sorted(item for item in environment.items() if item[0].startswith(READ_AT_IMPORT)))


class ForkedProcess:
    """A process that a server forked, with the part of ``subprocess.Popen`` that its owner needs.

    Args:
        pid: its id.
        status: where the server says how it ended.
    """

    def __init__(self, pid: int, status: Connection) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._status = status
        self._lock = threading.Lock()
        try:
            self._pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # it ended, and the server has noticed
            self._pidfd = -1
        self._gone_at: float | None = None

    def poll(self) -> int | None:
        """Return its exit code; ``None`` while it runs; 255 if it ended and the server is gone that knew the code."""
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
                waits_for = [] if self.returncode is not None else [self._status.fileno(), self._pidfd]
            ended = self._gone_at is not None  # then only the exit code is to come
            _readable([fd for fd in waits_for[: 1 if ended else 2] if fd >= 0], min(left, 0.1 if ended else 1.0))
        return code

    def kill(self) -> None:
        """Kill it, unless it has ended."""
        if self.poll() is None and self._pidfd >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _close(self) -> None:
        self._status.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)


class Launch:
    """A request to a server, until the process is there.

    Args:
        server: that was asked.
        status: its answers.
    """

    def __init__(self, server: ForkServer, status: socket.socket) -> None:
        self._server = server
        self._socket = status

    def wait(self) -> ForkedProcess:
        """Wait for the process.

        Raises:
            CannotFork: the server refused or died, or :meth:`cancel` was called.
        """
        status = Connection(os.dup(self._socket.fileno()))
        try:
            if not status.poll(IMPORT_SECONDS):
                raise CannotFork(f"importing took more than {IMPORT_SECONDS:.0f} s")
            kind, value = status.recv()
        except (EOFError, OSError) as error:
            status.close()
            raise CannotFork(f"the fork server ended{self._server.last_words()}") from error
        except BaseException:
            status.close()
            raise
        finally:
            self._socket.close()
        if kind == "refused":
            status.close()
            raise CannotFork(value)
        return ForkedProcess(value, status)

    def cancel(self) -> None:
        """Have no process forked, or the one that was forked this moment killed."""
        with contextlib.suppress(OSError):  # it was answered
            self._socket.shutdown(socket.SHUT_RDWR)


class ForkServer:
    """One server: a child of this process that imports ``module`` with ``environment`` and forks on request.

    Args:
        module: has ``preload`` and ``run``.
        environment: of the server.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self._lock = threading.Lock()
        self._driver = os.getpid()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - asked for last words until the end
        ours, theirs = socket.socketpair()
        watched = os.pidfd_open(self._driver)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", MODULE, module, str(theirs.fileno()), str(watched)],
                pass_fds=[theirs.fileno(), watched],
                # numpy's BLAS would start threads when it is imported; no engine computes with it
                env={"OPENBLAS_NUM_THREADS": "1", **environment},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                process_group=0,  # Ctrl-C at the terminal is for the driver
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(watched)
        self._control = ours
        # at interpreter exit, too: after the finalizers of replicas, which are made later
        self.end = weakref.finalize(self, _end, ours, self._log, self._process, self._driver)

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    def is_alive(self) -> bool:
        """Whether it runs, and belongs to this process rather than to one that forked it."""
        return self._driver == os.getpid() and self._process.poll() is None

    def fork(self, engine: int, log: int, environment: Mapping[str, str]) -> Launch:
        """Ask for a process; returns at once.

        Args:
            engine: descriptor of the engine's end of its socket.
            log: descriptor of what it prints to.
            environment: of the process, all of it.

        Raises:
            CannotFork: the server is gone.
        """
        request = ForkRequest(
            environment=dict(environment), folder=os.getcwd(), processors=frozenset(os.sched_getaffinity(0))
        )
        text = pickle.dumps(request)
        ours, theirs = socket.socketpair()
        try:
            with theirs, self._lock:
                socket.send_fds(self._control, [HEADER.pack(len(text))], [engine, log, theirs.fileno()])
                self._control.sendall(text)
        except OSError as error:
            ours.close()
            raise CannotFork(f"the fork server is gone{self.last_words()}") from error
        except BaseException:
            ours.close()
            raise
        return Launch(self, ours)

    def last_words(self) -> str:
        """Return what the server printed last, after a colon; "" if nothing."""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, SHOWN_BYTES, max(size - SHOWN_BYTES, 0)).decode(errors="replace").strip()
        return f": {text}" if text else ""

    def close(self) -> None:
        """Let it end once the processes that it forked have ended. Idempotent."""
        self._control.close()


def _end(control: socket.socket, log: IO[bytes], process: subprocess.Popen[bytes], driver: int) -> None:
    """Close a server and wait for its end; it is killed if it is still importing."""
    control.close()
    log.close()
    if driver != os.getpid():
        return
    try:
        process.wait(IDLE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _readable(descriptors: list[int], seconds: float) -> bool:
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return bool(poll.poll(seconds * 1000))


_servers: OrderedDict[tuple[object, ...], ForkServer] = OrderedDict()
_closed: list[ForkServer] = []  # their processes may still have children
_servers_lock = threading.Lock()


def fork_server(module: str, environment: Mapping[str, str]) -> ForkServer:
    """Return this process's server for a module and an environment, started if there is none; it may still import.

    A driver keeps two of them; a third closes the one that was asked for least recently.

    Raises:
        CannotFork: the platform or the user's settings forbid it.
    """
    if reason := _why_not(environment):
        raise CannotFork(reason)
    key = (os.getpid(), module, key_of(environment))
    with _servers_lock:
        server = _servers.pop(key, None)
        if server is None or not server.is_alive():
            server = ForkServer(module, environment)
        _servers[key] = server
        while len(_servers) > KEPT:
            _closed.append(_servers.popitem(last=False)[1])
            _closed[-1].close()
        _closed[:] = [closed for closed in _closed if closed.is_alive()]
    return server
