"""A module for a fork server that imports nothing slow, and whose processes do what their test says.

``preload`` adds a line to the file named by ``VLLM_TEST_IMPORTS`` and then does as ``VLLM_TEST_PRELOAD`` says; both are
part of a server's key. A forked process, or one run as ``python -m support.forkable FD DRIVER_PID``, answers commands:
``("report",)`` with what it has inherited, ``("run", source)`` with the value of the expression. It ends at the end of
file, or when its driver is gone, with code 3. :class:`Forks` is the driver's side.
"""

from __future__ import annotations

import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from torchrl_moe.modules.backends.process.engine_program import run_script
from torchrl_moe.modules.backends.process.fork_server import ForkedProcess, ForkServer, Launch, fork_server
from torchrl_moe.modules.backends.process.link import SocketStream
from torchrl_moe.modules.backends.vllm.engine_args import (
    arguments_of,
    devices_per_replica,
    engine_environment,
    reason_not_to_fork,
    seeded,
)

__all__ = ["PROGRAM", "Forks"]
__all__ += ["arguments_of", "devices_per_replica", "engine_environment", "reason_not_to_fork", "seeded"]

PROGRAM = "support.forkable"

GONE = 3
LOOK_SECONDS = 0.05
PYTHONPATH = os.pathsep.join(map(str, [Path(__file__).parents[2], Path(__file__).parents[1]]))


def preload() -> str:
    with open(os.environ["VLLM_TEST_IMPORTS"], "a") as file:
        file.write(f"{os.getpid()}\n")
    how, _, argument = os.environ.get("VLLM_TEST_PRELOAD", "").partition(" ")
    if how == "print":
        print("preloaded")
    elif how == "raise":
        raise ImportError("no such engine")
    elif how == "thread":
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    elif how == "hasty":  # its orphans get no time
        sys.modules["__main__"].ORPHAN_SECONDS = 0.3  # type: ignore[attr-defined]
    elif how == "wait":
        while not os.path.exists(argument):
            time.sleep(LOOK_SECONDS)
    return argument if how == "refuse" else ""


def report() -> dict[str, Any]:
    return {
        "pid": os.getpid(),
        "ppid": os.getppid(),
        "pgid": os.getpgid(0),
        "sid": os.getsid(0),
        "environment": dict(os.environ),
        "processors": os.sched_getaffinity(0),
        "temporary": tempfile.gettempdir(),
        "path": sys.path[0],
        "files": {name: _target(name) for name in os.listdir("/proc/self/fd")},
        "limits": resource.getrlimit(resource.RLIMIT_NOFILE),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _target(descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{descriptor}")
    except FileNotFoundError:  # that of the listing itself
        return ""


def run(stream: SocketStream, driver_is_gone: Callable[[], bool]) -> None:
    print("running", flush=True)
    connection = Connection(stream._end.detach())
    try:
        while not driver_is_gone():
            if connection.poll(LOOK_SECONDS):
                kind, *rest = connection.recv()
                connection.send(report() if kind == "report" else eval(*rest))
    except EOFError:
        pass
    os._exit(GONE)


class Forked:
    """A forked process and the driver's end of its socket."""

    def __init__(self, process: ForkedProcess, connection: Connection) -> None:
        self.process, self.connection = process, connection

    def ask(self, *message: Any) -> Any:
        self.connection.send(message)
        assert self.connection.poll(60)
        return self.connection.recv()

    def report(self) -> Any:
        return self.ask("report")

    def end(self) -> int:
        """Hang up; return the exit code."""
        self.connection.close()
        return self.process.wait(60)


class Forks:
    """Servers for this module, and what they fork; the folder has the log that all share, and the list of imports."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "log"
        self._servers: list[ForkServer] = []
        self._forked: list[Forked] = []

    def environment(self, **changes: str) -> dict[str, str]:
        """Return this process's, with ours."""
        return {**os.environ, "PYTHONPATH": PYTHONPATH, "VLLM_TEST_IMPORTS": str(self.folder / "imports"), **changes}

    def imports(self) -> list[int]:
        """Return the ids of the processes that imported."""
        return [int(line) for line in (self.folder / "imports").read_text().splitlines()]

    def server(self, **changes: str) -> ForkServer:
        server = fork_server("support.forkable", self.environment(**changes))
        if server not in self._servers:
            self._servers.append(server)
        return server

    def ask(self, server: ForkServer, **changes: str) -> tuple[Launch, Connection]:
        """Ask for a process."""
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("ab") as log:
            launch = server.fork(theirs.fileno(), log.fileno(), self.environment(**changes))
        return launch, Connection(ours.detach())

    def start(self, **changes: str) -> Forked:
        launch, connection = self.ask(self.server(**changes), **changes)
        forked = Forked(launch.wait(), connection)
        self._forked.append(forked)
        return forked

    def close(self) -> None:
        for forked in self._forked:
            forked.process.kill()
            forked.connection.close()
        for server in self._servers:
            server.end()


if __name__ == "__main__":
    run_script(run)
