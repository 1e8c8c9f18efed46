"""The worker's end of the nccl transport: vLLM's own NCCL engine, inside our bracket.

What it receives goes from GPU to GPU straight into the model, so it comes during the pause. Written to the interface of
vLLM 0.28 to 0.33; it takes two GPUs to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor

from torchrl_moe._errors import ManifestMismatch, WeightSyncError
from torchrl_moe.data.weight_store import Manifest

__all__ = ["PLAIN_BECAUSE", "NcclReceiver", "update_info"]

PLAIN_BECAUSE = "nccl sends during the pause"
OURS = {"timeout_seconds"}  # options that vLLM's engine does not know


def update_info(manifest: Manifest) -> dict[str, list[Any]]:
    """Return the fields of vLLM's ``NCCLWeightTransferUpdateInfo``.

    >>> from torchrl_moe.data.weight_store import Manifest
    >>> update_info(Manifest(version=1, slot=0, entries=()))
    {'names': [], 'dtype_names': [], 'shapes': []}
    """
    return {
        "names": [entry.name for entry in manifest.entries],
        "dtype_names": [entry.dtype for entry in manifest.entries],
        "shapes": [list(entry.shape) for entry in manifest.entries],
    }


class NcclReceiver:
    """Receives versions and loads them at the same time, by :meth:`load`.

    Args:
        options: the fields of vLLM's ``NCCLWeightTransferInitInfo``.
        rank: of this worker in the group.
        worker: our weight engine, for what vLLM's engine wants to know.

    Raises:
        WeightSyncError: the worker has no GPU.
    """

    def __init__(self, options: Mapping[str, Any], rank: int, worker: Any) -> None:
        if worker.device.type != "cuda":
            raise WeightSyncError(
                f"transport='nccl' needs workers with GPUs, this one computes on {worker.device.type}: use 'gloo'"
            )
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo

        self._rank, self._loads = rank, 0
        self._model = _Counting(worker.model)
        self._engine = NCCLWeightTransferEngine(worker.config, worker.vllm_config, worker.device, self._model)
        fields = {name: value for name, value in options.items() if name not in OURS}
        self._engine.init_transfer_engine(NCCLWeightTransferInitInfo(**fields))

    def manifest(self, version: int) -> Manifest:
        """Refuse: only what was staged has a manifest here."""
        raise ManifestMismatch(f"version {version} was not staged")

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Do nothing: the bytes come when :meth:`load` asks for them."""

    def reading(self, manifest: Manifest, *, verify: bool = False) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Refuse: nothing is held."""
        del verify
        raise WeightSyncError(f"version {manifest.version} is not held here: {PLAIN_BECAUSE}")

    def load(self, manifest: Manifest) -> int:
        """Say that this worker waits, receive a version into the model, and return how many tensors it took."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferUpdateInfo

        from torchrl_moe.modules.backends.vllm.nccl_trainer import ready_key

        self._model.taken = 0
        communicator: Any = self._engine.model_update_group
        communicator.group.store.set(ready_key(self._loads, self._rank), b"")
        self._loads += 1
        self._engine.receive_weights(NCCLWeightTransferUpdateInfo(**update_info(manifest)))
        return self._model.taken

    def close(self) -> None:
        """Leave the group. Idempotent."""
        self._engine.shutdown()


class _Counting:
    """A model, as far as vLLM's engine loads it, that counts what it takes."""

    def __init__(self, model: Any) -> None:
        self.taken = 0
        self._model = model

    def load_weights(self, weights: Any) -> Any:
        listed = list(weights)
        self.taken += len(listed)
        return self._model.load_weights(iter(listed))
