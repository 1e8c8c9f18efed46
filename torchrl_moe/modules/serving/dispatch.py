"""Requests on their way through the service: admitted, placed, sent, and placed again if a replica dies.

Everything happens in one thread, the service's event loop; ``in_flight`` draws the places of a request. Nothing runs
for a request while it waits. A change of the replica table wakes only unplaced requests that the changed replicas may
take, or that can no longer be taken; of requests with the same needs only the first is tried until one is taken. The
outcome of a group wakes only its own requests, and an answer only its request. So n requests cost n wake-ups.

A killed replica delivers nothing: its requests start again from their prompts, on a replica that the balancer picks.
Those that may have killed it are tried again alone (:class:`Suspects`), so that they kill no more than one other.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import replace
from functools import partial

import numpy as np

from torchrl_moe._checks import check_number
from torchrl_moe.errors import EngineError, NoReplicaError, ReplicaDiedError, RequestRefusedError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Completion, Replica, joined, nothing_yet
from torchrl_moe.modules.serving.balancer import Lease
from torchrl_moe.modules.serving.event_loop import EventLoop, end_wait, tell
from torchrl_moe.modules.serving.in_flight import (
    ALONE_SECONDS,
    Call,
    InFlight,
    Suspects,
    Unplaced,
    prospect,
    take_lease,
)
from torchrl_moe.modules.serving.replica_table import ReplicaTable

LOG = logging.getLogger(__name__)
ABORT_GRACE_SECONDS = 5.0
STOP_SECONDS = 5.0
PRIORITY_SECONDS = 30.0
AT_ONCE = 32
"""Requests admitted in one turn of the loop, so that other callbacks are not delayed."""


# Admission: how many requests the engines run at a time, and which request is next.
#
# A request that arrives when the service is full waits here, as one small record, not as a message in an engine.


class Admission:
    """Places for requests, given by priority, and by order of arrival within a priority. For one thread.

    No request starves: a priority number one higher counts like arriving 30 seconds later, so a request that has waited
    that much longer goes first. A later request is never ahead of one with the same priority. Each step costs the
    logarithm of the number of waiting requests.
    """

    def __init__(self, limit: int | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        check_number("max_concurrent_requests", limit, 1, whole=True, none=True)
        self.limit = limit
        self.taken = 0
        """Places in use."""
        self._clock = clock
        self._numbers = itertools.count()
        self._waiting: dict[int, InFlight] = {}  # by number
        self._turns: list[tuple[float, int]] = []  # a heap: their turns, and some of requests that were removed

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def put(self, request: InFlight) -> None:
        """Queue a request for a place; one that waited before keeps its old turn."""
        if request.turn is None:
            at = self._clock() + request.request.priority * PRIORITY_SECONDS
            request.turn = at, next(self._numbers)
        self._waiting[request.turn[1]] = request
        heapq.heappush(self._turns, request.turn)

    def remove(self, request: InFlight) -> bool:
        """Remove a request from the queue; return whether it was there."""
        if request.turn is None or self._waiting.pop(request.turn[1], None) is None:
            return False
        if len(self._turns) > 2 * len(self._waiting) + 64:
            self._turns = [one.turn for one in self._waiting.values() if one.turn is not None]
            heapq.heapify(self._turns)
        return True

    def next(self) -> InFlight | None:
        """Give a place to the next request; ``None`` if there is no place, or none waits."""
        if not self._waiting or (self.limit is not None and self.taken >= self.limit):
            return None
        request = None
        while request is None:
            _, number = heapq.heappop(self._turns)
            request = self._waiting.pop(number, None)
        self.taken += 1
        return request

    def give_back(self) -> None:
        self.taken -= 1


class Dispatcher:
    """Runs calls to their end. Its public methods may be called from any thread."""

    def __init__(
        self,
        table: ReplicaTable,
        admission: Admission,
        attempts: int,
        retried: Callable[[], object],
        loop: EventLoop,
    ) -> None:
        self._table = table
        self._admission = admission
        self._attempts = attempts
        self._retried = retried
        self._loop = loop
        # what only the loop's thread touches
        self._open: dict[str, InFlight] = {}  # by id
        self._unplaced = Unplaced(table)  # requests that no replica took
        self._suspects = Suspects(table)  # requests under which a replica died
        self._outgoing: dict[Replica, dict[InFlight, asyncio.Future[Completion]]] = {}  # placed in this turn
        self._admitting = False
        self._closed = ""  # why, if it is
        self._retrying = False  # other threads set it, under the table's lock
        self._back_lock = threading.Lock()
        self._back: list[tuple[asyncio.Future[Completion], Future[Completion]]] = []  # other threads add to it
        # the table does not keep this alive
        changed, settled = weakref.WeakMethod(self.on_table_change), weakref.WeakMethod(self.on_group_settled)
        self._on_change = lambda: (method := changed()) and method()
        self._on_settled = lambda group: (method := settled()) and method(group)
        table.add_listener(self._on_change)
        with table.lock:
            table.groups.listeners.add(self._on_settled)

    # -- calls ------------------------------------------------------------------------------------------------------

    def run(self, call: Call) -> list[Completion]:
        """Wait for all requests, in input order; Ctrl-C aborts what is not finished."""
        # the caller's thread only waits; the loop's does all else
        over = threading.Event()
        call.on_over = over.set
        try:
            if is_taken := self._loop.call(self._begin, call):
                over.wait()
        except BaseException as interrupt:
            # what there is so far comes back with the interrupt
            if self._loop.call(self._cancel, call):
                over.wait(2 * ABORT_GRACE_SECONDS)  # a second Ctrl-C ends this wait; the abort continues
            # so that generate(resume=...) can continue it
            interrupt.partial = call.partial()  # type: ignore[attr-defined]
            raise
        if not is_taken:
            raise EngineError("the service was shut down")
        return call.result()

    async def run_async(self, call: Call, on_part: Callable[[Completion], object] | None = None) -> list[Completion]:
        """:meth:`run` in the caller's event loop, without a waiting thread; cancelling it aborts the requests.

        ``on_part`` is called there with what comes before the end.
        """
        loop = asyncio.get_running_loop()
        over: asyncio.Future[None] = loop.create_future()
        call.on_over = partial(tell, loop, end_wait, over)
        if on_part is not None:
            call.on_part = partial(tell, loop, on_part)
        if not self._loop.call(self._begin, call):
            raise EngineError("the service was shut down")
        try:
            await over
        except BaseException:  # the task was cancelled, or closed
            self._loop.call(self._cancel, call)
            raise
        return call.result()

    def abort(self, request_ids: Iterable[str]) -> None:
        """Abort requests; what they have so far is their answer. Unknown ids are ignored."""
        ids = list(request_ids)
        self._loop.call(lambda: self._abort([self._open[name] for name in ids if name in self._open]))

    def set_limit(self, limit: int) -> None:
        self._admission.limit = limit
        self._loop.call(self._admit_soon)

    def close(self, why: str) -> None:
        """Fail what is in flight, and what comes from now on; called before the replicas end, whose deaths say less."""
        self._loop.call(self._close, why)

    def stop(self) -> None:
        """End the loop, and fail what is still in flight."""
        self._table.remove_listener(self._on_change)
        with self._table.lock:
            self._table.groups.listeners.discard(self._on_settled)
        self.close("the service was shut down")
        self._loop.stop()
        self._loop.join(STOP_SECONDS)

    # -- the ends of a call, in the loop ----------------------------------------------------------------------------

    def _begin(self, call: Call) -> None:
        if call.over:  # cancelled before it began
            return
        if self._closed:
            call.error = EngineError(self._closed)
            call.end()
            return
        # those that were complete when they came need no engine
        waiting = {one.request.request_id: one for one in call.requests if one.outcome is None}
        # an abort names a request by its id, so one is never in flight twice
        if taken := sorted(waiting.keys() & self._open.keys()):
            call.error = ValueError(f"request ids are in flight already: {', '.join(taken)}. Use an id once at a time.")
            call.end()
            return
        call.has_begun = True
        self._open |= waiting
        if call.deadline is not None:
            # the deadline began when the call was made, not when its turn came
            left = max(call.deadline - time.monotonic(), 0.0)
            call.timer = asyncio.get_running_loop().call_later(left, self._late, call)
        # from here each is on its own; the call ends with the last of them
        for request in waiting.values():
            self._admission.put(request)
        self._admit_soon()
        if not waiting:
            call.end()

    def _cancel(self, call: Call) -> None:
        """Abort what is not finished; the caller already has its result, or is gone."""
        if call.has_begun and not call.over:
            self._end_early(call)
        else:
            call.end()

    def _late(self, call: Call) -> None:
        if call.over:
            return
        call.is_late = True
        for request in call.requests:
            if request.lease is not None and not request.is_over:
                # a late answer may be a stalled replica's: it is probed at once
                self._table.doubt(request.lease.index)
        self._end_early(call)

    def _end_early(self, call: Call) -> None:
        """Abort what is not finished, and wait briefly for the engines' partial answers."""
        if call.timer is not None:
            call.timer.cancel()
        unfinished = [request for request in call.requests if not request.is_over]
        for request in unfinished:
            # an answer that still comes is kept for the caller, and is no success of the replica
            request.dropped = True
        # if the engines do not answer, the call ends without their partial answers; its requests count as running until
        # they do
        call.timer = asyncio.get_running_loop().call_later(ABORT_GRACE_SECONDS, call.end)
        self._abort(unfinished)

    # -- one request ------------------------------------------------------------------------------------------------

    async def _serve(self, request: InFlight) -> None:
        """Bring a request that was given a place to its outcome."""
        try:
            # a replica that dies under it, or a choice that no replica takes, brings it back here
            while not request.aborted:
                # a replica: one that is tried alone comes with its lease
                lease = request.lease or self._take_lease(request)
                if lease is None:
                    # its place goes to others; a change that may help brings it back here, with a place again
                    self._leave(request)
                    await request.wait()
                    continue
                # its answer
                try:
                    completion = await self._answer(request, lease)
                except ReplicaDiedError as death:
                    death.__traceback__ = None  # its frames refer to the request, which may be answered yet
                    if self._note_death(request, lease, death):
                        # until it has a lease on a replica that runs nothing else, or need not be alone
                        await request.wait()
                    continue
                self._finish(request, completion)
                return
            self._give_up(request, completion=nothing_yet(request.request))
        except GeneratorExit:  # the service was dropped, and its loop is gone: there is nobody to tell
            raise
        except BaseException as error:
            if not request.is_over:  # else it was given up meanwhile
                self._give_up(request, error=error)
            elif isinstance(error, Exception):  # of what ends it, after its outcome
                raise
            if not isinstance(error, Exception | asyncio.CancelledError):
                raise

    def _take_lease(self, request: InFlight) -> Lease | None:
        """Choose a replica; return ``None`` if none takes it now, and one may later. Then it is unplaced."""
        kind = self._unplaced.kind_of(request) if self._unplaced.kinds else None
        with self._table.lock:  # so that no change is missed
            if kind is not None and not request.is_first:  # the first of them is tried for all
                kind.join(request)
                return None
            try:
                request.lease, request.refusal = take_lease(request), None
            except (NoReplicaError, StaleReplicaError) as why:
                request.refusal = why
            request.is_first = False
            # one may come that takes it: wait for that, without a place in the engines
            if request.lease is None and (waits_for := prospect(request)) is not None:
                self._unplaced.put_first(request, waits_for)
                return None
        # what was decided for this one holds for all that wait for the same
        alike = [] if kind is None else list(kind.requests)
        if request.lease is None:
            for one in alike:  # they would wait in vain, too
                self._unplaced.remove(one)
                one.refusal = request.refusal
                self._give_up(one, error=one.not_placed())
            raise request.not_placed()
        if alike:
            self._try(alike, are_first=False)
        return request.lease

    async def _answer(self, request: InFlight, lease: Lease) -> Completion:
        """Send a request to the replica of its lease, and return what comes back."""
        released: bool | None = False  # whether the replica did its part; None: it had none
        loop = asyncio.get_running_loop()
        try:
            # numbered in the order of sending: the last sent are the first suspects if the replica dies
            self._suspects.sent(request)
            if request is self._suspects.tried and request.deaths == 1:
                # by its name: the request itself would keep its answer
                loop.call_later(ALONE_SECONDS, self._join, request.request.request_id, request.number)
            # all that are placed in this turn of the loop go in one message per replica, at its end
            if not self._outgoing:
                loop.call_soon(self._send_all)
            answer = self._outgoing.setdefault(lease.replica, {})[request] = loop.create_future()
            completion: Completion = await answer
            # if its call ended early, no one waits for this answer
            released = None if request.dropped and completion.aborted else True
            # counted, and given to the caller all the same: training refuses them, evaluation may not
            if bad := completion.count_not_finite():
                self._table.note_not_finite(lease.index, bad)
            return completion
        except ReplicaDiedError as death:
            self._table.mark_dead(lease.index, str(death), lease.replica)
            raise
        except ValueError as error:
            released = None  # it lives, and has made nothing that would keep a group to its version
            raise RequestRefusedError(f"request {request.position} was refused: {error}") from error
        except EngineError as error:
            self._table.fail(lease.index, str(error))
            raise
        finally:
            lease.release(released)

    def _send_all(self) -> None:
        outgoing, self._outgoing = self._outgoing, {}
        for replica in list(outgoing):
            # taken out: an error of one keeps its frames, and would keep the answers of others with them
            self._send(replica, outgoing.pop(replica))

    def _send(self, replica: Replica, answers: Mapping[InFlight, asyncio.Future[Completion]]) -> None:
        requests = [request.request for request in answers]
        if not requests:  # all were withdrawn
            return
        futures: Sequence[Future[Completion]]
        try:
            if any(request.stream for request in requests):
                futures = replica.submit(requests, lambda parts: self._loop.call(self._tell, replica, parts))
            else:
                futures = replica.submit(requests)
        except BaseException as error:
            # perhaps after some were sent: the error is the outcome of all
            failed: Future[Completion] = Future()
            failed.set_exception(error)
            futures = [failed] * len(requests)
            abort_on(replica, [request.request_id for request in requests])
            if not isinstance(error, Exception):
                raise
        for answer, future in zip(answers.values(), futures, strict=True):
            future.add_done_callback(partial(self._take_back, answer))

    def _tell(self, replica: Replica, parts: Sequence[Completion]) -> None:
        """Give callers what their answers gained."""
        for part in parts:
            request = self._open.get(part.request_id)
            if request is None or request.is_over or request.dropped or request.lease is None:
                continue
            # another one has the request by now, where a replica is ended as it tells a part
            if request.lease.replica is replica:
                request.parts.append(part)
                request.call.on_part(part)

    def _take_back(self, answer: asyncio.Future[Completion], future: Future[Completion]) -> None:
        """Note the end of a request; called from any thread."""
        with self._back_lock:
            is_first = not self._back
            self._back.append((answer, future))
        if is_first:  # one call for all that end before it runs
            self._loop.call(self._collect)

    def _collect(self) -> None:
        """Wake the requests that replicas have answered."""
        with self._back_lock:
            back, self._back = self._back, []
        back.reverse()
        while back:  # taken out, as in ``_send_all``
            _settle(*back.pop())

    def _note_death(self, request: InFlight, lease: Lease, death: ReplicaDiedError) -> bool:
        """Return whether a request must be alone at its next try; raise if it is given up."""
        request.lease = request.refusal = None
        # on another replica it continues after what its caller has
        if request.parts:
            so_far, request.parts = joined(request.request, request.parts), []
            ids = so_far.prompt_token_ids.astype(np.int32)
            request.request = replace(request.request, prompt=None, prompt_token_ids=ids, resume=so_far)
        entry = self._table[lease.index]
        # a replica that was removed, or was dead before, was not killed by this request
        counts = not (entry.leaving or request.met_dead)
        was_alone = request is self._suspects.tried and self._suspects.is_alone
        # the table's says more than that a stalled one was ended; an error without frames, which refer to the request
        says = entry.last_error if entry.replica is lease.replica and entry.last_error else str(death)
        request.death = ReplicaDiedError(says)
        request.deaths += counts
        cleared = self._suspects.ended(request, killed=counts)
        # later: the others of a replica that died are reported in this turn, and the last sent is to be first
        asyncio.get_running_loop().call_soon(self._try_alone, cleared)
        if request.aborted:
            return False
        # only a death that nobody else can have caused proves anything
        if request.deaths >= self._attempts and (was_alone or self._attempts == 1):
            raise ReplicaDiedError(
                f"request {request.position} ({request.request.request_id!r}) was given up: {request.deaths} replicas "
                f"died under it. The last one: {says}"
            )
        self._retried()
        return counts and self._suspects.add(request, lease.replica)

    def _finish(
        self, request: InFlight, completion: Completion | None = None, error: BaseException | None = None
    ) -> None:
        """Give a request its outcome, once."""
        if request.is_over:
            return
        # the id is free for another request
        if self._open.get(request.request.request_id) is request:
            del self._open[request.request.request_id]
        request.lease, request.outcome, request.error = None, completion, error
        # in this order: its place, what waits for it, then its caller
        self._leave(request)  # before its call ends: then all counts are right
        if self._suspects.waiting or request is self._suspects.tried:
            self._try_alone(self._suspects.ended(request))
        if request.is_first:
            request.is_first = False
            kind = self._unplaced.kind_of(request)
            self._try([] if kind is None else [kind.first])
        call = request.call
        if call.over:
            return
        call.unfinished -= 1
        if completion is not None and not request.dropped:
            try:
                call.finished(completion)
            except Exception as problem:  # a bar that cannot be drawn ends no call
                LOG.exception("the progress of a call cannot be shown any more: %r", problem)
                call.finished = lambda _: None
        if not call.unfinished:
            call.end()

    def _give_up(
        self, request: InFlight, completion: Completion | None = None, error: BaseException | None = None
    ) -> None:
        """End a request wherever it is, and whatever its replica does."""
        if request.lease is not None:
            request.lease.release(None)
        self._finish(request, completion, error)
        # its task may wait for an answer that no longer matters
        if request.task is not None:
            request.task.cancel()

    # -- places -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        """Give places to the next requests, a few in each turn of the loop."""
        self._admitting = False
        for _ in range(AT_ONCE):
            if (request := self._admission.next()) is None:
                return
            request.has_place = True
            if request.task is None:  # a request that waits for its first place is a record, and no task
                request.task = asyncio.get_running_loop().create_task(self._serve(request))
                # a service that is dropped drops its requests, in silence
                request.task._log_destroy_pending = False  # type: ignore[attr-defined]
            else:
                request.go_on()
        self._admit_soon()

    def _admit_soon(self) -> None:
        if self._admission.waiting and not self._admitting:
            self._admitting = True
            asyncio.get_running_loop().call_soon(self._admit)  # more at once would delay other callbacks

    def _leave(self, request: InFlight) -> None:
        if request.has_place:
            request.has_place = False
            self._admission.give_back()
            self._admit_soon()

    # -- waiting for a replica --------------------------------------------------------------------------------------

    def on_table_change(self) -> None:
        """Try requests that no replica took, soon. Called under the table's lock, from any thread."""
        if (self._unplaced.kinds or self._suspects.waiting) and not self._retrying:
            self._retrying = True
            self._loop.call(self._retry)

    def on_group_settled(self, group: str) -> None:
        """Try those of a group, soon. Called as :meth:`on_table_change` is."""
        self._unplaced.settle(group)
        self.on_table_change()

    def _retry(self) -> None:
        self._retrying = False
        self._try(self._unplaced.affected())
        self._try_alone()

    def _try(self, requests: Sequence[InFlight], are_first: bool = True) -> None:
        """Move unplaced requests back to admission, in their old turns."""
        for request in requests:
            self._unplaced.remove(request)
            request.is_first = are_first
            self._admission.put(request)
        if requests:
            self._admit_soon()

    def _try_alone(self, cleared: Sequence[InFlight] = ()) -> None:
        """Let the next request go that must be alone, if there is a replica for it; and ``cleared``, that need not."""
        for one in cleared:
            one.go_on()
        if (request := self._suspects.next()) is not None:
            request.go_on()

    def _join(self, name: str, number: int) -> None:
        """Let the next suspect join one that has been alone for a while, unless that was sent again since."""
        request = self._open.get(name)
        if request is not None and request.number == number:
            self._try_alone(self._suspects.ended(request))

    # -- aborts -----------------------------------------------------------------------------------------------------

    def _abort(self, requests: Iterable[InFlight]) -> None:
        """Abort requests wherever they are; running ones with one message per replica."""
        names: dict[Replica, list[str]] = {}
        for request in requests:
            request.aborted = True  # one that is about to be sent sees it
            if self._withdraw(request):
                self._give_up(request, completion=nothing_yet(request.request))  # no engine added to what it resumes
            elif request.lease is not None:
                names.setdefault(request.lease.replica, []).append(request.request.request_id)
        for replica, ids in names.items():
            abort_on(replica, ids)

    def _withdraw(self, request: InFlight) -> bool:
        """Remove a request that was not sent to a replica yet, wherever it waits; return False if it was sent."""
        if any(place.remove(request) for place in (self._admission, self._unplaced, self._suspects)):
            return True
        placed = {} if request.lease is None else self._outgoing.get(request.lease.replica, {})
        return placed.pop(request, None) is not None

    def _close(self, why: str) -> None:
        self._closed = self._closed or why
        unfinished = list(self._open.values())
        for request in unfinished:  # all before the first leaves its place to the next
            self._withdraw(request)
        for request in unfinished:
            self._give_up(request, error=EngineError(why))


def _settle(answer: asyncio.Future[Completion], future: Future[Completion]) -> None:
    """Give an answer what came back from its replica, unless its request was given up."""
    if answer.done():
        return
    try:
        answer.set_result(future.result())
    except (CancelledError, StopIteration) as error:  # no future takes these as the error of another
        answer.set_exception(EngineError(f"the replica gave up the request: {error!r}"))
    except BaseException as error:  # noqa: BLE001  raised where the answer is awaited
        answer.set_exception(error)


def abort_on(replica: Replica, request_ids: Sequence[str]) -> None:
    """Abort requests on a replica; an error is logged, because the other replicas must be told too."""
    try:
        replica.abort(request_ids)
    except Exception as error:
        LOG.exception("requests could not be aborted on a replica: %r", error)
