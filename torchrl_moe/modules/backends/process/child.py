"""The child process of a :class:`LocalReplica`: how it is started and ended, its socket, its log. It knows no requests.

The child leads a process group of its own, so a Ctrl-C at the terminal reaches the driver only, and the whole group
(vLLM starts two more processes) can be ended at once. It stays in the driver's session: Linux divides the cores among
sessions (autogroups), and ``sched_yield``, on which vLLM's polling relies, does not yield to another session. In
sessions of their own, two replicas on two cores lost a quarter of their throughput. The child, or the server that forks
it, is started by module name: the user's script is not imported again and needs no ``__main__`` guard.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import IO, TypeAlias

from torchrl_moe.modules.backends.engine_kind import EngineKind
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.engine_program import DRIVER_VARIABLE, FOLDER_VARIABLE, kill_group
from torchrl_moe.modules.backends.process.fork_server import CannotFork, ForkedProcess, Launch, fork_server

Process: TypeAlias = "subprocess.Popen[bytes] | ForkedProcess"
"""The leader of its group."""

GRACE_SECONDS = 10.0
SOCKET_NAME_BYTES = 107  # of a Unix socket, by the kernel
LOG_BYTES = 1 << 18
SHOWN_LOG_LINES = 6
SHOWN_LOG_COLUMNS = 400


def configuration(arguments: Mapping[str, object]) -> link.Frames:
    """Return the first message to a child: its engine's arguments, pickled.

    They may be objects of the engine's own classes. Nothing else is sent to it as a pickle, and this one goes no
    further than to a process of the same user on the same machine, which the sender started.
    """
    return link.message("configure", pickle.dumps(dict(arguments)))


class Child:
    """One engine process.

    Where that is safe, it is forked from a process that has imported the engine already. Otherwise it is started on its
    own, and the log says why. It may still be starting when the constructor returns.
    """

    def __init__(
        self,
        index: int,
        kind: EngineKind,
        environment: Mapping[str, str],
        log_folder: Path | None = None,
        fork: bool = True,
    ) -> None:
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"torchrl_moe-replica-{index}-"))
        self.log = self.folder / "log" if log_folder is None else log_folder / f"replica-{index}.log"
        self._kind = kind
        self._driver = os.getpid()
        self._launched: Future[Process] = Future()
        self._cancelled = False
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, self.folder)
            ours, theirs = socket.socketpair()
            stack.enter_context(ours)
            stack.enter_context(theirs)
            log = stack.enter_context(self.log.open("ab"))
            self._log_start = log.tell()
            self._launch = self._begin(environment, theirs, log, fork)
            stack.pop_all()
        self.stream = link.SocketStream(ours)
        self.outbox = link.Outbox(self.stream, reader=f"the engine process of replica {index}")
        self._lock = threading.RLock()  # the finalizer of a replica may run in the very thread that ends the child
        self._ended = False

    def _begin(
        self, environment: Mapping[str, str], engine: socket.socket, log: IO[bytes], fork: bool
    ) -> Launch | None:
        """Start the process, or have it forked, for which a thread waits. Closes both files."""
        places = _with_places(environment, self.folder)
        # forked, unless the caller or the kind is against it
        launch, reason = None, self._kind.reason_not_to_fork(environment) if fork else ""
        if fork and not reason:
            try:
                launch = fork_server(self._kind.PROGRAM, environment).fork(engine.fileno(), log.fileno(), places)
            except CannotFork as error:
                reason = str(error)
        # else started by module name, and the log says why
        if launch is None:
            with engine, log:
                self._launched.set_result(self._spawn(places, engine, log, reason))
            return None
        # the server may still be importing, for seconds: a thread waits for the process
        arguments = (launch, places, engine, log)
        threading.Thread(target=self._wait_for_fork, args=arguments, name="launch", daemon=True).start()
        return launch

    def _wait_for_fork(
        self, launch: Launch, environment: Mapping[str, str], engine: socket.socket, log: IO[bytes]
    ) -> None:
        with _not_in_forked_processes(engine), log:
            try:
                try:
                    process: Process = launch.wait()
                except CannotFork as error:
                    if self._cancelled:
                        raise
                    process = self._spawn(environment, engine, log, str(error))
                self._launched.set_result(process)
            except BaseException as error:  # noqa: BLE001  callers raise it, whatever it is: they would wait forever
                self._launched.set_exception(error)

    def _spawn(self, environment: Mapping[str, str], engine: socket.socket, log: IO[bytes], reason: str) -> Process:
        if reason:
            log.write(f"torchrl_moe: this replica imports its engine itself: {reason}\n".encode())
            log.flush()
        return subprocess.Popen(
            [sys.executable, "-m", self._kind.PROGRAM, str(engine.fileno()), str(os.getpid())],
            pass_fds=[engine.fileno()],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )

    @property
    def process(self) -> Process:
        """The process; waits until it is there."""
        return self._launched.result()

    def ending(self) -> str:
        """Return how it ended, after "replica 0"."""
        if error := self._launched.exception():
            return f"could not be started: {type(error).__name__}: {error}"
        code = self.process.poll()
        return "closed its socket" if code is None else f"ended with exit code {code}"

    def is_alive(self) -> bool:
        """Whether the process runs, or is still being started."""
        if not self._launched.done():
            return True
        return self._launched.exception() is None and self.process.poll() is None

    def end(self) -> None:
        """End the process and its group: ask it, kill them after a grace period. Idempotent; all callers wait for the
        end.

        Does nothing in a process that the driver forked, which runs Python's finalizers at its own end.
        """
        if os.getpid() != self._driver:
            return
        with self._lock:
            if self._ended:
                return
            self._ended = True  # for the same thread; others wait for the lock
            try:
                self._cancel()
                if self._launched.exception() is None:
                    self._end_process()
                self.outbox.close(1.0)
            except BaseException:  # Ctrl-C: it may be ended again
                self._ended = False
                raise

    def _cancel(self) -> None:
        """Cancel a start that is in progress; the process may appear all the same."""
        if self._launch is not None and not self._launched.done():
            self._cancelled = True
            self._launch.cancel()

    def _end_process(self) -> None:
        # it may end politely; then the whole group goes, since an engine starts processes of its own
        self.outbox.put(link.message("shutdown"))
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(GRACE_SECONDS)
        kill_group(self.process.pid)
        self.process.wait()

    def end_and_forget(self) -> None:
        """End it and remove its folder."""
        self.end()
        if os.getpid() == self._driver:
            shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, lines: int = SHOWN_LOG_LINES) -> str:
        """Return the last errors that the process printed, or its last lines if it printed none."""
        try:
            with self.log.open("rb") as log:
                # only what this child printed: a user's file also holds the logs of earlier ones
                log.seek(max(log.seek(0, os.SEEK_END) - LOG_BYTES, self._log_start))
                text = [line[:SHOWN_LOG_COLUMNS] for line in log.read().decode(errors="replace").splitlines()]
        except FileNotFoundError:  # removed at the end
            return "(no log)"
        errors = [line for line in text if "Error" in line and "See root cause above" not in line]
        shown = errors or [line for line in text if "WARNING" not in line and "shards:" not in line]
        return "\n".join(shown[-lines:]) or "(its log holds no error)"


_held: set[socket.socket] = set()  # the engines' ends of sockets, while the engines are being started


def _close_held() -> None:
    """Close them in a process that the driver forks: while it held one, the death of that engine would not show."""
    for engine in _held:
        engine.close()
    _held.clear()


os.register_at_fork(after_in_child=_close_held)


@contextlib.contextmanager
def _not_in_forked_processes(engine: socket.socket) -> Iterator[None]:
    """Hold a socket in this process only, and close it at the end."""
    _held.add(engine)
    try:
        with engine:
            yield
    finally:
        _held.discard(engine)


def _with_places(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Make vLLM create its files and sockets, which it leaves behind, in a folder that is removed.

    Only if the sockets' names then fit the kernel's limit. The user may choose another place for sockets.
    """
    ours = {**environment, FOLDER_VARIABLE: str(folder), DRIVER_VARIABLE: str(os.getpid())}
    if len(os.fsencode(folder / str(uuid.uuid4()))) <= SOCKET_NAME_BYTES:
        ours["TMPDIR"] = str(folder)
        ours.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    return ours
