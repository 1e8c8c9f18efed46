"""What an actor does, without Ray: a sealed connection, a listener, one toy engine, and drivers that come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from support.hosts import ToyHost
from support.processes import group, ids_request
from support.waiting import until
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.link import COUNT, LENGTH
from torchrl_moe.modules.backends.ray import replica_host as replica_host
from torchrl_moe.modules.backends.ray.replica_host import (
    CHUNK_BYTES,
    NONCE_BYTES,
    TAG_BYTES,
    LateStream,
    Listener,
    ReplicaHost,
    SealedStream,
    TamperedError,
    dial,
)

# -- a sealed connection -----------------------------------------------------------------------------------------------


KEY = b"k" * 32
HEADER_BYTES = COUNT.size + LENGTH.size  # of a message of one frame


class Between:
    """A socket between two sockets: what the first side says lies here until the test passes it on."""

    def __init__(self) -> None:
        self.actor_end, self._to_actor = socket.socketpair(socket.AF_UNIX)
        self.driver_end, self._to_driver = socket.socketpair(socket.AF_UNIX)

    def connect(self) -> tuple[SealedStream, SealedStream]:
        """Return the actor's end and the driver's; the handshake is passed on as it is."""
        hello = NONCE_BYTES + HEADER_BYTES + TAG_BYTES
        with ThreadPoolExecutor(2) as pool:
            actor = pool.submit(SealedStream, self.actor_end, KEY, True)
            driver = pool.submit(SealedStream, self.driver_end, KEY, False)
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
        """Return the message, of one frame of so many bytes, that the driver said."""
        return self._from_driver(HEADER_BYTES + length + TAG_BYTES)

    def tell_actor(self, data: bytes) -> None:
        self._to_actor.sendall(data)

    def tell_driver(self, data: bytes) -> None:
        self._to_driver.sendall(data)

    def close(self) -> None:
        for end in (self.actor_end, self.driver_end, self._to_actor, self._to_driver):
            end.close()


@pytest.fixture
def between() -> Iterator[Between]:
    wire = Between()
    yield wire
    wire.close()


def test_frames_of_any_size_arrive_both_ways_in_order(between: Between) -> None:
    actor, driver = between.connect()
    for content in (b"", b"one", b"two"):
        driver.send([content])
        between.tell_actor(between.said(len(content)))
        assert list(map(bytes, actor.receive())) == [content]
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        ends = [pool.submit(SealedStream, end, KEY, is_actor) for end, is_actor in ((ours, True), (theirs, False))]
        one, other = (end.result(20) for end in ends)
        for size in (CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 5 * CHUNK_BYTES + 7):
            content = np.random.default_rng(size).bytes(size)
            for sender, reader in ((one, other), (other, one)):
                sent = pool.submit(sender.send, [memoryview(content), b"more"])
                assert list(map(bytes, reader.receive())) == [content, b"more"]
                sent.result(20)
    one.close()
    with pytest.raises(EOFError):
        other.receive()
    other.close()


@pytest.mark.parametrize("place", [COUNT.size, HEADER_BYTES, HEADER_BYTES + 4, -1])
def test_a_bit_that_was_changed_ends_the_connection_with_a_line_in_the_log(
    between: Between, place: int, caplog: pytest.LogCaptureFixture
) -> None:
    actor, driver = between.connect()
    driver.send([b"hello"])
    frame = bytearray(between.said(5))
    frame[place] ^= 1
    between.tell_actor(bytes(frame) + bytes(100))
    with pytest.raises(TamperedError):
        actor.receive()
    assert "is given up: a message " in caplog.text


def two_said(between: Between) -> tuple[SealedStream, SealedStream, bytes, bytes]:
    """Both ends of a connection, and two frames that the driver has said."""
    actor, driver = between.connect()
    driver.send([b"first"])
    driver.send([b"other"])
    return actor, driver, between.said(5), between.said(5)


@pytest.mark.parametrize("way", ["twice", "before its turn", "back to its sender"])
def test_a_frame_passes_once_in_its_place_and_direction(between: Between, way: str) -> None:
    actor, driver, first, other = two_said(between)
    if way == "twice":
        between.tell_actor(first + first)
        assert list(map(bytes, actor.receive())) == [b"first"]
    elif way == "before its turn":  # so none can be left out
        between.tell_actor(other)
    else:
        between.tell_driver(first)
    with pytest.raises(TamperedError):
        (driver if way == "back to its sender" else actor).receive()


def test_a_frame_does_not_pass_in_another_connection_of_the_same_key(between: Between) -> None:
    _, _, first, _ = two_said(between)
    another = Between()
    actor, _ = another.connect()
    another.tell_actor(first)
    with pytest.raises(TamperedError):
        actor.receive()
    another.close()


def test_a_length_beyond_the_bound_is_refused_before_anything_is_set_aside(
    between: Between, caplog: pytest.LogCaptureFixture
) -> None:
    actor, _ = between.connect()
    between.tell_actor(COUNT.pack(1) + LENGTH.pack(1 << 62))
    with pytest.raises(
        TamperedError, match="a message of 4611686018427387904 bytes was announced; at most 4294967296 are"
    ):
        actor.receive()
    assert "was announced" in caplog.text


def test_who_has_another_key_is_found_out_by_both_sides() -> None:
    ours, theirs = socket.socketpair()
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(SealedStream, end, key, is_actor)
            for end, key, is_actor in ((ours, KEY, True), (theirs, b"wrong", False))
        ]
        for end in ends:
            with pytest.raises(AuthenticationError, match="the other side has another key"):
                end.result(20)
    ours.close()
    theirs.close()


# -- the listener ------------------------------------------------------------------------------------------------------


@pytest.fixture
def listener() -> Iterator[Listener]:
    """Says back what it hears."""

    def echo(connection: SealedStream) -> None:
        while True:
            connection.send(connection.receive())

    listener = Listener("127.0.0.1", echo)
    yield listener
    listener.close()


def test_hundreds_who_say_nothing_hold_few_threads_and_keep_nobody_out(listener: Listener) -> None:
    def threads() -> int:
        return sum(thread.name == "driver" for thread in threading.enumerate())

    with contextlib.ExitStack() as stack:
        silent = [
            stack.enter_context(socket.create_connection((listener.address.host, listener.address.port)))
            for _ in range(300)
        ]
        until(lambda: threads() <= replica_host.MOST_PENDING)
        assert silent[0].recv(1 << 16) is not None  # the actor's greeting; then the end, not 20 s of waiting
        until(lambda: silent[0].recv(1 << 16) == b"")
        with dial(listener.address) as right:
            right.send([b"hello"])
            assert right.receive() == [b"hello"]


def test_who_does_not_show_the_key_is_waited_for_so_long_and_who_did_may_be_silent(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_host, "DIAL_SECONDS", 1)
    with (
        dial(listener.address) as inside,
        socket.create_connection((listener.address.host, listener.address.port)) as silent,
    ):
        silent.settimeout(20)
        while silent.recv(1024):  # a nonce, then the end
            pass
        inside.send([b"still here"])
        assert inside.receive() == [b"still here"]
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = dataclasses.replace(listener.address, port=nobody.getsockname()[1])
        with pytest.raises(TimeoutError, match="the other side said nothing for 1 s"):
            dial(address)


# -- a connection that is yet to come ---------------------------------------------------------------------------------


def pair() -> tuple[SealedStream, SealedStream]:
    """Two ends of one connection."""
    with ThreadPoolExecutor(2) as pool:
        ends = [
            pool.submit(SealedStream, end, b"key", is_actor)
            for end, is_actor in zip(socket.socketpair(), (True, False), strict=True)
        ]
        return ends[0].result(20), ends[1].result(20)


def test_giving_up_ends_the_waiting_and_closes_a_late_connection() -> None:
    late = LateStream()
    caught: list[type[BaseException]] = []

    def read() -> None:
        try:
            late.receive()
        except EOFError as error:
            caught.append(type(error))

    reader = threading.Thread(target=read)
    reader.start()
    late.give_up()
    reader.join(60.0)
    assert caught == [EOFError]
    with pytest.raises(OSError, match="was never made"):
        late.send([b"x"])
    ours, other = pair()
    late.become(ours)
    with other, pytest.raises(EOFError):
        other.receive()


# -- one engine and its drivers ----------------------------------------------------------------------------------------


class Driver:
    """Says and hears messages, one by one."""

    def __init__(self, host: ReplicaHost, name: str, **secrets: str) -> None:
        self.stats: list[Any] = []
        self.stream = dial(host.address())
        self.stream.send(link.message("hello", secrets, name))

    def say(self, kind: str, body: Any = None, driver: str = "another") -> None:
        self.stream.send(link.message(kind, body, driver))

    def ask(self, request_id: str, ids: Any = (1,), **params: Any) -> None:
        self.say("generate", [ids_request(request_id, ids, sampling_params=params)])

    def hear(self) -> tuple[str, Any]:
        """The next message that is not of stats, which come by the clock."""
        while (message := link.read(self.stream))[0] == "stats":
            self.stats.append(message[2])
        return message[0], message[2]

    def hear_all(self) -> list[tuple[str, Any]]:
        """All messages to the end."""
        heard = []
        try:
            while True:
                heard.append(self.hear())
        except (EOFError, ConnectionResetError):
            return heard


@pytest.fixture
def host() -> Iterator[ToyHost]:
    host = ToyHost(sleeper=True)
    yield host
    host.end()
    assert group(host._child.process.pid) == []


def completed(message: tuple[str, Any]) -> dict[str, list[int]]:
    kind, completions = message
    assert kind == "completions"
    return {completion.request_id: completion.outputs[0].token_ids.tolist() for completion in completions}


def stats(driver: Driver, number: int) -> Any:
    driver.say("call", (number, Engine.stats.__name__, (), {}))
    kind, (answered, *value) = driver.hear()
    assert (kind, answered) == ("result", number)
    return link.untagged(*value)


def test_a_killed_engine_is_told_to_those_who_are_there_and_those_who_come(host: ToyHost) -> None:
    pid = host._child.process.pid
    driver = Driver(host, "early")
    assert driver.hear()[0] == "ready"
    assert not host.died.is_set()
    os.kill(pid, signal.SIGKILL)
    expected = [("tail", "toy: started"), ("died", "its engine process ended with exit code -9")]
    assert driver.hear_all() == expected
    assert host.died.wait(60.0)
    assert [message[0] for message in Driver(host, "late").hear_all()] == ["ready", "tail", "died"]
    assert group(pid) == []


def test_the_end_closes_the_door_and_leaves_no_process_and_no_folder() -> None:
    host = ToyHost(sleeper=True)
    driver = Driver(host, "d")
    assert driver.hear()[0] == "ready"
    driver.ask("open", seconds=3600)
    pid, folder = host._child.process.pid, Path(host._child.folder)
    assert len(group(pid)) == 2
    host.end()
    host.end()
    assert group(pid) == []
    assert not folder.exists()
    assert driver.hear_all()[-1][0] == "died"
    with pytest.raises(OSError):
        Driver(host, "late")


def test_an_end_on_purpose_is_reported_as_such_and_is_no_death_of_the_engine() -> None:
    host = ToyHost()
    driver = Driver(host, "d")
    assert driver.hear()[0] == "ready"
    host.shut_down()
    assert [message[0] for message in driver.hear_all()] == ["ended", "tail", "died"]
    for thread in threading.enumerate():
        if thread.name == "engine":
            thread.join(60.0)  # it has told the drivers, and would now have Ray restart the actor
    assert not host.died.is_set()


def test_an_engine_that_needs_secrets_starts_with_those_of_the_first_driver() -> None:
    host = ToyHost(awaits_secrets=True)
    assert host.log_tail() == "(its engine waits for a driver)"
    assert host._child is None
    first = Driver(host, "first", HF_TOKEN="hf_1")
    assert first.hear()[0] == "ready"
    second = Driver(host, "second", HF_TOKEN="hf_2")
    assert second.hear()[0] == "ready"
    assert psutil.Process(host._child.process.pid).environ()["HF_TOKEN"] == "hf_1"
    host.end()
    never = ToyHost(awaits_secrets=True)
    never.end()
    assert never._child is None


def test_a_driver_that_stops_reading_is_dropped_with_a_line_in_the_log_and_its_requests_are_aborted(
    host: ToyHost, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reads, stuck = Driver(host, "reads"), Driver(host, "stuck")
    assert [driver.hear()[0] for driver in (reads, stuck)] == ["ready", "ready"]
    outbox = host._drivers["stuck"]
    outbox._limit, outbox._stuck_seconds = 1 << 20, 0
    stuck.ask("long", seconds=3600)
    for number in range(3):  # 16 MB each: more than the socket holds, so the second waits, and the third is too much
        stuck.ask(f"large {number}", range(1 << 20))
    until(lambda: "stuck" not in host._drivers)
    assert "driver stuck does not keep up" in caplog.text
    until(lambda: stats(reads, 0).requests == 4)  # the long one was cut
    reads.ask("mine", (3,))
    assert completed(reads.hear()) == {"mine": [4]}


def test_a_driver_speaks_for_itself_only_and_ends_no_engine(host: ToyHost) -> None:
    one, other = Driver(host, "one"), Driver(host, "other")
    assert [driver.hear()[0] for driver in (one, other)] == ["ready", "ready"]
    one.ask("same", (3,), seconds=3600)
    other.say("abort", ["same"], driver="one")  # whatever name it gives
    other.say("left", driver="one")
    other.say("shutdown")
    other.ask("same", (5,))
    assert completed(other.hear()) == {"same": [6]}
    other.say("call", (7, Engine.snapshot.__name__, (), {}))
    assert other.hear() == ("result", [7, "", []])  # of the caller's requests only
    one.say("abort", ["same"])
    assert completed(one.hear()) == {"same": []}


def test_a_driver_that_sends_what_cannot_be_read_loses_the_engine_alone(host: ToyHost) -> None:
    one, other = Driver(host, "one"), Driver(host, "other")
    assert [driver.hear()[0] for driver in (one, other)] == ["ready", "ready"]
    head, *_ = link.message("generate")
    one.stream.send([head, b"\xc1"])
    kind, text = one.hear()
    assert (kind, text[:44]) == ("died", "its engine cannot read what this driver send")
    other.ask("same", (5,))
    assert completed(other.hear()) == {"same": [6]}
    assert not host.died.is_set()
