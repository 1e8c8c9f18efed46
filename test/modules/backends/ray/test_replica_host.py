"""Replicas in Ray, without Ray: names and environments, and what an actor does for drivers that come and go."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import signal
import socket
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import AuthenticationError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.exceptions import GetTimeoutError

from support.actors import ToyHost, ray_service
from support.processes import group, ids_request
from support.waiting import HOUR, PATIENCE, until
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.link import COUNT, LENGTH
from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.backends.ray.actor import (
    MOST_PENDING,
    NONCE_BYTES,
    TAG_BYTES,
    LateStream,
    Listener,
    ReplicaHost,
    SealedStream,
    TamperedError,
    dial,
)
from torchrl_moe.modules.backends.ray.cluster import (
    forwarded_environment,
    parse_actor_name,
    parse_group_name,
    secrets_of_environment,
)


@pytest.mark.parametrize("name", ["policy", "a/b", "a replica-1", "größe", "my-replica-1"])
def test_a_name_is_read_as_it_was_written(name: str) -> None:
    service = dataclasses.replace(ray_service(name=name), namespace="of/ours")
    assert service.actor_name(11) == f"{name}-replica-11"
    assert parse_actor_name(service.actor_name(11)) == (name, 11)
    assert parse_group_name(service.group_name(11, "0123abcd")) == ("of/ours", name, 11)


def test_settings_of_vllm_go_along_and_what_belongs_to_a_machine_or_is_secret_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ray keeps and shows what goes along."""
    settings = {"VLLM_LOGGING_LEVEL", "HF_HOME", "NCCL_DEBUG", "HF_TOKEN_PATH", "VLLM_MAX_TOKENS"}
    tokens = {"HF_TOKEN": "hf_1", "HUGGING_FACE_HUB_TOKEN": "hf_2", "VLLM_API_KEY": "key"}
    others = {"VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "PATH", "GITHUB_TOKEN"}
    for name in settings | tokens.keys() | others:
        monkeypatch.setenv(name, tokens.get(name, "x"))
    environment = forwarded_environment()
    assert settings <= environment.keys()
    assert not (others | tokens.keys()) & environment.keys()
    assert secrets_of_environment() == tokens


# -- the cluster -------------------------------------------------------------------------------------------------------
def test_a_ray_that_runs_is_used_a_cluster_that_is_found_joined_and_one_started_only_if_it_may_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found, inits = True, []

    def init(**how: Any) -> None:
        inits.append(how["address"])
        if how["address"] == "auto" and not found:
            raise ConnectionError("Could not find any running Ray instance")

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("Ray was shut down"))
    for running, addresses in ((True, []), (False, ["auto"])):
        monkeypatch.setattr(ray, "is_initialized", lambda running=running: running)
        assert cluster.join_cluster() is False
        assert inits == addresses
    found = False
    with pytest.raises(EngineError, match=r"no Ray cluster was found: .* Set RAY_ADDRESS"):
        cluster.join_cluster(start=False)
    assert cluster.join_cluster() is True
    assert inits == ["auto", "auto", "auto", "local"]


def test_a_shortage_tells_a_cluster_too_small_from_one_too_full(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(True, {"CPU": 8.0, "GPU": 2.0}), (True, {"CPU": 4.0}), (False, {"CPU": 64.0, "GPU": 8.0})]
    monkeypatch.setattr(ray, "nodes", lambda: [{"Alive": alive, "Resources": size} for alive, size in sizes])
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 5.0})
    full = cluster.shortage({"GPU": 2.0})
    assert "with {'GPU': 2.0} free" in full
    assert "2 node(s) have {'GPU': 2.0}; {'GPU': 0.0}; free in total: {'GPU': 0.0}. Others hold them" in full
    for more in ({"GPU": 4.0}, {"GPU": 1.0, "CPU": 16.0}):
        assert "No node is large enough" in cluster.shortage(more)


