"""The supervisor: a task of the service's loop that notices deaths and stalls, and brings replicas back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import threading
import time
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass

from torchrl_moe.errors import EngineError, ReplicaDiedError, TorchRLMoEError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import ProbeReport, Replica
from torchrl_moe.modules.serving.candidates import GONE, FaultPolicy, Recovery, ReplicaState
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.replica_table import ReplicaTable, TableEntry

__all__ = ["WORDS_SECONDS", "Bring", "ProbeHistory", "Probes", "Stalled", "Supervisor"]


# Health probes: whether a replica answers, and if not, whether it is stalled or only slow.


LOG = logging.getLogger(__name__)
PROBED = frozenset({ReplicaState.SERVING, ReplicaState.DRAINING})  # others are busy with something else
BUSY_SHARE = 0.05  # of one core; above it a process counts as computing


class ProbeHistory:
    """The history of one replica's probes. Probes are counted, not seconds, since a suspended driver sends none.

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
    replica: Replica
    reason: str


@dataclass(slots=True)
class _Probe:
    replica: Replica
    pulse: ProbeHistory
    due: float
    answer: Future[ProbeReport] | None = None  # None: no probe is under way


class Probes:
    """Probes the replicas of a replica table. For one thread; nothing waits."""

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
            probe.answer = probe.replica.ask(Engine.probe, self._policy.probe / 2)
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


TICK_SECONDS = 0.5
GATHER_SECONDS = 0.02  # so that many changes are handled in one pass
WORDS_SECONDS = 1.0  # for a replica that died to report why
JOIN_SECONDS = 5.0
PEER_SECONDS = 5.0

Bring = Callable[[int], None]
Serve = Callable[[], bool]


