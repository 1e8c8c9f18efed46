"""Health probes: what counts as a sign of life, and who is asked when."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from support.clock import Clock
from support.replicas import ScriptedReplica
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import ProbeReport
from torchrl_moe.modules.serving.candidates import BreakerState, FaultPolicy, ReplicaState
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.supervisor import ProbeHistory, Probes, Stalled

WELL = ProbeReport(core_answered=True)


def silent(cpu_seconds: float = 0.0, stopped: bool = False) -> ProbeReport:
    return ProbeReport(core_answered=False, cpu_seconds=cpu_seconds, stopped=stopped)


def notes(*probe_report: ProbeReport | None, **policy: float) -> list[str]:
    pulse = ProbeHistory(FaultPolicy(**{"probe": 10.0, "patience": 30.0, "slow_patience": 50.0, **policy}))
    return [pulse.note(one) for one in probe_report]


SILENT = "gave no sign of life in 30 s"


@pytest.mark.parametrize("one", [None, silent(), silent(stopped=True)], ids=["owner", "core", "stopped"])
def test_patience_ends_after_so_many_probes_without_a_sign_of_life(one: ProbeReport | None) -> None:
    assert notes(one, one, one) == ["", "", SILENT]
    assert notes(one, one, WELL, one, one, one) == ["", "", "", "", "", SILENT]
    assert notes(one, patience=10.0) == ["gave no sign of life in 10 s"]


def test_an_engine_that_computes_is_given_more_time() -> None:
    steps = [silent(cpu_seconds=0.5 * i) for i in range(1, 7)]  # a twentieth of one core
    assert notes(*steps) == [
        "",
        "",
        "",
        "",
        "computed for 50 s without an answer",
        "computed for 60 s without an answer",
    ]
    assert notes(*steps[:4], WELL, *steps[:4]) == [""] * 9


def test_an_engine_that_hardly_computes_is_not() -> None:
    steps = [silent(cpu_seconds=0.4 * i) for i in range(1, 4)]
    assert notes(*steps) == ["", "", SILENT]


def test_what_others_compute_is_no_life_of_a_stopped_process() -> None:
    steps = [silent(cpu_seconds=10.0 * i, stopped=True) for i in range(1, 4)]
    assert notes(*steps) == ["", "", SILENT]


# -- probing ----------------------------------------------------------------------------------------------------------


POLICY = FaultPolicy(probe=0.05, patience=0.1)


def asked(replica: ScriptedReplica) -> int:
    """How often, each time with what a probe brings."""
    probes = replica.asked("probe")
    assert probes == [0.025] * len(probes)
    return len(probes)


def watched(count: int = 2) -> tuple[Probes, ReplicaTable, Clock]:
    table, clock = ReplicaTable([ScriptedReplica(i) for i in range(count)], ReplicaState.SERVING), Clock()
    health = Probes(table, POLICY, clock)
    assert list(health.look()) == []
    return health, table, clock


def a_round(health: Probes, clock: Clock, replica: ScriptedReplica) -> list[Stalled]:
    """Let one probe come and go."""
    clock.now += POLICY.probe
    before = asked(replica)
    assert list(health.look()) == []
    assert asked(replica) == before + 1
    found = list(health.look())
    if any(probe.answer is not None for probe in health._probes.values()):  # no answer until the next is due
        clock.now += POLICY.probe
        found = list(health.look())
    return found


def test_each_is_asked_when_it_is_due_and_not_again_before_it_answered() -> None:
    health, table, clock = watched()
    replicas = [entry.replica for entry in table]
    clock.now = 0.04
    list(health.look())
    assert [asked(replica) for replica in replicas] == [0, 0]
    clock.now = 0.05
    list(health.look())
    list(health.look())
    assert [asked(replica) for replica in replicas] == [1, 1]
    assert [entry.breaker.state for entry in table] == [BreakerState.CLOSED] * 2


def test_one_that_answers_nothing_gets_no_requests_and_is_named_once_patience_ends() -> None:
    health, table, clock = watched()
    first = table[0].replica
    first.stall()
    assert a_round(health, clock, first) == []
    assert [entry.index for entry in table.serving()] == [1]
    (stalled,) = a_round(health, clock, first)
    assert stalled == Stalled(0, first, "gave no sign of life in 0.1 s")
    first.die()


def test_one_whose_core_is_stopped_is_named_too() -> None:
    health, table, clock = watched(1)
    replica = table[0].replica
    replica.probe_report = silent(stopped=True)
    assert a_round(health, clock, replica) == []
    assert [stalled.index for stalled in a_round(health, clock, replica)] == [0]


@pytest.mark.parametrize("error", [ValueError("no command 'probe'"), None], ids=["older", "dead"])
def test_neither_an_older_engine_nor_a_dead_one_is_stalled(error: Exception | None) -> None:
    health, table, clock = watched(1)
    replica = table[0].replica
    if error is None:
        replica.die()
    else:
        replica.script["probe"] = error
    for _ in range(3):
        assert a_round(health, clock, replica) == []
    assert not table[0].breaker.blocks


@pytest.mark.parametrize("state", [ReplicaState.SYNCING, ReplicaState.DEAD])
def test_one_that_is_busy_with_something_else_is_left_alone(state: ReplicaState) -> None:
    health, table, clock = watched(1)
    table[0].replica.stall()
    table.set_state(0, state)
    clock.now = 1.0
    list(health.look())
    assert asked(table[0].replica) == 0
    table[0].replica.die()


def test_a_sync_in_between_begins_the_count_again() -> None:
    health, table, clock = watched(1)
    replica = table[0].replica
    replica.stall()
    assert a_round(health, clock, replica) == []
    table.set_state(0, ReplicaState.SYNCING)
    list(health.look())
    table.set_state(0, ReplicaState.SERVING)
    list(health.look())
    assert a_round(health, clock, replica) == []
    replica.die()


def test_a_doubt_has_one_asked_at_once() -> None:
    health, table, _ = watched()
    table.doubt(1)
    list(health.look())
    assert [asked(entry.replica) for entry in table] == [0, 1]
    assert table.doubts == set()


def test_doubts_do_not_shorten_the_patience_with_one_that_computes() -> None:
    health, table, clock = watched(1)
    replica = table[0].replica
    replica.probe_report = silent(cpu_seconds=1e6)
    a_round(health, clock, replica)
    table.doubt(0)
    list(health.look())
    assert asked(replica) == 1
    a_round(health, clock, replica)
    assert asked(replica) == 2


def test_without_probes_nobody_is_asked_not_even_in_doubt() -> None:
    table = ReplicaTable([ScriptedReplica(0)], ReplicaState.SERVING)
    health = Probes(table, replace(POLICY, probe=math.inf), Clock())
    table.doubt(0)
    assert list(health.look()) == []
    assert asked(table[0].replica) == 0


def test_an_engine_error_is_no_answer() -> None:
    health, table, clock = watched(1)
    table[0].replica.script["probe"] = EngineError("not in time")
    a_round(health, clock, table[0].replica)
    assert table[0].last_error == "gave no sign of life to a health probe"
