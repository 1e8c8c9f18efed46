"""The replicas of a service: start and end, and commands to all of them at the same time.

They are used only through the :class:`~torchrl_moe.modules.backends.replica.Replica` protocol.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import TypeVar

from torchrl_moe.errors import EngineError, NoReplicaError, ReplicaDiedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import PauseMode, Replica, ReplicaInfo
from torchrl_moe.modules.serving.candidates import GONE, FaultPolicy, Recovery, ReplicaState
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.replica_table import ReplicaTable, TableEntry
from torchrl_moe.modules.serving.supervisor import WORDS_SECONDS, Bring, Supervisor

__all__ = ["CALL_SECONDS", "SILENT", "Fleet"]

T = TypeVar("T")
CALL_SECONDS = 60.0
SILENT = frozenset({ReplicaState.DEAD, ReplicaState.STARTING})
"""States in which a replica answers no command."""


class Fleet:
    """N replicas, and operations on all of them; thread-safe."""

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
        self.bring: Bring | None = None
        self._make_replica = make_replica
        self._paused = False  # by the user
        self.is_frozen = False
        self._sleep_level: int | None = None  # the same
        self._pausing = threading.Lock()
        self._adding = threading.Lock()
        self._supervisor = Supervisor(
            self.table, faults, loop, make_replica, lambda: self.bring, self._pause_as_the_others
        )

    # -- life -------------------------------------------------------------------------------------------------------

    def wait_ready(self, entry: TableEntry, seconds: float) -> None:
        """Wait until a replica that was started is ready."""
        self.infos.append(entry.replica.wait_ready(seconds))

    def serve(self, entry: TableEntry) -> None:
        """Let a ready replica serve: at once, or, if another has newer weights, once it has the newest."""
        if entry.version < self.table.latest_version:
            self._supervisor.await_update(entry)
        else:
            self.table.set_state(entry.index, ReplicaState.SERVING)

    def supervise(self) -> None:
        """Notice deaths and stalls from now on, and bring replicas back."""
        self._supervisor.start()

    @property
    def supervisor_error(self) -> str | None:
        """Why the supervisor's last check failed; ``None`` if it succeeded."""
        return self._supervisor.error

    def end(self, end_one: Callable[[Replica], object] = lambda replica: replica.shutdown()) -> None:
        """End every replica, at the same time. Idempotent."""
        self._supervisor.stop()
        for entry in self.table:
            self.table.mark_dead(entry.index)
        with ThreadPoolExecutor(max_workers=max(len(self.table), 1)) as pool:
            list(pool.map(lambda entry: end_one(entry.replica), self.table))
        self._supervisor.join()

    @contextlib.contextmanager
    def _noting_deaths(self) -> Iterator[None]:
        try:
            yield
        except ReplicaDiedError:
            self.note_deaths()
            raise

    def note_deaths(self) -> None:
        """Mark replicas that have died and are not marked yet."""
        for entry in self.table:
            replica = entry.replica
            if entry.state not in SILENT and not replica.is_alive():
                self.table.mark_dead(entry.index, _reason_of_death(replica), replica)

    # -- more and fewer replicas ------------------------------------------------------------------------------------

    def add(self, count: int, seconds: float) -> list[int]:
        """Start more replicas, and wait until they serve, with the current weights, and paused if the others are."""
        if count < 1:
            raise ValueError(f"add_replicas: the number of replicas must be at least 1, got {count}")
        if self._make_replica is None:
            raise RuntimeError("add_replicas: this service cannot make replicas: it was given its replicas")
        deadline = time.monotonic() + seconds
        entries: list[TableEntry] = []
        try:
            for _ in range(count):
                entries.append(self._add_one(self._make_replica))
            with ThreadPoolExecutor(max_workers=count) as pool:
                waits = [pool.submit(self._supervisor.admit, entry, deadline) for entry in entries]
                try:
                    for wait in as_completed(waits):
                        wait.result()
                except BaseException:
                    self._take_away(entries)  # which ends the other waits
                    raise
        except BaseException:
            self._take_away(entries)
            raise
        return [entry.index for entry in entries]

    def _add_one(self, make: Callable[[int], Replica]) -> TableEntry:
        """Add a replica to the table and start it. One at a time: each gets its own index and devices."""
        with self._adding:
            (entry,) = self.table.add([make(self.table.next_index)])
        try:
            self._supervisor.begin(entry)
        except BaseException:
            self._take_away([entry])
            raise
        return entry

    def remove(self, index: int, drain: bool, seconds: float) -> None:
        """End a replica for good and remove it."""
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
            self._supervisor.release(entry)
        with ThreadPoolExecutor(max_workers=max(len(entries), 1)) as pool:
            list(pool.map(lambda entry: entry.replica.shutdown(), entries))
        for entry in entries:
            self.table.remove(entry.index)

    # -- commands to all --------------------------------------------------------------------------------------------

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
        with ThreadPoolExecutor(max_workers=len(alive)) as pool:
            futures = [pool.submit(command, entry.replica) for entry in alive]
        with self._noting_deaths():
            return [future.result() for future in futures]

    def pause(self, mode: PauseMode, clear_cache: bool, seconds: float) -> None:
        """Stop scheduling on all; one that is restarted meanwhile comes back paused."""
        _check_mode(mode)
        self._check_awake("pause")
        before = self._note_pause(True)
        self._freeze(self.is_frozen or mode == "keep")  # otherwise requests in flight finish, or are cut, first
        try:
            self.on_all(lambda replica: replica.call(Engine.pause, seconds, mode, clear_cache))
            self._freeze(True)
        except BaseException:
            if not before:
                self._take_back_pause(seconds)
            raise
        if clear_cache:
            self._forget_prefixes()

    def resume(self, seconds: float) -> None:
        """Resume scheduling on all."""
        self._check_awake("resume")
        self._note_pause(False)
        self._freeze(False)
        self.on_all(lambda replica: replica.call(Engine.resume, seconds))

    def _freeze(self, frozen: bool) -> None:
        """Note whether requests go on, and tell those that wait for that."""
        with self.table.changed:
            self.is_frozen = frozen
            self.table.changed.notify_all()

    def sleep(self, level: int, mode: PauseMode, seconds: float) -> None:
        """Release the memory of all; a replica that is restarted meanwhile does so too, once it has started."""
        _check_mode(mode)
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
        """Undo :meth:`sleep` on all, or part of it."""
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

    def _take_back_pause(self, seconds: float) -> None:
        """Resume the replicas that a pause has reached; one that it still waits for also takes nothing new."""
        with contextlib.suppress(EngineError, RuntimeError):  # none is alive, or the service was shut down
            self.resume(seconds)

    def _note_pause(self, paused: bool) -> bool:
        """Store the requested pause before the replicas are told; return the previous one."""
        with self._pausing:
            before, self._paused = self._paused, paused
            return before

    def _pause_as_the_others(self, replica: Replica, serve: Callable[[], bool]) -> bool:
        """Pause a replica if all are, then have it serve. Under the lock: a resume comes before this, or reaches it.

        The same holds for sleep.
        """
        with self._pausing:
            if self._paused:
                replica.call(Engine.pause, CALL_SECONDS, "keep", False)
            if self._sleep_level is not None:
                replica.call(
                    Engine.sleep, CALL_SECONDS, 1, "keep"
                )  # level 2 would drop the weights that it just loaded
            return serve()

    def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; return False if a replica could not, because requests are running."""
        done = all(self.on_all(lambda replica: replica.call(Engine.reset_prefix_cache, CALL_SECONDS)))
        self._forget_prefixes()
        return done

    def _forget_prefixes(self) -> None:
        for entry in self.table:
            self.table.forget_prefixes(entry.index)


def _check_mode(mode: str) -> None:
    if mode not in ("keep", "wait", "abort"):
        raise ValueError(f"mode must be 'keep', 'wait' or 'abort', got {mode!r}")


def _reason_of_death(replica: Replica) -> str | None:
    """Return why a replica died; ``None`` if it gave no reason within a second."""
    deadline = time.monotonic() + WORDS_SECONDS
    while replica.death is None and time.monotonic() < deadline:
        time.sleep(0.01)
    words: str | None = replica.death
    return words