ACTORS = [
    *({"name": name, "namespace": "ours"} for name in ("b-replica-1", "b-replica-0", "a-replica-0", "somebody")),
    {"name": "a-replica-1", "namespace": "theirs"},
]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Name of an actor -> what it answers to ``describe``: a value, or an error."""
    answers: dict[str, Any] = {}

    def get(reference: Any, timeout: float) -> Any:
        if isinstance(answers[reference], Exception):
            raise answers[reference]
        service, group_id = answers[reference], ""
        if isinstance(service, tuple):
            service, group_id = service
        return SimpleNamespace(service=service, group=SimpleNamespace(id=bytes.fromhex(group_id)))

    def get_actor(name: str, namespace: str) -> Any:
        assert namespace == "ours"
        return SimpleNamespace(describe=SimpleNamespace(remote=lambda: name))

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: ACTORS)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(cluster, "placement_group_table", dict)
    return answers


def test_a_service_that_is_not_there_or_does_not_answer_is_distinguished(actors: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"no service 'c' is running\. Services in namespace 'ours': 'a'.*name='c'"):
        cluster.find_service("c", "ours")
    with pytest.raises(EngineError, match=r"None runs in namespace 'empty'"):
        cluster.find_service("c", "empty")
    actors["a-replica-0"] = actors["b-replica-0"] = GetTimeoutError("late")
    with pytest.raises(EngineError, match=r"'a': none of its replicas \[0\] answered within 20 s: late"):
        cluster.find_service("a", "ours")
    actors["b-replica-1"] = service = ray_service(name="b")
    assert cluster.find_service("b", "ours") == service  # one that answers is enough


# -- what is left -----------------------------------------------------------------------------------------------------
def group_row(name: str, number: int, state: str = "CREATED") -> dict[str, str]:
    return {"name": name, "state": state, "placement_group_id": f"{number:02x}" * 18}


@pytest.fixture
def groups(actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The placement groups of the cluster; those that are removed say so."""
    rows: list[dict[str, str]] = []

    def remove(handle: Any) -> None:
        for row in rows:
            if row["placement_group_id"] == handle.id.hex():
                row["state"] = "REMOVED"

    monkeypatch.setattr(cluster, "placement_group_table", lambda: {row["placement_group_id"]: row for row in rows})
    monkeypatch.setattr(cluster, "remove_placement_group", remove)
    monkeypatch.setattr(cluster, "MAKING_SECONDS", 0.0)
    return rows


def removed(rows: list[dict[str, str]]) -> list[int]:
    return [int(row["placement_group_id"][:2], 16) for row in rows if row["state"] == "REMOVED"]


