"""How much sooner batches come, by the schedule of ``AsyncLLMCollector``, than if generating and training take turns.

An event simulation around the real :class:`Schedule`: slots that generate answers of log-normal lengths, and a trainer
that takes a batch of 16 groups of 8 and updates the weights, which holds generation up. The unit of time is the mean
answer. Against taking turns: all answers of a batch, then the training, then the next.
"""

from __future__ import annotations

import heapq
import statistics
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from benchmarks.report import Row, finish
from torchrl_moe.collectors.schedule import Order, Schedule

GROUPS, GROUP, SYNC, STEPS, WARM_UP = 16, 8, 0.02, 300, 40
LENGTHS = {"sigma 0.8, cap 2.6x": (0.8, 2.6), "sigma 1, cap 8x": (1.0, 8.0)}
CASES: tuple[tuple[int, Order], ...] = ((1, "window"), (2, "fifo"), (2, "window"), (2, "ready"), (4, "window"))
KNOWN = {
    "sigma 0.8, cap 2.6x": (1.93, 2.76, 2.88, 2.91, 3.62),
    "sigma 1, cap 8x": (2.05, 2.85, 3.26, 5.02, 5.52),
}
"""An independent simulation's speed over taking turns (2026-11-22), in the order of the cases."""


@dataclass
class Simulation:
    """One run.

    Args:
        schedule: decides which groups begin and which are trained.
        sigma: of the lengths' logarithms.
        cap: the longest length.
        slots: answers that are generated at a time.
        train: time to train a batch.
    """

    schedule: Schedule
    sigma: float
    cap: float
    slots: int
    train: float
    seed: int = 0
    now: float = 0.0
    version: int = 0
    idle: float = 0.0
    ages: list[int] = field(default_factory=list)

    def run(self, steps: int) -> float:
        """Return the time per step, after a warm-up."""
        self._rng = np.random.default_rng(self.seed)
        self._events: list[tuple[float, int, int]] = []  # when, what, group
        self._waiting: deque[int] = deque()
        self._left: dict[int, int] = {}
        self._begun: dict[int, int] = {}
        self._paused_until, self._is_training, since, done = 0.0, False, 0.0, 0
        idle_from = 0.0
        self._begin()
        while done < steps + WARM_UP:
            if not self._is_training and (batch := self.schedule.take()):
                self._is_training = True
                self.idle += self.now - idle_from
                self.ages += [self.version - self._begun.pop(group) for group in batch]
                heapq.heappush(self._events, (self.now + self.train, 1, -1))
            self.now, is_trained, group = heapq.heappop(self._events)
            if is_trained:
                self._is_training, idle_from, done = False, self.now, done + 1
                self._update()
                if done == WARM_UP:
                    since, self.idle = self.now, 0.0
                    self.ages.clear()
            else:
                self._answered(group)
            self._begin()
        self.idle /= self.now - since
        return (self.now - since) / steps

    def _begin(self) -> None:
        while True:
            while self._waiting and self.slots:
                self.slots -= 1
                length = min(self._rng.lognormal(-(self.sigma**2) / 2, self.sigma), self.cap)
                group = self._waiting.popleft()
                self._begun.setdefault(group, self.version)  # as its first answer begins
                heapq.heappush(self._events, (max(self.now, self._paused_until) + length, 0, group))
            if not self.slots or not self.schedule.may_begin:
                return
            group = self.schedule.begin()
            self._left[group] = GROUP
            self._waiting.extend([group] * GROUP)

    def _answered(self, group: int) -> None:
        self.slots += 1
        self._left[group] -= 1
        if not self._left[group]:
            del self._left[group]
            self.schedule.ready(group)

    def _update(self) -> None:
        self.version += 1
        self.schedule.updated()
        self._paused_until = self.now + SYNC
        held = [(when + (0 if is_trained else SYNC), is_trained, group) for when, is_trained, group in self._events]
        heapq.heapify(held)
        self._events = held


def in_turns(sigma: float, cap: float, slots: int, train: float, steps: int = 2000) -> float:
    """Time per step if a batch is generated, then trained: answers begin as slots are free."""
    rng = np.random.default_rng(1)
    spent = []
    for _ in range(steps):
        ends = [0.0] * slots
        last = 0.0
        for length in np.minimum(rng.lognormal(-(sigma**2) / 2, sigma, GROUPS * GROUP), cap):
            last = max(last, end := heapq.heappop(ends) + length)
            heapq.heappush(ends, end)
        spent.append(last + train + SYNC)
    return statistics.mean(spent)


def main() -> None:
    """All cases; then how idle a trainer is that need not be."""
    rows = []
    for name, (sigma, cap) in LENGTHS.items():
        turns = in_turns(sigma, cap, 128, 1.0)
        for (staleness, order), known in zip(CASES, KNOWN[name], strict=True):
            run = Simulation(Schedule(GROUPS, staleness, order), sigma, cap, 128, 1.0)
            speed = turns / run.run(STEPS)
            words = (
                f"{name}: S = {staleness}, {order}: speed over taking turns (simulated elsewhere); trainer idle; age"
            )
            value = f"{speed:.2f} ({known:.2f}); {run.idle:.2f}; {max(run.ages)}"
            rows.append(Row(claim=words, value=value, target="within 5 %", met=abs(speed / known - 1) <= 0.05))
    for name, (sigma, cap) in LENGTHS.items():
        for staleness in (2, 4):
            train = 1.25 * cap / (staleness + 1)
            run = Simulation(Schedule(GROUPS, staleness, "window"), sigma, cap, 256, train)
            run.run(STEPS)
            words = f"{name}: trainer idle, S = {staleness}, a step of {train:.2f} = 1.25 longest / (S + 1)"
            rows.append(Row(claim=words, value=f"{run.idle:.2f}", target="<= 0.10", met=run.idle <= 0.10))
    finish("async_collection", rows)


if __name__ == "__main__":
    main()
