"""Messages come out as they went in, over a real socket, and a broken link or a stuck reader is never silent."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from support.waiting import HOUR, until
from torchrl_moe.modules.backends.process import wire


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """The two ends of one socket, with a small buffer: a large message is written while it is read."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    connections = [Connection(end.detach()) for end in pair]
    yield connections[0], connections[1]
    for connection in connections:
        connection.close()


def send(connection: Connection, message: Any) -> None:
    for frame in wire.encode(message):
        connection.send_bytes(frame)


def through(ends: tuple[Connection, Connection], message: Any) -> Any:
    """One message through the socket, written in a thread."""
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(send, ends[0], message)
        received = wire.receive(ends[1])
        written.result()
    return received


def test_what_is_received_is_read_only_and_not_a_copy(ends: tuple[Connection, Connection]) -> None:
    received = through(ends, {"big": np.arange(100_000)})["big"]
    assert not received.flags.writeable
    assert not received.flags.owndata
    np.testing.assert_array_equal(received, np.arange(100_000))


def test_a_small_array_needs_no_frame_of_its_own_and_views_arrive_as_they_look(
    ends: tuple[Connection, Connection],
) -> None:
    grid = np.arange(40_000, dtype=np.uint16).reshape(200, 200)
    sent = {"small": np.arange(3.0), "none": np.zeros((0, 4), np.uint8), "turned": grid.T[::2], "one": np.array(7)}
    assert len(wire.encode(sent)) == 2  # the head, and the large one
    received = through(ends, sent)
    for name, array in sent.items():
        assert received[name].dtype == array.dtype
        np.testing.assert_array_equal(received[name], array)


def test_a_parcel_passes_through_other_hands_unread(ends: tuple[Connection, Connection]) -> None:
    inner = ("call", 3, {"routes": np.arange(5000)})
    outer = through(ends, ("pass on", wire.parcel(inner)))
    again = through(ends, outer)  # as it came
    kind, number, content = wire.open_parcel(again[1])
    assert (kind, number) == ("call", 3)
    np.testing.assert_array_equal(content["routes"], np.arange(5000))


def test_what_is_not_plain_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(ValueError, match="function has no plain form"):
        wire.encode(("call", lambda: None))


EXTENSION = msgspec.msgpack.Ext


@pytest.mark.parametrize(
    "head",
    [
        b"\xc1",  # no msgpack
        b"",
        msgspec.msgpack.encode(["list", EXTENSION(1, msgspec.msgpack.encode(("|O", (1,), b"12345678")))]),
        msgspec.msgpack.encode(["list", EXTENSION(1, msgspec.msgpack.encode(("<f8", (1 << 40,), b"12345678")))]),
        msgspec.msgpack.encode(["list", EXTENSION(1, msgspec.msgpack.encode(("<f8", (1,), 7)))]),  # no such buffer
        msgspec.msgpack.encode(["list", EXTENSION(2, b"")]),
        msgspec.msgpack.encode(["os.system", "true"]),
        msgspec.msgpack.encode(["ReplicaInfo", {"no_such_field": 1}]),
    ],
)
def test_what_is_no_message_ends_the_connection_with_a_line_in_the_log(
    ends: tuple[Connection, Connection], head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ends[0].send_bytes(bytes(wire.COUNT_BYTES) + head)
    with pytest.raises(OSError):
        wire.receive(ends[1])
    assert "a connection is closed: what arrived is no message: " in caplog.text


def test_a_frame_that_is_announced_too_large_is_not_read(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_FRAME_BYTES", 1000)
    with pytest.raises(ValueError, match="an array of 1001 bytes cannot be sent: 1000 at most"):
        wire.encode(np.zeros(1001, np.uint8))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ends[0].send_bytes, bytes(1001))
        with pytest.raises(OSError):
            wire.receive(ends[1])


@pytest.mark.parametrize("frames", [0, 1])
def test_a_side_that_goes_away_ends_the_file(ends: tuple[Connection, Connection], frames: int) -> None:
    ours, theirs = ends
    for frame in wire.encode({"big": np.arange(1000)})[:frames]:  # also in the middle of a message
        ours.send_bytes(frame)
    ours.close()
    with pytest.raises(EOFError):
        wire.receive(theirs)


# -- the outbox ------------------------------------------------------------------------------------------------------


def small(item: Any) -> int:
    return 1


def one_each(items: list[Any]) -> list[wire.Frames]:
    return [wire.encode(item) for item in items]


def test_the_outbox_writes_in_order_and_hangs_up_when_closed(ends: tuple[Connection, Connection]) -> None:
    outbox = wire.Outbox(ends[0], one_each, small)
    for number in range(50):
        outbox.put(("message", number))
    assert [wire.receive(ends[1]) for _ in range(50)] == [("message", number) for number in range(50)]
    outbox.put("a goodbye")
    outbox.close()
    assert wire.receive(ends[1]) == "a goodbye"
    with pytest.raises(EOFError):
        wire.receive(ends[1])


def test_the_outbox_never_waits_for_a_reader_and_frames_what_gathered_together(
    ends: tuple[Connection, Connection],
) -> None:
    batches: list[int] = []

    def together(items: list[Any]) -> list[wire.Frames]:
        batches.append(len(items))
        return [wire.encode(items)]

    outbox = wire.Outbox(ends[0], together, small)
    big = np.zeros(1 << 20, np.uint8)  # many times the socket's buffer
    for _ in range(20):
        outbox.put(big)  # would hang here if it wrote itself
    received = 0
    while received < 20:
        received += len(wire.receive(ends[1]))
    outbox.close()
    assert sum(batches) == 20
    assert len(batches) < 20


def test_an_outbox_that_fails_to_frame_hangs_up_both_ways(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_type))
    outbox = wire.Outbox(ends[0], one_each, small)
    outbox.put(lambda: None)  # has no plain form
    for end in ends:
        with pytest.raises(EOFError):
            wire.receive(end)
    outbox.put("nobody writes this, and nobody waits for it")
    outbox.close()
    assert len(errors) == 1


