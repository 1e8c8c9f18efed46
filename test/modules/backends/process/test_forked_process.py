"""A process that is not the driver's child: its exit code, waiting for it, killing it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from multiprocessing.connection import Connection

import pytest

from torchrl_moe.modules.backends.process import forked_process
from torchrl_moe.modules.backends.process.forked_process import ForkedProcess


class Server:
    """What a fork server would do: it is the parent and says how the process ended."""

    def __init__(self) -> None:
        self.parent = subprocess.Popen(["sleep", "600"])
        ours, theirs = socket.socketpair()
        self.answers = Connection(theirs.detach())
        self.process = ForkedProcess(self.parent.pid, Connection(ours.detach()))

    def tell(self) -> None:
        self.answers.send(("ended", self.parent.wait(60)))


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.parent.kill()
    server.parent.wait(60)


def test_it_runs_until_it_has_ended_and_its_code_comes_from_the_server(server: Server) -> None:
    process = server.process
    assert process.pid == server.parent.pid
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.05)
    server.parent.terminate()
    telling = threading.Timer(0.2, server.tell)
    telling.start()
    assert process.wait() == -signal.SIGTERM
    assert process.poll() == process.wait(0) == process.returncode == -signal.SIGTERM
    telling.join()


def test_all_who_wait_have_the_code_and_its_files_are_closed_once(server: Server) -> None:
    before = len(os.listdir("/proc/self/fd"))
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(server.process.wait())) for _ in range(4)]
    for thread in threads:
        thread.start()
    server.process.kill()
    server.tell()
    for thread in threads:
        thread.join(60)
    assert codes == [-signal.SIGKILL] * 4
    assert len(os.listdir("/proc/self/fd")) == before - 2  # status and pidfd
    server.process.kill()  # nobody


def test_without_a_server_its_end_shows_and_its_code_is_unknown(server: Server) -> None:
    server.answers.close()
    assert server.process.poll() is None
    server.process.kill()
    assert server.process.wait(60) == 255


def test_a_server_that_is_stuck_is_not_waited_for(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forked_process, "CODE_SECONDS", 0.1)
    server.process.kill()
    assert server.process.wait(60) == 255


def test_a_process_that_has_been_reaped_has_its_code(server: Server) -> None:
    server.parent.kill()
    server.parent.wait(60)
    ours, theirs = socket.socketpair()
    process = ForkedProcess(server.parent.pid, Connection(ours.detach()))
    with Connection(theirs.detach()) as answers:
        answers.send(("ended", 7))
        assert process.wait(60) == 7
