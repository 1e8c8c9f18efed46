"""The driver's end of a process that imports vLLM once and forks engine processes; see ``fork_server_process.py``.

Importing vLLM takes ten seconds, and each engine process would do it again. The standard library's fork server is not
used: it imports the user's script again, and shares its list of modules to preload with the user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import IO, Any

from torchrl_moe.modules.backends.process.fork_request import request_like_this, send
from torchrl_moe.modules.backends.process.forked_process import ForkedProcess
from torchrl_moe.modules.backends.process.parent_watch import kill_group

__all__ = ["CannotFork", "ForkServer", "Launch", "fork_server", "key_of"]

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
KEPT = 2  # servers per driver: each holds 0.7 GB
IMPORT_SECONDS = 180.0
ANSWER_SECONDS = 30.0  # of a server that has imported; it takes milliseconds
IDLE_SECONDS = 0.5  # that a server without children takes to end
SHOWN_BYTES = 2000


class CannotFork(Exception):
    """No process was forked; the message says why."""


def _why_not() -> str:
    """Return why no process can be forked on this platform; "" if one can."""
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
    read = (item for item in environment.items() if item[0].startswith(READ_AT_IMPORT))
    return tuple(sorted(item for item in read if not item[0].startswith(READ_LATER)))


class Launch:
    """A pending request to a server.

    Args:
        server: the one that was asked.
        status: the socket that its replies come on.
    """

    def __init__(self, server: ForkServer, status: socket.socket) -> None:
        self._server = server
        self._socket = status

    def wait(self) -> ForkedProcess:
        """Wait for the process. A server that does not answer is killed, so that the next start gets another.

        Raises:
            CannotFork: the server refused or died, or :meth:`cancel` was called.
        """
        status = Connection(os.dup(self._socket.fileno()))
        try:
            kind, value = self._answer(status)
            if kind == "refused":
                raise CannotFork(value)
            if kind == "ended":
                raise CannotFork(f"the forked process ended with exit code {value} before it ran")
            return _watched(value, status)
        except EOFError as error:
            status.close()
            raise CannotFork(f"the fork server ended{self._server.how_it_ended()}") from error
        except OSError as error:
            status.close()
            raise CannotFork(f"the fork server's reply cannot be read: {error}") from error
        except BaseException:
            status.close()
            raise
        finally:
            self._socket.close()

    def _answer(self, status: Connection) -> tuple[str, Any]:
        patience = ANSWER_SECONDS if self._server.has_answered else IMPORT_SECONDS
        if not status.poll(patience):
            self._server.kill()
            raise CannotFork(f"the fork server did not answer within {patience:.0f} s{self._server.how_it_ended()}")
        answer: tuple[str, Any] = status.recv()
        self._server.has_answered = True
        return answer

    def cancel(self) -> None:
        """Withdraw the request: no process is forked, or one that was just forked exits."""
        with contextlib.suppress(OSError):  # it is closed, since it was answered
            self._socket.shutdown(socket.SHUT_RDWR)


def _watched(pid: int, status: Connection) -> ForkedProcess:
    try:
        return ForkedProcess(pid, status)
    except OSError:  # too many open files
        kill_group(pid)
        raise


class ForkServer:
    """One server: a child of this process that imports ``module`` with ``environment`` and forks on request.

    Args:
        module: has ``preload`` and ``run``.
        environment: of the server.
    """

    def __init__(self, module: str, environment: Mapping[str, str]) -> None:
        self.has_answered = False  # then it has imported, too
        self._driver = os.getpid()
        with contextlib.ExitStack() as stack:
            self._log: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self._control, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            stack.enter_context(self._control)
            watched = os.pidfd_open(self._driver)
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
        self.end = weakref.finalize(self, _end, self._control, self._log, self._process, self._driver)

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
            CannotFork: the server is gone, or this process can open no more files.
        """
        request = request_like_this(environment)
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                send(self._control, request, engine, log, theirs.fileno())
        except OSError as error:
            ours.close()
            raise CannotFork(f"the fork server cannot be reached: {error}{self.how_it_ended()}") from error
        except BaseException:
            ours.close()
            raise
        return Launch(self, ours)

    def how_it_ended(self) -> str:
        """Return what the server printed last, after a colon; "" if nothing."""
        if self._log.closed:
            return ""
        descriptor = self._log.fileno()
        size = os.fstat(descriptor).st_size
        text = os.pread(descriptor, SHOWN_BYTES, max(size - SHOWN_BYTES, 0)).decode(errors="replace").strip()
        return f": {text}" if text else ""

    def close(self) -> None:
        """Let it end once the processes that it forked have ended. Idempotent."""
        _hang_up(self._control, self._driver)

    def kill(self) -> None:
        """Kill it; the processes that it forked continue."""
        self._process.kill()


def _hang_up(control: socket.socket, driver: int) -> None:
    if driver == os.getpid():
        with contextlib.suppress(OSError):  # the server is gone, or it was done before
            control.shutdown(socket.SHUT_RDWR)  # closing alone does nothing while a forked process holds the socket
    control.close()


def _end(control: socket.socket, log: IO[bytes], process: subprocess.Popen[bytes], driver: int) -> None:
    """Close a server and wait for its end; it is killed if it is still importing."""
    _hang_up(control, driver)
    log.close()
    if driver != os.getpid():
        return
    try:
        process.wait(IDLE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


_servers: OrderedDict[tuple[object, ...], ForkServer] = OrderedDict()
_closed: list[ForkServer] = []  # their processes may still have children
_servers_lock = threading.Lock()


def fork_server(module: str, environment: Mapping[str, str]) -> ForkServer:
    """Return this process's server for a module and an environment, or start one; it may still be importing.

    A driver keeps two of them; a third closes the one that was asked for least recently.

    Raises:
        CannotFork: the platform forbids it.
    """
    if reason := _why_not():
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
