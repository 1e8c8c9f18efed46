"""TorchRL's transport methods over a sender and the weight store: what ``create_transport`` of a scheme returns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from tensordict import TensorDict

from torchrl_moe.weight_update.options import Scheme
from torchrl_moe.weight_update.sender import VLLMWeightSender
from torchrl_moe.weight_update.source.layout import Weights
from torchrl_moe.weight_update.store import WeightStoreReader

__all__ = ["SenderTransport"]


class SenderScheme(Scheme, Protocol):
    """A scheme that makes senders."""

    def create_sender(self) -> VLLMWeightSender:
        """Return the trainer's side."""


class SenderTransport:
    """Sends with its own sender, made on first use, and reads from the weight store.

    Args:
        scheme: the options.
        vllm_engine: passed to the sender by :meth:`init_all_workers_group`; may be set later.
    """

    def __init__(self, scheme: SenderScheme, vllm_engine: Any = None) -> None:
        self._scheme, self.vllm_engine = scheme, vllm_engine
        self._sender: VLLMWeightSender | None = None
        self._store = WeightStoreReader(scheme.options.store.seen_as)

    def _sending(self) -> VLLMWeightSender:
        if self._sender is None:
            self._sender = self._scheme.create_sender()
        return self._sender

    def init_all_workers_group(
        self, model_metadata: Mapping[str, Any] | None = None, gpus_per_replica: int | None = None
    ) -> None:
        """Prepare the engine's replicas, as the sender's method of this name does.

        Args:
            model_metadata: as there.
            gpus_per_replica: TorchRL's; the scheme's is compared with the engine.

        Raises:
            ValueError: :attr:`vllm_engine` is not an ``AsyncVLLM``, or ``gpus_per_replica`` is not the scheme's.
        """
        if gpus_per_replica not in (None, self._scheme.options.collective.gpus_per_replica):
            raise ValueError(f"gpus_per_replica={gpus_per_replica}: give it to the scheme")
        self._sending().init_all_workers_group(model_metadata, self.vllm_engine)

    def send_weights(self, model_id: str, weights: Weights) -> None:
        """Send as the sender's ``update_weights`` does.

        Args:
            model_id: TorchRL's, which only names the model in a log there.
            weights: a model, or names and tensors.

        Raises:
            RuntimeError: the scheme needs an engine, and there is none yet.
            WeightSyncError: too few replicas hold the version.
        """
        del model_id
        self._sending().update_weights(weights)

    def receive_weights(
        self, timeout: float | None = None, *, weights: Any = None, model: Any = None, strategy: Any = None
    ) -> TensorDict | None:
        """Return a copy of the newest version in the weight store, flat, or ``None`` if there is none.

        Args:
            timeout: TorchRL's; nothing is waited for.
            weights: refused.
            model: refused.
            strategy: refused.

        Raises:
            ValueError: ``weights``, ``model`` or ``strategy`` was given.
            ManifestMismatch: the version was replaced meanwhile by newer ones.
        """
        del timeout
        given = {"weights": weights, "model": model, "strategy": strategy}
        if named := [name for name, value in given.items() if value is not None]:
            raise ValueError(f"{', '.join(named)}: weights are returned, not loaded: load them yourself")
        version = self._store.newest()
        if version is None:
            return None
        with self._store.reading(self._store.manifest(version), verify=True) as found:
            return TensorDict({name: tensor.clone() for name, tensor in found.items()})

    def check_connection(self) -> bool:
        """Whether what is sent can arrive: the sender has an engine."""
        return self._sender is not None and self._sender.has_engine

    def shutdown(self) -> None:
        """Shut the sender down. Idempotent."""
        if self._sender is not None:
            self._sender.shutdown()
        self._store.close()
