"""Health probes: whether a replica answers, and if not, whether it is stalled or only slow."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from torchrl_moe._errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.reports import ProbeReport
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.replica_table import ReplicaTable, TableEntry
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["ProbeHistory", "Probes", "Stalled"]

LOG = logging.getLogger(__name__)
PROBED = frozenset({ReplicaState.SERVING, ReplicaState.DRAINING})  # others are busy with something else
BUSY_SHARE = 0.05  # of one core; above it a process counts as computing


class ProbeHistory:
    """The history of one replica's probes. Probes are counted, not seconds, since a suspended driver sends none.

    Args:
        policy: how many are too many.

    >>> history = ProbeHistory(FaultPolicy(probe=10, patience=30))
    >>> [history.note(None) for _ in range(3)]
    ['', '', 'gave no sign of life in 30 s']
    """

    def __init__(self, policy: FaultPolicy) -> None:
        self._policy = policy
        self._silent = 0
        self._slow = 0
        self._cpu_seconds = 0.0

    @property
    def silent(self) -> bool:
        """Whether the last probe got no sign of life."""
        return self._silent > 0

    @property
    def doubtful(self) -> bool:
        """Whether the engine core did not answer the last probe."""
        return self._silent + self._slow > 0

    def note(self, probe_report: ProbeReport | None) -> str:
        """Record the answer to a probe, ``None`` for none; return why the replica counts as stalled, or ``""``."""
        if probe_report is not None and probe_report.core_answered:
            self._silent = self._slow = 0
            self._cpu_seconds = probe_report.cpu_seconds
            return ""
        if probe_report is not None and not probe_report.stopped and self._computed(probe_report):
            self._silent = 0
            self._slow += 1
        else:
            self._silent += 1
        policy = self._policy
        if self._silent * policy.probe >= policy.patience:
            return f"gave no sign of life in {self._silent * policy.probe:g} s"
        if self._slow * policy.probe >= policy.slow_patience:
            return f"computed for {self._slow * policy.probe:g} s without an answer"
        return ""

    def _computed(self, probe_report: ProbeReport) -> bool:
        before, self._cpu_seconds = self._cpu_seconds, probe_report.cpu_seconds
        return probe_report.cpu_seconds - before >= BUSY_SHARE * self._policy.probe


@dataclass(frozen=True, slots=True)
class Stalled:
    """A replica that must be ended, and why."""

    index: int
    replica: Any
    reason: str


@dataclass(slots=True)
class _Probe:
    replica: Any
    pulse: ProbeHistory
    due: float
    answer: Future[ProbeReport] | None = None  # None: no probe is under way


class Probes:
    """Probes the replicas of a replica table. For one thread; nothing waits.

    Args:
        table: where silent replicas are marked, so that they get no new requests.
        policy: intervals and limits.
        clock: seconds.
    """

    def __init__(self, table: ReplicaTable, policy: FaultPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._table = table
        self._policy = policy
        self._clock = clock
        self._probes: dict[int, _Probe] = {}

    def look(self) -> Iterator[Stalled]:
        """Collect answers, send the probes that are due, and return the stalled replicas."""
        if self._policy.probe == math.inf:
            return
        with self._table.lock:
            doubts = set(self._table.doubts)
            self._table.doubts.clear()
            entries = [(entry, entry.replica) for entry in self._table if entry.state in PROBED]
        known, self._probes = self._probes, {}
        for entry, replica in entries:
            probe = known.get(entry.index)
            if probe is None or probe.replica is not replica:
                probe = _Probe(replica, ProbeHistory(self._policy), self._clock() + self._policy.probe)
            self._probes[entry.index] = probe
            if probe.answer is not None:
                is_late = self._clock() >= probe.due
                if (probe.answer.done() or is_late) and (reason := self._judge(entry, probe, probe.answer)):
                    yield Stalled(entry.index, replica, reason)
            else:
                # a doubted replica is not probed more often, since its probes count as seconds
                hurry = entry.index in doubts and not probe.pulse.doubtful
                if hurry or self._clock() >= probe.due:
                    self._ask(probe)

    def _judge(self, entry: TableEntry, probe: _Probe, answer: Future[ProbeReport]) -> str:
        probe.answer = None
        reason = probe.pulse.note(_read(answer))
        if probe.pulse.silent:
            self._table.fail(entry.index, "gave no sign of life to a health probe", trip=True)
        return reason

    def _ask(self, probe: _Probe) -> None:
        """Send a probe; the engine core gets half of the time, so that its owner's answer still arrives."""
        probe.due = self._clock() + self._policy.probe
        try:
            probe.answer = probe.replica.probe(self._policy.probe / 2)
        except Exception as error:  # logged; it counts as silent, and the others are still probed
            LOG.exception("a replica could not be probed: %r", error)
            probe.answer = Future()
            probe.answer.set_exception(EngineError(str(error)))


def _read(answer: Future[ProbeReport]) -> ProbeReport | None:
    """Return a replica's report, ``None`` if there is none.

    A dead one, or one without this command, passes: its death is reported elsewhere.
    """
    if not answer.done():
        return None
    error = answer.exception()
    if error is None:
        return answer.result()
    is_silent = isinstance(error, EngineError) and not isinstance(error, ReplicaDiedError)
    return None if is_silent else ProbeReport(core_answered=True)
