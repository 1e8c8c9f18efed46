"""One call's requests on their way through the service: admitted, placed, awaited, and placed again if a replica dies.

A call is a small machine. Everything that happens (an answer, a death, a place that became free, a replica that came
back) rings its bell; then one step takes in what has ended and places what waits. The call's own thread or task makes
the steps, so the service needs no thread for it.

A killed replica delivers nothing: its requests begin again, from their prompts, on a replica that the balancer picks.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any

from torchrl_moe._errors import GenerationTimeout, NoReplicaError, ReplicaDiedError, StaleReplicaError
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.admission import Admission, Ticket
from torchrl_moe.modules.serving.bells import LoopBell, ThreadBell
from torchrl_moe.modules.serving.errands import Errand, Progress
from torchrl_moe.modules.serving.load_balancer import LoadBalancer
from torchrl_moe.modules.serving.placing import Placement, Placer

__all__ = ["Dispatch"]

ABORT_GRACE_SECONDS = 5.0


class Dispatch:
    """The requests of one call; use it once.

    Args:
        balancer: gives the leases.
        requests: in input order, all of one priority.
        placement: where they may go.
        timeout: seconds that each request has, from now; ``None`` for ever.
        admission: how many requests the service has at a time.
        attempts: how many replicas may die under a request.
        retried: told of how many requests were handed over again.
    """

    def __init__(
        self,
        balancer: LoadBalancer,
        requests: Sequence[Request],
        placement: Placement,
        timeout: float | None,
        admission: Admission | None = None,
        attempts: int = 3,
        retried: Callable[[int], object] = lambda _: None,
    ) -> None:
        self._roster = balancer.roster
        self._placer = Placer(balancer, placement, ends=timeout is not None)
        self._admission = admission or Admission()
        self._attempts = attempts
        self._retried = retried
        self._timeout = timeout
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._errands = [Errand(position, request) for position, request in enumerate(requests)]
        self._by_id = {errand.request.request_id: errand for errand in self._errands}
        self._waiting = deque(self._errands)
        self._parked: list[Errand] = []  # those that no replica took, until something changes
        self._unfinished = len(self._errands)
        self._ring: Callable[[], object] = lambda: None
        self._ticket = Ticket(requests[0].priority, self._ring)
        # what other threads write
        self._lock = threading.Lock()
        self._open = False
        self._flying = 0  # requests that an engine has, and gives back in time
        self._roster_changed = False
        self._ended: deque[tuple[Errand, Future[Completion]]] = deque()
        self._cut: deque[Errand] = deque()

    # -- the two ways of waiting ------------------------------------------------------------------------------------

    def run(self, use_tqdm: bool = False) -> list[Completion]:
        """Wait for all requests, in input order; whatever ends the wait early aborts the rest.

        Raises:
            GenerationTimeout: some were not finished in time; ``.partial`` holds those that were.
            NoReplicaError: no replica serves, and none will in time.
            StaleReplicaError: none holds the version asked for, and none will in time.
            ReplicaDiedError: replicas died under a request again and again, or the named one is gone.
            ValueError: the engine refused a request, or a request id is in flight already.
            EngineError: the engine failed at a request.
        """
        bell = ThreadBell()
        try:
            with self._under_way(bell), Progress(len(self._errands), use_tqdm) as progress:
                while not self._step(bell, progress):
                    bell.wait(self._seconds_left())
        except BaseException:
            with bell.guard():
                self._close()  # again: a second Ctrl-C may have come before the first
            patience = time.monotonic() + ABORT_GRACE_SECONDS
            while self._flying and (left := patience - time.monotonic()) > 0.0:
                bell.wait(left)
            raise
        return self._results()

    async def run_async(self) -> Completion:
        """:meth:`run` in the event loop, for the only request of a call; cancelling the wait aborts the request."""
        bell = LoopBell()
        try:
            with self._under_way(bell):
                while not self._step(bell):
                    await bell.wait(self._seconds_left())
        except GenerationTimeout:
            patience = time.monotonic() + ABORT_GRACE_SECONDS
            while self._flying and (left := patience - time.monotonic()) > 0.0:
                await bell.wait(left)
            raise
        return self._results()[0]

    @contextmanager
    def _under_way(self, bell: ThreadBell | LoopBell) -> Iterator[None]:
        # the bell's, not ours: in a circle of references the answers would stay until Python looks for circles
        self._ring = self._ticket.ring = bell.ring
        try:
            with bell.guard():
                self._roster.requests.add(self._by_id, self.cut)
                self._open = True
                self._roster.add_listener(self._change)
            yield
        finally:
            with bell.guard():
                self._close()

    def _results(self) -> list[Completion]:
        return [errand.outcome for errand in self._errands if errand.outcome is not None]

    def _seconds_left(self) -> float | None:
        return None if self._deadline is None else max(self._deadline - time.monotonic(), 0.0)

    # -- what other threads tell ------------------------------------------------------------------------------------

    def _change(self) -> None:
        """Note that a replica may take what none took before."""
        self._roster_changed = True
        self._ring()

    def cut(self, ids: Iterable[str]) -> None:
        """Cut requests short, wherever they are; what they have so far is their answer."""
        errands = [self._by_id[request_id] for request_id in ids]
        for errand in errands:
            errand.cut = True
        self._cut.extend(errands)
        self._abort(errands)
        self._ring()

    def _over(self, errand: Errand, future: Future[Completion]) -> None:
        """Take note that an engine is done with a request, in the thread that says so."""
        lease, error = errand.lease, future.exception()
        assert lease is not None
        died = isinstance(error, ReplicaDiedError)
        answered = error is None or isinstance(error, ValueError)
        with self._lock:
            unheard = error is None and not self._open  # it was aborted for us: nobody holds what it had
        lease.release(None if unheard else answered)
        self._admission.give_back()
        if died:
            self._roster.mark_dead(lease.index, str(error), lease.replica)
        elif not answered:
            self._roster.fail(lease.index, str(error))
        with self._lock:
            self._ended.append((errand, future))
            self._flying -= 1
            final = not died or not self._open
        if final:
            self._roster.requests.remove([errand.request.request_id], self.cut)
        self._ring()

    # -- one step ---------------------------------------------------------------------------------------------------

    def _step(self, bell: ThreadBell | LoopBell, progress: Progress | None = None) -> bool:
        """Go as far as possible without waiting; whether all requests are finished."""
        with bell.guard():
            finished = self._collect()
            self._place()
            while self._ended:  # some engines answer at once
                finished += self._collect()
                self._place()
        if progress is not None:
            progress.add(finished)
        if self._unfinished and self._seconds_left() == 0.0:
            raise self._late()
        return not self._unfinished

    def _collect(self) -> list[Completion]:
        """Take in what has ended."""
        finished: list[Completion] = []
        failed: list[tuple[int, BaseException]] = []
        while self._ended:
            errand, future = self._ended.popleft()
            errand.lease = errand.future = None
            error = future.exception()
            if error is None:
                finished.append(self._finish(errand, future.result()))
            elif not isinstance(error, ReplicaDiedError):
                failed.append((errand.position, error))
            elif errand.cut:
                self._cut.append(errand)
            elif errand.died(error) < self._attempts:
                self._waiting.appendleft(errand)
            else:
                failed.append((errand.position, errand.given_up(self._partial())))
        while self._cut:
            errand = self._cut.popleft()
            if errand.outcome is None and errand.lease is None:
                self._forget(errand)
                finished.append(self._finish(errand, errand.cut_short()))
        if failed:
            raise self._failure(*min(failed, key=lambda pair: pair[0]))
        return finished

    def _finish(self, errand: Errand, completion: Completion) -> Completion:
        errand.outcome = completion
        self._unfinished -= 1
        return completion

    def _forget(self, errand: Errand) -> None:
        """Place it no more."""
        if errand in self._waiting:
            self._waiting.remove(errand)
        if errand in self._parked:
            self._parked.remove(errand)
        self._roster.requests.remove([errand.request.request_id], self.cut)

    def _failure(self, position: int, error: BaseException) -> BaseException:
        if not isinstance(error, ValueError):
            return error
        refusal = ValueError(f"request {position} was refused: {error}")
        refusal.__cause__ = error
        return refusal

    def _place(self) -> None:
        """Hand over what waits, as far as there are places and replicas."""
        if self._roster_changed:
            self._roster_changed = False
            self._waiting.extend(self._parked)
            self._parked.clear()
        while batch := self._admitted():
            taken = self._lease(batch)
            for index in dict.fromkeys(errand.index for errand in taken):
                self._hand_over([errand for errand in taken if errand.index == index])

    def _admitted(self) -> list[Errand]:
        """Take those that have a place."""
        granted = self._admission.ask(self._ticket, len(self._waiting))
        batch = [self._waiting.popleft() for _ in range(granted)]
        for errand in batch:
            errand.admitted = True
        return batch

    def _lease(self, batch: Sequence[Errand]) -> list[Errand]:
        """Lease replicas for those with a place, and return those that got one; the others leave their place."""
        hopeless = None
        with self._roster.lock:
            for errand in batch:
                try:
                    errand.lease = self._placer.lease(errand.position, errand.request)
                    errand.refusal = None
                except (NoReplicaError, StaleReplicaError) as refusal:
                    errand.refusal = refusal
                    if not self._placer.may_wait(errand.position):
                        hopeless = errand
        taken = [errand for errand in batch if errand.lease is not None]
        left = [errand for errand in batch if errand.lease is None]
        self._parked += left
        for errand in left:
            errand.admitted = False
        if left:
            self._admission.give_back(len(left))
        if hopeless is not None:
            raise self._no_replica(hopeless)
        return taken

    def _hand_over(self, errands: Sequence[Errand]) -> None:
        lease = errands[0].lease
        assert lease is not None
        futures = lease.replica.submit([errand.request for errand in errands])
        with self._lock:
            self._flying += len(futures)
        for errand, future in zip(errands, futures, strict=True):
            errand.admitted, errand.future = False, future  # from now on its end gives lease and place back
            future.add_done_callback(partial(self._over, errand))
        if again := sum(errand.deaths > 0 for errand in errands):
            self._retried(again)
        if cut := [errand for errand in errands if errand.cut]:
            self._abort(cut)  # again: the first may have come before its request

    # -- ends that come early ---------------------------------------------------------------------------------------

    def _late(self) -> Exception:
        unplaced = [errand for errand in self._parked if errand.refusal is not None]
        if unplaced:
            return self._no_replica(unplaced[0])
        for errand in self._errands:
            if errand.future is not None:
                self._roster.doubt(errand.index)
        partial_ = self._partial()
        return GenerationTimeout(
            f"{self._unfinished} of {len(partial_)} requests were not finished within {self._timeout:g} s and were "
            "aborted; what had finished is in .partial. Raise timeout_seconds or lower max_tokens.",
            partial_,
        )

    def _no_replica(self, errand: Errand) -> Exception:
        assert errand.refusal is not None
        return self._placer.error(errand.refusal, errand.death, self._partial())

    def _partial(self) -> list[Completion | None]:
        return [errand.outcome for errand in self._errands]

    def _abort(self, errands: Iterable[Errand]) -> None:
        """Have the engines abort those that they may have; one message for each."""
        ids: dict[Any, list[str]] = {}
        for errand in errands:
            if (lease := errand.lease) is not None:
                ids.setdefault(lease.replica, []).append(errand.request.request_id)
        for replica, names in ids.items():
            replica.abort(names)

    def _close(self) -> None:
        """Abort what is not finished, and give back what no engine will. What an engine still has, it gives back."""
        if not self._open:
            return
        self._roster.remove_listener(self._change)
        self._admission.ask(self._ticket, 0)
        with self._lock:
            self._open = False
            over = {errand.position for errand, _ in self._ended}
        unfinished = [errand for errand in self._errands if errand.outcome is None and errand.position not in over]
        for errand in unfinished:
            if errand.admitted:
                self._admission.give_back()
            if errand.lease is not None and errand.future is None:
                errand.lease.release(None)
        gone = [errand for errand in self._errands if errand.future is None or errand.position in over]
        self._roster.requests.remove((errand.request.request_id for errand in gone), self.cut)
        self._abort(unfinished)
