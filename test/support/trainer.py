"""A trainer over a collector and a fake engine, which does what a test drew, and keeps the books.

Its books are those of the data alone: which prompts have been trained, and which may not come. What the collector says
of itself is held against them.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby, pairwise
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase

from support.collecting import Questions, chat, policy_of, queries
from support.services import RestartingService
from support.waiting import until
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.replica_table import FaultPolicy, ReplicaState
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica

FAULTS = FaultPolicy(first_delay=0.001, longest_delay=0.02, max_restarts=1 << 20, attempts=1 << 20, probe=math.inf)


class Shuffled:
    """Numbered questions, ``count`` in an epoch, in another order in each."""

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.generator = torch.Generator().manual_seed(seed)

    def __iter__(self) -> Iterator[dict[str, list[str]]]:
        order = torch.randperm(self.count, generator=self.generator).split(3)
        return iter([{"query": [f"q{i}" for i in part.tolist()]} for part in order])

    def first(self, count: int) -> list[str]:
        """So many from where the generator is."""
        found: list[str] = []
        while len(found) < count:
            found += [query for batch in self for query in batch["query"]]
        return found[:count]


class MovingEngine(RestartingService):
    """New weights come while answers are generated, whose first tokens are of those that they began with.

    Replicas are restarted with the weights of the others, and what a sync in mode ``abort_resume`` cut is finished.
    """

    def __init__(self, num_replicas: int, version: int) -> None:
        def token_seconds(request: Request) -> float:
            assert request.prompt_token_ids is not None
            return (0.0, 1e-4, 1e-3)[int(request.prompt_token_ids.sum()) % 3]

        self.weights, self._moving = version, threading.Lock()
        super().__init__(num_replicas, lambda i, _: FakeReplica(i, token_seconds=token_seconds, layout=None), FAULTS)
        self.register_weight_sync(self._bring)
        self.update(version)

    def _bring(self, index: int) -> None:
        with self._moving:
            self._give(index)
            self.replica_table.set_state(index, ReplicaState.SERVING)

    def _give(self, index: int) -> None:
        self.replica_table[index].replica.version = self.weights
        self.replica_table.set_version(index, self.weights)

    def update(self, version: int) -> None:
        with self._moving:
            self.weights = version
            for entry in self.replica_table:
                if entry.state is ReplicaState.SERVING:
                    self._give(entry.index)
            self.replica_table.note_version(version)

    def cut(self) -> None:
        """Cut all that runs."""
        self.abort([request.request_id for line in self.made for one in line for request in list(one.submitted)])

    async def agenerate(self, prompt: Any = None, sampling_params: Any = None, **kwargs: Any) -> Completion:
        began = self.replica_table.latest_version
        completion = await super().agenerate(prompt, sampling_params, **kwargs)
        while completion.aborted:
            kwargs |= {"prompt_token_ids": None, "resume": completion}
            completion = await super().agenerate(None, sampling_params, **kwargs)
        versions = completion.outputs[0].policy_versions
        versions[:1] = np.minimum(versions[:1], began)
        return completion


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a collector is made with, and what comes of its prompts."""

    group_size: int = 2
    groups_per_batch: int = 2
    max_staleness: int = 1
    order: Any = "window"
    window: float = 0.3
    on_stale: Any = "wait"
    over_sample: float = 1.0
    max_in_flight: Any = "auto"
    prompts: int = 7  # in an epoch
    seed: int = 0
    failing: frozenset[str] = frozenset()
    filtered: frozenset[str] = frozenset()
    turns: int = 1
    is_shared: bool = True  # whether there is one environment, or a callable that makes them
    replicas: int = 2
    updates_once: bool = True  # whether weights are updated after each batch and at no other time

    @property
    def bound(self) -> float:
        """The greatest age of a token."""
        if self.on_stale == "drop":
            return self.max_staleness
        if self.order == "ready" or not self.updates_once:
            return math.inf
        places = (self.max_staleness + 1) * self.groups_per_batch
        width = max(1, int(self.window * places)) if self.order == "window" else 1
        return self.max_staleness + math.ceil((width - 1) / self.groups_per_batch)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    trained: list[str]
    groups: frozenset[int]
    version: int
    state: dict[str, Any]


