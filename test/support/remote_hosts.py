"""Actors for the tests of collectors in Ray. Each is a process that imports torch, so it is used again and again."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import ray
from torchrl.data import RayReplayBuffer
from torchrl.envs import EnvBase, StepCounter
from torchrl.envs.llm import DatasetChatEnv

from support.collecting import TOKENIZER, Questions, policy_of, queries
from torchrl_moe.collectors import ray_collectors
from torchrl_moe.collectors.ray_collectors import CollectorHost
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM


class ReusableHost(CollectorHost):
    """Makes a collector in the place of the one that it had, and runs what a test sends."""

    def make(self, kind: Any, arguments: Mapping[str, Any]) -> int | None:
        if self._made is not None:
            self._made.shutdown()
        super().__init__()
        return super().make(kind, arguments)

    def run(self, function: Callable[[Any], Any]) -> Any:
        """Call a function with the collector."""
        return function(self._made)

    def pid(self) -> int:
        return os.getpid()


def start_actors(count: int) -> list[Any]:
    """Start them side by side."""
    actors = [ray.remote(ReusableHost).options(max_concurrency=8).remote() for _ in range(count)]
    ray.get([actor.pid.remote() for actor in actors])
    return actors


@contextmanager
def placing(*actors: Any) -> Iterator[list[Any]]:
    """Have collectors find their place in these actors, in turns. Yields those that were ended; they live on."""
    ended: list[Any] = []
    places = [*actors]

    def place(options: Mapping[str, Any]) -> Any:
        places.append(places.pop(0))
        return places[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_collectors, "_place", place)
        patch.setattr(ray_collectors.RayCollector, "_kill", lambda collector: ended.append(collector._actor))
        yield ended


def run(actor: Any, function: Callable[[Any], Any]) -> Any:
    """Call a function with an actor's collector, there."""
    return ray.get(actor.run.remote(function), timeout=60)


def stall(collector: Any) -> None:
    """Have a collector's fake engine answer nothing any more."""
    for replica in collector.policy.model.replicas:
        replica.stall()


def fake_policy(**settings: Any) -> Callable[[], vLLMWrapper]:
    """A factory of a policy over a fake engine."""
    return lambda: policy_of(FakeAsyncVLLM(**settings))


def joined_policy(name: str, **settings: Any) -> Callable[[], vLLMWrapper]:
    """A factory of a policy over a service with a name."""
    return lambda: policy_of(AsyncVLLM.connect(name), tokenizer=TOKENIZER, **settings)


def dataset() -> EnvBase:
    """An environment of four samples with data of its own, each prompt twice."""
    env = DatasetChatEnv.from_dataloader(Questions(64), repeats=2, batch_size=(4,), tokenizer=TOKENIZER)
    return env.append_transform(StepCounter(max_steps=1))


class BufferClient:
    """A client of a buffer elsewhere, which is here where the client is."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def extend(self, batch: Any) -> None:
        self.seen += queries(batch)


class BufferOfRay(RayReplayBuffer):
    """A buffer in Ray, without Ray: it cannot be sent itself."""

    def __init__(self, client: BufferClient) -> None:
        self._client, self.lock = client, threading.Lock()

    def client(self) -> BufferClient:
        return self._client
