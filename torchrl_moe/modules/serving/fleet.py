"""The replicas of a service: started, watched, restarted, updated, and commanded all at the same time.

They are used only through the :class:`~torchrl_moe.modules.backends.replica.Replica` protocol. :func:`keep` is the life
of one replica, from top to bottom.
"""

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
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed, wait
from typing import TypeVar

from torchrl_moe.errors import EngineError, NoReplicaError, ReplicaDiedError, TorchRLMoEError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import PauseMode, ProbeReport, Replica, ReplicaInfo
from torchrl_moe.modules.serving.event_loop import EventLoop, NoThreadError, in_thread
from torchrl_moe.modules.serving.replica_table import (
    GONE,
    FaultPolicy,
    Recovery,
    ReplicaState,
    ReplicaTable,
    TableEntry,
)

LOG = logging.getLogger(__name__)
T = TypeVar("T")
CALL_SECONDS = 60.0
TICK_SECONDS = 0.5
GATHER_SECONDS = 0.02  # so that many changes are handled in one pass
WORDS_SECONDS = 1.0  # for a replica that died to report why
JOIN_SECONDS = 5.0
PEER_SECONDS = 5.0
SILENT = frozenset({ReplicaState.DEAD, ReplicaState.STARTING})
"""States in which a replica answers no command."""
PROBED = frozenset({ReplicaState.SERVING, ReplicaState.DRAINING})  # others are busy with something else
BUSY_SHARE = 0.05  # of one core; above it a process counts as computing


# The life of one replica.


async def keep(reference: weakref.ref[Fleet], entry: TableEntry, woken: asyncio.Event) -> None:
    """Keep one replica in service until it is removed or the service ends. Runs in the service's loop.

    ::

                 holds the newest weights            update
        STARTING ------------------------> SERVING <--------> SYNCING      (or by way of DRAINING)
         ^  | ^ waits (Recovery.UPDATE)       |                  |
         |  | +- for the user's update        | died, stalled    | died, or the update failed half-way
         |  v                                 v                  v
         |  +-----------------------------> DEAD         QUARANTINED: its weights are unknown
         |                                    |                  |
         +---- restart, after a delay --------+------------------+     (Recovery.SUPERVISOR, at most max_restarts)

    Senders make the transitions of an update; all others are made here. The fleet is held weakly between two looks,
    so that an unused service can be garbage collected.
    """
    while True:
        await woken.wait()  # for a tick at which there is something to do, or a change of its state
        woken.clear()
        fleet = reference()
        if fleet is None or fleet.is_over:
            return
        if entry.removed:
            fleet.forget(entry)
            return
        try:
            await fleet.look(entry)
        except Exception as error:  # it is logged and kept, and the next look tries again
            if entry.index not in fleet.errors:
                LOG.error("the supervisor failed at replica %d, and goes on", entry.index, exc_info=error)
            fleet.errors[entry.index] = f"{type(error).__name__}: {error}"
        else:
            fleet.errors.pop(entry.index, None)
        del fleet


async def _wake_keepers(reference: weakref.ref[Fleet], changed: asyncio.Event) -> None:
    """Wake a replica's keeper when its state has changed, and at a tick if it has something to do."""
    next_tick, seen = 0.0, 0
    while True:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(changed.wait(), TICK_SECONDS)
        await asyncio.sleep(GATHER_SECONDS)
        changed.clear()
        fleet = reference()
        if fleet is None or fleet.is_over:
            return
        is_tick = time.monotonic() >= next_tick
        seen = fleet.wake_keepers(seen, is_tick)
        if is_tick:
            next_tick = time.monotonic() + TICK_SECONDS
            try:
                fleet.table.cool()
            except Exception as error:  # a listener's; the next tick tries again
                LOG.exception("the breakers of the replicas could not be half-opened: %r", error)
        del fleet


# Health probes: whether a replica answers, and if not, whether it is stalled or only slow.


