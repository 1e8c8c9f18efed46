"""What we add to vLLM's workers: methods that the engine process calls by name through ``collective_rpc``.

It is imported inside worker processes only. Every method carries our prefix, because vLLM refuses an extension that
shares a name with its worker class. None of them waits for anything: while a worker runs one, it generates nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchrl_moe import _compat, _compat_routing, _compat_sampling
from torchrl_moe.modules.backends.kept_ids import name_kept
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process.parent_watch import end_with_leader
from torchrl_moe.modules.backends.vllm.adapters import build_lora_request
from torchrl_moe.modules.backends.vllm.forced_routing import ForcedRouting, prove
from torchrl_moe.modules.backends.vllm.prompt_scores import adjusted

__all__ = ["WorkerExtension"]


# vLLM imports this module in each worker before it makes the weight-transfer engine. Unlike an entry point, that needs
# no installed package and cannot be filtered away by VLLM_PLUGINS.
_compat.register_weight_engine()
_compat.keep_cpu_experts_with_lora()
end_with_leader()  # the engine core, this process's parent, does not watch its own parent


class WorkerExtension:
    """Mixed into vLLM's ``Worker``; the attributes without our prefix are the worker's own."""

    model_runner: Any
    weight_transfer_engine: Any
    add_lora: Callable[[Any], bool]
    torchrl_moe_saved: dict[str, Tensor]
    torchrl_moe_drive: Callable[[bool], None]

    def torchrl_moe_router_layers(self) -> list[int]:
        """Return the sorted indices of the decoder layers that have a router.

        Read from the modules of the model that runs, never from captured values: an untouched row is all zeros, and
        zero is an expert.
        """
        return _compat.router_layer_ids(self.model_runner.get_model())

    def torchrl_moe_set_seed(self, seed: int) -> None:
        """Seed torch, from which vLLM's samplers draw; every worker alike, as vLLM does at its start."""
        torch.manual_seed(seed)

    def torchrl_moe_name_kept_words(self, on: bool = True) -> None:
        """Report which words sampling kept, for requests with log-probs; or stop that, to measure its cost."""
        if on:
            _compat_sampling.fill_masks(self.model_runner, name_kept)
        else:
            _compat_sampling.leave_masks(self.model_runner)

    def torchrl_moe_adjust_scores(self) -> None:
        """Compute scores of prompts at the temperature, and over the words, that a request names."""
        _compat_sampling.adjust_prompt_logits(self.model_runner, adjusted)

    def torchrl_moe_follow_routes(self) -> str:
        """Make the routers follow recorded experts from now on; return why they cannot, or ""."""
        runner = self.model_runner
        config = runner.model_config
        try:
            routers = _compat_routing.routers_of(runner.get_model())
            sites = {
                layer: prove(layer, router, config.get_hidden_size(), config.dtype, runner.device)
                for layer, router in routers.items()
            }
        except ValueError as error:
            return str(error)
        _, num_layers, top_k = runner.routed_experts_capturer.get_device_buffer().shape
        self.torchrl_moe_drive = _compat_routing.drive_routers(runner, routers, ForcedRouting(sites, num_layers, top_k))
        self.torchrl_moe_drive(True)
        return ""

    def torchrl_moe_follow(self, on: bool) -> None:
        """Follow, or route live, to measure the cost; do not leave an engine that reports that it follows at live."""
        self.torchrl_moe_drive(on)

    def torchrl_moe_stage(self, manifest: str, shadow: bool, verify: bool, threads: int) -> bool:
        """Begin to stage a version; see ``WeightEngine.stage``."""
        began: bool = self.weight_transfer_engine.stage(manifest, shadow=shadow, verify=verify, threads=threads)
        return began

    def torchrl_moe_pass_on(self, order: dict[str, Any]) -> None:
        """Send a version that was received to another replica; see ``Relay.pass_on``."""
        self.weight_transfer_engine.pass_on(order)

    def torchrl_moe_staged(self) -> dict[str, Any]:
        """Return how far staging is; see ``Staging.report``."""
        report: dict[str, Any] = self.weight_transfer_engine.staged()
        return report

    def torchrl_moe_change_places(self, version: int) -> None:
        """Swap the model and its shadow."""
        self.weight_transfer_engine.change_places(version)

    def torchrl_moe_drop_staged(self) -> None:
        """Drop what was staged, or after a swap the old weights."""
        self.weight_transfer_engine.drop()

    def torchrl_moe_whole(self) -> bool:
        """Whether the model can run: no layer of it is taken apart."""
        whole: bool = self.weight_transfer_engine.whole
        return whole

    def torchrl_moe_load_adapter(self, fields: dict[str, Any]) -> list[str]:
        """Load an adapter, by the fields of vLLM's request; return the modules it names and this worker does not adapt.

        Both in one call: with room for one adapter only, the next step may evict it for that of a running request.
        """
        self.add_lora(build_lora_request(fields))
        return _compat.unused_adapter_modules(self.model_runner, fields["lora_int_id"])

    def torchrl_moe_save_params(self) -> int:
        """Keep a copy of the parameters in host memory, for :meth:`torchrl_moe_validate`; return how many."""
        parameters = self.model_runner.get_model().named_parameters()
        self.torchrl_moe_saved = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters}
        return len(self.torchrl_moe_saved)

    def torchrl_moe_validate(self, function: bytes) -> list[bytes]:
        """Return, in frames, what a pickled function of the saved parameters and the model returns."""
        saved = getattr(self, "torchrl_moe_saved", {})
        return [bytes(frame) for frame in wire.encode(pickle.loads(function)(saved, self.model_runner.get_model()))]
