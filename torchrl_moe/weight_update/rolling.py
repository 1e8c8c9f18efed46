"""Updating replicas to a version: each checks it while it serves, then a few at a time are swapped.

A replica takes no new requests while its weights are swapped; the others keep serving. If a swap fails before it
starts, the replica keeps serving its old weights. If it fails later, it is retried once, and a replica that fails twice
is quarantined: never resumed, never routed to, and its process is ended, so that requests frozen in it fail instead of
waiting.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from tqdm.auto import tqdm

from torchrl_moe.errors import (
    EngineError,
    ManifestMismatch,
    ReplicaDiedError,
    SyncTimeout,
    TorchRLMoEError,
    WeightsOwnedError,
    WeightSyncError,
)
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import PauseMode, Replica, StageReport, SwapReport, this_process
from torchrl_moe.modules.serving.replica_table import GONE, Recovery, ReplicaState, TableEntry
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.weight_update.options import SwapOptions
from torchrl_moe.weight_update.publishing import Published
from torchrl_moe.weight_update.report import ReplicaSync, SyncReport
from torchrl_moe.weight_update.transports.base import StageOptions, Transport

ATTEMPTS = 2
GIVE_UP_SECONDS = 10.0  # that a replica gets to confirm it
BAR_SECONDS = 2.0  # until a progress bar appears
NOTICE_SECONDS = 2.0  # until the supervisor has noticed a death
RESTART_POLL_SECONDS = 0.05
SYNCABLE = frozenset({ReplicaState.SERVING, ReplicaState.DRAINING})
LATE = SYNCABLE | {ReplicaState.STARTING}  # may be updated by index
PAUSES: Mapping[str, PauseMode] = {"hot_swap": "keep", "drain": "keep", "abort_resume": "abort"}

Staged = StageReport | TorchRLMoEError
T = TypeVar("T")


def waits_for_update(entry: TableEntry) -> bool:
    """Whether an update includes a replica: it serves, or was restarted and waits for the next update."""
    late = entry.state is ReplicaState.STARTING and entry.recovery is Recovery.UPDATE
    return late or entry.state in SYNCABLE


class RollingSwap:
    """Updates the replicas of one engine."""

    def __init__(
        self, engine: GenerationService, transport: Transport, staging: StageOptions, swapping: SwapOptions
    ) -> None:
        self.engine, self.transport = engine, transport
        self._staging, self._swapping = staging, swapping
        self._table = engine.replica_table
        self._claimed: weakref.WeakSet[Replica] = weakref.WeakSet()  # replicas whose weights this driver owns
        self._opened: weakref.WeakSet[Replica] = weakref.WeakSet()  # of those, the ones that opened the transport
        self._away: set[int] = set()  # replicas that are being swapped
        self._outcomes: dict[int, tuple[int, ReplicaSync]] = {}  # replica -> the version that it got last, and how

    def open(self, entries: Sequence[TableEntry], takeover: bool = False) -> None:
        """Claim replicas for this driver and open their transport. One that fails is asked again at the next version.

        If several drivers claim at the same time, the one that gets the first replica gets all.
        """
        first, *others = entries
        with ThreadPoolExecutor(len(entries), thread_name_prefix="weight-open") as pool:
            # the first replica decides: drivers that claim at once would else get one replica each
            claims = [_tried(partial(self._claim, first.replica, takeover))]
            if not isinstance(claims[0], WeightsOwnedError):
                claims += pool.map(lambda entry: _tried(partial(self._claim, entry.replica, takeover)), others)
            # all or none: half an engine is given back
            if refused := [claim for claim in claims if isinstance(claim, WeightsOwnedError)]:
                self.give_up()
                raise refused[0]
            # transports wait for their other ends, so they are opened at once
            errors = list(pool.map(lambda entry: _tried(partial(self._open, entry.replica)), entries))
        # one that failed is asked again at the next version; only if none opened is there nothing to update
        if errors[0] is not None and None not in errors:
            raise errors[0]

    def _claim(self, replica: Replica, takeover: bool = False) -> None:
        with self._naming_timeouts():
            claim = replica.call(Engine.claim_weights, self._swapping.timeout_seconds, this_process(), takeover)
        if not claim.granted:
            raise WeightsOwnedError(
                f"the weights of replica {replica.index} are updated by {claim.owner}: end its sender, or pass "
                "takeover=True to init_all_workers_group()"
            )
        self._claimed.add(replica)

    def _open(self, replica: Replica) -> None:
        # it was restarted since: nobody owns a new process yet, and another driver may have taken the others
        if replica not in self._claimed:
            self._check_owner()
            self._claim(replica)
        with self._naming_timeouts():
            self.transport.open(replica, self._swapping.timeout_seconds)
        self._opened.add(replica)

    def _check_owner(self) -> None:
        """Check that a claimed replica is still this driver's; a new one belongs to the owner of the others."""
        for replica in list(self._claimed):
            # one that answers speaks for all; one that does not may just be dying
            holds = _tried(partial(replica.call, Engine.owns_weights, self._swapping.timeout_seconds))
            if holds is False:
                raise WeightSyncError(
                    "another driver updates this engine now: call init_all_workers_group(takeover=True) to take it back"
                )
            if holds is True:
                return

    def give_up(self) -> None:
        """Release the living replicas to other drivers."""
        claimed = [replica for replica in self._claimed if replica.is_alive()]
        self._claimed.clear()
        self._opened.clear()
        releases = [partial(replica.call, Engine.give_up_weights, GIVE_UP_SECONDS) for replica in claimed]
        with ThreadPoolExecutor(max(len(claimed), 1), thread_name_prefix="weight-open") as pool:
            list(pool.map(_tried, releases))

    def stage(self, published: Published, replicas: Sequence[int] | None) -> dict[int, Staged]:
        """Let replicas prepare a version concurrently, by default all that an update includes; return their reports."""
        by_name = replicas is not None
        entries = list(self._table) if replicas is None else [self._table[index] for index in replicas]
        with ThreadPoolExecutor(max_workers=max(len(entries), 1), thread_name_prefix="weight-stage") as pool:
            found = pool.map(lambda entry: self._stage(entry, published, by_name), entries)
            return {entry.index: staged for entry, staged in zip(entries, found, strict=True)}

    def _stage(self, entry: TableEntry, published: Published, by_name: bool) -> Staged:
        replica = entry.replica
        # a replica that is named is brought in by its supervisor, and need not wait for an update
        takes = entry.state in LATE if by_name else waits_for_update(entry)
        manifest = published.manifest
        if not takes or manifest is None:
            return WeightSyncError(f"the replica is {entry.state.name}")

        def prepare() -> StageReport:
            if replica not in self._opened:
                self._open(replica)
            with self._naming_timeouts():
                return self.transport.stage(replica, manifest, self._staging, self._swapping.timeout_seconds)

        return _tried(prepare)

    @contextmanager
    def _naming_timeouts(self) -> Iterator[None]:
        """Turn a replica's missing reply into a ``SyncTimeout``."""
        started = time.monotonic()
        try:
            yield
        except ReplicaDiedError:
            raise
        except EngineError as error:
            # it answered, with an error of its own
            if time.monotonic() - started < 0.95 * self._swapping.timeout_seconds:
                raise
            raise SyncTimeout(str(error)) from error

    def swap(
        self, published: Published, staged: Mapping[int, Staged], indices: Sequence[int], progress: bool = True
    ) -> list[ReplicaSync]:
        """Swap a version into replicas that have prepared it, a few at a time; return a result for each."""
        bar = tqdm(
            total=len(indices),
            desc=f"weights v{published.version}, {published.nbytes / 1e6:,.0f} MB",
            unit="replica",
            disable=None if progress else True,  # None: only where there is a terminal
            delay=BAR_SECONDS,
        )

        def bring(index: int) -> ReplicaSync:
            outcome = self._bring(index, published, staged.get(index))
            self._outcomes[index] = published.version, outcome
            bar.update()
            return outcome

        # a removed one is nobody's failure
        there = [index for index in indices if not self._table[index].removed]
        at_a_time = self._swapping.at_a_time(self._members)
        with bar, ThreadPoolExecutor(at_a_time, thread_name_prefix="weight-swap") as pool:
            return list(pool.map(bring, there))

    def _bring(self, index: int, published: Published, staged: Staged | None) -> ReplicaSync:
        """Update one replica, or return why not; until the swap it keeps serving its old version."""
        if staged is None:
            return ReplicaSync(replica=index, error="it was not asked to prepare the version: prefetch() it there too")
        if isinstance(staged, TorchRLMoEError):
            return ReplicaSync(replica=index, error=_words(staged))
        began = time.perf_counter()
        outcome = ReplicaSync(
            replica=index, fetched=staged.fetched, staged=staged.loaded, swap_at=began - published.began
        )
        # before anything is paused
        if staged.digest != published.digest:
            return replace(outcome, error="the replica found other bytes than were published: is the store shared?")
        with self._turn(index):
            entry, replica = self._table[index], self._table[index].replica  # another replica may take its index
            # no new requests from here; what runs is frozen, or finishes, by the mode
            before, error = self._take_out(entry, replica, published.version)
            outcome = replace(outcome, waited=time.perf_counter() - began, error=error)
            if error is not None:
                return outcome
            try:
                swap, attempts, rejected = self._swap(entry, replica, published)
            except BaseException:  # after any error, what the replica holds is unknown
                self._end(entry, replica)
                raise
            # then it serves again, or never
            error = self._settle(entry, replica, published.version, before, swap)
        return replace(
            outcome,
            paused=swap.paused_seconds,
            loaded=swap.loading_seconds,
            attempts=attempts,
            rejected=rejected,
            unproved=swap.unproved,
            error=error,
        )

    @property
    def _members(self) -> int:
        """How many replicas the service counts on, without those being added or removed."""
        return sum(not (entry.joining or entry.leaving) for entry in self._table)

    @contextmanager
    def _turn(self, index: int) -> Iterator[None]:
        """Wait until the replica may leave service: one always may, more only while enough others serve."""
        changed, floor = self._table.changed, self._swapping.must_serve(self._members)

        def may_go() -> bool:
            # those that wait for their step still serve, those in it do not
            serving = {e.index for e in self._table if e.state is ReplicaState.SERVING} - self._away
            # one may always go, or a single replica could never be updated
            return not self._away or index not in serving or len(serving) - 1 >= floor

        with changed:
            changed.wait_for(may_go)
            self._away.add(index)
        try:
            yield
        finally:
            with changed:
                self._away.discard(index)
                changed.notify_all()

    def _take_out(self, entry: TableEntry, replica: Replica, version: int) -> tuple[ReplicaState, str | None]:
        """Take a replica out of service; return its state before, and why it cannot be taken."""
        before = entry.state
        if before not in LATE:
            return before, f"the replica is {before.name}"
        if replica not in self._opened:
            return before, f"it was replaced by another process after version {version} was prepared"
        # it serves nobody that would have to be moved
        if before is ReplicaState.STARTING:
            return before, None
        # drained first: a mode without frozen requests
        if self._swapping.mode == "drain" and (reason := self._drain(entry, replica)):
            self._move(entry, replica, before)
            return before, reason
        with self._table.changed:
            if entry.state in SYNCABLE and self._move(entry, replica, ReplicaState.SYNCING):
                return before, None
            return before, f"the replica is {entry.state.name}"

    def _drain(self, entry: TableEntry, replica: Replica) -> str:
        """Wait until a replica has no request; return why it still has some, or an empty string."""

        def is_over() -> bool:
            return entry.inflight == 0 or entry.state in GONE or entry.replica is not replica

        with self._table.changed:
            self._move(entry, replica, ReplicaState.DRAINING)
            # a paused engine finishes nothing, and the wait would last to its deadline
            self._table.changed.wait_for(lambda: is_over() or self.engine.is_frozen, self._swapping.timeout_seconds)
            if is_over():
                return ""
            if not self.engine.is_frozen:
                return "requests did not finish in time to drain"
            return (
                f"the engine is paused, so its {entry.inflight} requests in flight cannot finish: resume() it, or use "
                "mode='hot_swap'"
            )

    def _swap(self, entry: TableEntry, replica: Replica, published: Published) -> tuple[SwapReport, int, bool]:
        """Swap, with one retry; a replica that does not answer is not asked again."""
        report, manifest = SwapReport(error="not tried"), published.manifest
        assert manifest is not None

        def swap() -> SwapReport:
            return replica.call(
                Engine.swap_weights,
                self._swapping.timeout_seconds,
                published.version,
                published.digest,
                pause=PAUSES[self._swapping.mode],
                clear_cache=self._swapping.kv == "recompute",
                canary=published.canary,
                patience=self._swapping.timeout_seconds,
            )

        # a swap that was rejected leaves the old weights or none; the same bytes are loaded again once
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._naming_timeouts():
                    report = self.transport.swapping(replica, manifest, swap)
            except ReplicaDiedError as error:
                # its supervisor need not find out by itself
                self._table.mark_dead(entry.index, str(error), replica)
                return SwapReport(error=_words(error)), attempt, False
            except (EngineError, WeightSyncError, ValueError) as error:
                return SwapReport(error=_words(error)), attempt, False
            # it worked, or nothing was touched
            if report.error is None or not report.started:
                return report, attempt, report.error is not None
        return report, ATTEMPTS, True

    def _settle(
        self, entry: TableEntry, replica: Replica, version: int, before: ReplicaState, swap: SwapReport
    ) -> str | None:
        """Put a replica back into service, or quarantine it; return why it does not hold the version."""
        if not swap.started:  # its old weights are intact; a replica that never served has none of ours
            if before in SYNCABLE and self._move(entry, replica, ReplicaState.SERVING):
                self._move(entry, replica, before)
            return swap.error
        if swap.error is not None:
            self._end(entry, replica)
            return swap.error
        with self._table.changed:
            if not self._move(entry, replica, ReplicaState.SERVING):
                return "the replica died after its swap"
            # under the same lock: no request may see it serve the version before
            self._table.set_version(entry.index, version)
            # it was leaving when the update came, and goes on with that
            if before is ReplicaState.DRAINING:
                self._move(entry, replica, before)
        return None

    def _end(self, entry: TableEntry, replica: Replica) -> None:
        self._move(entry, replica, ReplicaState.QUARANTINED)
        replica.shutdown()

    def _move(self, entry: TableEntry, replica: Replica, state: ReplicaState) -> bool:
        """Set a state, unless the replica was marked dead or replaced meanwhile."""
        with self._table.changed:
            # a supervisor may have put a new process at this index, which is its business
            if entry.replica is not replica or entry.state in GONE:
                return False
            if entry.state is not state:
                self._table.set_state(entry.index, state)
            return True

    def check_serving(self, report: SyncReport, lock: threading.Condition) -> SyncReport:
        """Check that enough replicas hold a version that failed in some; a replica that died is waited for.

        Its supervisor restarts it, and then has it load the version from the store.
        """
        begun, faults = time.monotonic(), self.engine.faults
        # a restart, and the load after it
        longest = faults.start + self._swapping.timeout_seconds
        while failed := report.failed:
            # a failed one may hold another sender's version of that number
            holding = sum(
                entry.state in SYNCABLE and entry.version >= report.version and entry.index not in failed
                for entry in self._table
            )
            needed = self._swapping.must_hold(self._members)
            if holding >= needed:
                break
            waited = time.monotonic() - begun
            if waited > longest or not any(self._may_come(one, waited) for one in report.replicas if one.error):
                words = f"fewer than {needed} replicas hold version {report.version}: {failed}"
                raise WeightSyncError(words + self._causes(failed), report)
            # gives up the sender's lock: the supervisor's own update of that replica needs it
            lock.wait(RESTART_POLL_SECONDS)
            # what failed here may have come back with the version since
            report = replace(report, replicas=tuple(self._latest(one, report.version) for one in report.replicas))
        return report

    def _may_come(self, one: ReplicaSync, waited: float) -> bool:
        """Whether a replica that failed will be restarted, or a death may not have been noticed yet."""
        entry = self._table[one.replica]
        # weights that a replica has rejected twice are rejected again
        if one.rejected or entry.recovery is not Recovery.SUPERVISOR:
            return False
        return entry.state not in SYNCABLE or waited < NOTICE_SECONDS

    def _latest(self, one: ReplicaSync, version: int) -> ReplicaSync:
        """Return how a replica got a version after it had failed, if it did."""
        held, outcome = self._outcomes.get(one.replica, (version, one))
        return outcome if one.error and held >= version and outcome.error is None else one

    def _causes(self, failed: Iterable[int]) -> str:
        """Return for each replica that is gone why, where its log is, and why it is not restarted."""
        gone = [entry for index in failed if (entry := self._table[index]).state not in SYNCABLE]
        if not gone:
            return ""
        causes = [f". Replica {one.index}: {one.last_error}. Its log: {one.replica.log_path}" for one in gone]
        faults = self.engine.faults
        return "".join(causes) + (
            f". Restarts are bounded by faults=FaultPolicy(restart={faults.restart}, max_restarts="
            f"{faults.max_restarts}, start={faults.start:g}) of the engine"
        )

    def serves(self, index: int) -> None:
        """Put a replica into service that already holds the newest weights."""
        entry = self._table[index]
        self._move(entry, entry.replica, ReplicaState.SERVING)


def _tried(ask: Callable[[], T]) -> T | TorchRLMoEError:
    """Return a replica's reply, or its error."""
    try:
        return ask()
    except TorchRLMoEError as error:
        return error
    except ValueError as error:  # a ManifestMismatch arrives so from another process
        return ManifestMismatch(str(error))
    except (RuntimeError, OSError) as error:  # of a socket, or of a replica that is not started yet
        return WeightSyncError(f"{type(error).__name__}: {error}")


def _words(error: BaseException) -> str:
    plain = type(error) in (EngineError, WeightSyncError)
    return str(error) if plain else f"{type(error).__name__}: {error}"
