"""Balancing strategies: how a replica is chosen for a request. Pure objects without I/O.

The base class, the simple ones, sessions, prefixes (a radix tree of prompts), and their names.
"""

from __future__ import annotations

import abc
import json
import random
import struct
import time
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import ceil

import numpy as np
from xxhash import xxh3_64_intdigest

from torchrl_moe._checks import check_callable, check_instance, check_number
from torchrl_moe.modules.serving.replica_table import GONE, Candidates, TableEntry, load_bound

# The base class of balancing strategies, and what they know of a request.


check_prefix_length = partial(check_number, "prefix_length", least=1, whole=True, none=True)
check_overload_threshold = partial(
    check_number, "overload_threshold", least=1, infinite=True, hint="1 is the mean load itself."
)


@dataclass(slots=True, kw_only=True, eq=False)
class RoutingContext:
    """What is known of a request when it is placed: prompt (text, token ids, a chat), session, the caller's context."""

    prompt: Sized | None = None
    session_id: str | None = None
    request_context: Mapping[str, object] = field(default_factory=dict)


class Strategy(abc.ABC):
    """A way of choosing a replica. It does no I/O and needs no lock: the balancer makes one call at a time.

    Attributes:
        name: as users know it.
        reads_stats: whether it reads the stats that replicas send, ``usage`` of a candidate.
    """

    name: str
    reads_stats = False

    @abc.abstractmethod
    def choose(self, candidates: Candidates, context: RoutingContext) -> int | None:
        """Return the index of one of the candidates (there is at least one), or ``None`` for no opinion."""

    def placed(self, entry: TableEntry, context: RoutingContext) -> None:  # noqa: B027  most have nothing to learn
        """Learn that a request went to a replica, whichever strategy chose."""

    def finish_session(self, session_id: str) -> None:  # noqa: B027  most know no sessions
        """Forget a session that has ended."""


# Strategies that look at load only. Clock and random numbers come from outside.


REPORT_SECONDS = 5.0  # how long a replica's own stats hold


class LeastRequests(Strategy):
    """The replica with the fewest requests in flight; among equals, the one that was chosen longest ago."""

    name = "requests"

    def choose(self, candidates: Candidates, context: RoutingContext) -> int:
        del context
        return candidates.least_loaded().index


class RoundRobin(Strategy):
    """Each replica that may serve in turn, by index."""

    name = "round-robin"

    def __init__(self) -> None:
        self.next_index = 0

    def choose(self, candidates: Candidates, context: RoutingContext) -> int:
        del context
        indices = sorted(entry.index for entry in candidates)
        index = next((i for i in indices if i >= self.next_index), indices[0])
        self.next_index = index + 1
        return index


class PowerOfTwo(Strategy):
    """Of two candidates drawn at random, the less loaded one."""

    name = "power-of-two"

    def __init__(self, rng: random.Random | None = None) -> None:
        check_instance("rng", rng, random.Random, none=True)
        self._rng = rng or random.Random()

    def choose(self, candidates: Candidates, context: RoutingContext) -> int:
        del context
        first = self._rng.randrange(len(candidates))
        if len(candidates) == 1:
            return candidates[0].index
        second = self._rng.randrange(len(candidates) - 1)
        second += second >= first  # two different ones
        return min((candidates[first], candidates[second]), key=lambda entry: entry.load).index


