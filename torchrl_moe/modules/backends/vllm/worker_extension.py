"""What we add to vLLM's workers: methods that the engine process calls by name through ``collective_rpc``.

It is imported inside worker processes only. Every method carries our prefix, because vLLM refuses an extension that
shares a name with its worker class.
"""

from __future__ import annotations

import pickle
from typing import Any

from torch import Tensor

from torchrl_moe import _compat

__all__ = ["WorkerExtension"]


# vLLM imports this module in each worker before it makes the weight-transfer engine. Unlike an entry point, that needs
# no installed package and cannot be filtered away by VLLM_PLUGINS.
_compat.register_weight_engine()
_compat.keep_cpu_experts_with_lora()


class WorkerExtension:
    """Mixed into vLLM's ``Worker``; ``model_runner`` is the worker's own."""

    model_runner: Any
    torchrl_moe_saved: dict[str, Tensor]

    def torchrl_moe_router_layers(self) -> list[int]:
        """Return the sorted indices of the decoder layers that have a router.

        Read from the modules of the model that runs, never from captured values: an untouched row is all zeros, and
        zero is an expert.
        """
        return _compat.router_layer_ids(self.model_runner.get_model())

    def torchrl_moe_save_params(self) -> int:
        """Keep a copy of the parameters in host memory, for :meth:`torchrl_moe_validate`; return how many."""
        parameters = self.model_runner.get_model().named_parameters()
        self.torchrl_moe_saved = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters}
        return len(self.torchrl_moe_saved)

    def torchrl_moe_validate(self, function: bytes) -> bytes:
        """Return, pickled, what a pickled function of the saved parameters and the model says."""
        saved = getattr(self, "torchrl_moe_saved", {})
        return pickle.dumps(pickle.loads(function)(saved, self.model_runner.get_model()))