class ProbeHistory:
    """The history of one replica's probes. Probes are counted, not seconds, since a suspended driver sends none.

    Attributes:
        silent: how many of the last probes got no sign of life.
        slow: how many found the engine computing; both are 0 once the engine core has answered.

    >>> history = ProbeHistory(FaultPolicy(probe=10, patience=30))
    >>> [history.note(None) for _ in range(3)]
    ['', '', 'gave no sign of life in 30 s']
    """

    def __init__(self, policy: FaultPolicy) -> None:
        self._policy = policy
        self.silent = 0
        self.slow = 0
        self._cpu_seconds = 0.0

    def note(self, report: ProbeReport | None) -> str:
        """Record the answer to a probe, ``None`` for none; return why the replica counts as stalled, or ``""``."""
        policy = self._policy
        computed = 0.0
        if report is not None and not report.stopped:
            computed, self._cpu_seconds = report.cpu_seconds - self._cpu_seconds, report.cpu_seconds
        if report is not None and report.core_answered:
            self.silent = self.slow = 0
            self._cpu_seconds = report.cpu_seconds
            return ""
        if report is not None and not report.stopped and computed >= BUSY_SHARE * policy.probe:
            self.silent = 0
            self.slow += 1
        else:
            self.silent += 1
        if self.silent * policy.probe >= policy.patience:
            return f"gave no sign of life in {self.silent * policy.probe:g} s"
        if self.slow * policy.probe >= policy.slow_patience:
            return f"computed for {self.slow * policy.probe:g} s without an answer"
        return ""


class Probe:
    """The probes of one replica, while it serves. For one thread; nothing waits."""

    def __init__(self, entry: TableEntry, policy: FaultPolicy) -> None:
        self.replica = entry.replica
        self._index = entry.index
        self._seconds = policy.probe
        self._history = ProbeHistory(policy)
        self._due = time.monotonic() + policy.probe
        self._answer: Future[ProbeReport] | None = None  # None: no probe is under way

    @property
    def is_idle(self) -> bool:
        """Whether a look would do nothing, unless the replica is doubted."""
        return time.monotonic() < self._due and (self._answer is None or not self._answer.done())

    def look(self, table: ReplicaTable) -> str:
        """Collect an answer, or send the probe that is due; return why the replica is stalled, or ``""``."""
        is_doubted = table.take_doubt(self._index)
        if self._seconds == math.inf:
            return ""
        is_due = time.monotonic() >= self._due
        if self._answer is None:
            # a doubted replica is not probed more often, since its probes count as seconds
            if is_due or (is_doubted and not (self._history.silent or self._history.slow)):
                self._due = time.monotonic() + self._seconds
                try:
                    # the engine core gets half of the time, so that its owner's answer still arrives
                    self._answer = self.replica.ask(Engine.probe, self._seconds / 2)
                except Exception as problem:  # it counts as silent
                    LOG.exception("a replica could not be probed: %r", problem)
                    self._answer = Future()
                    self._answer.set_exception(EngineError(str(problem)))
            return ""
        if not (is_due or self._answer.done()):
            return ""
        answer, self._answer = self._answer, None
        report: ProbeReport | None = None
        if answer.done():
            error = answer.exception()
            if error is None:
                report = answer.result()
            elif isinstance(error, ReplicaDiedError) or not isinstance(error, EngineError):
                report = ProbeReport(core_answered=True)  # a death is reported elsewhere; it may lack this command
        reason = self._history.note(report)
        if self._history.silent:
            table.fail(self._index, "gave no sign of life to a health probe", trip=True)
        return reason


# All replicas.