class KVCache(Strategy):
    """The replica with the smallest share of its KV cache in use.

    The values are the replicas' own and lag. So each is corrected by the requests that started and ended here since, at
    the mean share of one request; else all requests would go to one replica until the next stats. A replica without
    fresh stats is estimated by its requests alone. No opinion if no stats are fresh.

    Args:
        clock: seconds, the clock by which stats were noted.
        max_age: seconds for which reported stats are used; those that a replica sends are used until its next.
    """

    name = "kv-cache"
    reads_stats = True

    def __init__(self, clock: Callable[[], float] = time.monotonic, max_age: float = REPORT_SECONDS) -> None:
        check_callable("clock", clock)
        check_number("max_age", max_age, 0, infinite=True)
        self._clock = clock
        self.max_age = max_age

    def choose(self, candidates: Candidates, context: RoutingContext) -> int | None:
        del context
        oldest = self._clock() - self.max_age
        fresh = {e.index: e.usage for e in candidates if e.usage is not None and e.usage.at >= oldest}
        if not fresh:
            return None
        requests = sum(usage.inflight for usage in fresh.values())
        share = sum(usage.share for usage in fresh.values()) / requests if requests else 0.0

        def estimate(entry: TableEntry) -> tuple[float, int, int]:
            usage = fresh.get(entry.index)
            known = 0.0 if usage is None else usage.share - share * usage.inflight
            return known + share * entry.inflight, entry.load, entry.chosen

        return min(candidates, key=estimate).index


# ``session``: sends all turns of a rollout to one replica, unless that is much busier than others.


MOST_SESSIONS = 1 << 16


@dataclass(slots=True)
class _Pin:
    entry: TableEntry
    used: float