def test_groups_without_an_actor_are_removed_and_no_others(
    actors: dict[str, Any], groups: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups += [
        group_row("ours/b/0/aaaaaaaa", 1),  # it has an actor
        group_row("ours/b/7/aaaaaaaa", 2),  # it has none
        group_row("ours/b/1/aaaaaaaa", 3),  # that of the actor
        group_row("ours/b/1/bbbbbbbb", 4),  # beside it
        group_row("theirs/b/7/aaaaaaaa", 5),
        group_row("ours/c/0/aaaaaaaa", 6),
        group_row("b-replica-7-aaaaaaaa", 7),  # nobody of ours names them so
        group_row("ours/b/8/aaaaaaaa", 8, state="PENDING"),
        *(group_row(f"ours/a/0/{n}", n) for n in (9, 10)),  # two of an actor that does not answer
    ]
    actors["b-replica-1"] = ray_service(name="b"), groups[2]["placement_group_id"]
    actors["a-replica-0"] = GetTimeoutError("late")
    with monkeypatch.context() as patch:  # an actor that comes meanwhile
        late = {"name": "b-replica-7", "namespace": "ours"}
        there = [*ACTORS]
        patch.setattr(cluster.time, "sleep", lambda seconds: there.append(late))
        patch.setattr(ray.util, "list_named_actors", lambda all_namespaces: there)
        assert cluster.remove_leftovers("b", "ours") == 2
    assert removed(groups) == [4, 8]
    assert [cluster.remove_leftovers(name, "ours") for name in "bba"] == [1, 0, 0]
    assert removed(groups) == [2, 4, 8]


def test_who_ends_a_service_asks_those_that_run_and_kills_those_that_wait_for_a_place_at_once(
    actors: dict[str, Any], groups: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups += [
        group_row("ours/b/0/aaaaaaaa", 1, state="PENDING"),
        group_row("ours/b/1/aaaaaaaa", 2, state="PENDING"),
        group_row("ours/b/1/bbbbbbbb", 3),
    ]
    asked, killed = [], []

    def get_actor(name: str, namespace: str) -> Any:
        return SimpleNamespace(name=name, shut_down=SimpleNamespace(remote=lambda: name))

    def wait(references: list[str], num_returns: int, timeout: float) -> None:
        assert num_returns == len(references)
        asked.extend(references)

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", lambda actor: killed.append(actor.name))
    monkeypatch.setattr(cluster, "GONE_SECONDS", 0.0)
    cluster.end_service("b", "ours")
    assert asked == ["b-replica-1"]
    assert killed == ["b-replica-0", "b-replica-1"]
    assert removed(groups) == [1, 2, 3]


# -- a sealed connection -----------------------------------------------------------------------------------------------
KEY = b"k" * 32
HEADER_BYTES = COUNT.size + LENGTH.size  # of a message of one frame


class Between:
    """A socket between two sockets: what the first side says lies here until the test passes it on."""

    def __init__(self) -> None:
        self.actor_end, self.to_actor = socket.socketpair(socket.AF_UNIX)
        self.driver_end, self.to_driver = socket.socketpair(socket.AF_UNIX)

    def connect(self) -> tuple[SealedStream, SealedStream]:
        """Return the actor's end and the driver's; the handshake is passed on as it is."""
        rest = HEADER_BYTES + TAG_BYTES
        with ThreadPoolExecutor(2) as pool:
            actor = pool.submit(SealedStream, self.actor_end, KEY, True)
            driver = pool.submit(SealedStream, self.driver_end, KEY, False)
            # each says its nonce at once, and the rest when it has the other's
            nonces = heard(self.to_actor, NONCE_BYTES), heard(self.to_driver, NONCE_BYTES)
            self.to_driver.sendall(nonces[0])
            self.to_actor.sendall(nonces[1])
            self.to_driver.sendall(heard(self.to_actor, rest + len(b"actor")))
            self.to_actor.sendall(heard(self.to_driver, rest + len(b"driver")))
            return actor.result(20), driver.result(20)

    def said(self, length: int) -> bytes:
        """Return the message, of one frame of so many bytes, that the driver said."""
        return heard(self.to_driver, HEADER_BYTES + length + TAG_BYTES)

    def close(self) -> None:
        for end in (self.actor_end, self.driver_end, self.to_actor, self.to_driver):
            end.close()


def heard(end: socket.socket, count: int) -> bytes:
    return end.recv(count, socket.MSG_WAITALL)


@pytest.fixture
def between() -> Iterator[Between]:
    wire = Between()
    yield wire
    wire.close()


def sealed(keys: tuple[bytes, bytes] = (KEY, KEY)) -> list[Future[SealedStream]]:
    """The actor's end of one connection and the driver's, each with its key, as they come."""
    with ThreadPoolExecutor(2) as pool:
        ends = zip(socket.socketpair(), keys, (True, False), strict=True)
        return [pool.submit(SealedStream, *end) for end in ends]


def test_frames_of_any_size_arrive_both_ways_in_order() -> None:
    one, other = (end.result(20) for end in sealed())
    with ThreadPoolExecutor(1) as pool:
        for size in (0, 1, 3, 1 << 18, (1 << 20) + 7):
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
    between.to_actor.sendall(bytes(frame) + bytes(100))
    with pytest.raises(TamperedError):
        actor.receive()
    assert "is given up: a message " in caplog.text


@pytest.mark.parametrize("way", ["twice", "before its turn", "back to its sender", "in another connection"])
def test_a_frame_passes_once_in_its_place_direction_and_connection(between: Between, way: str) -> None:
    actor, driver = between.connect()
    driver.send([b"first"])
    driver.send([b"other"])
    first, other = between.said(5), between.said(5)
    with contextlib.closing(Between()) as another:
        reader, end, frame = actor, between.to_actor, first
        if way == "twice":
            end.sendall(first)
            assert list(map(bytes, actor.receive())) == [b"first"]
        elif way == "before its turn":  # so none can be left out
            frame = other
        elif way == "back to its sender":
            reader, end = driver, between.to_driver
        else:  # of the same key
            reader, end = another.connect()[0], another.to_actor
        end.sendall(frame)
        with pytest.raises(TamperedError):
            reader.receive()


def test_a_length_beyond_the_bound_is_refused_at_once(between: Between, caplog: pytest.LogCaptureFixture) -> None:
    actor, _ = between.connect()
    between.to_actor.sendall(COUNT.pack(1) + LENGTH.pack(1 << 62))
    with pytest.raises(TamperedError, match=f"a message of {1 << 62} bytes was announced; at most 4294967296 are"):
        actor.receive()
    assert "was announced" in caplog.text


def test_who_has_another_key_is_found_out_by_both_sides() -> None:
    for end in sealed((KEY, b"wrong")):
        with pytest.raises(AuthenticationError, match="the other side has another key"):
            end.result(20)


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


def test_hundreds_who_say_nothing_hold_few_threads_and_keep_nobody_out(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_moe.modules.backends.ray.actor.DIAL_SECONDS", HOUR)  # so that none ends by itself
    place = (listener.address.host, listener.address.port)
    with contextlib.ExitStack() as stack:
        silent = [stack.enter_context(socket.create_connection(place)) for _ in range(300)]
        for one in silent[:-MOST_PENDING]:  # the first are sent away
            one.settimeout(PATIENCE)
            while one.recv(1 << 16):  # the actor's greeting
                pass
        until(lambda: sum(one.name == "driver" for one in threading.enumerate()) <= MOST_PENDING)
        with contextlib.closing(dial(listener.address)) as right:
            right.send([b"hello"])
            assert right.receive() == [b"hello"]


def test_who_does_not_show_the_key_is_waited_for_so_long_and_who_did_may_be_silent(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_moe.modules.backends.ray.actor.DIAL_SECONDS", 1)
    with (
        contextlib.closing(dial(listener.address)) as inside,
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
def test_giving_up_ends_the_waiting_and_closes_a_late_connection() -> None:
    late, refs = LateStream(), []

    def read() -> None:
        replica = threading.Event()  # in the frames of what it raises
        refs.append(weakref.ref(replica))
        late.receive()

    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        late.give_up()
        assert isinstance(reading.exception(60.0), EOFError)
    del reading
    gc.collect()
    assert refs[0]() is None
    with pytest.raises(OSError, match="was never made"):
        late.send([b"x"])
    ours, other = (end.result(20) for end in sealed())
    late.become(ours)
    with contextlib.closing(other), pytest.raises(EOFError):
        other.receive()


# -- one engine and its drivers ----------------------------------------------------------------------------------------
class Driver:
    """Says and hears messages, one by one."""

    def __init__(self, host: ReplicaHost, name: str, **secrets: str) -> None:
        self.stream = dial(host.address())
        self.stream.send(link.message("hello", secrets, name))

    def say(self, kind: str, body: Any = None, driver: str = "another") -> None:
        self.stream.send(link.message(kind, body, driver))

    def ask(self, request_id: str, ids: Any = (1,), **params: Any) -> None:
        self.say("generate", [ids_request(request_id, ids, sampling_params=params)])

    def hear(self) -> tuple[str, Any]:
        """The next message that is not of stats, which come by the clock."""
        while (message := link.read(self.stream))[0] == "stats":
            pass
        return message[0], message[2]

    def hear_all(self) -> list[tuple[str, Any]]:
        """All messages to the end."""
        heard = []
        with contextlib.suppress(EOFError, ConnectionResetError):
            while True:
                heard.append(self.hear())
        return heard

    def answered(self) -> dict[str, list[int]]:
        kind, completions = self.hear()
        assert kind == "completions"
        return {completion.request_id: completion.outputs[0].token_ids.tolist() for completion in completions}

    def requests(self) -> int:
        """How many requests the engine has answered."""
        self.say("call", (0, Engine.stats.__name__, (), {}))
        kind, (_, *value) = self.hear()
        assert kind == "result"
        return link.untagged(*value).requests


def served(host: ReplicaHost, *names: str) -> list[Driver]:
    """Drivers whose engine is ready."""
    drivers = [Driver(host, name) for name in names]
    assert [driver.hear()[0] for driver in drivers] == ["ready"] * len(names)
    return drivers


@pytest.fixture
def host() -> Iterator[ToyHost]:
    host = ToyHost(sleeper=True)
    yield host
    host.end()
    assert group(host._child.process.pid) == []


def test_a_killed_engine_is_told_to_those_who_are_there_and_those_who_come(host: ToyHost) -> None:
    pid = host._child.process.pid
    (driver,) = served(host, "early")
    assert not host.died.is_set()
    os.kill(pid, signal.SIGKILL)
    ends = [("tail", "toy: started"), ("died", "its engine process ended with exit code -9")]
    assert driver.hear_all() == ends
    assert host.died.wait(60.0)
    assert Driver(host, "late").hear_all()[1:] == ends  # the first says that it was ready
    assert group(pid) == []


def test_the_end_closes_the_door_and_leaves_no_process_and_no_folder() -> None:
    host = ToyHost(sleeper=True)
    (driver,) = served(host, "d")
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
    (driver,) = served(host, "d")
    host.shut_down()
    assert [message[0] for message in driver.hear_all()] == ["ended", "tail", "died"]
    for thread in threading.enumerate():
        if thread.name == "engine":
            thread.join(60.0)  # it has told the drivers, and would now have Ray restart the actor
    assert not host.died.is_set()


def test_an_engine_that_needs_secrets_starts_with_those_of_the_first_driver() -> None:
    host, never = ToyHost(awaits_secrets=True), ToyHost(awaits_secrets=True)
    assert host.log_tail() == "(its engine waits for a driver)"
    assert host._child is None
    for name in ("first", "second"):
        assert Driver(host, name, HF_TOKEN=f"hf_{name}").hear()[0] == "ready"
    assert psutil.Process(host._child.process.pid).environ()["HF_TOKEN"] == "hf_first"
    for one in (host, never):
        one.end()
    assert never._child is None


def test_a_driver_that_stops_reading_is_dropped_with_a_line_in_the_log_and_its_requests_are_aborted(
    host: ToyHost, caplog: pytest.LogCaptureFixture
) -> None:
    reads, stuck = served(host, "reads", "stuck")
    outbox = host._drivers["stuck"]
    outbox._limit, outbox._stuck_seconds = 1 << 20, 0
    stuck.ask("long", seconds=3600)
    for number in range(3):  # 16 MB each: more than the socket holds, so the second waits, and the third is too much
        stuck.ask(f"large {number}", range(1 << 20))
    until(lambda: "stuck" not in host._drivers)
    assert "driver stuck does not keep up" in caplog.text
    until(lambda: reads.requests() == 4)  # the long one was cut
    reads.ask("mine", (3,))
    assert reads.answered() == {"mine": [4]}


def test_a_driver_speaks_for_itself_only_and_ends_no_engine(host: ToyHost) -> None:
    one, other = served(host, "one", "other")
    one.ask("same", (3,), seconds=3600)
    other.say("abort", ["same"], driver="one")  # whatever name it gives
    other.say("left", driver="one")
    other.say("shutdown")
    other.ask("same", (5,))
    assert other.answered() == {"same": [6]}
    other.say("call", (7, Engine.snapshot.__name__, (), {}))
    assert other.hear() == ("result", [7, "", []])  # of the caller's requests only
    one.say("abort", ["same"])
    assert one.answered() == {"same": []}
    # one that sends what cannot be read loses the engine alone
    head, *_ = link.message("generate")
    one.stream.send([head, b"\xc1"])
    kind, text = one.hear()
    assert (kind, text[:44]) == ("died", "its engine cannot read what this driver send")
    other.ask("same", (5,))
    assert other.answered() == {"same": [6]}
    assert not host.died.is_set()


def test_an_engine_that_does_not_start_says_why_and_the_host_stays_to_repeat_it() -> None:
    host = ToyHost(error="no such model", print="SomeError: in the log")
    heard = Driver(host, "early").hear_all()
    assert heard[0][0] == "tail" and "SomeError: in the log" in heard[0][1]
    assert heard[1] == ("failed", "ValueError: no such model")
    assert Driver(host, "late").hear_all() == heard
    assert not host.died.is_set()  # one that never served would not do so the next time
    host.end()
