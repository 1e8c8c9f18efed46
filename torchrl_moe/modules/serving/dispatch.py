"""One call's requests on their way through the service: placed by lease, handed over, awaited, aborted when late.

Requests bound for one replica travel in one message. Each holds one lease, given back when its future resolves, and
every future resolves: with a completion, with what an abort left of it, or with its replica's death.

Sending and waiting come in two kinds, for threads and for event loops; neither holds a thread of the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import Future, as_completed
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass

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
    """Where a call's requests may go: a replica by name, the sessions they belong to, the version they need."""

    actor_index: int | None = None
    session_ids: Sequence[str] | None = None
    min_version: int | None = None


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
            for position in range(len(self._requests)):
                leases.append(self._lease(position, wait))
            self._where = [lease.index for lease in leases]
            for index in dict.fromkeys(self._where):
                positions = [i for i, where in enumerate(self._where) if where == index]
                futures = self._roster[index].replica.submit([self._requests[i] for i in positions])
                for i, future in zip(positions, futures, strict=True):
                    future.add_done_callback(lambda _, i=i: self._over(i, leases[i]))
                    handed[i] = future
        except BaseException:
            self._take_back(leases, handed)
            raise
        self.futures = [handed[i] for i in range(len(leases))]

    async def send_async(self) -> None:
        """:meth:`send`, waiting in the event loop; a cancelled wait leaves nothing behind."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed under its own tasks
                loop.call_soon_threadsafe(changed.set)

        with self._roster.listening(wake):
            while True:
                changed.clear()
                try:
                    return self.send(wait=False)
                except (NoReplicaError, StaleReplicaError):
                    if not self._is_worth_waiting():
                        raise
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(changed.wait(), self._seconds_left())

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    def _is_worth_waiting(self) -> bool:
        return self._seconds_left() != 0.0 and any(entry.state in COMING_BACK for entry in self._roster)

    def _lease(self, position: int, wait: bool) -> Lease:
        with self._roster.changed:
            while True:
                try:
                    return self._acquire(position)
                except (NoReplicaError, StaleReplicaError):
                    if not wait or not self._is_worth_waiting():
                        raise
                    self._roster.changed.wait(self._seconds_left())

    def _acquire(self, position: int) -> Lease:
        where = self._placement
        if where.actor_index is not None:
            return self._balancer.acquire_at(where.actor_index, where.min_version)
        request = self._requests[position]
        prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
        session = None if where.session_ids is None else where.session_ids[position]
        return self._balancer.acquire(prompt, session, where.min_version)

    def _over(self, position: int, lease: Lease) -> None:
        lease.release()
        self._roster.close_ids([self._requests[position].request_id])

    def _take_back(self, leases: Sequence[Lease], handed: dict[int, Future[Completion]]) -> None:
        """Undo half a :meth:`send`. A message may have left before its futures came back: abort by id, everywhere."""
        for index in dict.fromkeys(self._where):
            ids = [r.request_id for r, where in zip(self._requests, self._where, strict=True) if where == index]
            self._roster[index].replica.abort(ids)
        for lease in leases:
            lease.release()
        self._roster.close_ids(r.request_id for i, r in enumerate(self._requests) if i not in handed)

    # -- awaiting ---------------------------------------------------------------------------------------------------

    def wait(self, use_tqdm: bool) -> list[Completion]:
        """Wait for all requests, in input order; whatever ends the wait early aborts the rest.

        Raises:
            GenerationTimeout: some were not finished in time; ``.partial`` holds those that were.
            ValueError: the engine refused a request; the message names its position.
            EngineError: a replica failed a request.
        """
        try:
            with tqdm(total=len(self.futures), desc="generate", unit="req", disable=not use_tqdm) as bar:
                tokens = 0
                for future in as_completed(self.futures, self._seconds_left()):
                    if future.exception() is not None:
                        break
                    if use_tqdm:
                        tokens += sum(len(output.token_ids) for output in future.result().outputs)
                        bar.set_postfix_str(f"{tokens} tok", refresh=False)
                    bar.update()
        except FutureTimeout:
            done = self._done()
            self.abort()
            self._check_late(done)
        except BaseException:
            self.abort()
            raise
        return self._results()

    async def wait_async(self) -> list[Completion]:
        """:meth:`wait` in the event loop; cancelling it aborts the requests."""
        awaited = [asyncio.wrap_future(future) for future in self.futures]
        try:
            _, late = await asyncio.wait(awaited, timeout=self._seconds_left(), return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            self.abort(wait=False)
            raise
        if late:
            done = self._done()
            self.abort(wait=False)
            await asyncio.wait(awaited, timeout=ABORT_GRACE_SECONDS)
            self._check_late(done)
        return self._results()
