"""What a stranger at the port of a board gets, and what passes with the secret."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # its stubs leave it out

from support.waiting import in_thread, until
from torchrl_moe.weight_update.transports import board
from torchrl_moe.weight_update.transports.board import BoardServer, RemoteBoard

TIMEOUT = 20.0
LOOPBACK = "127.0.0.1"


@pytest.fixture
def server() -> Iterator[BoardServer]:
    made = BoardServer(LOOPBACK)
    made.boards["a"] = HashStore()
    yield made
    made.end()


def remote(server: BoardServer, name: str = "a", secret: bytes | None = None) -> RemoteBoard:
    return RemoteBoard(LOOPBACK, server.server_address[1], name, server.secret if secret is None else secret)


def visit(server: BoardServer) -> socket.socket:
    return socket.create_connection((LOOPBACK, server.server_address[1]), TIMEOUT)


def test_values_of_any_bytes_come_back(server: BoardServer) -> None:
    here = remote(server)
    assert not here.check(["key"])
    here.set("key", bytes(range(256)))
    here.set("text", "value")
    here.set("empty", b"")
    assert here.check(["key", "text", "empty"])
    assert (here.get("key"), here.get("text")) == (bytes(range(256)), b"value")


def test_groups_do_not_see_each_others_keys_and_one_that_ended_says_so(server: BoardServer) -> None:
    server.boards["b"] = HashStore()
    remote(server).set("key", b"1")
    assert not remote(server, "b").check(["key"])
    del server.boards["b"]
    with pytest.raises(RuntimeError, match="the trainer has given the group up"):
        remote(server, "b").check(["key"])


def test_another_secret_sets_nothing(server: BoardServer) -> None:
    with pytest.raises(ConnectionError, match=r"the server at 127\.0\.0\.1:\d+ does not have the trainer's secret"):
        remote(server, secret=b"guessed").set("key", b"1")
    assert not remote(server).check(["key"])


def test_a_stranger_reads_random_bytes_and_no_more(server: BoardServer) -> None:
    seen = []
    for _ in range(2):
        with visit(server) as end, end.makefile("rb") as reader:
            seen.append(reader.read(32))
            end.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
            assert reader.read() == b""
    assert [len(nonce) for nonce in seen] == [32, 32]
    assert seen[0] != seen[1]


def test_a_stranger_who_says_nothing_keeps_nobody_waiting(server: BoardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with visit(server):
        remote(server).set("key", b"1")
    monkeypatch.setattr(board, "STRANGER_SECONDS", 0.1)
    with visit(server) as end, end.makefile("rb") as reader:
        assert len(reader.read()) == 32  # and then the server hangs up


def test_a_question_that_was_overheard_cannot_be_asked_again(server: BoardServer) -> None:
    with socket.create_server((LOOPBACK, 0)) as between:
        heard: list[bytes] = []

        def pass_on() -> None:
            caller, _ = between.accept()
            with caller, visit(server) as end:
                caller.sendall(end.recv(32))
                heard.append(caller.recv(1 << 16))
                end.sendall(heard[0])
                while answer := end.recv(1 << 16):
                    caller.sendall(answer)

        passing = in_thread(pass_on)
        RemoteBoard(LOOPBACK, between.getsockname()[1], "a", server.secret).set("key", b"1")
        passing.result(TIMEOUT)
    assert remote(server).get("key") == b"1"
    remote(server).set("key", b"2")
    with visit(server) as end, end.makefile("rb") as reader:
        reader.read(32)
        end.sendall(heard[0])
        assert reader.read() == b""
    assert remote(server).get("key") == b"2"


def test_who_answers_without_the_secret_is_not_believed(server: BoardServer) -> None:
    with socket.create_server((LOOPBACK, 0)) as impostor:

        def answer() -> None:
            caller, _ = impostor.accept()
            with caller:
                caller.sendall(bytes(32))
                caller.recv(1 << 16)
                caller.sendall((1).to_bytes(4, "big") + b"1" + bytes(32))

        answering = in_thread(answer)
        with pytest.raises(ConnectionError, match="does not have the trainer's secret"):
            RemoteBoard(LOOPBACK, impostor.getsockname()[1], "a", server.secret).check(["key"])
        answering.result(TIMEOUT)


def test_a_length_that_is_too_large_is_not_waited_for(server: BoardServer) -> None:
    with visit(server) as end, end.makefile("rb") as reader:
        reader.read(32)
        end.sendall(bytes(32) + (1 << 31).to_bytes(4, "big"))
        assert reader.read() == b""


def test_many_may_come_at_the_same_time(server: BoardServer) -> None:
    assert server.request_queue_size == board.BACKLOG >= 1024


def test_a_stranger_that_says_a_byte_now_and_then_has_one_deadline(
    server: BoardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board, "STRANGER_SECONDS", 0.3)
    over = threading.Event()

    def trickle(end: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not over.wait(0.02):  # far more often than the deadline, and far from all that is awaited
                end.sendall(b"\0")

    with visit(server) as end:
        talking = in_thread(lambda: trickle(end))
        with contextlib.suppress(ConnectionError):
            while end.recv(64):
                pass
        over.set()
        talking.result(TIMEOUT)


def test_a_full_house_hangs_up_and_has_room_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "MOST_VISITORS", 2)
    full = BoardServer(LOOPBACK)
    full.boards["a"] = HashStore()
    silent = [visit(full) for _ in range(2)]
    for one in silent:
        assert len(one.recv(64)) == 32
    with pytest.raises(ConnectionError, match="has hung up: it is full, or is ending"):
        remote(full).check(["key"])
    for one in silent:
        one.close()

    def answers() -> bool:
        with contextlib.suppress(ConnectionError):
            return not remote(full).check(["key"])
        return False

    until(answers)
    full.end()