class SessionAffinity(Strategy):
    """The replica that had the session's last turn; for a new session, the one with the fewest active sessions.

    Among equals a new session goes to the replica that got one longest ago. A session moves for good when its replica
    is too busy or gone. While its replica temporarily takes no requests (an update), there is no opinion: the next
    strategy chooses another replica, and the session returns later. No opinion without a session either.

    Args:
        overload_threshold: a replica with more than this multiple of the mean load is too busy, ...
        margin: ... but never below this many requests above the mean.
        idle_seconds: a session without requests for longer has ended.
        clock: seconds.
    """

    name = "session"

    def __init__(
        self,
        overload_threshold: float = 1.15,
        margin: float = 2.0,
        idle_seconds: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_overload_threshold(overload_threshold)
        check_number("margin", margin, 0, infinite=True)
        check_number("idle_seconds", idle_seconds, 0, infinite=True)
        check_callable("clock", clock)
        self.overload_threshold = overload_threshold
        self.margin = margin
        self.idle_seconds = idle_seconds
        self._clock = clock
        self._pins: OrderedDict[str, _Pin] = OrderedDict()  # the latest used last
        self._sessions: Counter[int] = Counter()
        self._given: dict[int, int] = {}  # replica -> when it last got a session, in sessions
        self._count = 0

    def choose(self, candidates: Candidates, context: RoutingContext) -> int | None:
        """Return the session's replica, a new one if it has to move, or ``None``."""
        session = context.session_id
        if session is None:
            return None
        now = self._clock()
        # those that were idle for too long have ended
        while self._pins and now - next(iter(self._pins.values())).used > self.idle_seconds:
            self.finish_session(next(iter(self._pins)))
        pin = self._pins.get(session)
        if pin is not None and pin.entry.state in GONE:
            self.finish_session(session)
            pin = None
        if pin is None:
            entry = min(candidates, key=lambda e: (self._sessions[e.index], self._given.get(e.index, -1), e.index))
        elif candidates.find(pin.entry.index) is None:
            pin.used = now
            self._pins.move_to_end(session)
            return None
        else:
            bound = load_bound(candidates, self.overload_threshold, self.margin) - 1.0
            entry = pin.entry if pin.entry.load <= bound else candidates.least_loaded()
        self._pin(session, entry, now)
        return entry.index

    def _pin(self, session: str, entry: TableEntry, now: float) -> None:
        old = self._pins.pop(session, None)
        if old is None or old.entry is not entry:
            self._sessions[entry.index] += 1
            self._given[entry.index] = self._count
            self._count += 1
            if old is not None:
                self._sessions[old.entry.index] -= 1
        self._pins[session] = _Pin(entry, now)
        if len(self._pins) > MOST_SESSIONS:
            self.finish_session(next(iter(self._pins)))

    def finish_session(self, session_id: str) -> None:
        pin = self._pins.pop(session_id, None)
        if pin is not None:
            self._sessions[pin.entry.index] -= 1


# Which replicas hold which prefixes, inferred from placements: an index over hashed blocks of prompts.
#
# A prompt becomes a chain of keys, one for each block boundary and one for its end; a key identifies everything
# before it, so two prompts share as many keys as they share whole blocks. Keys are xxh3 hashes of bytes: equal in
# every process, whatever Python's own hash salt.


TOKEN_BYTES = 4  # an int32 id, and about the bytes of a token of text
BLOCK = 32 * TOKEN_BYTES  # two of vLLM's blocks on GPUs
HOLDERS = 32  # remembered of one prefix
HALF_LIFE = 1024  # distinct prompts after which what was counted before weighs half


def _spans(limit: int) -> list[tuple[int, int]]:
    """Block boundaries, up to ``limit`` bytes; late blocks are an eighth of what precedes them, to keep keys few."""
    spans = [(0, BLOCK)]
    while spans[-1][1] < limit:
        start = spans[-1][1]
        blocks = start // BLOCK
        spans.append((start, start + BLOCK * max(1, blocks // 8)))
    return spans


SPANS = _spans(TOKEN_BYTES << 24)  # a prompt of 16 million tokens has 107 keys
ENDS = [end for _, end in SPANS]
_packer = lru_cache(maxsize=4096)(lambda length: struct.Struct(f"{length}i").pack)


def prompt_bytes(prompt: Sized | None) -> tuple[bytes, int] | None:
    """Return the bytes of a prompt, and a seed for its kind; ``None`` for an empty prompt, or what is not one.

    Text, chats (a list of messages, each a mapping), token ids (a list, or anything numpy reads as integers), and
    mappings with ``prompt_token_ids`` or ``prompt``. A chat begins with the bytes of any chat that it continues.
    """
    if isinstance(prompt, str):
        return (prompt.encode(errors="surrogatepass"), 1) if prompt else None
    if isinstance(prompt, Mapping):
        ids = prompt.get("prompt_token_ids")
        return prompt_bytes(prompt.get("prompt") if ids is None else ids)
    if prompt is None or len(prompt) == 0:
        return None
    if isinstance(prompt, list) and isinstance(prompt[0], Mapping):
        return "".join(json.dumps(message, sort_keys=True, default=str) for message in prompt).encode(), 2
    if isinstance(prompt, list):  # several times as fast as by way of an array
        return _packer(len(prompt))(*prompt), 0
    return np.asarray(prompt, dtype=np.int32).tobytes(), 0


def prompt_keys(data: bytes, seed: int = 0) -> list[int]:
    """Return the keys of a prompt's prefixes of whole blocks, shortest first, and then, negative, that of all of it.

    >>> prompt_keys(bytes(128))[:1] == prompt_keys(bytes(200))[:1]
    True
    """
    spans = SPANS[: bisect_right(ENDS, len(data))]
    key = seed
    keys = [key := xxh3_64_intdigest(data[start:end], key) for start, end in spans]
    keys.append(-1 - xxh3_64_intdigest(data[spans[-1][1] if spans else 0 :], key))
    return keys


Branch = tuple[list[int], int, int, tuple[int, ...]]
"""A run of keys that no prompt has left so far; how many distinct prompts went through it as of an epoch (each one
since halves it); that epoch; the numbers of the caches that hold it, the latest last."""


class PrefixIndex:
    """A radix tree of prompts' keys, its least recently used branches dropped.

    A key identifies everything before it, so a branch is found by its first key alone. It keeps ``capacity`` keys; one
    takes about three hundred bytes where prompts are short.
    """

    def __init__(self, capacity: int = 1 << 18) -> None:
        check_number("capacity", capacity, 1, whole=True)
        self.capacity = capacity
        self._branches: OrderedDict[int, Branch] = OrderedDict()
        self._size = 0  # keys
        self._epoch = 0
        self._prompts = 0  # distinct ones, halved each epoch

    def __len__(self) -> int:
        return self._size

    def match(self, keys: list[int]) -> tuple[list[Branch], bool]:
        """Return the branches on a prompt's path, shortest prefix first, and whether the prompt is a distinct one.

        It is not distinct if it came before, or continues an earlier one, like a conversation's next turn.
        """
        known: list[Branch] = []
        position = 0
        while position < len(keys):
            branch = self._branches.get(keys[position])
            if branch is None:
                return known, True
            run = branch[0]
            known.append(branch)
            common = _common(run, keys, position)
            if common < len(run):
                return known, not (run[-1] < 0 and common == len(run) - 1)
            position += common
        return known, False

    def share(self, branch: Branch, is_distinct: bool) -> float:
        """Return the share of all distinct prompts that begin with a branch; 0 if only one does.

        ``is_distinct``: whether the prompt on whose path it is, is one more.
        """
        prompts = (branch[1] >> (self._epoch - branch[2])) + is_distinct
        return prompts / (self._prompts + is_distinct) if prompts > 1 else 0.0

    def record(self, keys: list[int], cache: int, is_distinct: bool) -> None:
        """Note that a prompt went to the replica with this cache; ``is_distinct`` is what :meth:`match` said."""
        branches, epoch = self._branches, self._epoch
        way = []
        position = 0
        while position < len(keys):
            first = keys[position]
            way.append(first)
            branch = branches.get(first)
            if branch is None:
                run = keys[position:]
                self._size += len(run)
                branches[first] = (run, 1, epoch, (cache,))
                break
            run, prompts, since, caches = branch
            common = _common(run, keys, position)
            if common < len(run):  # the prompt diverges here: the rest becomes a separate branch
                branches[run[common]] = (run[common:], prompts, since, caches)
                run = run[:common]
            position += common
            if cache != caches[-1]:
                caches = (*(other for other in caches if other != cache), cache)[-HOLDERS:]
            branches[first] = (run, (prompts >> (epoch - since)) + is_distinct, epoch, caches)
        for first in reversed(way):  # what leads to a branch outlives it
            branches.move_to_end(first)
        if is_distinct:
            self._prompts += 1
            if self._prompts >= 2 * HALF_LIFE:
                self._prompts >>= 1
                self._epoch += 1
        while self._size > self.capacity:
            _, branch = branches.popitem(last=False)
            self._size -= len(branch[0])


def _common(run: list[int], keys: list[int], position: int) -> int:
    """Return how many keys of a run match ``keys`` from a position on; only its last key ends a prompt."""
    if run == keys[position : position + len(run)]:
        return len(run)
    return next(i for i, key in enumerate(run) if key != keys[position + i])


# ``prefix-aware``: chooses a replica that has the prompt's beginning in its cache, unless it is too busy.


TEMPLATE = 0.25  # share of distinct prompts
SPREAD = 2.0  # believed holders of a prefix, as a multiple of its fair number of replicas

_Match = tuple[list[int], list[Branch], bool]  # keys; the branches on their path; whether the prompt is distinct


class PrefixAware(Strategy):
    """The candidate that holds the longest beginning of the prompt, within the load bound; of equals, the least loaded.

    It learns from every placement, its own or not. A prefix of more than a quarter of all distinct prompts is a
    template: every replica has it or soon will, so it is ignored. Prefixes cached under other weights are ignored too.
    Of the replicas that got a prefix, only the latest are assumed to still hold it: one, plus twice its share of the
    prompts as a share of the fleet; else each prefix would end up in every cache, and push others out.

    No opinion without a prompt, if no replica holds more than the template, or if all that do are too busy: then the
    next strategy chooses, and one more replica holds the prefix.

    Args:
        prefix_length: leading tokens that are compared (four bytes each, for text); ``None`` for all.
        overload_threshold: a replica with more than this multiple of the mean load is too busy, but never one with at
            most one request above the mean.
        index: the prefixes known so far.
    """

    name = "prefix-aware"

    def __init__(
        self, prefix_length: int | None = None, overload_threshold: float = 1.15, index: PrefixIndex | None = None
    ) -> None:
        check_prefix_length(prefix_length)
        check_overload_threshold(overload_threshold)
        check_instance("index", index, PrefixIndex, none=True)
        self.prefix_length = prefix_length
        self.overload_threshold = overload_threshold
        self.index = PrefixIndex() if index is None else index
        self._last: tuple[RoutingContext, _Match | None] | None = None

    def choose(self, candidates: Candidates, context: RoutingContext) -> int | None:
        match = self._match(context)
        if match is None:
            return None
        _, known, is_distinct = match
        bound = load_bound(candidates, self.overload_threshold, margin=1.0) - 1.0
        for branch in reversed(known):
            share = self.index.share(branch, is_distinct)
            if share > TEMPLATE:
                return None
            best: TableEntry | None = None
            for cache in branch[3][-1 - ceil(SPREAD * share * len(candidates)) :]:
                entry = candidates.by_cache.get(cache)
                if entry is None or entry.load > bound:
                    continue
                if best is None or (entry.load, entry.chosen) < (best.load, best.chosen):
                    best = entry
            if best is not None:
                return best.index
        return None

    def placed(self, entry: TableEntry, context: RoutingContext) -> None:
        match = self._match(context)
        self._last = None
        if match is not None:
            keys, _, is_distinct = match
            self.index.record(keys, entry.cache, is_distinct)

    def _match(self, context: RoutingContext) -> _Match | None:
        """Return what is known of a request's prompt. One result is kept, since placing directly follows choosing."""
        if self._last is None or self._last[0] is not context:
            match = None
            if (found := prompt_bytes(context.prompt)) is not None:
                data, seed = found
                if self.prefix_length is not None:
                    data = data[: self.prefix_length * TOKEN_BYTES]
                keys = prompt_keys(data, seed)
                match = (keys, *self.index.match(keys))
            self._last = (context, match)
        return self._last[1]


# Strategies by their names.


DEFAULT_HIERARCHY = ("prefix-aware", "requests")
OVERLOAD_THRESHOLD = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The settings of strategies made by name; see their arguments."""

    prefix_length: int | None = None
    overload_threshold: float = OVERLOAD_THRESHOLD
    clock: Callable[[], float] = time.monotonic
    rng: random.Random | None = None

    def __post_init__(self) -> None:
        check_prefix_length(self.prefix_length)
        check_overload_threshold(self.overload_threshold)
        check_callable("clock", self.clock)
        check_instance("rng", self.rng, random.Random, none=True)


STRATEGIES: Mapping[str, Callable[[Settings], Strategy]] = {
    "prefix-aware": lambda s: PrefixAware(s.prefix_length, s.overload_threshold),
    "session": lambda s: SessionAffinity(s.overload_threshold, clock=s.clock),
    "requests": lambda _: LeastRequests(),
    "least-loaded": lambda _: LeastRequests(),
    "kv-cache": lambda s: KVCache(s.clock),
    "power-of-two": lambda s: PowerOfTwo(s.rng),
    "round-robin": lambda _: RoundRobin(),
}


def make_strategy(strategy: str | Strategy, settings: Settings | None = None) -> Strategy:
    """Return a strategy by name (hyphens or underscores), or the object as it is."""
    if isinstance(strategy, str):
        maker = STRATEGIES.get(strategy.replace("_", "-"))
        if maker is None:
            raise ValueError(f"unknown strategy {strategy!r}; valid strategies: {', '.join(sorted(STRATEGIES))}")
        return maker(settings or Settings())
    if isinstance(strategy, Strategy):
        return strategy
    raise TypeError(
        f"a strategy is a name ({', '.join(sorted(STRATEGIES))}) or an object of a class derived from Strategy "
        f"({Strategy.__module__}), got {strategy!r}"
    )
