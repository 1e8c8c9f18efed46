"""One call's requests on their way through the service: placed by lease, handed over, awaited, aborted when late.

Requests bound for one replica travel in one message. Each holds one lease, given back when its future resolves, and
every future resolves: with a completion, with what an abort left of it, or with its replica's death.
"""

from __future__ import annotations

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
        """Place all requests and hand them over.

        Args:
            wait: whether to wait, to the deadline, for replicas that are about to serve again.

        Raises:
            NoReplicaError: no replica serves, and none will in time.
            StaleReplicaError: none holds the version asked for, and none will in time.
        """
        leases: list[Lease] = []
        try:
            for position in range(len(self._requests)):
                leases.append(self._lease(position, wait))
        except BaseException:
            for lease in leases:
                lease.release()
            raise
        self._where = [lease.index for lease in leases]
        slots: list[Future[Completion] | None] = [None] * len(leases)
        for index in dict.fromkeys(self._where):
            positions = [i for i, where in enumerate(self._where) if where == index]
            futures = self._roster[index].replica.submit([self._requests[i] for i in positions])
            for i, future in zip(positions, futures, strict=True):
                future.add_done_callback(lambda _, lease=leases[i]: lease.release())
                slots[i] = future
        self.futures = [future for future in slots if future is not None]

    def _lease(self, position: int, wait: bool) -> Lease:
        with self._roster.changed:
            while True:
                try:
                    return self._acquire(position)
                except (NoReplicaError, StaleReplicaError):
                    left = None if self._deadline is None else self._deadline - time.monotonic()
                    coming = any(entry.state in COMING_BACK for entry in self._roster)
                    if not wait or not coming or (left is not None and left <= 0):
                        raise
                    self._roster.changed.wait(left)

    def _acquire(self, position: int) -> Lease:
        where = self._placement
        if where.actor_index is not None:
            return self._balancer.acquire_at(where.actor_index, where.min_version)
        request = self._requests[position]
        prompt = request.prompt if request.prompt_token_ids is None else request.prompt_token_ids
        session = None if where.session_ids is None else where.session_ids[position]
        return self._balancer.acquire(prompt, session, where.min_version)

    # -- awaiting ---------------------------------------------------------------------------------------------------

    def wait(self, use_tqdm: bool) -> list[Completion]:
        """Wait for all requests, in input order; whatever ends the wait early aborts the rest.

        Raises:
            GenerationTimeout: some were not finished in time; ``.partial`` holds those that were.
            ValueError: the engine refused a request; the message names its position.
            EngineError: a replica failed a request.
        """
        left = None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)
        try:
            with tqdm(total=len(self.futures), desc="generate", unit="req", disable=not use_tqdm) as bar:
                tokens, started = 0, time.monotonic()
                for future in as_completed(self.futures, left):
                    if future.exception() is None and use_tqdm:
                        tokens += sum(len(output.token_ids) for output in future.result().outputs)
                        bar.set_postfix_str(f"{tokens / (time.monotonic() - started):.0f} tok/s", refresh=False)
                    bar.update()
                    if future.exception() is not None:
                        break
        except FutureTimeout:
            raise self.late() from None
        except BaseException:
            self.abort()
            raise
        return self._results()

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

    def late(self) -> GenerationTimeout:
        """Abort what is not finished and return the error that says so."""
        done = [future.done() for future in self.futures]
        self.abort()
        partial = [
            future.result() if finished and future.exception() is None else None
            for future, finished in zip(self.futures, done, strict=True)
        ]
        count = sum(entry is None for entry in partial)
        return GenerationTimeout(
            f"{count} of {len(partial)} requests were not finished within {self._timeout:g} s and were aborted; "
            "what had finished is in .partial. Raise timeout_seconds or lower max_tokens.",
            partial,
        )

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
