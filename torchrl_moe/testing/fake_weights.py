"""Fake replicas that take weights from the real store or over gloo; they keep a log, and fail on demand."""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.engine import WeightOwner
from torchrl_moe.modules.backends.replica import PauseMode, ReplicaInfo, StageReport, SwapReport, WeightClaim
from torchrl_moe.modules.serving.replica_table import ReplicaState
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.store import Manifest, WeightStoreReader, check_tensors, copy_adapter
from torchrl_moe.store.reader import ADAPTER_FILES
from torchrl_moe.testing.fake_engine import FakeAsyncVLLM, FakeReplica
from torchrl_moe.weight_update.transports.base import Receiver
from torchrl_moe.weight_update.transports.registry import open_receiver

Kinds = Mapping[str, tuple[torch.dtype, torch.Size]]
FENCE = {"digest"}  # what tests do not look at
EXPECTED: Kinds = {"a": (torch.float32, torch.Size([2, 2])), "b": (torch.int64, torch.Size([3]))}


class SoftError(Exception):
    """A swap failure that the replica survives and reports."""

    def __init__(self, message: str, restored: bool = False) -> None:
        super().__init__(message)
        self.restored = restored


class Stall(Exception):
    """A replica that does not answer: the caller's own timeout ends the call."""


class FakeWeightReplica(FakeReplica):
    """One fake engine that takes weights."""

    def __init__(
        self, index: int = 0, *, expected: Kinds | None = EXPECTED, dtype: str = "", workers: int = 1, **kwargs: Any
    ) -> None:
        super().__init__(index, **kwargs)
        self._expected, self._dtype, self._workers = expected, dtype, workers
        self.fail: dict[str, Callable[[int], Exception | None]] = {}
        self.calls: list[tuple[str, dict[str, object]]] = []
        self.receivers: list[Receiver] = []
        self.weights: dict[str, Tensor] = {}
        self.reader: WeightStoreReader | None = None
        self._adapters: Path | None = None  # the store, if it holds adapters
        self._adapter: dict[str, Tensor] = {}  # an adapter
        self.staged = ""
        self.owner = WeightOwner()
        self.note: Callable[[str, int], None] | None = None

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        return replace(super().wait_ready(timeout), dtype=self._dtype, tensor_parallel_size=self._workers)

    def die(self, reason: str = "injected death") -> None:
        """Fail everything; its workers leave their group."""
        super().die(reason)
        self._leave()

    def _leave(self) -> None:
        for receiver in self.receivers:
            receiver.close()
        self.receivers = []

    @property
    def asked(self) -> Counter[str]:
        """Number of calls of each command."""
        return Counter(command for command, _ in self.calls)

    def told(self, command: str) -> dict[str, object]:
        """The arguments of a command's last call."""
        return next(arguments for name, arguments in reversed(self.calls) if name == command)

    def _command(self, name: str, timeout: float, /, **arguments: Any) -> Any:
        """Answer weight commands too."""
        # By name, as the engine process finds its commands; those without weights are the parent's.
        method = getattr(self, f"command_{name}", None)
        if method is None:
            return super()._command(name, timeout, **arguments)
        self._check_alive()
        if self.note is not None:
            self.note(name, self.index)
        fail = self.fail.get(name)
        error = None if fail is None else fail(self.asked[name])  # by the number of earlier calls
        self.calls.append((name, {key: value for key, value in arguments.items() if key not in FENCE}))
        if isinstance(error, Stall):
            time.sleep(timeout)
            raise EngineError(f"replica {self.index} did not answer {name!r} within {timeout:g} s")
        if isinstance(error, SoftError):
            return SwapReport(started=not error.restored, paused_seconds=0.5, error=str(error))
        if error is not None:
            raise error
        return method(**arguments)

    # Each answers the verb of its name, by an engine's own rules.

    def command_metadata(self) -> Kinds:
        return self._expected or {}

    def command_claim_weights(self, name: str, takeover: bool) -> WeightClaim:
        return self.owner.claim("", name, takeover)

    def command_owns_weights(self) -> bool:
        return self.owner.holds("")

    def command_give_up_weights(self) -> None:
        self.owner.give_up("")

    def command_init_weights(self, transport: str, options: Mapping[str, Any]) -> None:
        self.owner.check("")
        # Of the real transports, those that need no GPU and no engine.
        if transport not in ("adapter", "memmap", "gloo"):
            raise EngineError(f"the fake engine has no transport {transport!r}")
        self._leave()
        self._adapters = Path(options["folder"]) if transport == "adapter" else None
        self.reader = WeightStoreReader(options["folder"]) if transport == "memmap" else None
        if transport == "gloo":
            for rank in range(self._workers):
                place = SimpleNamespace(data_parallel_index=0, world_size=self._workers, rank=rank)
                self.receivers.append(open_receiver("gloo", options, SimpleNamespace(parallel_config=place)))

    def command_stage_weights(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        self.owner.check("")
        if self._adapters is not None:
            with tempfile.TemporaryDirectory() as folder:
                found = copy_adapter(self._adapters, version, Path(folder))
                self._adapter = safetensors.torch.load((Path(folder) / ADAPTER_FILES[1]).read_bytes())
            self.staged = found.digest
            return StageReport(seconds=0.5, nbytes=found.nbytes, digest=found.digest, fetched=0.25, loaded=0.25)
        found = self._store.manifest(version) if manifest is None else Manifest.from_json(manifest)
        if self._expected is not None:
            check_tensors(found.tensors, self._expected)
        # The workers of one replica receive together: each waits for the others of its group.
        if self.receivers:
            with ThreadPoolExecutor(self._workers) as pool:
                list(pool.map(lambda one: one.fetch(found, verify=verify == "digest", threads=threads), self.receivers))
        elif verify == "digest":
            self._store.verify(found, threads)
        self.staged = found.digest
        return StageReport(seconds=0.25, nbytes=found.nbytes, digest=found.digest, fetched=0.25)

    def command_swap_weights(
        self,
        version: int,
        digest: str,
        pause: PauseMode,
        clear_cache: bool,
        canary: Mapping[str, object] | None,
        patience: float = math.inf,
    ) -> SwapReport:
        if reason := self.owner.why_not_swap("", version, digest, self.staged):
            return SwapReport(started=False, error=reason)
        del pause, clear_cache, canary, patience
        # As an engine that sleeps: weights may be written before the cache is back.
        self._wake_up(["weights"])
        self._weights_lost = False
        if self._adapters is not None:
            self.weights, self.version = self._adapter, version
            return SwapReport()
        source = self.receivers[0] if self.receivers else self._store  # every worker has the same
        with source.reading(source.manifest(version)) as tensors:
            self.weights = {name: tensor.clone() for name, tensor in tensors.items()}
        self.version = version
        return SwapReport(loading_seconds=0.25, paused_seconds=0.5)

    @property
    def _store(self) -> WeightStoreReader:
        if self.reader is None:
            raise EngineError("the weight transport is not initialised")
        return self.reader


class FakeFleet(FakeAsyncVLLM):
    """An engine of fake replicas that take weights; it serves on construction."""

    def __init__(
        self, num_replicas: int = 3, *, expected: Kinds | None = EXPECTED, late: Sequence[int] = (), **kwargs: Any
    ) -> None:
        self.fakes = [FakeWeightReplica(index, expected=expected, **kwargs) for index in range(num_replicas)]
        self.replicas = list(self.fakes)
        self.log: list[tuple[str, int, list[str]]] = []
        self._log_lock = threading.Lock()
        GenerationService.__init__(self, self.fakes)  # not the parent's, which would make plain fakes
        for replica in self.fakes:
            replica.note = self._note
            self.infos.append(replica.wait_ready(0.0))
            if replica.index not in late:
                self.replica_table.set_state(replica.index, ReplicaState.SERVING)
        self._running = True

    def restart(self, index: int) -> FakeWeightReplica:
        """Replace a dead replica by a new one, which is STARTING."""
        self.fakes[index].die()
        self.replica_table.mark_dead(index)
        new = FakeWeightReplica(index, expected=self.fakes[index]._expected)
        new.note = self._note
        self.fakes[index] = self.replicas[index] = self.replica_table[index].replica = new
        self.replica_table.set_state(index, ReplicaState.STARTING)
        return new

    def _note(self, command: str, index: int) -> None:
        with self._log_lock:
            self.log.append((command, index, self.states))

    @property
    def states(self) -> list[str]:
        """Names of the replicas' states."""
        # `_name_`: each call of each replica logs all states, and `name` is a slow property of an enumeration
        return [entry.state._name_ for entry in self.replica_table]

    @property
    def versions(self) -> list[int]:
        """Versions that the service knows the replicas to hold."""
        return [entry.version for entry in self.replica_table]
