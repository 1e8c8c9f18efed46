"""The socket between drivers and an actor: who has the key comes in, and an end is heard at once."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import pytest

from support.waiting import until
from torchrl_moe.modules.backends.ray import replica_host as listener_module
from torchrl_moe.modules.backends.ray.replica_host import LateConnection, Listener, SealedConnection, dial


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Says back what it hears."""

    def echo(connection: SealedConnection) -> None:
        while True:
            connection.send_bytes(connection.recv_bytes())

    listener = Listener("127.0.0.1", echo)
    yield listener
    listener.close()


def test_several_clients_with_the_key_connect_and_do_not_disturb_each_other(listener: Listener) -> None:
    with dial(listener.address) as one, dial(listener.address) as two:
        for connection, word in ((one, b"one"), (two, b"two"), (one, b"x" * (1 << 20))):
            connection.send_bytes(word)
            assert connection.recv_bytes() == word


def test_a_wrong_key_stays_outside_and_the_next_one_comes_in(listener: Listener) -> None:
    with pytest.raises(AuthenticationError):
        dial(dataclasses.replace(listener.address, key=b"wrong"))
    with dial(listener.address) as right:
        right.send_bytes(b"hello")
        assert right.recv_bytes() == b"hello"


def test_somebody_who_says_nothing_holds_nobody_up(listener: Listener) -> None:
    with socket.create_connection((listener.address.host, listener.address.port)), dial(listener.address) as right:
        right.send_bytes(b"hello")
        assert right.recv_bytes() == b"hello"


def test_hundreds_who_say_nothing_hold_few_threads_and_keep_nobody_out(listener: Listener) -> None:
    def threads() -> int:
        return sum(thread.name == "driver" for thread in threading.enumerate())

    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((listener.address.host, listener.address.port)))
            for _ in range(300)
        ]
        until(lambda: threads() <= listener_module.MOST_STRANGERS)
        assert silent[0].recv(1 << 16) is not None  # the actor's greeting; then the end, not 20 s of waiting
        until(lambda: silent[0].recv(1 << 16) == b"")
        with dial(listener.address) as right:
            right.send_bytes(b"hello")
            assert right.recv_bytes() == b"hello"


def test_an_error_as_somebody_comes_in_leaves_the_door_open(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failures = socket.socket.accept, [errno.EMFILE, errno.ECONNABORTED]

    def fail_first(self: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures.pop(), "as the system said")
        return accept(self)

    monkeypatch.setattr(socket.socket, "accept", fail_first)
    for _ in range(3):  # the first one comes in by the accept that waits already
        with dial(listener.address) as caller:
            caller.send_bytes(b"hello")
            assert caller.recv_bytes() == b"hello"
    assert failures == []
    listener.close()
    until(lambda: not listener._thread.is_alive())


def test_who_does_not_show_the_key_is_waited_for_so_long_and_who_did_may_be_silent(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "DIAL_SECONDS", 1)
    with (
        dial(listener.address) as inside,
        socket.create_connection((listener.address.host, listener.address.port)) as silent,
    ):
        silent.settimeout(20)
        while silent.recv(1024):  # a nonce, then the end
            pass
        inside.send_bytes(b"still here")
        assert inside.recv_bytes() == b"still here"
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = dataclasses.replace(listener.address, port=nobody.getsockname()[1])
        with pytest.raises(TimeoutError, match="the other side said nothing for 1 s"):
            dial(address)


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux only")
def test_what_is_not_received_ends_a_connection_as_silence_does(listener: Listener) -> None:
    with dial(listener.address) as caller, socket.socket(fileno=caller.fileno()) as end:
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 25_000
        assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        end.detach()


def test_each_door_has_a_key_of_its_own(listener: Listener) -> None:
    other = Listener("127.0.0.1", lambda connection: None)
    assert other.address.key != listener.address.key
    assert other.address.port != listener.address.port
    other.close()


def test_a_closed_door_lets_nobody_in_and_leaves_alone_who_is_in(listener: Listener) -> None:
    with dial(listener.address) as inside:
        listener.close()
        listener.close()
        with pytest.raises(OSError):
            dial(listener.address)
        inside.send_bytes(b"still here")
        assert inside.recv_bytes() == b"still here"


def test_who_is_seen_out_hears_the_end() -> None:
    listener = Listener("127.0.0.1", lambda connection: None)
    with dial(listener.address) as connection, pytest.raises((EOFError, ConnectionResetError)):
        connection.recv_bytes()
    listener.close()


# -- a connection that is yet to come ---------------------------------------------------------------------------------


def pair() -> tuple[SealedConnection, SealedConnection]:
    """Two ends of one connection."""
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(SealedConnection, end, b"key", is_actor)
            for end, is_actor in zip(socket.socketpair(), (True, False), strict=True)
        ]
        return ends[0].result(20), ends[1].result(20)


def test_readers_and_writers_wait_for_it() -> None:
    late = LateConnection()
    ours, other = pair()
    heard: list[bytes] = []
    reader = threading.Thread(target=lambda: heard.append(late.recv_bytes()))
    writer = threading.Thread(target=late.send_bytes, args=(b"early",))
    for thread in (reader, writer):
        thread.start()
    with pytest.raises(OSError, match="was never made"):
        late.fileno()
    with other:
        late.become(ours)
        assert other.recv_bytes() == b"early"
        other.send_bytes(b"answer")
        for thread in (reader, writer):
            thread.join(60.0)
        assert heard == [b"answer"]
        assert late.fileno() > 0
        late.give_up()  # too late to
        late.send_bytes(b"more")
        assert other.recv_bytes() == b"more"
        late.close()
        with pytest.raises(EOFError):
            other.recv_bytes()


def test_giving_up_ends_the_waiting_and_closes_a_late_connection() -> None:
    late = LateConnection()
    caught: list[type[BaseException]] = []

    def read() -> None:
        try:
            late.recv_bytes()
        except EOFError as error:
            caught.append(type(error))

    reader = threading.Thread(target=read)
    reader.start()
    late.give_up()
    reader.join(60.0)
    assert caught == [EOFError]
    with pytest.raises(OSError, match="was never made"):
        late.send_bytes(b"x")
    ours, other = pair()
    late.become(ours)
    with other, pytest.raises(EOFError):
        other.recv_bytes()
