"""``session``: sends all turns of a rollout to one replica, unless that is much busier than others."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from torchrl_moe._checks import check_callable, check_number
from torchrl_moe.modules.serving.balancing.strategy import RoutingContext, Strategy, check_overload_threshold
from torchrl_moe.modules.serving.candidates import Candidates, TableEntry, load_bound
from torchrl_moe.modules.serving.states import GONE

__all__ = ["SessionAffinity"]

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
        self._expire(now)
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

    def _expire(self, now: float) -> None:
        while self._pins:
            session, pin = next(iter(self._pins.items()))
            if now - pin.used <= self.idle_seconds:
                return
            self.finish_session(session)

    def finish_session(self, session_id: str) -> None:
        """Forget a session; unknown ones are ignored."""
        pin = self._pins.pop(session_id, None)
        if pin is not None:
            self._sessions[pin.entry.index] -= 1

    def active_sessions(self, index: int) -> int:
        """Return how many sessions a replica has."""
        return self._sessions[index]
