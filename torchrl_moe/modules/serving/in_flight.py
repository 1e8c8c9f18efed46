"""Requests in flight: what the service keeps of each, from its call to its outcome.

.. code-block:: text

    call ---> admission ---> a replica is chosen ---> in flight ---> answer
              waits for a      |            ^         holds a lease
              place            | none       |              |
                ^              v            |              | the replica died
                |            parked         |              v
                +--- waits for a change     +------- tries again, perhaps
                     of the replica table            alone: see ``suspects``

An abort, or a call that ends early (deadline, Ctrl-C), takes a waiting request out at once; a request in flight ends
with the tokens that its engine returns for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchrl_moe._errors import EngineError, GenerationTimeout, NoReplicaError, ReplicaDiedError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Completion, Request, nothing_yet
from torchrl_moe.modules.serving.balancing.balancer import LoadBalancer
from torchrl_moe.modules.serving.lease import Lease
from torchrl_moe.modules.serving.requests import Placement
from torchrl_moe.modules.serving.resumption import whole
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["Call", "InFlight"]

LOG = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class InFlight:
    """One request of a call, and where it is."""

    call: Call
    position: int
    request: Request
    placement: Placement
    turn: tuple[float, int] | None = None  # in the queue for a place; the lowest is next
    has_place: bool = False
    is_first: bool = False  # of the parked requests with the same needs: it is tried for all
    lease: Lease | None = None  # on the replica that runs it
    refusal: EngineError | None = None  # why no replica took it, the last time
    death: ReplicaDiedError | None = None  # of the replica that had it last
    deaths: int = 0
    met_dead: bool = False  # its replica had died before it was sent there
    number: int = 0  # of the requests that its replica has had
    aborted: bool = False  # by the user, or because its call ends early
    dropped: bool = False  # its call ended early, and waits only briefly for what it has
    outcome: Completion | None = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether its call no longer waits for it."""
        return self.outcome is not None or self.error is not None

    @property
    def finished(self) -> bool:
        """Whether it has its complete answer."""
        return self.outcome is not None and not self.outcome.aborted

    def died(self, error: ReplicaDiedError, counts: bool = True) -> None:
        """Note that its replica died; a removed replica does not count as a death."""
        self.death, self.refusal = error, None
        self.deaths += counts

    def given_up(self) -> ReplicaDiedError:
        """Return the error for a request under which too many replicas died."""
        return ReplicaDiedError(
            f"request {self.position} ({self.request.request_id!r}) was given up: {self.deaths} replicas died under "
            f"it. The last one: {self.death}"
        )

    def not_placed(self) -> EngineError:
        """Return the error for a request that no replica takes: the reason, and an earlier death of its replica."""
        why, death, named = self.refusal, self.death, self.placement.actor_index
        assert why is not None
        table = self.call.balancer.replica_table
        if named is not None and table[named].state is ReplicaState.DEAD:
            words = death or table[named].last_error or "its process is gone"
            return ReplicaDiedError(f"replica {named}, which actor_index names, is dead: {words}")
        text = str(why) if death is None else f"{why}. It had started on another replica: {death}"
        return StaleReplicaError(text) if isinstance(why, StaleReplicaError) else NoReplicaError(text)

    def cut_short(self) -> Completion:
        """Return the answer of a request that was aborted before an engine added to what it resumes."""
        return nothing_yet(self.request)


class Call:
    """The requests of one ``generate``, which end together.

    Args:
        balancer: grants the leases.
        requests: in input order; those with a complete answer are over.
        placements: where each may go.
        timeout: seconds for each request, from now; ``None`` for no limit.
        finished: called with each completion, in the thread of the service's loop.
    """

    __slots__ = (
        "balancer", "deadline", "error", "finished", "has_begun", "is_late", "on_over", "over", "requests", "timeout",
        "timer", "unfinished",
    )  # fmt: skip

    def __init__(
        self,
        balancer: LoadBalancer,
        requests: Sequence[Request],
        placements: Sequence[Placement],
        timeout: float | None = None,
        finished: Callable[[Completion], object] = lambda _: None,
    ) -> None:
        self.balancer = balancer
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.finished = finished
        self.requests = [
            InFlight(self, position, request, placement, outcome=whole(request))
            for position, (request, placement) in enumerate(zip(requests, placements, strict=True))
        ]
        self.unfinished = sum(not request.is_over for request in self.requests)
        self.has_begun = False
        self.is_late = False
        self.error: BaseException | None = None  # of the call as a whole
        self.timer: asyncio.TimerHandle | None = None
        self.over = False
        self.on_over: Callable[[], object] = lambda: None

    def tell(self, completion: Completion) -> None:
        """Report a completion to ``finished``; an error there ends the reports, not the call."""
        try:
            self.finished(completion)
        except Exception as error:
            LOG.exception("the progress of a call cannot be shown any more: %r", error)
            self.finished = lambda _: None

    def end(self) -> None:
        """Release the caller with the current results, once."""
        if self.timer is not None:
            self.timer.cancel()
        if not self.over:
            self.over, self.timer = True, None
            self.on_over()

    def partial(self) -> list[Completion]:
        """Return the outcomes in input order; an aborted request has its tokens so far, one that never started none."""
        return [request.cut_short() if request.outcome is None else request.outcome for request in self.requests]

    def result(self) -> list[Completion]:
        """Return the completions, once the call is over.

        Raises:
            EngineError: or whatever else ended it, or the first of its requests that failed.
        """
        error = self.error or next((request.error for request in self.requests if request.error is not None), None)
        if error is None and self.is_late:
            error = self._lateness()
        if isinstance(error, EngineError):
            error.partial = list(self.partial())
        # they refer to the call; a reference cycle would keep the answers until the next garbage collection
        requests, self.requests = self.requests, []
        if error is not None:
            raise error
        return [request.outcome for request in requests if request.outcome is not None]

    def _lateness(self) -> EngineError | None:
        """Return the error of a call at its deadline; ``None`` if all requests had finished."""
        late = [request for request in self.requests if request.dropped and not request.finished]
        if not late:
            return None
        if (unplaced := next((request for request in late if request.refusal is not None), None)) is not None:
            return unplaced.not_placed()
        what = (
            f"{len(late)} of {len(self.requests)} requests were not finished within {self.timeout:g} s and were aborted"
        )
        if late[0].request.scoring is not None:
            return GenerationTimeout(f"{what}. Raise timeout_seconds, or score fewer tokens at once.")
        return GenerationTimeout(
            f"{what}; finished and partial answers are in .partial. Raise timeout_seconds, "
            "lower max_tokens, or continue with generate(resume=error.partial)."
        )