class Fleet:
    """N replicas, and operations on all of them; thread-safe. Watched from :meth:`supervise` to :meth:`end`."""

    def __init__(
        self,
        replicas: Sequence[Replica],
        faults: FaultPolicy,
        loop: EventLoop,
        make_replica: Callable[[int], Replica] | None = None,
    ) -> None:
        if not replicas:
            raise ValueError("a service needs at least one replica, got none")
        self.table = ReplicaTable(replicas, faults=faults)
        self.infos: list[ReplicaInfo] = []
        self.bring: Callable[[int], None] | None = None
        self.policy = faults
        self.errors: dict[int, str] = {}
        """Replica -> why the last look at it failed."""
        self._loop = loop
        self._make_replica = make_replica
        self._restarts = faults.restart and make_replica is not None
        self._restarted_at: defaultdict[int, deque[float]] = defaultdict(deque)  # times of restarts
        self._watches = False
        self._keepers: dict[int, tuple[asyncio.Event, Future[None]]] = {}
        self._probes: dict[int, Probe] = {}
        self._changed = asyncio.Event()
        self._over = threading.Event()  # set under the table's lock: from then on no recovery is promised
        self._ending = asyncio.Event()  # the same for the loop
        self._starting = threading.Lock()  # under which replicas are, and the end begins
        self._adding = threading.Lock()
        self._pausing = threading.Lock()
        self._paused = False  # by the user
        self._sleep_level: int | None = None  # the same
        self.is_frozen = False

    # -- life -------------------------------------------------------------------------------------------------------

    def serve(self, entry: TableEntry) -> None:
        """Let a ready replica serve: at once, or, if another has newer weights, once it has the newest."""
        if entry.version < self.table.latest_version:
            self._await_update(entry)
        else:
            self.table.set_state(entry.index, ReplicaState.SERVING)

    def supervise(self) -> None:
        """Notice deaths and stalls from now on, and bring replicas back."""
        self._watches = True
        self.table.add_listener(self._on_change, doubts=True)
        # made after the replicas, so at interpreter exit it runs before theirs: what then dies is not restarted
        weakref.finalize(self, self._over.set)
        for entry in self.table:
            self._adopt(entry)
        self._loop.spawn(_wake_keepers(weakref.ref(self), self._changed))

    def _adopt(self, entry: TableEntry) -> None:
        """From now on watch a replica, and restart it when it dies, if restarts are enabled."""
        if not self._watches:
            return
        if self._restarts and entry.recovery is not Recovery.UPDATE:
            self._set_recovery(entry, Recovery.SUPERVISOR)
        woken = asyncio.Event()
        self._keepers[entry.index] = woken, self._loop.spawn(keep(weakref.ref(self), entry, woken))

    def _on_change(self) -> None:
        """Called from any thread."""
        self._loop.call(self._changed.set)

    def wake_keepers(self, since: int, is_tick: bool) -> int:
        """Wake the keepers of replicas that have changed since a change of the table; return the latest change.

        At a tick also those with something to do: not all, since there may be a thousand.
        """
        with self.table.lock:
            changed = self.table.doubts.union(entry.index for entry in self.table.changed_since(since))
            latest = self.table.changes
        if is_tick:
            changed.update(entry.index for entry in self.table if not self._is_quiet(entry))
        for index in changed & self._keepers.keys():
            self._keepers[index][0].set()
        return latest

    def _is_quiet(self, entry: TableEntry) -> bool:
        """Whether a look at a replica would find nothing new."""
        replica, probe = entry.replica, self._probes.get(entry.index)
        if probe is None or probe.replica is not replica or not probe.is_idle:
            return False
        if entry.state not in PROBED or entry.lacks is not None or entry.index in self.errors:
            return False
        try:
            stats = replica.last_stats
            return replica.is_alive() and (stats is None or stats.weights_version <= entry.version)
        except Exception as error:  # noqa: BLE001  the look will find the same, and say so
            LOG.debug("replica %d cannot be asked: %r", entry.index, error)
            return False

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def end(self, end_one: Callable[[Replica], object] = lambda replica: replica.shutdown()) -> None:
        """End every replica, at the same time. Idempotent."""
        with self._starting, self.table.lock:
            self._over.set()
            for entry in self.table:
                self.table.set_recovery(entry.index, Recovery.NOBODY)
        self.table.remove_listener(self._on_change)
        is_running = self._loop.call(self._end_keepers)
        for entry in self.table:
            self.table.mark_dead(entry.index)
        try:
            _each(end_one, list(self.table))
        finally:
            if is_running and not self._loop.is_here:
                wait([keeper for _, keeper in list(self._keepers.values())], JOIN_SECONDS)

    def _end_keepers(self) -> None:
        self._ending.set()
        for woken, _ in self._keepers.values():
            woken.set()

    def note_deaths(self) -> None:
        for entry in self.table:
            replica = entry.replica
            if entry.state not in SILENT and not replica.is_alive():
                self.table.mark_dead(entry.index, _reason_of_death(replica), replica)

    # -- a replica's keeper: watch ----------------------------------------------------------------------------------

    @property
    def supervisor_error(self) -> str | None:
        """Why the last look at a replica failed; ``None`` if all succeeded."""
        return next(iter(list(self.errors.values())), None)

    def forget(self, entry: TableEntry) -> None:
        self.errors.pop(entry.index, None)
        self._keepers.pop(entry.index, None)
        self._probes.pop(entry.index, None)

    async def look(self, entry: TableEntry) -> None:
        """Watch a replica, and restart or update it if it is time for that."""
        replica, stalled = entry.replica, ""
        if entry.state not in GONE:
            # the version that it reports: if this driver loads none, another one may have
            if (stats := replica.last_stats) is not None:
                self.table.note_version(stats.weights_version)
                with self.table.lock:
                    unheard = entry.replica is replica and entry.version < stats.weights_version
                    if unheard and entry.state is ReplicaState.SERVING and self.bring is None:
                        self.table.set_version(entry.index, stats.weights_version)
            # whether it answers, and whether it lives
            stalled = self._probe(entry)
            # what starts one notices its death
            if not stalled and (entry.state is not ReplicaState.STARTING or entry.recovery is Recovery.UPDATE):
                await self._note_death(entry)
        if entry.state in GONE and (stalled or self._may_restart(entry)):
            await self._restart(entry)
        elif self._was_updated(entry):
            await self._catch_up(entry)

    def _probe(self, entry: TableEntry) -> str:
        """Probe a replica that may be probed; mark one that has stalled, which must be ended, and return why."""
        if entry.state not in PROBED:
            self._probes.pop(entry.index, None)
            return ""
        probe = self._probes.get(entry.index)
        if probe is None or probe.replica is not entry.replica:
            self._probes[entry.index] = probe = Probe(entry, self.policy)
        stalled = probe.look(self.table)
        if stalled:
            log = probe.replica.log_tail()
            reason = f"replica {entry.index} {stalled} and was ended" + (log and f". Its log says:\n{log}")
            self.table.mark_dead(entry.index, reason, probe.replica)
        return stalled

    async def _note_death(self, entry: TableEntry) -> None:
        """Mark a replica that has died, once it has reported why, or had the time to."""
        replica = entry.replica
        try:
            if not replica.is_alive():
                death = replica.death or await self._in_thread(entry, _reason_of_death, replica)
                self.table.mark_dead(entry.index, death, replica)
        except Exception as error:
            raise EngineError(f"replica {entry.index} could not be asked whether it is alive: {error!r}") from error

    async def _in_thread(self, entry: TableEntry, function: Callable[..., T], *arguments: object) -> T:
        return await in_thread(f"torchrl_moe-restart-{entry.index}", function, *arguments)

    # -- a replica's keeper: restart --------------------------------------------------------------------------------

    def _may_restart(self, entry: TableEntry) -> bool:
        """Whether it is this driver that restarts a replica."""
        if entry.recovery is not Recovery.SUPERVISOR or entry.leaving:
            return False
        if not self._restarts:  # nobody does, or the driver that made the replica
            self.table.set_recovery(entry.index, Recovery.NOBODY)
        elif entry.replica.was_ended:
            self._give_up(entry, f"replica {entry.index} was shut down by another driver")
        return entry.recovery is Recovery.SUPERVISOR

    async def _restart(self, entry: TableEntry) -> None:
        """End what is left of a replica, and start new ones in its place until one serves, or waits for an update."""
        begun, policy = self._restarted_at[entry.index], self.policy
        try:
            # its memory is free before another one asks for it
            await self._in_thread(entry, entry.replica.shutdown)
            while self._may_restart(entry):
                # wait as the policy says, or give up
                while begun and time.monotonic() - begun[0] > policy.restart_window:
                    begun.popleft()
                if len(begun) >= policy.max_restarts:
                    self._give_up(
                        entry,
                        f"restarted {len(begun)} times within {policy.restart_window:g} s, and given up. The last "
                        f"error: {entry.last_error}",
                    )
                    return
                if await self._ends_within(policy.delay(len(begun))):
                    return
                # start another one
                replica = await self._in_thread(entry, self._make_for, entry)
                try:
                    if not await self._in_thread(entry, self._start_in_place, entry, replica):
                        await self._in_thread(entry, replica.shutdown)  # it was not started; nothing else would end it
                        return
                    await self._in_thread(entry, replica.wait_ready, policy.start)
                    await self._join(entry, replica)
                    return
                except (EngineError, OSError) as error:
                    self.table.mark_dead(entry.index, str(error), replica)
                    if entry.leaving or not self.is_over:
                        await self._in_thread(entry, replica.shutdown)
                    # else the service ends it, or leaves it to its other drivers
        except NoThreadError:
            raise
        except Exception as error:
            self._give_up(entry, f"restarting failed with {error!r}")
            raise

    async def _ends_within(self, seconds: float) -> bool:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
        return self.is_over

    def _give_up(self, entry: TableEntry, reason: str) -> None:
        self.table.mark_dead(entry.index)
        entry.last_error = reason
        LOG.error("replica %d is not restarted any more: %s", entry.index, reason.partition("\n")[0])
        self.table.set_recovery(entry.index, Recovery.NOBODY)

    def _make_for(self, entry: TableEntry) -> Replica:
        """Make a replica, and end it at once if nobody waits for it any more."""
        assert self._make_replica is not None
        replica = self._make_replica(entry.index)
        if self.is_over:
            replica.shutdown()
        return replica

    def _start_in_place(self, entry: TableEntry, replica: Replica) -> bool:
        """Start a new replica in place of an old one, unless the old one is being removed, or the service has ended."""
        with self._starting:
            if self.is_over or not self.table.replace(entry.index, replica):
                return False
            self._restarted_at[entry.index].append(time.monotonic())
            try:
                replica.start()
            except RuntimeError as error:
                if "start new thread" not in str(error):
                    raise
                raise EngineError(str(error)) from error  # there may be room for one at the next try
            return True

    # -- a replica's keeper: update ---------------------------------------------------------------------------------

    async def _join(self, entry: TableEntry, replica: Replica, deadline: float = math.inf) -> None:
        """Let a started replica serve, with the current weights, and paused if the service is."""
        for failures in itertools.count():
            bring = self.bring
            if bring is not None and entry.state is ReplicaState.STARTING:
                try:
                    await self._in_thread(entry, bring, entry.index)
                except (TorchRLMoEError, ValueError, RuntimeError, OSError) as error:
                    entry.last_error = f"its weights could not be loaded: {error}"
            if entry.state in GONE:  # the process may still be alive: do not wait for it
                break
            if entry.state is not ReplicaState.STARTING:
                await self._in_thread(entry, self._serve_as_the_others, entry, replica)
                return
            nothing_to_bring = bring is None or not self.table.latest_version
            if nothing_to_bring and await self._in_thread(entry, self._serve_or_wait, entry, replica):
                return
            if await self._ends_within(self.policy.delay(failures)) or not replica.is_alive():
                break
            if time.monotonic() > deadline:
                raise EngineError(f"replica {entry.index} was not brought into service in time: {entry.last_error}")
        raise ReplicaDiedError(entry.last_error or f"replica {entry.index} died before it could serve")

    def _serve_or_wait(self, entry: TableEntry, replica: Replica) -> bool:
        """Let a replica serve with its weights, or wait for an update if others have newer ones."""
        # the others are asked, since another driver may have loaded what they have
        for peer in self.table:
            if self.table.latest_version:
                break
            if peer is not entry and peer.state not in SILENT | GONE:
                self.table.note_version(_version_of(peer.replica))
        newest = self.table.latest_version
        holds = _version_of(replica) if newest else 0
        if holds < newest:
            self._await_update(entry)
            return True
        if holds:
            self.table.set_version(entry.index, holds)
        return self._serve_as_the_others(entry, replica)

    def _await_update(self, entry: TableEntry) -> None:
        """Let a STARTING replica serve once it holds the newest weights, which any driver may load."""
        entry.lacks = self.table.latest_version
        self._set_recovery(entry, Recovery.UPDATE)

    def _was_updated(self, entry: TableEntry) -> bool:
        """Whether the update that a replica waited for has happened, with or without this replica."""
        if entry.lacks is None or entry.state is not ReplicaState.STARTING:
            return entry.lacks is not None
        stats = entry.replica.last_stats
        holds = 0 if stats is None else stats.weights_version
        newest = self.table.latest_version
        return entry.recovery is Recovery.UPDATE and (entry.lacks < newest or 0 < newest <= holds)

    async def _catch_up(self, entry: TableEntry) -> None:
        """Bring a replica back after the update that it waited for, unless the update did so already."""
        entry.lacks = None
        if entry.state in GONE:
            return
        replica = entry.replica
        self._set_recovery(entry, Recovery.SUPERVISOR)
        try:
            await self._join(entry, replica)
        except Exception as error:  # after any error: otherwise it would stay STARTING for ever
            self.table.mark_dead(entry.index, str(error) or repr(error), replica)
            if not isinstance(error, EngineError):
                raise

    def _set_recovery(self, entry: TableEntry, recovery: Recovery) -> None:
        """Set what will bring a replica back (nothing after the end), and notify the calls that wait."""
        with self.table.lock:
            if not self.is_over:
                self.table.set_recovery(entry.index, recovery)

    # -- more and fewer replicas ------------------------------------------------------------------------------------

    def add(self, count: int, seconds: float) -> list[int]:
        if self._make_replica is None:
            raise RuntimeError("add_replicas: this service cannot make replicas: it was given its replicas")
        deadline = time.monotonic() + seconds
        entries: list[TableEntry] = []
        try:
            for _ in range(count):
                with self._adding:  # one at a time: each gets its own index and devices
                    entries += self.table.add([self._make_replica(self.table.next_index)])
                with self._starting:
                    if self.is_over:
                        raise EngineError("the service was shut down")
                    entries[-1].replica.start()
            for admitted in as_completed([self._loop.spawn(self._admit(entry, deadline)) for entry in entries]):
                admitted.result()
        except BaseException as error:
            self._take_away(entries)  # which ends the other waits
            if isinstance(error, CancelledError):
                raise EngineError("the service was shut down") from None
            raise
        return [entry.index for entry in entries]

    async def _admit(self, entry: TableEntry, deadline: float) -> None:
        """Wait until an added replica serves like the others, or waits for the next update."""
        replica = entry.replica
        await self._in_thread(entry, replica.wait_ready, max(deadline - time.monotonic(), 0.0))
        await self._join(entry, replica, deadline)
        self._adopt(entry)

    def remove(self, index: int, drain: bool, seconds: float) -> None:
        entry = self.table[index]
        with self.table.lock:
            if entry.leaving:
                raise ValueError(f"remove_replica: replica {index} was removed already")
            if all(one is entry or one.leaving for one in self.table):
                raise ValueError("remove_replica: a service needs at least one replica: use shutdown()")
            self.table.set_leaving(index, True)
        try:
            if drain and not self._is_idle(entry, seconds):
                raise EngineError(
                    f"remove_replica: {entry.inflight} requests of replica {index} were not finished within "
                    f"{seconds:g} s; it keeps serving. Wait longer, or restart them elsewhere: drain=False"
                )
        except BaseException:  # Ctrl-C, too
            self.table.set_leaving(index, False)
            raise
        self._take_away([entry])

    def _is_idle(self, entry: TableEntry, seconds: float) -> bool:
        """Wait until a replica has neither a request nor an update; return False on a timeout."""
        with self.table.changed:
            return self.table.changed.wait_for(
                lambda: (entry.inflight == 0 and entry.state is not ReplicaState.SYNCING) or entry.state in GONE,
                seconds,
            )

    def _take_away(self, entries: Sequence[TableEntry]) -> None:
        """End replicas for good. They stay listed until their processes have ended; then their devices are free."""
        for entry in entries:
            with self._starting:
                self.table.set_leaving(entry.index, True)
            self.table.set_recovery(entry.index, Recovery.NOBODY)
            self.table.mark_dead(entry.index, "it was removed")
        _each(lambda replica: replica.shutdown(), entries)
        for entry in entries:
            self.table.remove(entry.index)

    # -- commands to all; what they promise is said in the service --------------------------------------------------

    def alive(self) -> list[TableEntry]:
        """Return the replicas that can answer; one that has died is marked."""
        self.note_deaths()
        alive = [entry for entry in self.table if entry.state not in SILENT]
        if not alive:
            coming = any(entry.recovery is not Recovery.NOBODY for entry in self.table)
            advice = "Wait for their restart." if coming else "Make a new service."
            raise NoReplicaError(f"no replica is alive: {self.table!r}. {advice}")
        return alive

    def on_all(self, command: Callable[[Replica], T]) -> list[T]:
        """Run a command on every living replica at the same time and return the values in replica order."""
        alive = self.alive()
        try:
            return _each(command, alive)
        except ReplicaDiedError:
            self.note_deaths()
            raise

    def pause(self, mode: PauseMode, clear_cache: bool, seconds: float) -> None:
        self._check_awake("pause")
        with self._pausing:  # before the replicas are told
            before, self._paused = self._paused, True
        self._freeze(self.is_frozen or mode == "keep")  # otherwise requests in flight finish, or are cut, first
        try:
            self.on_all(lambda replica: replica.call(Engine.pause, seconds, mode, clear_cache))
            self._freeze(True)
        except BaseException:
            if not before:  # those that it still waits for also take nothing new
                with contextlib.suppress(EngineError, RuntimeError):  # none is alive, or the service was shut down
                    self.resume(seconds)
            raise
        if clear_cache:
            self._forget_prefixes()

    def resume(self, seconds: float) -> None:
        self._check_awake("resume")
        with self._pausing:
            self._paused = False
        self._freeze(False)
        self.on_all(lambda replica: replica.call(Engine.resume, seconds))

    def _freeze(self, frozen: bool) -> None:
        """Note whether requests go on, and tell those that wait for that."""
        with self.table.changed:
            self.is_frozen = frozen
            self.table.changed.notify_all()

    def sleep(self, level: int, mode: PauseMode, seconds: float) -> None:
        before = self._note_sleep(level)
        try:
            self.on_all(lambda replica: replica.call(Engine.sleep, seconds, level, mode))
            self._freeze(True)
        except BaseException:
            self._note_sleep(before)
            if before is None:
                with contextlib.suppress(EngineError, RuntimeError):
                    self.on_all(lambda replica: replica.call(Engine.wake_up, seconds, None))
            raise
        self._forget_prefixes()

    def wake_up(self, tags: Sequence[str] | None, seconds: float) -> None:
        if tags is not None and set(tags) == {"kv_cache"}:
            tags = None  # the rest: the weights too, unless an update has woken them
        before = self._note_sleep(None) if tags is None or "kv_cache" in tags else self._sleep_level
        try:
            self.on_all(lambda replica: replica.call(Engine.wake_up, seconds, tags))
        except BaseException:
            self._note_sleep(before)
            raise
        self._freeze(self._paused or self._sleep_level is not None)

    def _note_sleep(self, level: int | None) -> int | None:
        """Store the requested sleep level before the replicas are told; return the previous one."""
        with self._pausing:
            before, self._sleep_level = self._sleep_level, level
            return before

    def _check_awake(self, what: str) -> None:
        if self._sleep_level is not None:
            raise RuntimeError(f"{what}: the engines sleep; wake_up() first")

    def _serve_as_the_others(self, entry: TableEntry, replica: Replica) -> bool:
        """Pause a replica if all are, or have it sleep; then let it serve, if it is STARTING. Return whether it serves.

        Under the lock: a resume comes before this, or reaches it.
        """
        with self._pausing:
            if self._paused:
                replica.call(Engine.pause, CALL_SECONDS, "keep", False)
            if self._sleep_level is not None:  # level 2 would drop the weights that it just loaded
                replica.call(Engine.sleep, CALL_SECONDS, 1, "keep")
            with self.table.lock:
                is_starting = entry.state is ReplicaState.STARTING
                if is_starting:
                    self.table.set_state(entry.index, ReplicaState.SERVING)
                return is_starting

    def reset_prefix_cache(self) -> bool:
        done = all(self.on_all(lambda replica: replica.call(Engine.reset_prefix_cache, CALL_SECONDS)))
        self._forget_prefixes()
        return done

    def _forget_prefixes(self) -> None:
        for entry in self.table:
            self.table.forget_prefixes(entry.index)


def _each(function: Callable[[Replica], T], entries: Sequence[TableEntry]) -> list[T]:
    """Call a function with all replicas at the same time; an error is raised once all have been called."""
    with ThreadPoolExecutor(max_workers=max(len(entries), 1)) as pool:
        futures = [pool.submit(function, entry.replica) for entry in entries]
    return [future.result() for future in futures]


def _reason_of_death(replica: Replica) -> str | None:
    deadline = time.monotonic() + WORDS_SECONDS
    while (words := replica.death) is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return words


def _version_of(replica: Replica) -> int:
    """Return the version of a replica's weights; 0 if it does not answer now."""
    with contextlib.suppress(EngineError, ValueError, RuntimeError, OSError):
        return int(replica.call(Engine.weights_version, PEER_SECONDS))
    return 0