class Supervisor:
    """Watches a replica table until :meth:`stop`, or until the supervisor is garbage collected.

    The process of a replica that died, was quarantined or is stalled is ended, and a new replica is started in its
    place, in its own thread, since an engine takes a minute to start. It serves once it holds the current weights.
    """

    def __init__(
        self,
        table: ReplicaTable,
        policy: FaultPolicy,
        loop: EventLoop,
        make_replica: Callable[[int], Replica] | None = None,
        get_bring: Callable[[], Bring | None] = lambda: None,
        as_the_others: Callable[[Replica, Serve], bool] = lambda _, serve: serve(),
    ) -> None:
        self._table = table
        self._policy = policy
        self._make_replica = make_replica if policy.restart else None
        self._get_bring = get_bring
        self._as_the_others = as_the_others
        self._health = Probes(table, policy)
        self._restarted_at: defaultdict[int, deque[float]] = defaultdict(deque)  # times of restarts
        self._lacks: dict[int, int] = {}  # the latest version when a replica started to wait for the next
        self._renewing: dict[int, threading.Thread] = {}
        self._lock = threading.Lock()  # under which threads are started: none once it has stopped
        self._starting = threading.Lock()  # under which replicas are
        self._stopped = threading.Event()
        self._loop = loop
        self._wake_event = asyncio.Event()
        # replicas that died without giving a reason so far -> since when
        self._silent: weakref.WeakKeyDictionary[Replica, float] = weakref.WeakKeyDictionary()
        self._watches = False
        self.error: str | None = None
        """Why its last check failed; ``None`` if it succeeded."""

    def start(self) -> None:
        """Start watching."""
        self._watches = True
        for entry in self._table:
            self._supervise(entry)
        self._table.add_listener(self._wake, doubts=True)
        # made after the replicas, so at interpreter exit it runs before theirs: what then dies is not restarted
        weakref.finalize(self, self._stopped.set)
        self._loop.spawn(_watch(weakref.ref(self), self._wake_event, self._stopped))

    def _wake(self) -> None:
        """Schedule a check. Called from any thread."""
        self._loop.call(self._wake_event.set)

    def _supervise(self, entry: TableEntry) -> None:
        """From now on restart a replica when it dies, if restarts are enabled."""
        if self._watches and self._make_replica is not None:
            self._set_recovery(entry, Recovery.SUPERVISOR)

    def begin(self, entry: TableEntry) -> None:
        """Start a replica that was added."""
        with self._starting:
            if self._stopped.is_set():
                raise EngineError("the service was shut down")
            entry.replica.start()

    def release(self, entry: TableEntry) -> None:
        """Stop restarting a replica that is being removed, and mark it dead."""
        with self._starting:
            self._table.set_leaving(entry.index, True)
        self._table.set_recovery(entry.index, Recovery.NOBODY)
        self._table.mark_dead(entry.index, "it was removed")

    def admit(self, entry: TableEntry, deadline: float) -> None:
        """Wait until an added replica serves like the others, or waits for the next update."""
        replica = entry.replica
        replica.wait_ready(max(deadline - time.monotonic(), 0.0))
        self._join(entry, replica, deadline)
        if entry.recovery is not Recovery.UPDATE:
            self._supervise(entry)

    def stop(self) -> None:
        """Stop starting replicas; those that were started are in the replica table."""
        with self._starting, self._lock:
            self._stopped.set()
        self._wake()
        self._table.remove_listener(self._wake)
        for entry in self._table:
            self._table.set_recovery(entry.index, Recovery.NOBODY)

    def join(self) -> None:
        """Wait until its threads have ended, once it was stopped and the replicas were shut down."""
        for thread in list(self._renewing.values()):
            thread.join(JOIN_SECONDS)

    # -- in the loop ------------------------------------------------------------------------------------------------

    def look_and_go_on(self) -> None:
        """Check all replicas once; an error is logged and kept, and the next check tries again."""
        try:
            self.look()
        except Exception as error:
            if self.error is None:
                LOG.exception("the supervisor could not check the replicas; it tries again")
            self.error = f"{type(error).__name__}: {error}"
        else:
            self.error = None

    def look(self) -> None:
        """Check all replicas once."""
        failed = [error for entry in self._table if (error := self._note_death(entry)) is not None]
        for stalled in self._health.look():
            words = stalled.replica.log_tail()
            reason = f"replica {stalled.index} {stalled.reason} and was ended" + (words and f". Its log says:\n{words}")
            self._table.mark_dead(stalled.index, reason, stalled.replica)
            self._in_background(self._renew, self._table[stalled.index])
        self._table.cool()
        for entry in self._table:
            if entry.state in GONE and entry.recovery is Recovery.SUPERVISOR and not entry.leaving:
                if self._make_replica is None:  # the driver that made the replica ends and restarts it
                    self._table.set_recovery(entry.index, Recovery.NOBODY)
                elif entry.replica.was_ended:
                    self._give_up(entry, f"replica {entry.index} was shut down by another driver")
                else:
                    self._in_background(self._renew, entry)
            elif self._was_updated(entry):
                self._in_background(self._catch_up, entry)
        if failed:
            raise failed[0]

    def _note_death(self, entry: TableEntry) -> EngineError | None:
        """Note whether a replica has died; return an error if it cannot be asked."""
        replica, state = entry.replica, entry.state
        started = state is not ReplicaState.STARTING or entry.recovery is Recovery.UPDATE
        try:
            self._read_version(entry)
            if started and state is not ReplicaState.DEAD and not replica.is_alive() and self._has_reported(replica):
                self._table.mark_dead(entry.index, replica.death, replica)
        except Exception as error:  # noqa: BLE001  returned, and raised once all were checked
            failure = EngineError(f"replica {entry.index} could not be asked whether it is alive: {error!r}")
            failure.__cause__ = error
            return failure
        return None

    def _has_reported(self, replica: Replica) -> bool:
        """Whether a dead replica has reported why, or had the time to."""
        since = self._silent.setdefault(replica, time.monotonic())
        if replica.death is None and time.monotonic() - since < WORDS_SECONDS:
            self._wake_event.set()
            return False
        del self._silent[replica]
        return True

    def _was_updated(self, entry: TableEntry) -> bool:
        """Whether the update that a replica waited for has happened, with or without this replica."""
        lacks = self._lacks.get(entry.index)
        if lacks is None or entry.state is not ReplicaState.STARTING:
            return lacks is not None
        stats = entry.replica.last_stats
        holds = 0 if stats is None else stats.weights_version
        newest = self._table.latest_version
        return entry.recovery is Recovery.UPDATE and (lacks < newest or 0 < newest <= holds)

    def _read_version(self, entry: TableEntry) -> None:
        """Note the version that a replica reports: if this driver loads none, another one may have."""
        replica = entry.replica
        if (stats := replica.last_stats) is None:
            return
        self._table.note_version(stats.weights_version)
        with self._table.lock:
            unheard = entry.replica is replica and entry.version < stats.weights_version
            if unheard and entry.state is ReplicaState.SERVING and self._get_bring() is None:
                self._table.set_version(entry.index, stats.weights_version)

    def _in_background(self, task: Callable[[TableEntry], None], entry: TableEntry) -> None:
        with self._lock:
            thread = self._renewing.get(entry.index)
            if self._stopped.is_set() or (thread is not None and thread.is_alive()):
                return
            name = f"torchrl_moe-restart-{entry.index}"
            self._renewing[entry.index] = thread = threading.Thread(target=task, args=(entry,), name=name, daemon=True)
            thread.start()  # under the lock: join() waits for the threads that it finds

    # -- in a thread for each restart -------------------------------------------------------------------------------

    def _renew(self, entry: TableEntry) -> None:
        """End what is left of a replica, and start new ones in its place until one serves."""
        if entry.state not in GONE:  # an earlier thread has just brought it back
            return
        try:
            entry.replica.shutdown()  # its memory is free before another one asks for it
            while entry.recovery is Recovery.SUPERVISOR and not entry.leaving and self._wait_for_turn(entry):
                if self._restart(entry):
                    return
        except BaseException as error:
            self._give_up(entry, f"restarting failed with {error!r}")
            raise

    def _wait_for_turn(self, entry: TableEntry) -> bool:
        """Wait as the policy says; return False if it must not be restarted again."""
        begun, policy = self._restarted_at[entry.index], self._policy
        while begun and time.monotonic() - begun[0] > policy.restart_window:
            begun.popleft()
        if len(begun) < policy.max_restarts:
            return not self._stopped.wait(policy.delay(len(begun)))
        self._give_up(
            entry,
            f"restarted {len(begun)} times within {policy.restart_window:g} s, and given up. The last error: "
            f"{entry.last_error}",
        )
        return False

    def _give_up(self, entry: TableEntry, reason: str) -> None:
        self._table.mark_dead(entry.index)
        entry.last_error = reason
        LOG.error("replica %d is not restarted any more: %s", entry.index, reason.partition("\n")[0])
        self._table.set_recovery(entry.index, Recovery.NOBODY)

    def _restart(self, entry: TableEntry) -> bool:
        """Start a new replica, and wait until it serves, or waits for the next update; return False if it failed."""
        assert self._make_replica is not None
        if self._stopped.is_set():
            return True
        replica = self._make_replica(entry.index)
        try:
            with self._starting:
                if self._stopped.is_set() or not self._table.replace(entry.index, replica):
                    replica.shutdown()  # it was not started, and nothing else would end it
                    return True
                self._restarted_at[entry.index].append(time.monotonic())
                replica.start()
            replica.wait_ready(self._policy.start)
            self._join(entry, replica)
        except (EngineError, OSError) as error:
            self._table.mark_dead(entry.index, str(error), replica)
            if entry.leaving or not self._stopped.is_set():
                replica.shutdown()  # else the service ends it, or leaves it to its other drivers
            return False
        return True

    def _join(self, entry: TableEntry, replica: Replica, deadline: float = math.inf) -> None:
        """Let a started replica serve, with the current weights, and paused if the service is."""
        for failures in itertools.count():
            bring = self._get_bring()
            if bring is not None and entry.state is ReplicaState.STARTING:
                try:
                    bring(entry.index)
                except (TorchRLMoEError, ValueError, RuntimeError, OSError) as error:
                    entry.last_error = f"its weights could not be loaded: {error}"
            if entry.state in GONE:  # the process may still be alive: do not wait for it
                break
            if entry.state is not ReplicaState.STARTING:
                self._as_the_others(replica, lambda: True)
                return
            nothing_to_bring = bring is None or not self._table.latest_version
            if nothing_to_bring and self._begin(entry, replica):
                return
            if self._stopped.wait(self._policy.delay(failures)) or not replica.is_alive():
                break
            if time.monotonic() > deadline:
                raise EngineError(f"replica {entry.index} was not brought into service in time: {entry.last_error}")
        raise ReplicaDiedError(entry.last_error or f"replica {entry.index} died before it could serve")

    def _begin(self, entry: TableEntry, replica: Replica) -> bool:
        """Let a replica serve with its weights, or wait for an update if others have newer ones."""
        newest = self._newest_version(entry)
        holds = _version_of(replica) if newest else 0
        if holds < newest:
            self.await_update(entry)
            return True
        if holds:
            self._table.set_version(entry.index, holds)
        return self._as_the_others(replica, lambda: self._serve(entry))

    def await_update(self, entry: TableEntry) -> None:
        """Let a STARTING replica serve once it holds the newest weights, which any driver may load."""
        self._lacks[entry.index] = self._table.latest_version
        self._set_recovery(entry, Recovery.UPDATE)

    def _newest_version(self, entry: TableEntry) -> int:
        """Return the newest version of the others; they are asked, since another driver may have loaded it."""
        for peer in self._table:
            if self._table.latest_version:
                break
            if peer is entry or peer.state is ReplicaState.STARTING or peer.state in GONE:
                continue
            self._table.note_version(_version_of(peer.replica))
        return self._table.latest_version

    def _set_recovery(self, entry: TableEntry, recovery: Recovery) -> None:
        """Set what will bring a replica back (nothing after a stop), and notify the calls that wait."""
        with self._lock:
            if not self._stopped.is_set():
                self._table.set_recovery(entry.index, recovery)

    def _catch_up(self, entry: TableEntry) -> None:
        """Bring a replica back after the update that it waited for, unless the update did so already."""
        self._lacks.pop(entry.index, None)
        if entry.state in GONE:
            return
        replica = entry.replica
        self._set_recovery(entry, Recovery.SUPERVISOR)
        try:
            self._join(entry, replica)
        except BaseException as error:  # after any error: otherwise it would stay STARTING for ever
            self._table.mark_dead(entry.index, str(error) or repr(error), replica)
            if not isinstance(error, EngineError):
                raise

    def _serve(self, entry: TableEntry) -> bool:
        with self._table.lock:
            starting = entry.state is ReplicaState.STARTING
            if starting:
                self._table.set_state(entry.index, ReplicaState.SERVING)
            return starting


def _version_of(replica: Replica) -> int:
    """Return the version of a replica's weights; 0 if it does not answer now."""
    with contextlib.suppress(EngineError, ValueError, RuntimeError, OSError):
        return int(replica.call(Engine.weights_version, PEER_SECONDS))
    return 0


async def _watch(reference: weakref.ref[Supervisor], wake_event: asyncio.Event, stopped: threading.Event) -> None:
    """Check repeatedly. The supervisor is held weakly, so that an unused service can be garbage collected."""
    while not stopped.is_set():
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(wake_event.wait(), TICK_SECONDS)
        await asyncio.sleep(GATHER_SECONDS)
        wake_event.clear()
        supervisor = reference()
        if supervisor is None:
            return
        if not stopped.is_set():
            supervisor.look_and_go_on()
        del supervisor