class Trainer:
    """Trains by a plan; each method is something that a trainer does."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.order = Shuffled(plan.prompts, plan.seed).first(1 << 12)
        self._begin(Checkpoint([], frozenset(), 0, {}))

    def _begin(self, checkpoint: Checkpoint) -> None:
        plan = self.plan
        self.trained, self.version = list(checkpoint.trained), checkpoint.version
        self._groups, self._lost = set(checkpoint.groups), self._missing(checkpoint)
        self._batches = self._pushed = 0
        self._restored = checkpoint.state.get("begun", 0)  # groups with lower numbers came from there
        self.engine = MovingEngine(plan.replicas, self.version)
        size = plan.group_size if plan.turns == 1 else 1
        names = ("group_size", "groups_per_batch", "max_staleness", "order", "window", "on_stale", "over_sample")
        given = {name: getattr(plan, name) for name in (*names, "max_in_flight")}
        self.collector = AsyncLLMCollector(
            self._env(size) if plan.is_shared else lambda: self._env(size),
            policy=policy_of(self.engine, max_new_tokens=4),
            dataloader=Shuffled(plan.prompts, plan.seed),
            group_filter=lambda rows: queries(rows)[0] not in plan.filtered,
            max_failures=1 << 20,
            heartbeat_timeout=60.0,
            **given,
        )
        if checkpoint.state:
            self.collector.load_state_dict(checkpoint.state)
        self._batches_of = iter(self.collector)

    def _env(self, size: int) -> Any:
        def reward(query: str) -> float:
            if query in self.plan.failing:
                raise ZeroDivisionError(query)
            return 1.0

        return chat(size, self.plan.turns, reward)

    def take(self) -> None:
        batch = next(self._batches_of)
        assert batch is not None
        self._batches += 1
        self._check(batch)
        if self.plan.updates_once:
            self._update()

    def update(self) -> None:
        if not self.plan.updates_once:
            self._update()

    def _update(self) -> None:
        self.version += 1
        self._pushed += not self._batches
        self.engine.update(self.version)
        self.collector.increment_version()

    def cut(self) -> None:
        self.engine.cut()

    def kill(self) -> None:
        self.engine.kill(self.version % self.plan.replicas)

    def freeze(self) -> None:
        """Pause the engine, as a sync in mode ``hot_swap`` does."""
        table = self.engine.replica_table
        until(lambda: all(one.state is ReplicaState.SERVING and one.replica.is_alive() for one in table))
        self.engine.pause()
        self.engine.resume()

    def pause(self) -> None:
        with self.collector.pause():
            self.collector.stats()

    def evaluate(self) -> None:
        answers = self.collector.evaluate(chat(1), 2, dataloader=Questions(2))
        assert queries(answers) == ["q0", "q1"]

    def save(self) -> None:
        """Note where it is, to go back there."""
        self._checkpoint()

    def _checkpoint(self) -> Checkpoint:
        saved = Checkpoint(list(self.trained), frozenset(self._groups), self.version, self.collector.state_dict())
        missing = self._missing(saved)
        if self.plan.on_stale == "wait":
            assert missing.keys() <= self.plan.failing | self.plan.filtered
        self.saved = saved
        return saved

    def crash(self) -> None:
        """Lose all since the last checkpoint, and continue from that."""
        saved = getattr(self, "saved", None) or self._checkpoint()
        self.close()
        self._begin(saved)

    def move(self) -> None:
        """Continue in another collector."""
        self._checkpoint()
        self.crash()

    def close(self) -> None:
        self.collector.shutdown()
        self.engine.shutdown()

    def settle(self) -> None:
        """Wait until nothing is under way, and compare what is missing with what the collector counted."""
        with self.collector.pause():
            schedule = self.collector._schedule
            until(lambda: schedule.ready_groups == schedule.in_line)
            missing = self._missing(self._checkpoint())
            stats = self.collector.stats()
        reasons = ("failed", "filtered", "stale")
        failed, filtered, stale = (stats.get(f"collector/groups_dropped/{reason}", 0) for reason in reasons)
        lost = missing - self._lost
        assert self._lost - missing == Counter()
        assert stats["batches"] == self._batches
        assert stats["collector/failures"] == failed
        assert stats["collector/refills"] == failed + filtered + stale == lost.total()
        assert stale == 0 or self.plan.on_stale == "drop"
        if not stale:
            assert sum(lost[query] for query in self.plan.failing) == failed
            assert sum(lost[query] for query in self.plan.filtered) == filtered

    def _missing(self, checkpoint: Checkpoint) -> Counter[str]:
        """Prompts that were read and are neither trained, nor ready, nor to come; nothing may be two of these."""
        if not checkpoint.state:
            return Counter()
        prompts, ready = checkpoint.state["prompts"], checkpoint.state["ready"]
        positions = [*prompts["again"], *(entry["position"] for entry in ready)]
        assert len(positions) == len(set(positions))
        assert all(position < prompts["position"] for position in positions)
        waiting = [data["query"] for data in (*prompts["again"].values(), *(entry["data"] for entry in ready))]
        assert [self.order[position] for position in positions] == waiting
        read = Counter(self.order[: prompts["position"]])
        read.subtract(checkpoint.trained)
        read.subtract(waiting)
        assert all(count >= 0 for count in read.values()), "a prompt came twice"
        return +read

    def _check(self, batch: TensorDictBase) -> None:
        plan = self.plan
        rows = batch.unbind(0)
        of_group = plan.group_size * plan.turns
        assert len(rows) == of_group * plan.groups_per_batch
        runs = [(number, list(run)) for number, run in groupby(rows, lambda row: int(row.get("group_id")))]
        assert [len(run) for _, run in runs] == [of_group] * plan.groups_per_batch
        numbers = {number for number, _ in runs}
        assert len(numbers) == plan.groups_per_batch
        assert not numbers & self._groups
        self._groups |= numbers
        for _, run in runs:
            (query,) = {row["query"] for row in run}
            assert query not in plan.failing | plan.filtered
            self.trained.append(query)
            steps = [int(row["next", "step_count"]) for row in run]
            assert steps == list(range(1, plan.turns + 1)) * plan.group_size
        for row in rows:
            versions = [version for version in row["policy_versions", "full"].tolist() if version >= 0]
            assert all(one <= other for one, other in pairwise(versions))
            # what is pushed between a restore and the first batch makes nothing older
            pushed = self._pushed if int(row.get("group_id")) < self._restored else 0
            assert self.version - pushed - versions[0] <= plan.bound
        if plan.order == "fifo" and plan.on_stale == "wait":
            bad = plan.failing | plan.filtered
            expected = [query for query in self.order if query not in bad]
            assert self.trained == expected[: len(self.trained)]


PROMPTS = 24  # in an epoch
DONE = "done"


def token_seconds(request: Request) -> float:
    """1 to 5 ms, by the prompt."""
    assert request.prompt_token_ids is not None
    return 1e-3 * (1 + int(request.prompt_token_ids.sum()) % 5)


def checkpoint(folder: Path) -> dict[str, Any]:
    """What was saved last: prompts that were trained, and the collector's state."""
    path = folder / "checkpoint"
    return torch.load(path, weights_only=False) if path.exists() else {"trained": [], "collector": None}