def test_an_outbox_whose_reader_is_gone_ends_quietly(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: pytest.fail(str(args)))
    outbox = wire.Outbox(ends[0], one_each, small)
    ends[1].close()
    outbox.put("hello")
    with pytest.raises(EOFError):
        wire.receive(ends[0])
    outbox.close()


def test_a_reader_that_has_stopped_is_dropped_at_the_bound_and_both_sides_hear_of_it(
    ends: tuple[Connection, Connection], caplog: pytest.LogCaptureFixture
) -> None:
    outbox = wire.Outbox(ends[0], limit=1000, stuck_seconds=0, reader="driver seven")
    first, second = np.zeros(1 << 20, np.uint8), np.zeros(600, np.uint8)
    outbox.put(wire.encode(first))  # any size will do if nothing waits; the thread now writes it in vain
    assert not outbox.overflowed
    outbox.put(wire.encode(second))
    assert outbox.overflowed
    outbox.put(wire.encode("nobody reads this"))
    with pytest.raises((EOFError, OSError)):  # this side reads the end
        wire.receive(ends[0])
    with pytest.raises(EOFError):  # the other had not read all of the first
        wire.receive(ends[1])
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("driver seven does not keep up: 1048")
    until(lambda: not outbox._thread.is_alive())


def test_a_slow_reader_is_not_dropped_for_what_it_has_read(ends: tuple[Connection, Connection]) -> None:
    outbox = wire.Outbox(ends[0], limit=3000, stuck_seconds=0)
    for number in range(100):  # 100 times 1 KB, of which two may wait
        outbox.put([bytes(wire.COUNT_BYTES) + wire.encode(number)[0][wire.COUNT_BYTES :] + bytes(0), *[]])
        assert wire.receive(ends[1]) == number
    assert not outbox.overflowed
    outbox.close()


def test_a_reader_that_reads_may_be_eight_times_as_late(ends: tuple[Connection, Connection]) -> None:
    outbox = wire.Outbox(ends[0], limit=1 << 20, stuck_seconds=HOUR)
    big = np.zeros(1 << 20, np.uint8)
    for _ in range(7):
        outbox.put(wire.encode(big))
    assert not outbox.overflowed
    outbox.put(wire.encode(big))
    assert outbox.overflowed


def test_what_is_put_after_the_end_is_not_kept(ends: tuple[Connection, Connection]) -> None:
    outbox = wire.Outbox(ends[0])
    ends[1].close()
    outbox.put(wire.encode("hello"))
    until(lambda: not outbox._thread.is_alive())
    before = outbox._queue.qsize()
    outbox.put(wire.encode("kept for nobody"))
    assert outbox._queue.qsize() == before
