"""How much faster ``AsyncLLMCollector`` delivers batches than alternating generation and training.

Slots generate answers of log-normal lengths; a trainer takes a batch of 16 groups of 8 and updates the weights, which
blocks generation. The unit of time is the mean answer. The baseline is synchronous: all answers of a batch, then
training, then the next batch. It is measured in two ways: in an event simulation around the real :class:`Schedule`,
with up to 512 replicas; and with the real collectors, ours and TorchRL's, on a simulated clock over one fake engine.
"""

from __future__ import annotations

import heapq
import itertools
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import DatasetChatEnv

from benchmarks.report import Row, finish
from benchmarks.virtual_clock import ClockedReplicas, VirtualClock
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.collectors.schedule import Order, Schedule
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

GROUPS, GROUP, SYNC, STEPS, WARM_UP, BAR = 16, 8, 0.02, 300, 40, 2.5
LENGTHS = {"sigma 0.8, cap 2.6x": (0.8, 2.6), "sigma 1, cap 8x": (1.0, 8.0)}
CASES: tuple[tuple[int, Order], ...] = ((1, "window"), (2, "fifo"), (2, "window"), (2, "ready"), (4, "window"))
KNOWN = {
    "sigma 0.8, cap 2.6x": (1.93, 2.76, 2.88, 2.91, 3.62),
    "sigma 1, cap 8x": (2.05, 2.85, 3.26, 5.02, 5.52),
}
"""The speed-up over synchronous training in an independent simulation (2026-11-22), in the order of the cases."""


@dataclass
class Simulation:
    """One run.

    Args:
        schedule: decides which groups begin and which are trained.
        sigma: standard deviation of the lengths' logarithms.
        cap: the longest length.
        slots: number of answers generated at a time.
        train: time to train a batch.
        sync: time of a weight update, in which nothing is generated.
    """

    schedule: Schedule
    sigma: float
    cap: float
    slots: int
    train: float
    sync: float = SYNC
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
                self._begun.setdefault(group, self.version)  # when its first answer begins
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
        self._paused_until = self.now + self.sync
        held = [
            (when + (0 if is_trained else self.sync), is_trained, group) for when, is_trained, group in self._events
        ]
        heapq.heapify(held)
        self._events = held


def in_turns(
    sigma: float, cap: float, slots: int, train: float, steps: int = 2000, groups: int = GROUPS, sync: float = SYNC
) -> float:
    """Time per step if a batch is generated, then trained; answers begin as slots become free."""
    rng = np.random.default_rng(1)
    spent = []
    for _ in range(steps):
        ends = [0.0] * slots
        last = 0.0
        for length in np.minimum(rng.lognormal(-(sigma**2) / 2, sigma, groups * GROUP), cap):
            last = max(last, end := heapq.heappop(ends) + length)
            heapq.heappush(ends, end)
        spent.append(last + train + sync)
    return statistics.mean(spent)


# -- the real collectors on a simulated clock -------------------------------------------------------------------------


class Questions:
    """Without end."""

    batch_size = GROUPS

    def __iter__(self) -> Iterator[dict[str, list[str]]]:
        for first in itertools.count(0, self.batch_size):
            yield {"query": [f"q{first + i}" for i in range(self.batch_size)]}


def collectors(replicas: int) -> dict[str, Callable[[vLLMWrapper], Any]]:
    """What is compared: batches of 16 groups of 8 for each replica."""
    answers = replicas * GROUPS * GROUP

    def env() -> EnvBase:
        chat = DatasetChatEnv.from_dataloader(
            Questions(), repeats=GROUP, batch_size=(answers,), tokenizer=ByteTokenizer()
        )
        return chat.append_transform(StepCounter(max_steps=1))

    whole: dict[str, Any] = {"dialog_turns_per_batch": answers, "yield_completed_trajectories": True}
    window: dict[str, Any] = {"group_size": GROUP, "groups_per_batch": replicas * GROUPS, "max_staleness": 2}
    return {
        "async": lambda policy: AsyncLLMCollector(env(), policy=policy, max_in_flight=answers, **window),
        "sync": lambda policy: LLMCollector(env(), policy=policy, **whole),
        "TorchRL's": lambda policy: TorchRLCollector(env(), policy=policy, **whole),
    }


@dataclass
class Timed:
    """Measurements of a trainer."""

    step: float
    """Simulated time per step."""
    idle: float
    """Share of the time that the trainer waited."""
    age: int
    """Weight updates since the oldest token of each batch."""