def train(folder: Path, order: Any, progress: Connection) -> None:
    """Train until the epoch has ended; say what was done, and about to be done."""
    saved = checkpoint(folder)
    trained, rng = saved["trained"], random.Random(len(saved["trained"]))
    with FakeAsyncVLLM(2, token_seconds=token_seconds, layout=None) as engine:
        given: dict[str, Any] = {"policy": policy_of(engine), "dataloader": Questions(PROMPTS), "order": order}
        collector = AsyncLLMCollector(chat(2), group_size=2, groups_per_batch=2, max_staleness=2, **given)
        if saved["collector"] is not None:
            collector.load_state_dict(saved["collector"])

        def save() -> None:
            progress.send("about to write")
            torch.save({"trained": trained, "collector": collector.state_dict()}, folder / "unfinished")
            progress.send("written")
            os.replace(folder / "unfinished", folder / "checkpoint")
            progress.send("saved")

        batches = iter(collector)
        while len(trained) < PROMPTS:
            trained += queries(next(batches))[::2]
            progress.send("trained")
            if rng.random() < 0.5:
                save()
        save()
        progress.send(DONE)
        collector.shutdown()


@contextmanager
def life(folder: Path, order: str) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a trainer; yields its process, and what it says. It is a fork, so nothing is imported again."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(folder, order, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()
