"""An engine of fake replicas that take weights: they read the real store, keep a log, and fail where told to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchrl_moe.data.weight_store import WeightStoreReader, check_tensors
from torchrl_moe.modules.backends.replica import StageReport, SwapReport
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica

EXPECTED = {"a": (torch.float32, torch.Size([2, 2])), "b": (torch.int64, torch.Size([3]))}


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.full((2, 2), float(value)), "b": torch.full((3,), int(value))}


class WeightReplica(FakeReplica):
    """Takes weights. ``fail[command]`` is called with how many times it was asked before; its error, if any, is raised,
    or for ``swap_weights`` reported."""

    def __init__(self, index: int, **kwargs: Any) -> None:
        super().__init__(index, **kwargs)
        self.fleet: Fleet
        self.fail: dict[str, Callable[[int], Exception | None]] = {}
        self.asked: Counter[str] = Counter()
        self.weights: dict[str, Tensor] = {}
        self.reader: WeightStoreReader | None = None
        self.options: dict[str, Any] = {}
        self.staging: dict[str, Any] = {}

    def call(self, command: str, timeout: float, **kwargs: Any) -> Any:
        method = getattr(self, f"command_{command}", None)
        if method is None:
            return super().call(command, timeout, **kwargs)
        self._check_alive()
        self.fleet.note(command, self.index)
        error = self.fail.get(command, lambda _: None)(self.asked[command])
        self.asked[command] += 1
        if error is not None and command != "swap_weights":
            raise error
        return method(error=error, **kwargs) if command == "swap_weights" else method(**kwargs)

    def command_metadata(self) -> Any:
        return EXPECTED

    def command_init_weights(self, transport: str, options: dict[str, Any]) -> None:
        assert transport == "memmap"
        self.reader = WeightStoreReader(options["folder"])

    def command_stage_weights(self, version: int, **options: Any) -> StageReport:
        self.staging = options
        assert self.reader is not None, "the transport is not initialised"
        manifest = self.reader.manifest(version)
        check_tensors(manifest.tensors, EXPECTED)
        self.reader.verify(manifest)
        return StageReport(seconds=0.25, nbytes=manifest.nbytes, digest=manifest.digest)

    def command_swap_weights(
        self, version: int, pause: str, clear_cache: bool, canary: Any, error: Exception | None
    ) -> SwapReport:
        self.options = {"pause": pause, "clear_cache": clear_cache, "canary": canary}
        if isinstance(error, SoftError):
            return SwapReport(paused_seconds=0.5, error=str(error))
        if error is not None:
            raise error
        assert self.reader is not None
        with self.reader.reading(self.reader.manifest(version)) as tensors:
            self.weights = {name: tensor.clone() for name, tensor in tensors.items()}
        self.version = version
        return SwapReport(loading_seconds=0.25, paused_seconds=0.5)


class SoftError(Exception):
    """A failure that the replica survives, and reports."""


class Fleet(FakeAsyncVLLM):
    """Fake replicas that take weights. ``log`` has one line per weight command: what, which, and all states by then."""

    def __init__(self, num_replicas: int = 3, late: Sequence[int] = (), **kwargs: Any) -> None:
        self.replicas: list[WeightReplica] = [WeightReplica(index, **kwargs) for index in range(num_replicas)]
        self.log: list[tuple[str, int, list[str]]] = []
        self._log_lock = threading.Lock()
        GenerationService.__init__(self, self.replicas)
        for replica in self.replicas:
            replica.fleet = self
            self.infos.append(replica.wait_ready(0.0))
            if replica.index not in late:
                self.roster.set_state(replica.index, ReplicaState.SERVING)
        self._running = True

    def note(self, command: str, index: int) -> None:
        with self._log_lock:
            self.log.append((command, index, [entry.state.name for entry in self.roster]))

    @property
    def states(self) -> list[str]:
        return [entry.state.name for entry in self.roster]

    @property
    def versions(self) -> list[int]:
        return [entry.version for entry in self.roster]

    def holds(self, index: int) -> float | None:
        """The value of the weights that a replica has."""
        held = self.replicas[index].weights
        return held["a"][0, 0].item() if held else None
