"""The child process of a :class:`LocalReplica`: how it is started and ended, its socket, its log. No request is known.

The child leads a process group of its own, so a Ctrl-C at the terminal reaches the driver only, and the whole group
(vLLM starts two more processes) can be ended at once. It stays in the driver's session: Linux shares out the cores by
session (autogroups), and between sessions the ``sched_yield`` of vLLM's polling hands nothing over; two replicas on two
cores lost a quarter of their tokens. The child is started by module name: the user's script is not imported again and
needs no ``__main__`` guard.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path

from torchrl_moe.modules.backends.vllm import wire
from torchrl_moe.modules.backends.vllm.lifeline import DRIVER_VARIABLE, FOLDER_VARIABLE, kill_group

__all__ = ["Child"]

MODULE = "torchrl_moe.modules.backends.vllm.engine_process"
GRACE_SECONDS = 10.0
SOCKET_NAME_BYTES = 107  # of a Unix socket, by the kernel
LOG_BYTES = 1 << 18
SHOWN_LOG_LINES = 6
SHOWN_LOG_COLUMNS = 400


class Child:
    """One engine process.

    Args:
        index: of the replica; names the log.
        environment: of the process.
        log_folder: where its log is kept, under the replica's index; a later child goes on in the same file. By
            default it is among what is removed at the end.
    """

    def __init__(self, index: int, environment: Mapping[str, str], log_folder: Path | None = None) -> None:
        if log_folder is not None:
            log_folder.mkdir(parents=True, exist_ok=True)
        self.folder = Path(tempfile.mkdtemp(prefix=f"torchrl_moe-replica-{index}-"))
        self.log = self.folder / "log" if log_folder is None else log_folder / f"replica-{index}.log"
        ours, theirs = socket.socketpair()
        with ours, theirs, self.log.open("ab") as log:
            self._log_start = log.tell()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                    pass_fds=[theirs.fileno()],
                    env=_with_places(environment, self.folder),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            except BaseException:
                shutil.rmtree(self.folder)
                raise
            self.connection = Connection(ours.detach())
        self.outbox = wire.Outbox(self.connection, list)
        self._lock = threading.RLock()  # the finalizer of a replica may run in the very thread that ends the child
        self._ended = False

    def end(self) -> None:
        """End the process and its whole group: politely, then for certain. Idempotent; all callers wait for the end."""
        with self._lock:
            if self._ended:
                return
            self._ended = True  # for the same thread; others wait for the lock
            try:
                self.outbox.put(wire.encode(("shutdown",)))
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.process.wait(GRACE_SECONDS)
                kill_group(self.process.pid)
                self.process.wait()
                self.outbox.close(1.0)
            except BaseException:  # Ctrl-C: it may be ended again
                self._ended = False
                raise

    def end_and_forget(self) -> None:
        """End it and remove its folder."""
        self.end()
        shutil.rmtree(self.folder, ignore_errors=True)

    def log_tail(self, lines: int = SHOWN_LOG_LINES) -> str:
        """Return the last errors that the process printed, or its last lines if it printed none."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(log.seek(0, os.SEEK_END) - LOG_BYTES, self._log_start))
                text = [line[:SHOWN_LOG_COLUMNS] for line in log.read().decode(errors="replace").splitlines()]
        except FileNotFoundError:  # removed at the end
            return "(no log)"
        errors = [line for line in text if "Error" in line and "See root cause above" not in line]
        shown = errors or [line for line in text if "WARNING" not in line and "shards:" not in line]
        return "\n".join(shown[-lines:]) or "(its log holds no error)"


def _with_places(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Have vLLM make its files and sockets, which it leaves behind, where they are removed.

    Only if the sockets' names then fit the kernel's limit. The user may choose another place for sockets.
    """
    ours = {**environment, FOLDER_VARIABLE: str(folder), DRIVER_VARIABLE: str(os.getpid())}
    if len(os.fsencode(folder / str(uuid.uuid4()))) <= SOCKET_NAME_BYTES:
        ours["TMPDIR"] = str(folder)
        ours.setdefault("VLLM_RPC_BASE_PATH", str(folder))
    return ours
