"""Health probes: what counts as a sign of life, and who is asked when."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import Any

import pytest

from support.clock import Clock
from support.replicas import ScriptedReplica
from support.services import QUICK
from support.waiting import until
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.replica import ProbeReport
from torchrl_moe.modules.serving.candidates import BreakerState, FaultPolicy, ReplicaState
from torchrl_moe.modules.serving.fleet import Probe, ProbeHistory
from torchrl_moe.modules.serving.replica_table import ReplicaTable

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


class Watch:
    """The probes of a table's replicas, at a clock of the test's."""

    def __init__(self, count: int = 1, policy: FaultPolicy = POLICY) -> None:
        self.clock = Clock()
        self.replicas = [ScriptedReplica(i) for i in range(count)]
        self.table = ReplicaTable(self.replicas, ReplicaState.SERVING)
        self.probes = [Probe(entry, policy, self.clock) for entry in self.table]
        assert not any(self.look())

    def look(self) -> list[str]:
        return [probe.look(self.table) for probe in self.probes]

    def a_round(self, answers: bool = True) -> list[str]:
        """Let one probe of the first come and go."""
        self.clock.now += POLICY.probe
        before = asked(self.replicas[0])
        assert not any(self.look())
        assert asked(self.replicas[0]) == before + 1
        if not answers:  # until the next is due
            assert not any(self.look())
            self.clock.now += POLICY.probe
        return self.look()


def test_each_is_asked_when_it_is_due_and_not_again_before_it_answered() -> None:
    watch = Watch(2)
    watch.clock.now = 0.04
    watch.look()
    assert [asked(replica) for replica in watch.replicas] == [0, 0]
    watch.clock.now = 0.05
    watch.look()
    watch.look()
    assert [asked(replica) for replica in watch.replicas] == [1, 1]
    assert [entry.breaker.state for entry in watch.table] == [BreakerState.CLOSED] * 2


def test_one_that_answers_nothing_gets_no_requests_and_is_stalled_once_patience_ends() -> None:
    watch = Watch(2)
    watch.replicas[0].stall()
    assert watch.a_round(answers=False) == ["", ""]
    assert [entry.index for entry in watch.table.serving()] == [1]
    assert watch.a_round(answers=False) == ["gave no sign of life in 0.1 s", ""]
    watch.replicas[0].die()


def test_one_whose_core_is_stopped_is_stalled_too() -> None:
    watch = Watch()
    watch.replicas[0].probe_report = silent(stopped=True)
    assert watch.a_round() == [""]
    assert watch.a_round() == ["gave no sign of life in 0.1 s"]


@pytest.mark.parametrize("error", [ValueError("no command 'probe'"), None], ids=["older", "dead"])
def test_neither_an_older_engine_nor_a_dead_one_is_stalled(error: Exception | None) -> None:
    watch = Watch()
    if error is None:
        watch.replicas[0].die()
    else:
        watch.replicas[0].script["probe"] = error
    for _ in range(3):
        assert watch.a_round() == [""]
    assert not watch.table[0].breaker.blocks


def test_a_doubt_has_one_asked_at_once() -> None:
    watch = Watch(2)
    watch.table.doubt(1)
    watch.look()
    assert [asked(replica) for replica in watch.replicas] == [0, 1]
    assert watch.table.doubts == set()


def test_doubts_do_not_shorten_the_patience_with_one_that_computes() -> None:
    watch = Watch()
    watch.replicas[0].probe_report = silent(cpu_seconds=1e6)
    watch.a_round()
    watch.table.doubt(0)
    watch.look()
    assert asked(watch.replicas[0]) == 1
    watch.a_round()
    assert asked(watch.replicas[0]) == 2


def test_without_probes_nobody_is_asked_not_even_in_doubt() -> None:
    watch = Watch(policy=replace(POLICY, probe=math.inf))
    watch.table.doubt(0)
    assert watch.look() == [""]
    assert asked(watch.replicas[0]) == 0


def test_an_engine_error_is_no_answer() -> None:
    watch = Watch()
    watch.replicas[0].script["probe"] = EngineError("not in time")
    watch.a_round()
    assert watch.table[0].last_error == "gave no sign of life to a health probe"


# -- while an update runs ---------------------------------------------------------------------------------------------


def test_one_whose_weights_are_replaced_is_left_alone_and_then_the_count_begins_again(fleet: Any) -> None:
    service = fleet(1, lambda i, n: ScriptedReplica(i), replace(QUICK, probe=0.2, patience=0.4))
    replica, table = service.made[0][0], service.replica_table
    replica.stall()
    until(lambda: table[0].last_error == "gave no sign of life to a health probe")
    table.set_state(0, ReplicaState.SYNCING)
    before = len(replica.asked("probe"))
    time.sleep(0.5)
    assert len(replica.asked("probe")) == before
    table.set_state(0, ReplicaState.SERVING)
    until(lambda: service.restarts == [1])
    assert len(replica.asked("probe")) == before + 2


def test_a_look_has_nothing_to_do_until_a_probe_is_due_or_answered() -> None:
    watch = Watch()
    probe, replica = watch.probes[0], watch.replicas[0]
    assert probe.is_idle
    watch.clock.now += POLICY.probe
    assert not probe.is_idle
    watch.look()  # asked, and answered
    assert not probe.is_idle
    watch.look()
    assert probe.is_idle
    replica.stall()
    watch.clock.now += POLICY.probe
    watch.look()  # asked
    assert probe.is_idle
    watch.clock.now += POLICY.probe
    assert not probe.is_idle
