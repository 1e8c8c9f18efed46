"""One call's requests on their way through the service: placed by lease, handed over, awaited, aborted when late.

Requests bound for one replica travel in one message. Each holds one lease, given back when its future resolves, and
every future resolves: with a completion, with what an abort left of it, or with its replica's death.

Sending and waiting come in two kinds, for threads and for event loops; the latter hold no thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from typing import Any

from tqdm.auto import tqdm

from torchrl_moe._errors import GenerationTimeout, NoReplicaError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.load_balancer import Lease, LoadBalancer
from torchrl_moe.modules.serving.roster import Roster
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["Dispatch", "Placement"]

ABORT_GRACE_SECONDS = 5.0
COMING_BACK = {ReplicaState.STARTING, ReplicaState.DRAINING, ReplicaState.SYNCING}


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a call's requests may go: a replica by name, the version they need; and what strategies are told.

    ``session_ids`` and ``group_ids`` hold one name per request.
    """

    actor_index: int | None = None
    session_ids: Sequence[str] | None = None
    min_version: int | None = None
    group_ids: Sequence[str] | None = None
    request_context: Mapping[str, Any] | None = None


class _Bell:
    """Wakes a task of this event loop from any thread."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._rung = asyncio.Event()

    def ring(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed under its own tasks
            self._loop.call_soon_threadsafe(self._rung.set)

    async def wait(self, seconds: float | None) -> None:
        """Wait until it rings, or for so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        self._rung.clear()


