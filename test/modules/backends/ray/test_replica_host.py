"""What an actor does, without Ray: one toy engine, and drivers that come and go."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.hosts import ToyHost
from support.processes import group, ids_request
from support.waiting import until
from torchrl_moe.modules.backends.process import child, wire
from torchrl_moe.modules.backends.process import wire as packing
from torchrl_moe.modules.backends.ray.replica_host import ReplicaHost, dial, driver_of, named_after, wrap


class Driver:
    """Says and hears messages, one by one."""

    def __init__(self, host: ReplicaHost, name: str, **secrets: str) -> None:
        self.name = name
        self.stats: list[Any] = []
        self.connection = dial(host.address())
        self._write(wire.encode((name, secrets)))

    def _write(self, frames: wire.Frames) -> None:
        for frame in frames:
            self.connection.send_bytes(frame)

    def say(self, *message: Any, opens: tuple[str, ...] = ()) -> None:
        self._write(wrap(message, [named_after(self.name, name) for name in opens]))

    def ask(self, request_id: str, ids: Any = (1,), **params: Any) -> None:
        request = ids_request(named_after(self.name, request_id), ids, sampling_params=params)
        self.say("generate", packing.pack_requests([request]), opens=(request_id,))

    def hear(self) -> tuple[Any, ...]:
        """The next message that is not of stats, which come by the clock."""
        while (message := wire.receive(self.connection))[0] == "stats":
            self.stats.append(message[1])
        return message

    def hear_all(self) -> list[tuple[Any, ...]]:
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


def completed(message: tuple[Any, ...]) -> dict[str, list[int]]:
    assert message[0] == "completions"
    completions = packing.unpack_completions(message[1], 0)
    return {completion.request_id: completion.outputs[0].token_ids.tolist() for completion in completions}


def stats(driver: Driver, number: int) -> Any:
    driver.say("call", (driver.name, number), "stats", wire.parcel({}))
    kind, answered, value = driver.hear()
    assert (kind, answered) == ("result", (driver.name, number))
    return wire.open_parcel(value)


def test_ids_of_drivers_are_kept_apart() -> None:
    assert named_after("d", "x/y") == "d/x/y"
    assert driver_of("d/x/y") == ("d", "x/y")


def test_each_driver_gets_its_own_messages_and_a_late_one_that_the_engine_is_ready(host: ToyHost) -> None:
    one = Driver(host, "one")
    kind, info = one.hear()
    assert (kind, info.model) == ("ready", "toy")
    two = Driver(host, "two")
    assert two.hear()[0] == "ready"
    one.ask("same", (1, 2), seconds=0.2)
    two.ask("same", (7,), seconds=0.1)
    assert completed(two.hear()) == {"two/same": [8]}
    assert completed(one.hear()) == {"one/same": [2, 3]}
    assert stats(two, 5).requests == 2
    assert [driver.open for driver in host._drivers.values()] == [set(), set()]  # nothing to abort if they leave
    one.say("call", ("one", 0), "no_such_command", wire.parcel({}))
    assert one.hear()[:3] == ("error", ("one", 0), "value")
    one.ask("bad", refuse="too long")
    assert one.hear() == ("refused", "one/bad", "value", "too long")


def test_what_a_driver_that_left_had_asked_is_aborted_and_the_others_continue(host: ToyHost) -> None:
    stays, leaves = Driver(host, "stays"), Driver(host, "leaves")
    assert [driver.hear()[0] for driver in (stays, leaves)] == ["ready", "ready"]
    leaves.ask("long", seconds=3600)
    leaves.ask("short")
    stays.ask("mine", (3,), seconds=2)
    assert completed(leaves.hear()) == {"leaves/short": [2]}
    leaves.connection.close()
    until(lambda: stats(stays, 0).requests == 2)  # the short one, and the long one that was cut
    assert completed(stays.hear()) == {"stays/mine": [4]}


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


def test_an_engine_that_does_not_start_says_why_and_the_host_stays_to_repeat_it() -> None:
    host = ToyHost(error="no such model", print="SomeError: in the log")
    early = Driver(host, "early")
    expected = [("tail", "SomeError: in the log"), ("failed", "ValueError: no such model")]
    heard = early.hear_all()
    assert (heard[0][0], heard[1]) == ("tail", expected[1])
    assert "SomeError: in the log" in heard[0][1]
    assert Driver(host, "late").hear_all() == heard
    assert not host.died.is_set()  # one that never served would not do so the next time
    host.end()


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


def test_stats_are_told_to_all(host: ToyHost) -> None:
    drivers = Driver(host, "one"), Driver(host, "two")
    assert [driver.hear()[0] for driver in drivers] == ["ready", "ready"]
    drivers[0].ask("x")
    assert completed(drivers[0].hear()) == {"one/x": [2]}

    def told(driver: Driver) -> bool:
        stats(driver, 0)  # which also hears what came before
        return any(stats.requests == 1 for stats in driver.stats)

    until(lambda: all(map(told, drivers)))


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
    outbox = host._drivers["stuck"].outbox
    outbox._limit, outbox._stuck_seconds = 1 << 20, 0
    stuck.ask("long", seconds=3600)
    for number in range(3):  # 16 MB each: more than the socket holds, so the second waits, and the third is too much
        stuck.ask(f"large {number}", range(1 << 20))
    until(lambda: "stuck" not in host._drivers)
    assert "driver stuck does not keep up" in caplog.text
    until(lambda: stats(reads, 0).requests == 4)  # the long one was cut
    reads.ask("mine", (3,))
    assert completed(reads.hear()) == {"reads/mine": [4]}


def test_an_engine_process_that_stops_reading_is_ended_and_told_as_dead(
    host: ToyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "GRACE_SECONDS", 0.5)
    driver = Driver(host, "d")
    assert driver.hear()[0] == "ready"
    os.kill(host._child.process.pid, signal.SIGSTOP)
    host._child.outbox._limit = 1 << 20
    for number in range(3):
        driver.ask(f"large {number}", range(1 << 20))
    assert [message[0] for message in driver.hear_all()] == ["tail", "died"]
    assert host._child.outbox.overflowed


def test_its_log_can_be_read(host: ToyHost) -> None:
    driver = Driver(host, "d")
    assert driver.hear()[0] == "ready"
    assert host.log_tail() == "toy: started"
