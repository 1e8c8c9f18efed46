"""Groups of requests that all go to one weight version."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["MOST_GROUPS", "Groups"]

MOST_GROUPS = 1 << 17
"""Groups kept without a running request; the one that ended longest ago is dropped first."""


@dataclass(slots=True)
class _Group:
    version: int
    open: int = 0  # running requests
    answered: bool = False  # whether a caller has an answer of that version
    awaited: bool = False  # whether a request waits for the outcome of the others


class Groups:
    """The version of each group. The caller ensures that one thread at a time uses it."""

    def __init__(self) -> None:
        self.listeners: set[Callable[[str], object]] = set()
        """Called with a group when the outcome of its requests settles what other requests of it wait for."""
        self._open: dict[str, _Group] = {}  # with running requests; never dropped
        self._answered: OrderedDict[str, _Group] = OrderedDict()  # without running requests; the latest last

    def version(self, group_id: str) -> int | None:
        """Return the version that a group is on; ``None`` if it has none yet, or no longer has one."""
        group = self._find(group_id)
        return None if group is None else group.version

    def _find(self, group_id: str) -> _Group | None:
        return self._open.get(group_id) or self._answered.get(group_id)

    def may_begin_again(self, group_id: str) -> bool:
        """Whether a group's version depends on running requests; if so, the outcome that settles it is reported."""
        group = self._find(group_id)
        if group is None or group.answered:
            return False
        group.awaited = True
        return True

    def join(self, group_id: str, version: int) -> Callable[[bool | None], None]:
        """Count a request of a group; return a function to be called with whether it was answered.

        A group is on the version of its first request until all its requests ended without an answer; then it begins
        again. With one answer of a version out, the others must be of that version too.
        """
        group = self._open.get(group_id) or self._answered.pop(group_id, None) or _Group(version)
        self._open[group_id] = group
        group.open += 1

        def over(answered: bool | None) -> None:
            group.open -= 1
            group.answered |= bool(answered)
            if not group.open:
                self._close(group_id)
            if group.awaited and (group.answered or not group.open):
                group.awaited = False
                for listener in self.listeners:
                    listener(group_id)

        return over

    def _close(self, group_id: str) -> None:
        """Note that no request of a group is running; a group without an answer starts again."""
        group = self._open.pop(group_id)
        if group.answered:
            self._answered[group_id] = group
            if len(self._answered) > MOST_GROUPS:
                self._answered.popitem(last=False)
