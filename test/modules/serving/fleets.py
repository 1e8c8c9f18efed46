"""Services over fake replicas that die and come back, with a supervisor whose delays are short."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.testing.fake_engine import FakeReplica

QUICK = FaultPolicy(first_delay=0.001, longest_delay=0.02, probe=0.05, patience=0.1, start=5.0)


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
            replica = make(index, len(self.made[index]))
            self.made[index].append(replica)
            return replica

        replicas = [make_replica(index) for index in range(num_replicas)]
        super().__init__(replicas, faults=faults, make_replica=make_replica, **kwargs)
        for replica in replicas:
            self.infos.append(replica.wait_ready(0.0))
            self.roster.set_state(replica.index, ReplicaState.SERVING)
        self._running = True
        self._supervisor.start()

    @property
    def states(self) -> list[str]:
        return [entry.state.name for entry in self.roster]

    @property
    def restarts(self) -> list[int]:
        return [entry.restarts for entry in self.roster]

    def kill(self, index: int, reason: str = "killed") -> None:
        self.roster[index].replica.die(reason)