def train(make: Callable[[vLLMWrapper], Any], replicas: int, sigma: float, cap: float, steps: int, warm: int) -> Timed:
    """Collect batches and simulate training on them."""
    rng = np.random.default_rng(2)
    lengths = (min(rng.lognormal(-(sigma**2) / 2, sigma), cap) for _ in itertools.count())
    with FakeAsyncVLLM(replicas, layout=None, max_concurrent_requests=None) as engine, VirtualClock() as clock:
        slots = ClockedReplicas(engine, clock, GROUPS * GROUP, lambda: next(lengths))
        collector = make(vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 2}))
        batches = iter(collector)
        since = idle = 0.0
        age = 0
        for version in range(warm + steps):
            asked = clock.now
            batch = next(batches)
            if version == warm:
                since, idle = asked, 0.0
            idle += clock.now - asked
            age = max(age, version - min(int(row["policy_version"]) for row in batch.reshape(-1).unbind(0)))
            clock.sleep(1.0)
            for replica in engine.replicas:
                replica.version = version + 1
                engine.replica_table.set_version(replica.index, version + 1)
            slots.hold_up(SYNC)
        spent = clock.now - since
        collector.shutdown()
    print(f"{type(collector).__module__}, {replicas} replicas: {spent / steps:.2f} a step", flush=True)
    return Timed(spent / steps, idle / spent, age)


def on_a_simulated_clock(name: str, replicas: int, steps: int) -> list[Row]:
    """The real collectors, against each other and against the simulation."""
    sigma, cap = LENGTHS[name]
    made = collectors(replicas)
    ours = train(made["async"], replicas, sigma, cap, steps, 6)
    simulated = Simulation(Schedule(replicas * GROUPS, 2, "window"), sigma, cap, replicas * 128, 1.0).run(STEPS)
    rows = [
        Row(
            claim=f"{name}, {replicas} replicas: time per step, the real collector / the simulation; trainer idle; age",
            value=f"{ours.step / simulated:.2f}; {ours.idle:.2f}; {ours.age}",
            target="within 5 %",
            met=abs(ours.step / simulated - 1) <= 0.05,
        )
    ]
    for other, words in (("sync", "our LLMCollector"), ("TorchRL's", "TorchRL's LLMCollector")):
        speed = train(made[other], replicas, sigma, cap, max(steps // 3, 4), 1).step / ours.step
        claim = f"{name}, {replicas} replicas: the real collector, S = 2, speed-up over {words}"
        rows.append(Row(claim=claim, value=f"{speed:.2f}", target=f">= {BAR}", met=speed >= BAR))
    return rows


# -- all --------------------------------------------------------------------------------------------------------------


def simulated(replicas: Sequence[int]) -> list[Row]:
    """The schedule alone, with a batch that grows with the replicas."""
    rows = []
    for name, (sigma, cap) in LENGTHS.items():
        for count in replicas:
            run = Simulation(Schedule(count * GROUPS, 2, "window"), sigma, cap, count * 128, 1.0)
            steps = max(STEPS // count, 20)
            speed = in_turns(sigma, cap, count * 128, 1.0, steps, count * GROUPS) / run.run(steps)
            claim = f"{name}, {count} replicas, simulated: S = 2, window: speed-up over synchronous; trainer idle"
            rows.append(Row(claim=claim, value=f"{speed:.2f}; {run.idle:.2f}", target=f">= {BAR}", met=speed >= BAR))
    return rows


def main() -> None:
    """All cases; then the idle time of a trainer that need not wait; then more replicas, and the real collectors."""
    rows = []
    for name, (sigma, cap) in LENGTHS.items():
        turns = in_turns(sigma, cap, 128, 1.0)
        for (staleness, order), known in zip(CASES, KNOWN[name], strict=True):
            run = Simulation(Schedule(GROUPS, staleness, order), sigma, cap, 128, 1.0)
            speed = turns / run.run(STEPS)
            words = (
                f"{name}: S = {staleness}, {order}: speed-up over synchronous (another simulation); trainer idle; age"
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
    rows += simulated((2, 8, 32, 128, 512))
    for name, replicas, steps in (*((name, 2, 30) for name in LENGTHS), (next(iter(LENGTHS)), 8, 12)):
        rows += on_a_simulated_clock(name, replicas, steps)
    finish("async_collection", rows)


if __name__ == "__main__":
    main()
