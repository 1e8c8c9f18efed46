"""The names of the requests that the service has, wherever they are: waiting, in an engine, or between two."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

__all__ = ["OpenRequests"]


class OpenRequests:
    """Request ids in use, each with the call that can cut it short. Safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cut: dict[str, Callable[[list[str]], None]] = {}

    def add(self, ids: Iterable[str], cut: Callable[[list[str]], None]) -> None:
        """Note that requests of these names begin; ``cut`` is called with names to end them early.

        Raises:
            ValueError: one of them is in use already; a replica could not tell the two apart.
        """
        with self._lock:
            wanted = dict.fromkeys(ids, cut)
            if taken := sorted(wanted.keys() & self._cut.keys()):
                raise ValueError(f"request ids are in flight already: {', '.join(taken)}. Use an id once at a time.")
            self._cut |= wanted

    def remove(self, ids: Iterable[str], cut: Callable[[list[str]], None]) -> None:
        """Note that requests of the call that ``cut`` belongs to are over; those of others stay, whatever their names.

        A call may remove a name twice, and meanwhile another one may use it.
        """
        with self._lock:
            for request_id in ids:
                if self._cut.get(request_id) == cut:
                    del self._cut[request_id]

    def cut(self, ids: Iterable[str]) -> None:
        """End requests early; unknown names are ignored, since a request may just be over."""
        calls: dict[Callable[[list[str]], None], list[str]] = {}
        with self._lock:
            for request_id in ids:
                if (cut := self._cut.get(request_id)) is not None:
                    calls.setdefault(cut, []).append(request_id)
        for cut, names in calls.items():
            cut(names)
