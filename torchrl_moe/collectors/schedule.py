"""Which groups of answers may start, and which go to the trainer, so that none is older than allowed.

Pure bookkeeping: no thread, no clock. Letters: P groups in a batch, S the greatest staleness, W the window.

A group's age is counted in weight updates, from the version of its oldest token to the version that is being trained
when the group is used, so the time that it waits counts too. With one update per batch, a group that starts while batch
T is awaited and is used in batch b has an age of at most b - T: so a group starts only if its place in line puts it
into batch T + S or an earlier one. ``fifo`` takes the head of the line; ``window`` takes any of its oldest W, so that a
long answer blocks no other group. Then at most W - 1 groups overtake another: its age is at most S + ceil((W - 1) / P).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from itertools import islice
from typing import Literal

from torchrl_moe._checks import check_number

Order = Literal["fifo", "window", "ready"]
ORDERS = ("fifo", "window", "ready")


@dataclass(slots=True, eq=False)
class _Place:
    group: int
    at: int
    is_ready: bool = False
    is_taken: bool = False


class Schedule:
    """The line of groups, from their start to the trainer.

    >>> schedule = Schedule(groups_per_batch=2, max_staleness=0, order="fifo")
    >>> [schedule.begin() for _ in range(2)], schedule.may_begin
    ([0, 1], False)
    >>> schedule.ready(1), schedule.take()
    (None, [])
    >>> schedule.ready(0), schedule.take()
    (None, [0, 1])
    >>> schedule.trained(), schedule.may_begin
    (None, True)
    """

    def __init__(
        self,
        groups_per_batch: int,
        max_staleness: int,
        order: Order = "window",
        window: float = 0.3,
        over_sample: float = 1.0,
    ) -> None:
        check_number("groups_per_batch", groups_per_batch, 1, 1 << 20, whole=True)
        check_number("max_staleness", max_staleness, 0, 1 << 16, whole=True)
        if order not in ORDERS:
            raise ValueError(f"order must be one of {ORDERS}, got {order!r}")
        check_number("window", window, above=0, most=1)
        check_number("over_sample", over_sample, 1, 100)
        self.groups_per_batch = groups_per_batch
        self.max_staleness = max_staleness
        self._over_sample = over_sample
        places = (max_staleness + 1) * groups_per_batch
        self.window = {"fifo": 1, "window": max(1, int(window * places))}.get(order)
        """W; ``None`` for any group of the line."""
        self._line: dict[int, _Place] = {}  # by place, without gaps, from the oldest that is not taken
        self._end = 0  # the place of the next group
        self._head = 0  # the first place whose group is not complete
        self._within_reach = 0  # groups that are complete and may be taken now
        self._places: dict[int, _Place] = {}  # of the groups that are not taken
        self.ready_groups = 0
        """Groups that are complete and not given out."""
        self.begun = 0
        """Groups that have started; the number of the next one. A restored schedule continues the numbers."""
        self.batches = 0
        """Batches taken."""
        self._trained = 0  # batches
        self._updates = 0  # since the last batch was given
        self._recent = deque([1], maxlen=4)  # recent counts of updates between batches

    @property
    def in_line(self) -> int:
        """Groups that have started and were not taken."""
        return len(self._places)

    @property
    def _updates_per_batch(self) -> int:
        return max(1, *self._recent)

    @property
    def may_begin(self) -> bool:
        """Whether a group that starts now will be young enough when it is used."""
        # S batches ahead, or fewer if the weights change more than once a batch; a group beyond them would wait, and
        # age, for one update too many
        lead = self.max_staleness // self._updates_per_batch
        room = math.ceil((lead + 1) * self.groups_per_batch * self._over_sample)
        return (self.batches - self._trained) * self.groups_per_batch + self.in_line < room

    def begin(self) -> int:
        """Put a group in line, and return its number."""
        group = self.begun
        self.begun += 1
        self._places[group] = self._line[self._end] = _Place(group, self._end)
        self._end += 1
        return group

    @property
    def slack(self) -> int:
        """By how many updates the weights may lag behind the newest ones, for the group that started last."""
        batch = self.batches + (self.in_line - 1) // self.groups_per_batch
        return max(0, self.max_staleness - (batch - self._trained) * self._updates_per_batch)

    def ready(self, group: int) -> None:
        """Note that a group is complete."""
        place = self._places[group]
        place.is_ready = True
        self.ready_groups += 1
        self._within_reach += self._reaches(place.at)
        self._move_head()

    def drop(self, group: int) -> None:
        """Remove a group from the line; another one may start, at the end of the line."""
        place = self._places.pop(group)
        self.ready_groups -= place.is_ready
        del self._line[place.at]
        # those behind it move up: they are used earlier than they were started for, so none gets too old
        begin = next(iter(self._line), self._end)
        left = list(self._line.values())
        for at, one in enumerate(left, begin):
            one.at = at
        self._line, self._end, self._head = dict(enumerate(left, begin)), begin + len(left), begin
        self._within_reach = sum(one.is_ready and not one.is_taken for one in left if self._reaches(one.at))
        self._move_head()
        self._forget_taken()

    def take(self) -> list[int]:
        """Return the groups of the next batch, oldest first, and take them out; ``[]`` if they are not all complete."""
        if self._within_reach < self.groups_per_batch:
            return []
        # those within reach are the first ones of the line
        complete = (place for place in self._line.values() if place.is_ready and not place.is_taken)
        found = list(islice(complete, self.groups_per_batch))
        for place in found:
            place.is_taken = True
            del self._places[place.group]
        self.ready_groups -= len(found)
        self._within_reach -= len(found)
        self._forget_taken()
        # updates before the first batch are a restored trainer's, and say nothing about later ones
        if self.batches:
            self._recent.append(self._updates)
        self.batches += 1
        self._updates = 0
        return sorted(place.group for place in found)

    def _reaches(self, at: int) -> bool:
        """Whether the group at a place may be taken: the window begins with the first one that is not complete."""
        return self.window is None or at < self._head + self.window

    def _move_head(self) -> None:
        """Move the window past groups that are complete, as taking them would."""
        while self._head < self._end and self._line[self._head].is_ready:
            self._head += 1
            if self.window is not None:
                last = self._line.get(self._head + self.window - 1)
                self._within_reach += last is not None and last.is_ready and not last.is_taken

    def _forget_taken(self) -> None:
        while (place := next(iter(self._line.values()), None)) is not None and place.is_taken:
            del self._line[place.at]

    def updated(self, times: int = 1, by_update: bool = False) -> None:
        """Note that the weights have changed."""
        self._updates += times
        if by_update:  # nobody says when a batch was trained on: one update stands for one batch
            self._trained = min(self._trained + times, self.batches)
        elif times and self._updates >= self._updates_per_batch:
            self._trained = self.batches

    def trained(self) -> None:
        """Note that the trainer is done with all batches it took, whether the weights changed or not."""
        self._trained = self.batches
