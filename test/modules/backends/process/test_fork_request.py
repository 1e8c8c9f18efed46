"""A request for a process on its way: a packet with descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from torchrl_moe.modules.backends.process import fork_request
from torchrl_moe.modules.backends.process.fork_request import request_like_this
from torchrl_moe.modules.backends.process.parent_watch import FOLDER_VARIABLE


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours, theirs:
        yield ours, theirs


def ask(control: socket.socket, **environment: str) -> Connection:
    """Send a request whose engine and log are the null device; return our end of the status socket."""
    ours, theirs = socket.socketpair()
    with theirs, open(os.devnull, "ab") as nothing:
        number = nothing.fileno()
        fork_request.send(control, request_like_this(environment), number, number, theirs.fileno())
    return Connection(ours.detach())


def test_a_request_arrives_as_it_was_sent(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with ask(ends[0], NAME="value \udcff", LARGE="x" * 1_000_000) as status:
        arrived = fork_request.receive(ends[1])
        assert arrived.request.environment == {b"NAME": b"value \xff", b"LARGE": b"x" * 1_000_000}
        assert arrived.request.processors == os.sched_getaffinity(0)
        assert os.readlink(f"/proc/self/fd/{arrived.folder}") == str(tmp_path)
        assert os.readlink(f"/proc/self/fd/{arrived.engine}") == os.devnull
        assert not any(os.get_inheritable(number) for number in (arrived.folder, arrived.engine, arrived.log))
        with arrived.status:
            arrived.status.send("answer")
        arrived.close()
        assert status.recv() == "answer"


def test_no_file_is_left_open_by_a_request(ends: tuple[socket.socket, socket.socket]) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with ask(ends[0]):
        arrived = fork_request.receive(ends[1])
        arrived.close()
        arrived.status.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_end_of_the_socket_is_no_request(ends: tuple[socket.socket, socket.socket]) -> None:
    with ask(ends[0]):
        ends[0].shutdown(socket.SHUT_RDWR)
        fork_request.receive(ends[1]).close()  # what was sent before still comes
    with pytest.raises(EOFError):
        fork_request.receive(ends[1])


def test_a_server_that_reads_nothing_holds_nobody_up(ends: tuple[socket.socket, socket.socket]) -> None:
    waiting = []
    with pytest.raises(OSError, match=r"temporarily unavailable|Too many references"):
        while True:
            waiting.append(ask(ends[0]))
    assert len(waiting) > 30


def test_withdrawn_requests_leave_their_folders_to_be_removed(
    ends: tuple[socket.socket, socket.socket], tmp_path: Path
) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        (folder / "log").touch()
    statuses = [ask(ends[0], **{FOLDER_VARIABLE: str(folder)}) for folder in folders]
    statuses.append(ask(ends[0]))  # has none
    found = fork_request.withdraw(ends[1])
    assert found == {os.fsencode(folder) for folder in folders}
    assert fork_request.withdraw(ends[1]) == set()
    for status in statuses:
        with pytest.raises(EOFError):
            status.recv()
    fork_request.remove_folders([*found, b"/no/such/folder"])
    assert list(tmp_path.iterdir()) == []
