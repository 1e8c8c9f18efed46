"""Bringing replicas to a version: each checks it while it serves, then a few at a time are swapped.

A replica takes no new requests while its weights are swapped; the others go on serving. A failure that its old weights
survive leaves it serving them; after any other the swap is tried once more, and a replica that fails twice is
quarantined: never resumed, never routed to, and its process ended, so that requests frozen in it fail instead of
waiting.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from torchrl_moe._errors import (
    EngineError,
    ManifestMismatch,
    ReplicaDiedError,
    SyncTimeout,
    TorchRLMoEError,
    WeightSyncError,
)
from torchrl_moe.modules.backends.replica import PauseMode, StageReport, SwapReport
from torchrl_moe.modules.serving.roster import RosterEntry
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.weight_update.options import SwapOptions
from torchrl_moe.weight_update.publishing import Published
from torchrl_moe.weight_update.report import ReplicaSync
from torchrl_moe.weight_update.transports.transport import StageOptions, Transport

__all__ = ["LATE", "SYNCABLE", "RollingSwap", "Staged"]

ATTEMPTS = 2
BAR_SECONDS = 5.0  # until a progress bar appears
SYNCABLE = frozenset({ReplicaState.SERVING, ReplicaState.DRAINING})
LATE = SYNCABLE | {ReplicaState.STARTING}  # what may be brought to a version by name
PAUSES: Mapping[str, PauseMode] = {"hot_swap": "keep", "drain": "keep", "abort_resume": "abort"}

Staged = StageReport | TorchRLMoEError


class RollingSwap:
    """The replicas of one engine, and how versions come to them.

    Args:
        engine: the service.
        transport: that takes versions there.
        staging: how replicas prepare a version.
        swapping: how they change over.
    """

    def __init__(
        self, engine: GenerationService, transport: Transport, staging: StageOptions, swapping: SwapOptions
    ) -> None:
        self.engine, self.transport = engine, transport
        self._staging, self._swapping = staging, swapping
        self._roster = engine.roster
        self._opened: weakref.WeakSet[Any] = weakref.WeakSet()  # replicas that know the transport
        self._away: set[int] = set()  # replicas whose turn it is

    # -- before the swap --------------------------------------------------------------------------------------------

    def open(self, entry: RosterEntry) -> None:
        """Make a replica ready to take versions."""
        with self._naming_timeouts():
            self.transport.open(entry.replica, self._swapping.timeout_seconds)
        self._opened.add(entry.replica)

    def stage(self, published: Published, replicas: Sequence[int] | None) -> dict[int, Staged]:
        """Let replicas, all that serve by default, prepare a version at the same time; return what each says."""
        takes = SYNCABLE if replicas is None else LATE
        entries = list(self._roster) if replicas is None else [self._roster[index] for index in replicas]
        with ThreadPoolExecutor(max_workers=max(len(entries), 1), thread_name_prefix="weight-stage") as pool:
            found = pool.map(lambda entry: self._stage(entry, published, takes), entries)
            return {entry.index: staged for entry, staged in zip(entries, found, strict=True)}

    def _stage(self, entry: RosterEntry, published: Published, takes: frozenset[ReplicaState]) -> Staged:
        if entry.state not in takes or published.manifest is None:
            return WeightSyncError(f"the replica is {entry.state.name}")
        try:
            if entry.replica not in self._opened:
                self.open(entry)
            with self._naming_timeouts():
                return self.transport.stage(
                    entry.replica, published.manifest, self._staging, self._swapping.timeout_seconds
                )
        except TorchRLMoEError as error:
            return error
        except ValueError as error:  # so a ManifestMismatch arrives from another process
            return ManifestMismatch(str(error))

    @contextmanager
    def _naming_timeouts(self) -> Iterator[None]:
        """Give a replica that did not answer the name of what it is."""
        started = time.monotonic()
        try:
            yield
        except ReplicaDiedError:
            raise
        except EngineError as error:
            if time.monotonic() - started < 0.95 * self._swapping.timeout_seconds:
                raise
            raise SyncTimeout(str(error)) from error

    # -- the swap ---------------------------------------------------------------------------------------------------

    def swap(self, published: Published, staged: Mapping[int, Staged], indices: Sequence[int]) -> list[ReplicaSync]:
        """Swap a version into replicas that have prepared it, a few at a time; return what became of each."""
        bar = tqdm(
            total=len(indices), desc=f"weights v{published.version}", unit="replica", disable=None, delay=BAR_SECONDS
        )

        def bring(index: int) -> ReplicaSync:
            outcome = self._bring(index, published, staged[index])
            bar.update()
            return outcome

        with bar, ThreadPoolExecutor(self._swapping.rolling, thread_name_prefix="weight-swap") as pool:
            return list(pool.map(bring, indices))

    def _bring(self, index: int, published: Published, staged: Staged) -> ReplicaSync:
        """Bring one replica to a version, or say why it was not; until it is swapped, its old version goes on."""
        if isinstance(staged, TorchRLMoEError):
            return ReplicaSync(replica=index, error=_words(staged))
        began = time.perf_counter()
        outcome = ReplicaSync(
            replica=index,
            fetched=staged.fetched,
            staged=staged.loaded,
            stage=staged.stage,
            reason=staged.reason,
            swap_at=began - published.began,
        )
        assert published.manifest is not None
        if staged.digest != published.manifest.digest:
            return replace(outcome, error="the replica found other bytes than were published: is the store shared?")
        with self._turn(index):
            before, error = self._take_out(index)
            outcome = replace(outcome, waited=time.perf_counter() - began, error=error)
            if error is not None:
                return outcome
            try:
                swap, attempts = self._swap(index, published)
            except BaseException:  # whatever it was, nobody knows what the replica holds
                self._move(index, ReplicaState.QUARANTINED)
                raise
            self._settle(index, published.version, before, swap)
        return replace(
            outcome, paused=swap.paused_seconds, loaded=swap.loading_seconds, attempts=attempts, error=swap.error
        )

    @contextmanager
    def _turn(self, index: int) -> Iterator[None]:
        """Wait until the replica may be away: one always may, more while enough others serve."""
        changed, floor = self._roster.changed, self._swapping.must_serve(len(self._roster))

        def may_go() -> bool:
            serving = {e.index for e in self._roster if e.state is ReplicaState.SERVING} - self._away
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

    def _take_out(self, index: int) -> tuple[ReplicaState, str | None]:
        """Take a replica out of service; return what it was, and why it cannot be taken."""
        before = self._roster[index].state
        if before not in LATE:
            return before, f"the replica is {before.name}"
        if self._swapping.mode == "drain" and before in SYNCABLE and not self._drain(index):
            self._move(index, before)
            return before, "requests did not finish in time to drain"
        if before in SYNCABLE and not self._move(index, ReplicaState.SYNCING):
            return before, "the replica is DEAD"
        return before, None

    def _drain(self, index: int) -> bool:
        entry, changed = self._roster[index], self._roster.changed
        self._move(index, ReplicaState.DRAINING)
        with changed:
            return changed.wait_for(
                lambda: entry.inflight == 0 or entry.state is ReplicaState.DEAD, self._swapping.timeout_seconds
            )

    def _swap(self, index: int, published: Published) -> tuple[SwapReport, int]:
        """Swap, and once more if it failed; a replica that does not answer is not asked again."""
        options = {
            "version": published.version,
            "pause": PAUSES[self._swapping.mode],
            "clear_cache": self._swapping.kv == "recompute",
            "canary": published.canary,
        }
        report = SwapReport(error="not tried")
        for attempt in range(1, ATTEMPTS + 1):
            try:
                with self._naming_timeouts():
                    report = self._roster[index].replica.call("swap_weights", self._swapping.timeout_seconds, **options)
            except ReplicaDiedError as error:
                self._roster.mark_dead(index)
                return SwapReport(error=_words(error)), attempt
            except (EngineError, WeightSyncError, ValueError) as error:
                return SwapReport(error=_words(error)), attempt
            if report.error is None or not report.started:
                return report, attempt
        return report, ATTEMPTS

    def _settle(self, index: int, version: int, before: ReplicaState, swap: SwapReport) -> None:
        """Put a replica back into service, or out of it for good."""
        if not swap.started:  # its old weights are whole; a replica that never served has none of ours
            if before in SYNCABLE and self._move(index, ReplicaState.SERVING):
                self._move(index, before)
            return
        if swap.error is not None:
            self._move(index, ReplicaState.QUARANTINED)
            self._roster[index].replica.shutdown()
            return
        with self._roster.changed:
            self._roster.set_version(index, version)
            if self._move(index, ReplicaState.SERVING) and before is ReplicaState.DRAINING:
                self._move(index, before)

    def _move(self, index: int, state: ReplicaState) -> bool:
        """Set a state, unless the replica died meanwhile, which anyone may have noted."""
        with self._roster.changed:
            if self._roster[index].state is ReplicaState.DEAD:
                return False
            if self._roster[index].state is not state:
                self._roster.set_state(index, state)
            return True

    def serves(self, index: int) -> None:
        """Put a replica into service that already holds the newest weights."""
        self._move(index, ReplicaState.SERVING)


def _words(error: BaseException) -> str:
    plain = type(error) in (EngineError, WeightSyncError)
    return str(error) if plain else f"{type(error).__name__}: {error}"
