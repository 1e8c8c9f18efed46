"""Services over fake replicas: calls to them, and one whose replicas die and come back, with short delays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from support.waiting import HOUR, until
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.in_flight import Call, InFlight
from torchrl_moe.modules.serving.replica_table import FaultPolicy, ReplicaState, ReplicaTable
from torchrl_moe.modules.serving.requests import placements
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica

QUICK = FaultPolicy(first_delay=0.001, longest_delay=0.02, probe=0.05, patience=0.1, start=5.0)


def ask(engine: GenerationService, prompts: Any = "hi", max_tokens: int = 4, **kwargs: Any) -> Any:
    return engine.generate(prompts, {"max_tokens": max_tokens, "logprobs": 0}, use_tqdm=False, **kwargs)


def submitted(engine: FakeAsyncVLLM) -> list[Request]:
    return [request for replica in engine.replicas for request in replica.submitted]


def slow_if(*prompts: str) -> Callable[[Request], float]:
    return lambda request: HOUR if request.prompt in prompts else 0.0


def until_running(engine: GenerationService, counts: list[int]) -> None:
    """Wait until so many requests run on each replica: they count as in flight a moment before."""
    until(lambda: [row["running"] for row in engine.stats()] == counts)


@contextmanager
def listening(table: ReplicaTable, listener: Callable[[], None]) -> Iterator[None]:
    """Hear of changes for as long as the context lasts."""
    table.add_listener(listener)
    try:
        yield
    finally:
        table.remove_listener(listener)


class RestartingService(GenerationService):
    """Makes its replicas by ``make(index, number)``: the ``number``-th of that index, from 0."""

    def __init__(
        self,
        num_replicas: int = 2,
        make: Callable[[int, int], FakeReplica] = lambda index, _: FakeReplica(index),
        faults: FaultPolicy = QUICK,
        **kwargs: Any,
    ) -> None:
        self.made: list[list[FakeReplica]] = [[] for _ in range(num_replicas)]

        def make_replica(index: int) -> FakeReplica:
            if index == len(self.made):  # it is added
                self.made.append([])
            replica = make(index, len(self.made[index]))
            self.made[index].append(replica)
            return replica

        replicas = [make_replica(index) for index in range(num_replicas)]
        super().__init__(replicas, faults=faults, make_replica=make_replica, **kwargs)
        for replica in replicas:
            self.infos.append(replica.wait_ready(0.0))
            self.replica_table.set_state(replica.index, ReplicaState.SERVING)
        self._running = True
        self._fleet.supervise()

    @property
    def states(self) -> list[str]:
        return [entry.state.name for entry in self.replica_table]

    @property
    def restarts(self) -> list[int]:
        return [entry.restarts for entry in self.replica_table]

    def kill(self, index: int, reason: str = "killed") -> None:
        self.replica_table[index].replica.die(reason)


def named_requests(names: Sequence[str], max_tokens: int = 4, priority: int = 0) -> list[Request]:
    """Requests whose prompts are their names."""
    how: dict[str, Any] = {"sampling_params": {"max_tokens": max_tokens, "logprobs": 0}, "priority": priority}
    ids = {name: np.frombuffer(name.encode(), np.uint8) for name in names}
    return [Request(request_id=name, prompt_token_ids=ids[name], **how) for name in names]


def waiting_request(priority: int = 0, **fields: Any) -> InFlight:
    """A request of a call of its own."""
    call = Call(LoadBalancer(["a replica"]), named_requests("r", priority=priority), placements(1, **fields))
    return call.requests[0]
