"""A discrete-event simulator of generation replicas: prefill, decode, KV capacity, LRU prefix cache, preemption.

Prompts are chains of segments (a template, a question, a turn); a segment is cached as a whole, and counts as a hit if
all before it are cached too, rounded down to KV blocks. Running requests get one token each per step, and a step takes
``step + step_per_request * running`` seconds; a prefill holds decoding up. When running requests exceed the KV cache,
the last admitted one is preempted, and recomputed later. Between two events all of a replica's requests advance at the
same rate, so a request costs a few heap operations, however many tokens it has.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Fleet", "FleetSpec", "Job", "Outcome", "Policy", "SimRequest"]

Segment = tuple[int, int]  # name, tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSpec:
    """Identical replicas; units are seconds and tokens. The defaults roughly match an 8B model on one H100."""

    replicas: int = 8
    kv_tokens: int = 120_000
    block: int = 16
    prefill: float = 1 / 20_000  # per token
    step: float = 0.010
    step_per_request: float = 0.0001
    most_running: int = 256


@dataclass(slots=True, eq=False)
class SimRequest:
    """One turn: prompt segments, tokens to generate, and the name under which the answer is cached."""

    session: str
    prompt: tuple[Segment, ...]
    answer: Segment
    job: Job
    done: int = 0  # tokens generated before a preemption
    tokens: int = 0
    _ids: NDArray[np.int32] | None = None

    def __post_init__(self) -> None:
        self.tokens = sum(tokens for _, tokens in self.prompt)

    @property
    def ids(self) -> NDArray[np.int32]:
        """Token ids; equal segments have equal ids, others differ from the first token on."""
        if self._ids is None:
            parts = [np.arange(tokens, dtype=np.int32) + name * 65_537 % 2_000_000_011 for name, tokens in self.prompt]
            self._ids = np.concatenate(parts).astype(np.int32)
        return self._ids


@dataclass(slots=True, eq=False)
class Job:
    """Consecutive turns, with a pause (an environment) in between."""

    session: str
    turns: Iterator[tuple[tuple[Segment, ...], Segment, float]]  # prompt, answer, seconds before it is sent


class Policy(Protocol):
    """Decides which replica takes a request."""

    def place(self, request: SimRequest) -> int:
        """Return a replica that is up, and count the request."""

    def finished(self, request: SimRequest, index: int) -> None:
        """Note that a request left its replica."""

    def ended(self, session: str) -> None:
        """Note that a job is finished."""

    def changed(self, index: int, up: bool) -> None:
        """Note that a replica went down, or came back with an empty cache."""


@dataclass(slots=True, kw_only=True)
class Outcome:
    """The result of a run. ``excess``: the largest load at a placement, as a share of the bound."""

    requests: int = 0
    seconds: float = 0.0
    generated: int = 0
    prompted: int = 0
    cached: int = 0
    preemptions: int = 0
    excess: float = 0.0

    def __add__(self, other: Outcome) -> Outcome:
        """Return the combined result of two runs."""
        return Outcome(
            requests=self.requests + other.requests,
            seconds=self.seconds + other.seconds,
            generated=self.generated + other.generated,
            prompted=self.prompted + other.prompted,
            cached=self.cached + other.cached,
            preemptions=self.preemptions + other.preemptions,
            excess=max(self.excess, other.excess),
        )

    @property
    def throughput(self) -> float:
        """Generated tokens per simulated second."""
        return self.generated / self.seconds

    @property
    def hits(self) -> float:
        """Share of prompt tokens that were in the cache."""
        return self.cached / self.prompted


@dataclass(slots=True)
class _Running:
    request: SimRequest
    start: float  # progress of the replica when it began, minus the tokens that it already had


@dataclass(slots=True, eq=False)
class _Replica:
    spec: FleetSpec
    outcome: Outcome
    clock: float = 0.0
    stall: float = 0.0  # seconds of prefill still to come
    progress: float = 0.0  # tokens that a request would have if it had always run
    held: int = 0  # tokens in the cache that running requests use
    evictable: int = 0
    stamp: int = 0
    up: bool = True
    running: OrderedDict[int, _Running] = field(default_factory=OrderedDict)
    ends: list[tuple[float, int]] = field(default_factory=list)
    starts: float = 0.0  # sum over running requests
    waiting: deque[SimRequest] = field(default_factory=deque)
    users: dict[int, int] = field(default_factory=dict)  # segment -> running requests that use it
    free: OrderedDict[int, int] = field(default_factory=OrderedDict)  # segment -> tokens, least recently used first
    numbers: Iterator[int] = field(default_factory=itertools.count)

    # -- cache ------------------------------------------------------------------------------------------------------

    def cached(self, request: SimRequest) -> int:
        """Tokens of a prompt that are in the cache."""
        found = 0
        for name, tokens in request.prompt:
            if name not in self.users and name not in self.free:
                break
            found += tokens
        # the last token is always computed
        return min(found, request.tokens - 1) // self.spec.block * self.spec.block

    @property
    def used(self) -> float:
        """Tokens of KV cache that cannot be evicted."""
        return self.held + self.progress * len(self.running) - self.starts

    def _evict(self, capacity: float) -> None:
        while self.evictable > capacity and self.free:
            _, tokens = self.free.popitem(last=False)
            self.evictable -= tokens

    def _take(self, request: SimRequest) -> None:
        for name, tokens in request.prompt:
            if name in self.users:
                self.users[name] += 1
            else:
                self.users[name] = 1
                self.held += tokens
                if self.free.pop(name, None) is not None:
                    self.evictable -= tokens

    def _release(self, request: SimRequest) -> None:
        for name, tokens in reversed(request.prompt):  # the ends of chains go first
            self.users[name] -= 1
            if not self.users[name]:
                del self.users[name]
                self.held -= tokens
                self._keep(name, tokens)

    def _keep(self, name: int, tokens: int) -> None:
        if name not in self.users and name not in self.free:
            self.free[name] = tokens
            self.evictable += tokens

    # -- time -------------------------------------------------------------------------------------------------------

    def _step(self) -> float:
        return self.spec.step + self.spec.step_per_request * len(self.running)

    def advance(self, now: float) -> None:
        """Bring the replica to a later time, at which nothing more than its next event happens."""
        seconds = now - self.clock
        self.clock = now
        stalled = min(seconds, self.stall)
        self.stall -= stalled
        if self.running:
            self.progress += (seconds - stalled) / self._step()

    def next_event(self) -> float | None:
        """When a request ends, or the KV cache is full."""
        if not self.running:
            return None
        tokens = self.ends[0][0] - self.progress
        room = (self.spec.kv_tokens - self.used) / len(self.running)
        return self.clock + self.stall + max(min(tokens, room), 0.0) * self._step()

    def settle(self) -> list[SimRequest]:
        """Process due events: finish, preempt, admit. Return the finished requests."""
        ended = []
        while self.ends and self.ends[0][0] <= self.progress + 1e-6:
            _, number = heapq.heappop(self.ends)
            if number in self.running:
                ended.append(self._end(number))
        while self.running and self.used >= self.spec.kv_tokens - 1e-6:
            self._preempt()
        self._admit()
        self._evict(max(self.spec.kv_tokens - self.used, 0.0))
        while self.ends and self.ends[0][1] not in self.running:
            heapq.heappop(self.ends)
        return ended

    def _end(self, number: int) -> SimRequest:
        run = self.running.pop(number)
        self.starts -= run.start
        self._keep(*run.request.answer)
        self._release(run.request)
        self.outcome.generated += run.request.answer[1]
        self.outcome.requests += 1
        return run.request

    def _preempt(self) -> None:
        _, run = self.running.popitem()
        self.starts -= run.start
        run.request.done = max(int(self.progress - run.start), run.request.done)
        self._release(run.request)
        self.waiting.appendleft(run.request)
        self.outcome.preemptions += 1
        if not self.running and run.request.tokens + run.request.answer[1] > self.spec.kv_tokens:
            raise ValueError(f"a request of {run.request.tokens} tokens can never run: raise kv_tokens")

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self.spec.most_running:
            request = self.waiting[0]
            new = sum(tokens for name, tokens in request.prompt if name not in self.users) + request.done
            if self.running and self.used + new + len(self.running) + self.spec.block > self.spec.kv_tokens:
                return
            self.waiting.popleft()
            cached = self.cached(request)
            self.outcome.prompted += request.tokens
            self.outcome.cached += cached
            self.stall += (request.tokens - cached + request.done) * self.spec.prefill
            self._take(request)
            number = next(self.numbers)
            start = self.progress - request.done
            self.running[number] = _Running(request, start)
            self.starts += start
            heapq.heappush(self.ends, (start + request.answer[1], number))
            self._evict(max(self.spec.kv_tokens - self.used, 0.0))

    def die(self) -> list[SimRequest]:
        """Lose everything; return the unfinished requests."""
        lost = [run.request for run in self.running.values()] + list(self.waiting)
        for request in lost:
            request.done = 0
        for part in (self.running, self.ends, self.waiting, self.users, self.free):
            part.clear()
        self.held = self.evictable = 0
        self.starts = self.stall = 0.0
        self.up = False
        return lost


class Fleet:
    """Replicas, and the requests in flight.

    Args:
        spec: the replicas.
        jobs: yields one job after another.
        concurrency: number of concurrent jobs.
        bound: the largest load that a placement should cause, given the mean load after it.
    """

    def __init__(self, spec: FleetSpec, jobs: Iterator[Job], concurrency: int, bound: Callable[[float], float]) -> None:
        self.spec = spec
        self.outcome = Outcome()
        self.replicas = [_Replica(spec, self.outcome) for _ in range(spec.replicas)]
        self.loads = [0] * spec.replicas
        self.total = 0
        self.up = list(range(spec.replicas))
        self.bound = bound
        self._jobs, self._concurrency = jobs, concurrency
        self._events: list[tuple[float, int, int, SimRequest | None, int]] = []
        self._order = itertools.count()
        self.now = 0.0

    def cached(self, request: SimRequest, index: int) -> int:
        """Tokens of a prompt that a replica has cached now, which only an oracle can know."""
        return self.replicas[index].cached(request)

    def run(self, policy: Policy, requests: int, loss: tuple[float, float] | None = None) -> Outcome:
        """Run until a number of requests are finished.

        Args:
            policy: places them.
            requests: their number.
            loss: shares of the requests after which replica 0 dies, and after which it comes back.
        """
        marks = deque(zip((share * requests for share in loss or ()), (self._lose, self._return), strict=False))
        for _ in range(self._concurrency):
            self._begin_job()
        while self.outcome.requests < requests:
            while marks and self.outcome.requests >= marks[0][0]:
                marks.popleft()[1](policy)
            self.now, _, index, request, stamp = heapq.heappop(self._events)
            if request is not None:
                self._place(policy, request)
            elif self.replicas[index].stamp == stamp:
                self._visit(policy, index)
        self.outcome.seconds = self.now
        return self.outcome

    def _begin_job(self) -> None:
        job = next(self._jobs, None)
        if job is not None:
            self._next_turn(job)

    def _next_turn(self, job: Job) -> bool:
        turn = next(job.turns, None)
        if turn is None:
            return False
        prompt, answer, pause = turn
        request = SimRequest(job.session, prompt, answer, job)
        heapq.heappush(self._events, (self.now + pause, next(self._order), -1, request, 0))
        return True

    def _place(self, policy: Policy, request: SimRequest) -> None:
        index = policy.place(request)
        self.loads[index] += 1
        self.total += 1
        bound = self.bound(self.total / len(self.up))
        self.outcome.excess = max(self.outcome.excess, self.loads[index] / bound)
        replica = self.replicas[index]
        replica.advance(self.now)
        replica.waiting.append(request)
        self._visit(policy, index)

    def _visit(self, policy: Policy, index: int) -> None:
        replica = self.replicas[index]
        replica.advance(self.now)
        for request in replica.settle():
            self._leave(policy, request, index)
            if not self._next_turn(request.job):
                policy.ended(request.session)
                self._begin_job()
        self._schedule(index)

    def _leave(self, policy: Policy, request: SimRequest, index: int) -> None:
        self.loads[index] -= 1
        self.total -= 1
        policy.finished(request, index)

    def _schedule(self, index: int) -> None:
        replica = self.replicas[index]
        replica.stamp += 1
        due = replica.next_event()
        if due is not None:
            heapq.heappush(self._events, (due, next(self._order), index, None, replica.stamp))

    def _lose(self, policy: Policy) -> None:
        self.up.remove(0)
        lost = self.replicas[0].die()
        self._schedule(0)
        policy.changed(0, False)
        for request in lost:
            self._leave(policy, request, 0)
            heapq.heappush(self._events, (self.now, next(self._order), -1, request, 0))

    def _return(self, policy: Policy) -> None:
        replica = self.replicas[0]
        replica.up, replica.clock = True, self.now
        self.up.insert(0, 0)
        policy.changed(0, True)
