"""The engine's side of a weight sync under TorchRL's name. Replicas load versions themselves, so it only observes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.weight_update.options import Scheme
from torchrl_moe.weight_update.rolling import waits_for_update
from torchrl_moe.weight_update.sender import check_numbers, engine_of, tensors_of
from torchrl_moe.weight_update.source import check_metadata

__all__ = ["VLLMWeightReceiver"]


class VLLMWeightReceiver:
    """Observes what a sender loads into an engine; :meth:`create_receiver` of a scheme makes it.

    In TorchRL both sides join a process group at the same time. Here the sender has the engine: it sets replicas up and
    updates them, with or without a receiver.

    Args:
        scheme: the sender's, or one like it.
        vllm_engine: an ``AsyncVLLM``, or a handle of one.

    Raises:
        ValueError: it is not an ``AsyncVLLM``.

    Attributes:
        version: of the engine's weights at the last poll.
    """

    def __init__(self, scheme: Scheme, vllm_engine: Any) -> None:
        self._scheme = scheme
        self._engine: GenerationService = engine_of(vllm_engine)
        self.version: int = self._engine.replica_table.latest_version

    def init_all_workers_group(self, model_metadata: Mapping[str, Any] | None = None) -> None:
        """Compare the trainer's tensors with the engine's. There is no group to join, and nothing is waited for.

        Args:
            model_metadata: name -> (dtype, shape), as the trainer's ``get_model_metadata(model)`` returns it.

        Raises:
            ValueError: the engine has other numbers of replicas or workers than the scheme.
            ManifestMismatch: it has other tensors.
            NoReplicaError: none of its replicas serves.
            EngineError: no replica reports its tensors.
        """
        options = self._scheme.options
        check_numbers(self._engine, options)
        if model_metadata is not None and options.source.lora != "adapter":  # an adapter has names of its own
            ready = filter(waits_for_update, self._engine.replica_table)
            check_metadata(model_metadata, tensors_of(self._engine, ready, options.swapping.timeout_seconds))

    def apply_weights(self, weights: Any = None, inplace: bool = True) -> None:
        """Do nothing, as TorchRL's receiver: when the sender's ``update_weights`` returns, replicas have the weights.

        Args:
            weights: refused.
            inplace: the engine's weights are replaced in place.

        Raises:
            ValueError: weights were given, which would not be applied.
        """
        if weights is not None or not inplace:
            raise ValueError(
                "apply_weights: this receiver applies no weights: the sender brings them to the engine, inplace=True. "
                "Call sender.update_weights(weights)"
            )

    def poll_and_apply(self, timeout: float = 0.1) -> bool:
        """Return whether the engine has newer weights than at the last poll.

        Args:
            timeout: TorchRL's; nothing is waited for.
        """
        del timeout
        before, self.version = self.version, self._engine.replica_table.latest_version
        return self.version > before
