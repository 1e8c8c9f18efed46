"""What a weight update promises, whatever brings the bytes: who has which version, and what a failure costs."""

from __future__ import annotations

import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from support.interrupts import interrupts
from support.services import listening
from support.waiting import in_thread, until
from support.weights import (
    Connect,
    Fleet,
    UpdateCounter,
    always,
    fleets,
    senders,
    soft,
    value_in,
    values,
    weights,
)
from torchrl_moe.errors import EngineError, ManifestMismatch, ReplicaDiedError, WeightSyncError
from torchrl_moe.testing.fake_weights import FakeFleet, SoftError, Stall

TRANSPORTS: dict[str, dict[str, Any]] = {
    "memmap": {"delta": False},
    "delta": {"delta": True},
    "gloo": {"transport": "gloo"},
}


@pytest.fixture(params=TRANSPORTS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Makes a sender for an engine, over each transport; patches are for a folder on a disk."""
    numbers = itertools.count()

    def connect(engine: Any, **choices: Any) -> Any:
        folder = {"folder": tmp_path / f"store-{next(numbers)}"} if request.param == "delta" else {}
        return make(engine, **folder, **choices)

    with senders(**TRANSPORTS[request.param]) as make:
        yield connect


@pytest.fixture
def fleet(connect: Connect) -> Fleet:
    """Makes an engine of so many fake replicas, and a sender for it."""
    return fleets(connect)


def meet_at(barrier: threading.Barrier) -> Callable[[int], None]:
    """For a replica's faults: it fails at nothing, and waits for the others there."""

    def wait(asked: int) -> None:
        barrier.wait(60.0)

    return wait


# -- what succeeds ----------------------------------------------------------------------------------------------------
def test_every_replica_gets_the_weights_and_the_version(fleet: Fleet) -> None:
    engine, sender = fleet(3)
    for number in (1, 2, 3):
        report = sender.update_weights(weights(10 * number))
        assert (report.version, sender.version, report.failed) == (number, number, {})
        assert (engine.versions, engine.states) == ([number] * 3, ["SERVING"] * 3)
        assert values(engine) == [10.0 * number] * 3
    assert report.nbytes == 16 + 24
    found = [(r.replica, r.fetched, r.paused, r.loaded, r.attempts) for r in report.replicas]
    assert found == [(index, 0.25, 0.5, 0.25, 1) for index in range(3)]


def test_all_check_first_then_one_after_another_is_swapped(fleet: Fleet) -> None:
    engine, sender = fleet(3)
    engine.log.clear()
    sender.update_weights(weights())
    stages, swaps = engine.log[:3], engine.log[3:]
    assert sorted((command, index) for command, index, _ in stages) == [("stage_weights", i) for i in range(3)]
    assert all(states == ["SERVING"] * 3 for _, _, states in stages)
    # at most one is away, and it is this one
    away = [["SYNCING" if i == index else "SERVING" for i in range(3)] for index in range(3)]
    assert swaps == [("swap_weights", index, away[index]) for index in range(3)]


def test_the_steps_may_be_taken_by_themselves(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    staged = sender.prefetch(version := sender.publish(weights(5)))
    assert engine.versions == [0, 0]
    assert staged[0].digest == sender.apply(version, staged).digest  # type: ignore[union-attr]
    assert engine.versions == [1, 1]
    assert sender.apply(version).failed == {}  # again, and checked by itself


def test_an_older_version_comes_back_under_a_new_number(fleet: Fleet) -> None:
    engine, sender = fleet(2, keep_versions=3)
    for number in (1, 2, 3):
        sender.update_weights(weights(number))
    report = sender.rollback(2)
    assert (report.version, report.failed, engine.versions) == (4, {}, [4, 4])
    assert values(engine) == [2.0, 2.0]
    engine.restart(1)
    sender.bring(1)
    assert (value_in(engine, 1), engine.versions) == (2.0, [4, 4])
    for number in (5, 6):
        assert (sender.update_weights(weights(number)).version, value_in(engine, 0)) == (number, number)
    with pytest.raises(ManifestMismatch, match=r"version 1 is not there, only \["):
        sender.rollback(1)
    assert (engine.states, engine.versions) == (["SERVING"] * 2, [6, 6])


def test_updates_from_many_threads_take_turns(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    for replica in engine.fakes:
        replica.fail["swap_weights"] = lambda asked: time.sleep(0.002)
    engine.log.clear()

    def update(value: int) -> list[int]:
        return [sender.update_weights(weights(value)).version for _ in range(5)]

    updates = [in_thread(functools.partial(update, value)) for value in range(4)]
    assert sorted(version for one in updates for version in one.result(60.0)) == list(range(1, 21))
    assert engine.versions == [20, 20]
    commands = [command for command, _, _ in engine.log]
    assert commands == (["stage_weights"] * 2 + ["swap_weights"] * 2) * 20


# -- failures of one replica ------------------------------------------------------------------------------------------
LATE = "replica 1 did not answer 'swap_weights' within 5 s"
KEPT, LOST = "SERVING", "QUARANTINED"
RESTORED = always(SoftError("it went wrong", restored=True))


@pytest.mark.parametrize(
    ("command", "fault", "failed", "attempts", "state"),
    [
        ("stage_weights", always(EngineError("did not answer")), "did not answer", 0, KEPT),
        ("stage_weights", always(ValueError("1 missing (x)")), "ManifestMismatch: 1 missing (x)", 0, KEPT),
        ("stage_weights", always(RuntimeError("call start() first")), "RuntimeError: call start() first", 0, KEPT),
        ("stage_weights", always(OSError("no route")), "OSError: no route", 0, KEPT),
        ("swap_weights", soft(1), None, 2, KEPT),  # it is tried again
        ("swap_weights", soft(1, 2), "it went wrong", 2, LOST),
        ("swap_weights", always(EngineError(LATE)), LATE, 1, LOST),  # it is not asked again
        ("swap_weights", RESTORED, "it went wrong", 1, KEPT),
    ],
)
def test_what_fails_at_one_replica_is_named_and_the_others_continue(
    fleet: Fleet, command: str, fault: Any, failed: str | None, attempts: int, state: str
) -> None:
    """What cannot be checked, and a swap whose old weights survive, leave it with its old version."""
    engine, sender = fleet(3)
    sender.update_weights(weights(1))
    engine.fakes[1].fail[command] = fault
    report = sender.update_weights(weights(2))
    assert report.failed == ({} if failed is None else {1: failed})
    assert [entry.attempts for entry in report.replicas if entry.replica != 1] == [1, 1]
    assert (engine.states, engine.versions) == ([KEPT, state, KEPT], [2, 2 if failed is None else 1, 2])
    assert engine.fakes[1].asked["swap_weights"] == 1 + attempts
    assert engine.fakes[1].is_alive() == (state == KEPT)
    if state == KEPT:
        assert value_in(engine, 1) == engine.versions[1]


def test_a_swap_that_fails_twice_is_for_good(fleet: Fleet) -> None:
    engine, sender = fleet(3, token_seconds=3600.0)
    sender.update_weights(weights(1))
    broken, entry = engine.fakes[1], engine.replica_table[1]
    broken.fail["swap_weights"] = soft(1, 2)
    seen: list[str] = []
    with listening(engine.replica_table, lambda: seen.append(entry.state.name)):
        frozen = in_thread(lambda: engine.generate([1], actor_index=1, use_tqdm=False))
        until(lambda: entry.inflight == 1)
        report = sender.update_weights(weights(2))
        with pytest.raises(ReplicaDiedError):  # and it is not left to wait
            frozen.result(60.0)
    assert (report.failed, report.replicas[1].attempts, engine.versions) == ({1: "it went wrong"}, 2, [2, 1, 2])
    assert "QUARANTINED" in seen
    assert "SERVING" not in seen[seen.index("QUARANTINED") :]
    assert engine.states[1] not in ("SERVING", "SYNCING")
    asked = broken.asked["swap_weights"]
    assert sender.update_weights(weights(3)).failed[1].startswith("the replica is ")
    assert broken.asked["swap_weights"] == asked  # never again


@pytest.mark.parametrize("noted", [False, True])
def test_a_replica_that_dies_is_dead_whichever_thread_detects_it(connect: Connect, noted: bool) -> None:
    engine = FakeFleet(3)

    def die(_: int) -> Exception:
        engine.fakes[0].die()
        if noted:
            engine.replica_table.mark_dead(0)
        return ReplicaDiedError("replica 0 died")

    engine.fakes[0].fail["swap_weights"] = die
    sender = connect(engine)
    assert sender.update_weights(weights()).failed == {0: "ReplicaDiedError: replica 0 died"}
    assert engine.states == ["DEAD", "SERVING", "SERVING"]
    assert sender.update_weights(weights()).failed == {0: "the replica is DEAD"}


# -- replicas that come late, or in the place of one that died --------------------------------------------------------
def test_who_came_after_the_staging_is_not_swapped(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    version = sender.publish(weights())
    staged = sender.prefetch(version)
    new = engine.restart(0)
    report = sender.apply(version, staged)
    assert report.failed == {0: "it was replaced by another process after version 1 was prepared"}
    assert (engine.states, engine.versions) == (["STARTING", "SERVING"], [0, 1])
    assert (new.is_alive(), new.asked["swap_weights"]) == (True, 0)
    sender.bring(0)  # as its supervisor does
    assert (engine.states, engine.versions) == (["SERVING"] * 2, [1, 1])


@pytest.mark.parametrize(
    "ending", [ReplicaDiedError("it died"), EngineError("no answer"), SoftError("no", restored=True), None]
)
def test_what_becomes_of_one_that_died_does_not_touch_the_one_in_its_place(
    fleet: Fleet, ending: Exception | None
) -> None:
    engine, sender = fleet(2)

    def restart(_: int) -> Exception | None:
        engine.restart(0)
        engine.replica_table[0].version = 0
        return ending

    engine.fakes[0].fail["swap_weights"] = restart
    failed = sender.update_weights(weights()).failed
    assert failed.keys() == {0} and (ending is None or str(ending) in failed[0])
    assert (engine.states, engine.versions) == (["STARTING", "SERVING"], [0, 1])
    assert engine.fakes[0].is_alive()


def test_one_that_was_not_asked_to_prepare_is_named(fleet: Fleet) -> None:
    _, sender = fleet(2)
    version = sender.publish(weights())
    report = sender.apply(version, sender.prefetch(version, [0]), replicas=[0, 1])
    assert report.failed == {1: "it was not asked to prepare the version: prefetch() it there too"}


def test_a_starting_replica_is_left_alone_until_it_is_named(fleet: Fleet) -> None:
    engine, sender = fleet(3, late=[1])
    assert sender.update_weights(weights(4)).failed == {1: "the replica is STARTING"}
    assert (engine.fakes[1].asked, engine.states) == ({}, ["SERVING", "STARTING", "SERVING"])
    swapped = engine.fakes[0].asked["swap_weights"]
    report = sender.apply(sender.version, replicas=[1])
    assert ([entry.replica for entry in report.replicas], report.failed) == ([1], {})
    assert engine.fakes[0].asked["swap_weights"] == swapped
    assert (engine.states, engine.versions, value_in(engine, 1)) == (["SERVING"] * 3, [1, 1, 1], 4.0)
    command, _, states = engine.log[-1]
    assert (command, states) == ("swap_weights", ["SERVING", "STARTING", "SERVING"])  # no request until it holds them


@pytest.mark.parametrize(("fault", "state"), [(soft(0, 1), LOST), (RESTORED, "STARTING")])
def test_a_late_replica_that_fails_is_not_put_into_service(fleet: Fleet, fault: Any, state: str) -> None:
    engine, sender = fleet(2, late=[1])
    sender.update_weights(weights())
    engine.fakes[1].fail["swap_weights"] = fault
    assert sender.apply(1, replicas=[1]).failed == {1: "it went wrong"}  # the other still holds it
    assert engine.states == ["SERVING", state]


def test_the_engine_brings_a_restarted_replica_to_the_newest_weights(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    sender.update_weights(weights(6))
    sender.update_weights(weights(7))
    new = engine.restart(1)
    assert engine.states == ["SERVING", "STARTING"]
    assert engine.weight_sync is not None
    for _ in range(2):  # once is enough
        engine.weight_sync(1)
        assert (engine.states, engine.versions, value_in(engine, 1)) == (["SERVING"] * 2, [2, 2], 7.0)
        assert new.asked == {"claim_weights": 1, "init_weights": 1, "stage_weights": 1, "swap_weights": 1}
    assert [fake.asked["swap_weights"] for fake in engine.fakes] == [2, 1]  # the other was left alone


def test_before_anything_was_sent_a_restarted_replica_serves_its_checkpoint(connect: Connect) -> None:
    engine = FakeFleet(2, late=[1])
    connect(engine).bring(1)
    assert (engine.states, engine.fakes[1].asked) == (["SERVING"] * 2, {})


def test_a_replica_that_cannot_be_brought_says_so(fleet: Fleet) -> None:
    engine, sender = fleet(3)
    sender.update_weights(weights())
    engine.restart(1).fail["stage_weights"] = always(EngineError("out of memory"))
    with pytest.raises(WeightSyncError, match="replica 1 was not brought to version 1: out of memory"):
        sender.bring(1)
    assert engine.states == ["SERVING", "STARTING", "SERVING"]


def test_a_replica_does_not_serve_its_checkpoint_beside_weights_of_an_earlier_sender(connect: Connect) -> None:
    engine = FakeFleet(2)
    first = connect(engine)
    first.update_weights(weights(1))
    first.shutdown()
    second = connect(engine)
    engine.restart(1)
    with pytest.raises(WeightSyncError, match="nothing was applied since the engine got this sender"):
        second.bring(1)
    assert engine.states == ["SERVING", "STARTING"]
    second.update_weights(weights(2))
    second.bring(1)
    assert (engine.states, engine.versions) == (["SERVING"] * 2, [2, 2])


# -- how many must hold it --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("replicas", "broken", "min_serving", "enough"),
    [
        (3, 1, None, True),
        (3, 2, None, False),
        (1, 1, None, False),
        (2, 1, None, True),
        (3, 1, 3, False),
        (3, 2, 1, True),
        (2, 2, 0, True),
    ],
)
def test_min_serving_decides_between_a_report_and_an_error(
    fleet: Fleet, replicas: int, broken: int, min_serving: int | None, enough: bool
) -> None:
    engine, sender = fleet(replicas, min_serving=min_serving)
    for replica in engine.fakes[:broken]:
        replica.fail["swap_weights"] = soft(0, 1)
    if enough:
        report = sender.update_weights(weights())
    else:
        with pytest.raises(WeightSyncError, match=r"fewer than \d replicas hold version 1") as caught:
            sender.update_weights(weights())
        report = caught.value.report
    assert (sorted(report.failed), report.version) == (list(range(broken)), 1)
    assert [entry.error is None for entry in report.replicas] == [False] * broken + [True] * (replicas - broken)


# -- draining ---------------------------------------------------------------------------------------------------------
def test_drain_waits_for_requests_in_flight_and_sends_new_ones_elsewhere(fleet: Fleet) -> None:
    engine, sender = fleet(2, token_seconds=0.02, mode="drain")
    asking = in_thread(lambda: engine.generate([1], {"max_tokens": 10}, actor_index=0, use_tqdm=False))
    until(lambda: engine.replica_table[0].inflight == 1)
    seen: list[int] = []
    engine.fakes[0].fail["swap_weights"] = lambda asked: seen.append(engine.replica_table[0].inflight)
    updating = in_thread(lambda: sender.update_weights(weights()))
    until(lambda: engine.states[0] == "DRAINING")
    (other,) = engine.generate([[2]], {"max_tokens": 1}, use_tqdm=False)
    assert other.metrics.replica == 1
    updating.result(60.0)
    asking.result(60.0)
    assert (seen, engine.states, engine.versions) == ([0], ["SERVING"] * 2, [1, 1])


def test_a_drain_that_takes_too_long_leaves_the_old_version_serving(fleet: Fleet) -> None:
    engine, sender = fleet(2, mode="drain", timeout_seconds=0.1)
    lease = engine.load_balancer.acquire_at(0, None)
    report = sender.update_weights(weights())
    assert report.failed == {0: "requests did not finish in time to drain"}
    assert (engine.states, engine.versions) == (["SERVING"] * 2, [0, 1])
    assert engine.fakes[0].asked["swap_weights"] == 0
    lease.release()
    assert (sender.apply(1, replicas=[0]).failed, engine.versions) == ({}, [1, 1])


# -- a few at a time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choices", "most"),
    [
        ({}, 1),
        ({"rolling": 2}, 2),
        ({"rolling": 0.5}, 2),
        ({"rolling": 4}, 4),
        ({"rolling": 4, "min_serving": 3}, 1),
        ({"rolling": 3, "min_serving": 2}, 2),
    ],
)
def test_no_more_are_away_than_rolling_and_min_serving_allow(fleet: Fleet, choices: dict[str, Any], most: int) -> None:
    engine, sender = fleet(4, **choices)
    together = threading.Barrier(most)
    for replica in engine.fakes:
        replica.fail["swap_weights"] = meet_at(together)
    for number in (1, 2):
        report = sender.update_weights(weights(number))
        assert (report.failed, [entry.replica for entry in report.replicas]) == ({}, [0, 1, 2, 3])
    assert max(states.count("SYNCING") for command, _, states in engine.log if command == "swap_weights") == most
    assert engine.states == ["SERVING"] * 4


def test_replicas_that_are_lost_do_not_keep_the_others_from_their_turn(fleet: Fleet) -> None:
    engine, sender = fleet(3, min_serving=2, rolling=2)
    engine.replica_table.mark_dead(2)
    assert (sender.update_weights(weights()).failed, engine.versions) == ({2: "the replica is DEAD"}, [1, 1, 0])


def test_a_stalled_replica_is_named_and_the_others_continue(fleet: Fleet) -> None:
    engine, sender = fleet(3, timeout_seconds=0.2)
    engine.fakes[0].fail["stage_weights"] = always(Stall())
    engine.fakes[1].fail["swap_weights"] = always(Stall())
    with pytest.raises(WeightSyncError, match="fewer than 2 replicas hold version 1") as caught:
        sender.update_weights(weights())
    failed = caught.value.report.failed
    assert failed.keys() == {0, 1} and all(why.startswith("SyncTimeout: ") for why in failed.values())
    assert (engine.states, engine.versions) == (["SERVING", "QUARANTINED", "SERVING"], [0, 0, 1])


def test_an_error_that_nobody_expected_leaves_no_replica_syncing(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    engine.fakes[0].fail["swap_weights"] = always(KeyError("a bug"))
    with pytest.raises(KeyError, match="a bug"):
        sender.update_weights(weights())
    assert (engine.states[0], engine.states[1]) == ("QUARANTINED", "SERVING")


# -- versions that replicas turn down ---------------------------------------------------------------------------------
def test_a_version_that_every_replica_turns_down_is_not_what_restarted_ones_get(fleet: Fleet) -> None:
    engine, sender = fleet(2)

    def turned_down(number: int) -> None:
        for fake in engine.fakes:
            fake.fail["swap_weights"] = always(SoftError("its canary failed", restored=True))
        with pytest.raises(WeightSyncError, match="its canary failed"):
            sender.update_weights(weights(number))
        for fake in engine.fakes:
            fake.fail.clear()
        engine.restart(1)
        sender.bring(1)

    turned_down(9)  # before any was taken: it keeps its checkpoint
    assert (engine.states, engine.versions, values(engine)) == (["SERVING"] * 2, [0, 0], [None, None])
    taken = sender.update_weights(weights(1)).version
    for number in (2, 3, 4):  # more than the store keeps
        turned_down(number)
        assert (value_in(engine, 1), engine.states, engine.versions) == (1.0, ["SERVING"] * 2, [taken] * 2)
    report = sender.update_weights(weights(5))
    assert (report.failed, values(engine)) == ({}, [5.0, 5.0])


def test_a_version_that_one_replica_took_is_what_the_others_get(fleet: Fleet) -> None:
    engine, sender = fleet(2, min_serving=1)
    engine.fakes[1].fail["swap_weights"] = always(SoftError("it went wrong", restored=True))
    assert sender.update_weights(weights(2)).failed.keys() == {1}
    engine.restart(1)
    sender.bring(1)
    assert value_in(engine, 1) == 2.0


# -- many replicas ----------------------------------------------------------------------------------------------------
def test_an_update_of_many_continues_without_a_few(fleet: Fleet) -> None:
    engine, sender = fleet(64)
    for index in (3, 17):
        engine.fakes[index].die()
    assert sender.update_weights(weights(2)).failed.keys() == {3, 17}
    for index in range(20, 26):
        engine.fakes[index].die()
    with pytest.raises(WeightSyncError, match="fewer than 57 replicas hold version 2"):
        sender.update_weights(weights(3))


def test_replicas_open_their_transport_at_the_same_time(connect: Connect) -> None:
    engine, together = FakeFleet(16), threading.Barrier(16)
    for fake in engine.fakes:
        fake.fail["init_weights"] = meet_at(together)
    connect(engine, timeout_seconds=60.0)
    assert [fake.asked["init_weights"] for fake in engine.fakes] == [1] * 16


# -- wrong versions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "bad",
    [
        {"a": weights()["a"]},
        {**weights(), "c": torch.ones(1)},
        {**weights(), "a": torch.ones(3)},
        {**weights(), "b": torch.ones(3)},
    ],
)
def test_other_tensors_touch_no_replica_and_cost_no_version(fleet: Fleet, bad: Any) -> None:
    engine, sender = fleet(2)
    sender.update_weights(weights(1))
    engine.log.clear()
    with pytest.raises(ManifestMismatch):
        sender.update_weights(bad)
    assert (engine.log, sender.version) == ([], 1)
    assert sender.update_weights(weights(2)).version == 2


def test_only_the_last_version_can_be_applied(connect: Connect) -> None:
    sender = connect(FakeFleet(1))
    with pytest.raises(WeightSyncError, match=r"version 1 is not the one published last \(none\)"):
        sender.apply(1)
    sender.publish(weights())
    sender.publish(weights())
    with pytest.raises(WeightSyncError, match=r"version 1 is not the one published last \(2\)"):
        sender.apply(1)


# -- senders ----------------------------------------------------------------------------------------------------------
def test_a_collector_counts_the_updates_that_took_effect(fleet: Fleet) -> None:
    (engine, sender), collector, forgotten = fleet(2, min_serving=1), UpdateCounter(), UpdateCounter()
    sender.register_collector(collector)
    sender.register_collector(forgotten)
    del forgotten
    sender.update_weights(weights())
    assert collector.count == 1
    with pytest.raises(ManifestMismatch):
        sender.update_weights({"a": weights()["a"]})
    assert collector.count == 1
    engine.fakes[1].fail["stage_weights"] = always(EngineError("no"))
    version = sender.update_weights(weights()).version
    engine.fakes[1].fail.clear()
    sender.apply(version, replicas=[1])  # the same update
    assert collector.count == 2
    for replica in engine.fakes:
        replica.fail["stage_weights"] = always(EngineError("no"))
    with pytest.raises(WeightSyncError):
        sender.update_weights(weights())
    assert collector.count == 2


def test_an_engine_has_one_sender_at_a_time_and_the_last_one_is_it(connect: Connect) -> None:
    engine = FakeFleet(2)
    first, second = connect(engine), connect(engine)
    with pytest.raises(WeightSyncError, match="takes its weights from another sender now"):
        first.update_weights(weights(1))
    second.update_weights(weights(2))
    third = connect(engine)
    third.shutdown()
    with pytest.raises(WeightSyncError, match="takes its weights from another sender now, or from none"):
        second.update_weights(weights(3))  # it does not get the engine back because the newer one left
    second.init_all_workers_group(None, vllm_engine=engine)
    first.shutdown()
    assert engine.weight_sync == second.bring  # it still brings what is restarted
    assert second.update_weights(weights(3)).version == 2
    assert (engine.versions, values(engine)) == ([2, 2], [3.0, 3.0])


# -- Ctrl-C -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", ["stage_weights", "swap_weights"])
@pytest.mark.parametrize("mode", ["hot_swap", "drain", "abort_resume"])
def test_after_a_ctrl_c_in_an_update_the_engine_serves_and_the_next_one_works(
    fleet: Fleet, step: str, mode: str
) -> None:
    engine, sender = fleet(3, mode=mode)
    sender.update_weights(weights(1))
    reached, interrupted = threading.Event(), threading.Event()

    def hold(asked: int) -> None:
        if asked == 1:  # of the second update
            reached.set()
            interrupted.wait(60)

    engine.fakes[1].fail[step] = hold
    with interrupts(interrupted.set) as interrupt, pytest.raises(KeyboardInterrupt):
        interrupt(reached.is_set)
        sender.update_weights(weights(2))
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("weight-")])
    assert (engine.states, values(engine)) == (["SERVING"] * 3, engine.versions)
    assert set(engine.versions) <= {1, 2}
    engine.generate("hi", {"max_tokens": 1}, use_tqdm=False)
    report = sender.update_weights(weights(3))
    assert (report.failed, engine.versions, values(engine)) == ({}, [report.version] * 3, [3.0] * 3)


def test_a_ctrl_c_while_weights_are_written_leaves_no_half_version(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    sender.update_weights(weights(1))

    def cut() -> Iterator[tuple[str, torch.Tensor]]:
        yield "a", weights(2)["a"]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sender.update_weights(cut())
    assert (engine.versions, sender.version) == ([1, 1], 1)
    report = sender.update_weights(weights(3))
    assert (engine.versions, values(engine)) == ([report.version] * 2, [3.0, 3.0])
