"""A sealed connection: what was changed, left out, repeated, turned round or made without the key does not pass."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError

import numpy as np
import pytest

from torchrl_moe.modules.backends.ray.replica_host import (
    CHUNK_BYTES,
    NONCE_BYTES,
    NUMBER_BYTES,
    TAG_BYTES,
    SealedConnection,
    TamperedError,
)

KEY = b"k" * 32


class Wire:
    """A socket between two sockets: what the first side says lies here until the test passes it on."""

    def __init__(self) -> None:
        self.actor_end, self._to_actor = socket.socketpair(socket.AF_UNIX)
        self.driver_end, self._to_driver = socket.socketpair(socket.AF_UNIX)

    def connect(self) -> tuple[SealedConnection, SealedConnection]:
        """Return the actor's end and the driver's; the handshake is passed on as it is."""
        hello = NONCE_BYTES + NUMBER_BYTES + TAG_BYTES
        with ThreadPoolExecutor(2) as pool:
            actor = pool.submit(SealedConnection, self.actor_end, KEY, True)
            driver = pool.submit(SealedConnection, self.driver_end, KEY, False)
            # each says its nonce at once, and the rest when it has the other's
            nonces = self._from_actor(NONCE_BYTES), self._from_driver(NONCE_BYTES)
            self._to_driver.sendall(nonces[0])
            self._to_actor.sendall(nonces[1])
            rest = hello - NONCE_BYTES
            self._to_driver.sendall(self._from_actor(rest + len(b"actor")))
            self._to_actor.sendall(self._from_driver(rest + len(b"driver")))
            return actor.result(20), driver.result(20)

    def _from_actor(self, count: int) -> bytes:
        return self._to_actor.recv(count, socket.MSG_WAITALL)

    def _from_driver(self, count: int) -> bytes:
        return self._to_driver.recv(count, socket.MSG_WAITALL)

    def said(self, length: int) -> bytes:
        """Return the frame, of so many bytes of content, that the driver said."""
        return self._from_driver(NUMBER_BYTES + length + TAG_BYTES)

    def tell_actor(self, data: bytes) -> None:
        self._to_actor.sendall(data)

    def tell_driver(self, data: bytes) -> None:
        self._to_driver.sendall(data)

    def close(self) -> None:
        for end in (self.actor_end, self.driver_end, self._to_actor, self._to_driver):
            end.close()


@pytest.fixture
def between() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_frames_of_any_size_arrive_both_ways_in_order(between: Wire) -> None:
    actor, driver = between.connect()
    for content in (b"", b"one", b"two"):
        driver.send_bytes(content)
        between.tell_actor(between.said(len(content)))
        assert bytes(actor.recv_bytes()) == content
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(SealedConnection, end, KEY, is_actor) for end, is_actor in ((ours, True), (theirs, False))]
        one, other = (end.result(20) for end in ends)
        for size in (CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7):
            content = np.random.default_rng(size).bytes(size)
            for sender, reader in ((one, other), (other, one)):
                sent = pool.submit(sender.send_bytes, memoryview(content))
                assert bytes(reader.recv_bytes()) == content
                sent.result(20)
    one.close()
    with pytest.raises(EOFError):
        other.recv_bytes()
    other.close()


@pytest.mark.parametrize("place", [0, NUMBER_BYTES - 1, NUMBER_BYTES, NUMBER_BYTES + 4, -1])
def test_a_bit_that_was_changed_ends_the_connection_with_a_line_in_the_log(
    between: Wire, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    actor, driver = between.connect()
    driver.send_bytes(b"hello")
    frame = bytearray(between.said(5))
    frame[place] ^= 1
    between.tell_actor(bytes(frame) + bytes(100))
    with pytest.raises(TamperedError):
        actor.recv_bytes()
    assert "is given up: a frame " in caplog.text


def two_said(between: Wire) -> tuple[SealedConnection, SealedConnection, bytes, bytes]:
    """Both ends of a connection, and two frames that the driver has said."""
    actor, driver = between.connect()
    driver.send_bytes(b"first")
    driver.send_bytes(b"other")
    return actor, driver, between.said(5), between.said(5)


def test_a_frame_does_not_pass_twice(between: Wire) -> None:
    actor, _, first, _ = two_said(between)
    between.tell_actor(first + first)
    assert bytes(actor.recv_bytes()) == b"first"
    with pytest.raises(TamperedError):
        actor.recv_bytes()


def test_a_frame_does_not_pass_before_its_turn_so_none_can_be_left_out(between: Wire) -> None:
    actor, _, _, other = two_said(between)
    between.tell_actor(other)
    with pytest.raises(TamperedError):
        actor.recv_bytes()


def test_a_frame_does_not_pass_back_to_who_said_it(between: Wire) -> None:
    _, driver, first, _ = two_said(between)
    between.tell_driver(first)
    with pytest.raises(TamperedError):
        driver.recv_bytes()


def test_a_frame_does_not_pass_in_another_connection_of_the_same_key(between: Wire) -> None:
    _, _, first, _ = two_said(between)
    another = Wire()
    actor, _ = another.connect()
    another.tell_actor(first)
    with pytest.raises(TamperedError):
        actor.recv_bytes()
    another.close()


def test_a_length_beyond_the_bound_is_refused_before_anything_is_set_aside(
    between: Wire, caplog: pytest.LogCaptureFixture
) -> None:
    actor, _ = between.connect()
    between.tell_actor((1 << 62).to_bytes(NUMBER_BYTES, "big"))
    with pytest.raises(
        TamperedError, match="a frame of 4611686018427387904 bytes was announced; at most 4294967296 are"
    ):
        actor.recv_bytes()
    assert "was announced" in caplog.text


def test_who_has_another_key_is_found_out_by_both_sides() -> None:
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(SealedConnection, end, key, is_actor)
            for end, key, is_actor in ((ours, KEY, True), (theirs, b"wrong", False))
        ]
        for end in ends:
            with pytest.raises(AuthenticationError, match="the other side has another key"):
                end.result(20)
    ours.close()
    theirs.close()
