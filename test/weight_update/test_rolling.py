"""Replicas change over a few at a time, and a failure of one is nobody else's."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tqdm.auto import tqdm

from support.services import listening
from support.waiting import in_thread, until
from support.weights import Connect, always, soft, value_in, weights
from torchrl_moe.errors import EngineError, ReplicaDiedError, WeightSyncError
from torchrl_moe.modules.serving.candidates import Recovery, ReplicaState
from torchrl_moe.testing.fake_weights import FakeFleet, SoftError, Stall
from torchrl_moe.weight_update import rolling
from torchrl_moe.weight_update.sender import VLLMWeightSender

Fleet = Callable[..., tuple[FakeFleet, VLLMWeightSender]]


# -- failures of the swap ---------------------------------------------------------------------------------------------
def test_a_swap_that_fails_once_is_tried_again(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    engine.fakes[0].fail["swap_weights"] = soft(0)
    report = sender.update_weights(weights(3))
    assert (report.failed, [entry.attempts for entry in report.replicas]) == ({}, [2, 1])
    assert (engine.states, engine.versions) == (["SERVING"] * 2, [1, 1])


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
    assert entry.state not in (ReplicaState.SERVING, ReplicaState.SYNCING)
    asked = broken.asked["swap_weights"]
    assert sender.update_weights(weights(3)).failed[1].startswith("the replica is ")
    assert broken.asked["swap_weights"] == asked  # never again


def test_a_replica_that_does_not_answer_is_not_asked_again(connect: Connect) -> None:
    engine = FakeFleet(2)
    engine.fakes[1].fail["swap_weights"] = always(EngineError("replica 1 did not answer 'swap_weights' within 5 s"))
    report = connect(engine).update_weights(weights())
    assert report.failed == {1: "replica 1 did not answer 'swap_weights' within 5 s"}
    assert (report.replicas[1].attempts, engine.states) == (1, ["SERVING", "QUARANTINED"])
    assert not engine.fakes[1].is_alive()


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


# -- another replica in the place of one that died --------------------------------------------------------------------
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
    ("ending", "words"),
    [
        (ReplicaDiedError("replica 0 died"), "ReplicaDiedError: replica 0 died"),
        (EngineError("replica 0 did not answer"), "replica 0 did not answer"),
        (SoftError("no", restored=True), "no"),
        (None, "the replica died after its swap"),
    ],
)
def test_what_becomes_of_one_that_died_does_not_touch_the_one_in_its_place(
    fleet: Fleet, ending: Exception | None, words: str
) -> None:
    engine, sender = fleet(2)

    def restart(_: int) -> Exception | None:
        engine.restart(0)
        engine.replica_table[0].version = 0
        return ending

    engine.fakes[0].fail["swap_weights"] = restart
    assert sender.update_weights(weights()).failed == {0: words}
    assert (engine.states, engine.versions) == (["STARTING", "SERVING"], [0, 1])
    assert engine.fakes[0].is_alive()


@pytest.mark.parametrize(
    ("happens", "state", "words"),
    [
        (lambda engine: engine.restart(0), "STARTING", None),
        (lambda engine: engine.replica_table.mark_dead(0), "DEAD", None),
        (lambda engine: engine.replica_table.set_state(0, ReplicaState.SYNCING), "SYNCING", "the replica is SYNCING"),
    ],
    ids=["restarted", "dies", "another sender has it"],
)
def test_one_with_which_something_happens_while_it_drains_is_left_to_it(
    fleet: Fleet, happens: Callable[[FakeFleet], object], state: str, words: str | None
) -> None:
    engine, sender = fleet(2, mode="drain")
    lease = engine.load_balancer.acquire_at(0, None)
    updating = in_thread(lambda: sender.update_weights(weights()))
    until(lambda: engine.replica_table[0].state is ReplicaState.DRAINING)
    happens(engine)
    if words:
        lease.release()
    assert updating.result(60.0).failed.keys() == {0}
    assert words in (None, updating.result().failed[0])
    assert (engine.states, engine.versions) == ([state, "SERVING"], [0, 1])
    lease.release()


def test_one_that_waits_for_an_update_gets_it(connect: Connect) -> None:
    """The only one, restarted after its sender was shut down: nobody serves, and nobody else will bring it."""
    engine = FakeFleet(1)
    first = connect(engine)
    first.update_weights(weights(1))
    first.shutdown()
    engine.restart(0)
    engine.replica_table[0].version = 0
    engine.replica_table.set_recovery(0, Recovery.UPDATE)
    report = connect(engine).update_weights(weights(2))
    assert (report.version, report.failed) == (2, {})  # and not 1 again
    assert (engine.states, engine.versions, value_in(engine, 0)) == (["SERVING"], [2], 2.0)
    assert engine.replica_table[0].recovery is Recovery.SUPERVISOR


def test_one_that_was_not_asked_to_prepare_is_named(fleet: Fleet) -> None:
    _, sender = fleet(2)
    version = sender.publish(weights())
    report = sender.apply(version, sender.prefetch(version, [0]), replicas=[0, 1])
    assert report.failed == {1: "it was not asked to prepare the version: prefetch() it there too"}


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
    until(lambda: engine.replica_table[0].state is ReplicaState.DRAINING)
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
        replica.fail["swap_weights"] = lambda asked: [None, together.wait(60.0)][0]
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
    assert caught.value.report.failed == {
        0: "SyncTimeout: replica 0 did not answer 'stage_weights' within 0.2 s",
        1: "SyncTimeout: replica 1 did not answer 'swap_weights' within 0.2 s",
    }
    assert (engine.states, engine.versions) == (["SERVING", "QUARANTINED", "SERVING"], [0, 0, 1])


def test_an_error_that_nobody_expected_leaves_no_replica_syncing(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    engine.fakes[0].fail["swap_weights"] = always(KeyError("a bug"))
    with pytest.raises(KeyError, match="a bug"):
        sender.update_weights(weights())
    assert (engine.states[0], engine.states[1]) == ("QUARANTINED", "SERVING")


@pytest.mark.parametrize("late", [False, True])
def test_a_swap_whose_old_weights_survive_changes_nothing(fleet: Fleet, late: bool) -> None:
    engine, sender = fleet(2, late=[1] if late else [], min_serving=0)
    engine.fakes[1].fail["swap_weights"] = always(SoftError("the canary sings another song", restored=True))
    version = sender.publish(weights())
    report = sender.apply(version, replicas=[1])
    assert (report.failed, report.replicas[0].attempts) == ({1: "the canary sings another song"}, 1)
    assert (engine.states, engine.versions) == (["SERVING", "STARTING" if late else "SERVING"], [0, 0])


def test_the_mode_says_how_requests_are_paused_and_how_to_stage_is_passed_on(fleet: Fleet) -> None:
    engine, sender = fleet(1, mode="abort_resume", prefetch=3, verify="off")
    sender.update_weights(weights())
    assert engine.fakes[0].told("swap_weights")["pause"] == "abort"
    staging = {"version": 1, "verify": "off", "threads": 3, "manifest": None}
    assert engine.fakes[0].told("stage_weights") == staging


# -- versions that replicas turn down ---------------------------------------------------------------------------------
@pytest.mark.parametrize("delta", [False, True])
def test_a_version_that_every_replica_turns_down_is_not_what_restarted_ones_get(
    fleet: Fleet, tmp_path: Path, delta: bool
) -> None:
    engine, sender = fleet(2, delta=delta, folder=tmp_path / "store")
    sender.update_weights(weights(1))
    for number in (2, 3, 4):  # more than the store keeps
        for fake in engine.fakes:
            fake.fail["swap_weights"] = always(SoftError("its canary failed", restored=True))
        with pytest.raises(WeightSyncError, match="its canary failed"):
            sender.update_weights(weights(number))
        engine.restart(1)
        sender.bring(1)
        assert (value_in(engine, 1), engine.states, engine.versions) == (1.0, ["SERVING"] * 2, [1, 1])
    engine.fakes[0].fail.clear()
    report = sender.update_weights(weights(5))
    assert (report.failed, [value_in(engine, index) for index in range(2)]) == ({}, [5.0, 5.0])


def test_without_a_version_that_was_taken_a_restarted_replica_keeps_its_checkpoint(fleet: Fleet) -> None:
    engine, sender = fleet(1)
    engine.fakes[0].fail["swap_weights"] = always(SoftError("its canary failed", restored=True))
    with pytest.raises(WeightSyncError):
        sender.update_weights(weights(2))
    engine.restart(0)
    sender.bring(0)
    assert (engine.states, engine.versions, value_in(engine, 0)) == (["SERVING"], [0], None)


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
        fake.fail["init_weights"] = lambda asked: [None, together.wait(60.0)][0]
    connect(engine, timeout_seconds=60.0)
    assert [fake.asked["init_weights"] for fake in engine.fakes] == [1] * 16


@pytest.mark.parametrize("progress", [True, False])
def test_a_long_update_shows_bytes_and_replicas_unless_told_not_to(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, progress: bool
) -> None:
    """40 bytes in two replicas; in a terminal, once two seconds have passed."""
    _, sender = fleet(2)
    shown: list[dict[str, Any]] = []
    monkeypatch.setattr(rolling, "tqdm", lambda **options: [tqdm(**options), shown.append(options)][0])
    sender.update_weights(weights(1), progress=progress)
    assert [(bar["total"], bar["unit"], bar["desc"]) for bar in shown] == [(2, "replica", "weights v1, 0 MB")]
    assert [(bar["delay"], bar["disable"]) for bar in shown] == [(2.0, None if progress else True)]