class Dispatch:
    """The requests of one call.

    Args:
        balancer: gives the leases.
        requests: in input order.
        placement: where they may go.
        timeout: seconds that each request has, placement included; ``None`` for ever.
    """

    def __init__(
        self, balancer: LoadBalancer, requests: Sequence[Request], placement: Placement, timeout: float | None
    ) -> None:
        self._balancer = balancer
        self._roster: Roster = balancer.roster
        self._requests = list(requests)
        self._placement = placement
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._where: list[int] = []
        self.futures: list[Future[Completion]] = []

    # -- placing ----------------------------------------------------------------------------------------------------

    def send(self, wait: bool = True) -> None:
        """Place all requests and hand them over: all, or none.

        Args:
            wait: whether to wait, to the deadline, for replicas that are about to serve again.

        Raises:
            NoReplicaError: no replica serves, and none will in time.
            StaleReplicaError: none holds the version asked for, and none will in time.
            ValueError: a request id is in flight already.
        """
        self._roster.open_ids(request.request_id for request in self._requests)
        leases: list[Lease] = []
        handed: dict[int, Future[Completion]] = {}
        try:
            leases = self._lease_all(wait)
            self._where = [lease.index for lease in leases]
            for index in dict.fromkeys(self._where):
                positions = [i for i, where in enumerate(self._where) if where == index]
                futures = self._roster[index].replica.submit([self._requests[i] for i in positions])
                for i, future in zip(positions, futures, strict=True):
                    handed[i] = future
                    future.add_done_callback(lambda _, i=i: self._over(i, leases[i]))
        except BaseException:
            self._take_back(leases, handed)
            if wait:
                wait_futures(handed.values(), ABORT_GRACE_SECONDS)
            raise
        self.futures = [handed[i] for i in range(len(leases))]

    async def send_async(self) -> None:
        """:meth:`send`, waiting in the event loop; a cancelled wait leaves nothing behind."""
        bell = _Bell()
        with self._roster.listening(bell.ring):
            while True:
                try:
                    return self.send(wait=False)
                except (NoReplicaError, StaleReplicaError):
                    if not self._is_worth_waiting():
                        raise
                await bell.wait(self._seconds_left())

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def _is_worth_waiting(self) -> bool:
        named = self._placement.actor_index
        entries = self._roster if named is None else [self._roster[named]]
        return self._seconds_left() != 0.0 and any(entry.state in COMING_BACK for entry in entries)

    def _lease_all(self, wait: bool) -> list[Lease]:
        """Take a lease for every request, or none: one held while others wait would keep a replica from draining."""
        with self._roster.changed:
            # a group that gets no lease may yet begin on a newer version
            groups = [g for g in self._placement.group_ids or () if not self._balancer.has_group(g)]
            while True:
                leases: list[Lease] = []
                try:
                    for position in range(len(self._requests)):
                        leases.append(self._acquire(position))
                    return leases
                except BaseException as error:
                    for lease in leases:
                        lease.release()
                    self._balancer.forget_groups(groups)
                    known = isinstance(error, NoReplicaError | StaleReplicaError)
                    if not known or not wait or not self._is_worth_waiting():
                        raise
                self._roster.changed.wait(self._seconds_left())

    def _acquire(self, position: int) -> Lease:
        where, request = self._placement, self._requests[position]
        prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
        session = None if where.session_ids is None else where.session_ids[position]
        group = None if where.group_ids is None else where.group_ids[position]
        if where.actor_index is not None:
            return self._balancer.acquire_at(where.actor_index, where.min_version, prompt, session, group)
        return self._balancer.acquire(prompt, session, where.min_version, where.request_context, group)

    def _over(self, position: int, lease: Lease) -> None:
        lease.release()
        self._roster.close_ids([self._requests[position].request_id])

    def _take_back(self, leases: Sequence[Lease], handed: dict[int, Future[Completion]]) -> None:
        """Undo half a :meth:`send`. A message may have left without its futures having come back: abort by id."""
        for i, lease in enumerate(leases):
            if i not in handed:
                lease.release()
        self._roster.close_ids(request.request_id for i, request in enumerate(self._requests) if i not in handed)
        for index in dict.fromkeys(self._where):
            ids = [r.request_id for r, where in zip(self._requests, self._where, strict=True) if where == index]
            self._roster[index].replica.abort(ids)

    # -- awaiting ---------------------------------------------------------------------------------------------------

    def wait(self, use_tqdm: bool) -> list[Completion]:
        """Wait for all requests, in input order; whatever ends the wait early aborts the rest.

        Raises:
            GenerationTimeout: some were not finished in time; ``.partial`` holds those that were.
            ValueError: the engine refused a request; the message names its position.
            EngineError: a replica failed a request.
        """
        try:
            self._watch(use_tqdm)
        except FutureTimeout:
            done = self._done()
            self.abort()
            self._check_late(done)
        except BaseException:
            self.abort()
            raise
        return self._results()

    def _watch(self, use_tqdm: bool) -> None:
        """Wait for all, or for the first that fails."""
        with tqdm(total=len(self.futures), desc="generate", unit="req", disable=not use_tqdm) as bar:
            tokens, started = 0, time.monotonic()
            for future in as_completed(self.futures, self._seconds_left()):
                if future.exception() is not None:
                    return
                if use_tqdm:
                    tokens += sum(len(output.token_ids) for output in future.result().outputs)
                    seconds = max(time.monotonic() - started, 1e-9)
                    bar.set_postfix_str(f"{tokens / seconds:.0f} tok/s", refresh=False)
                bar.update()

    async def wait_async(self) -> Completion:
        """:meth:`wait` in the event loop, for the only request of a call; cancelling the wait aborts the request."""
        (future,) = self.futures
        bell = _Bell()
        future.add_done_callback(bell.ring)
        try:
            await bell.wait(self._seconds_left())
        except asyncio.CancelledError:
            self.abort(wait=False)
            raise
        done = self._done()
        if not future.done():
            self.abort(wait=False)
            await bell.wait(ABORT_GRACE_SECONDS)
        self._check_late(done)
        return future.result()

    def _done(self) -> list[bool]:
        return [future.done() for future in self.futures]

    def _check_late(self, done: Sequence[bool]) -> None:
        """Raise if requests were not ``done`` at the deadline."""
        if all(done):
            return
        partial = [
            future.result() if was_done and future.exception() is None else None
            for future, was_done in zip(self.futures, done, strict=True)
        ]
        raise GenerationTimeout(
            f"{done.count(False)} of {len(done)} requests were not finished within {self._timeout:g} s and were "
            "aborted; what had finished is in .partial. Raise timeout_seconds or lower max_tokens.",
            partial,
        ) from None

    def _results(self) -> list[Completion]:
        failed = [(i, f.exception()) for i, f in enumerate(self.futures) if f.done() and f.exception() is not None]
        if not failed:
            return [future.result() for future in self.futures]
        self.abort()
        position, error = failed[0]
        if isinstance(error, ValueError):
            raise ValueError(f"request {position} was refused: {error}") from error
        assert error is not None
        raise error

    def abort(self, wait: bool = True) -> None:
        """Abort what is not finished; ``wait`` a moment for the replicas to have let go of it."""
        open_ids: dict[int, list[str]] = {}
        for request, where, future in zip(self._requests, self._where, self.futures, strict=False):
            if not future.done():
                open_ids.setdefault(where, []).append(request.request_id)
        for index, ids in open_ids.items():
            self._roster[index].replica.abort(ids)
        if wait:
            wait_futures(self.futures, ABORT_GRACE_SECONDS)
