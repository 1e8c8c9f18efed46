"""Sends requests to replicas, and returns their outcomes to the loop."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeAlias

from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.in_flight import InFlight

__all__ = ["Submissions", "abort_on"]

LOG = logging.getLogger(__name__)

Ended: TypeAlias = Callable[[InFlight, "Future[Completion]"], object]


class Submissions:
    """Sends the requests placed in one turn of the loop, in one message per replica. Used only in the loop.

    Args:
        loop: woken once for all outcomes that arrive meanwhile.
    """

    def __init__(self, loop: EventLoop) -> None:
        self._loop = loop
        self._outgoing: dict[Any, dict[InFlight, Ended]] = {}  # by replica
        self._lock = threading.Lock()
        self._back: list[tuple[InFlight, Ended, Future[Completion]]] = []  # other threads add to it

    def put(self, request: InFlight, ended: Ended) -> None:
        """Send a request to the replica of its lease at the end of this turn.

        Args:
            request: with its lease.
            ended: called in the loop with the request and the replica's future, once that is done.
        """
        assert request.lease is not None
        if not self._outgoing:
            asyncio.get_running_loop().call_soon(self._hand_over)
        self._outgoing.setdefault(request.lease.replica, {})[request] = ended

    def remove(self, request: InFlight) -> bool:
        """Withdraw a request; return whether it was not sent yet. Then its outcome is not reported."""
        outgoing = {} if request.lease is None else self._outgoing.get(request.lease.replica, {})
        return outgoing.pop(request, None) is not None

    def _hand_over(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for replica, requests in outgoing.items():
            futures = _submit(replica, [request.request for request in requests]) if requests else ()
            for (request, ended), future in zip(requests.items(), futures, strict=True):
                future.add_done_callback(partial(self._take_back, request, ended))

    def _take_back(self, request: InFlight, ended: Ended, future: Future[Completion]) -> None:
        """Record the end of a request; called from any thread."""
        with self._lock:
            is_first = not self._back
            self._back.append((request, ended, future))
        if is_first:
            self._loop.call(self._collect)

    def _collect(self) -> None:
        with self._lock:
            back, self._back = self._back, []
        loop = asyncio.get_running_loop()
        for request, ended, future in back:  # each by itself, so that an error in one does not affect the others
            loop.call_soon(ended, request, future)


def _submit(replica: Any, requests: Sequence[Request]) -> Sequence[Future[Completion]]:
    """Send requests. If that fails, perhaps after some were sent, the error is the outcome of all of them."""
    try:
        futures: Sequence[Future[Completion]] = replica.submit(requests)
    except BaseException as error:
        failed: Future[Completion] = Future()
        failed.set_exception(error)
        abort_on(replica, [request.request_id for request in requests])
        if not isinstance(error, Exception):
            raise
        return [failed] * len(requests)
    return futures


def abort_on(replica: Any, request_ids: Sequence[str]) -> None:
    """Abort requests on a replica; an error is logged, because the other replicas must be told too."""
    try:
        replica.abort(request_ids)
    except Exception as error:
        LOG.exception("requests could not be aborted on a replica: %r", error)
