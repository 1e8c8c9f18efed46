"""What TorchRL's code asks of an engine beside ``generate``: its ``RLvLLMEngine``, and what goes with that.

TorchRL's names and meanings; what cannot be meant here is refused with what to do instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchrl_moe.modules.serving.fleet import CALL_SECONDS
from torchrl_moe.modules.serving.service import GenerationService

__all__ = ["EngineInterface"]


class EngineInterface(GenerationService):
    """A service that TorchRL's code may take for an engine of its own."""

    # -- what the weight sync asks ----------------------------------------------------------------------------------

    def get_tp_size(self) -> int:
        """Return over how many devices one replica spans its tensors."""
        self._check_running("get_tp_size")
        return self.infos[0].tensor_parallel_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return checkpoint name -> (dtype, shape) of every tensor, experts one by one, as the checkpoint has them."""
        self._check_running("get_model_metadata")
        return self._fleet.alive()[0].replica.metadata(CALL_SECONDS)

    # -- tests of what the workers hold -----------------------------------------------------------------------------

    def save_model_params(self) -> None:
        """Have every worker keep a copy of its parameters in host memory, for :meth:`validate_model_params`."""
        self.collective_rpc("torchrl_moe_save_params")

    def validate_model_params(self, function: Callable[[Mapping[str, torch.Tensor], torch.nn.Module], Any]) -> Any:
        """Run a check of yours inside every worker: ``function(saved_params, model)``.

        The function is pickled by value where it cannot be imported, and unpickled in the engine's own processes, which
        trust this one as it is. Names and layouts are vLLM's: fused projections, packed experts.

        Returns:
            What the function returned, which must be plain data: one list per replica, with one value per worker.

        Raises:
            EngineError: the function raised; the message ends with its words.
        """
        import cloudpickle

        from torchrl_moe.modules.backends.process import wire

        answers = self.collective_rpc("torchrl_moe_validate", args=(cloudpickle.dumps(function),))
        return [[wire.decode(answer[0], answer[1:]) for answer in workers] for workers in answers]
