"""What we add to vLLM's workers: methods that the engine process calls by name through ``collective_rpc``.

It is imported inside worker processes only. Every method carries our prefix, because vLLM refuses an extension that
shares a name with its worker class. None of them waits for anything: while a worker runs one, it generates nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from torch import Tensor
from vllm.utils.torch_utils import set_random_seed

from torchrl_moe import _compat
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process.parent_watch import end_with_leader
from torchrl_moe.modules.backends.vllm import cpu_kernels
from torchrl_moe.modules.backends.vllm.adapters import build_lora_request
from torchrl_moe.modules.backends.vllm.forced_routing import follow_in_workers
from torchrl_moe.modules.backends.vllm.prompt_scores import adjust_scores
from torchrl_moe.modules.backends.vllm.sampling_masks import report_kept

__all__ = ["WorkerExtension"]


# vLLM imports this module in each worker before it makes the weight-transfer engine. Unlike an entry point, that needs
# no installed package and cannot be filtered away by VLLM_PLUGINS.
_compat.register_weight_engine()
_compat.keep_cpu_experts_with_lora()
_compat.refuse_bad_adapters()
_compat.zero_new_blocks()
cpu_kernels.register()
follow_in_workers()
end_with_leader()  # the engine core, this process's parent, does not watch its own parent


class WorkerExtension:
    """Mixed into vLLM's ``Worker``; the attributes without our prefix are the worker's own."""

    model_runner: Any
    weight_transfer_engine: Any
    add_lora: Callable[[Any], bool]
    torchrl_moe_saved: dict[str, Tensor]

    def torchrl_moe_router_layers(self) -> list[int]:
        """Return the sorted indices of the decoder layers that have a router.

        Read from the modules of the model that runs, never from captured values: an untouched row is all zeros, and
        zero is an expert.
        """
        return _compat.router_layer_ids(self.model_runner.get_model())

    def torchrl_moe_set_seed(self, seed: int) -> None:
        """Seed the random numbers from which requests without a seed get theirs; every worker alike, as at start-up."""
        set_random_seed(seed)

    def torchrl_moe_report(self, masks: bool) -> str:
        """Report kept words if asked, and score as sampled; return why no request can follow experts, or ""."""
        runner = self.model_runner
        if runner.sampler is not None:  # the last pipeline stage samples
            if masks:
                report_kept(runner)
            adjust_scores(runner)
        return runner.torchrl_moe_forced.why_live if hasattr(runner, "torchrl_moe_forced") else ""

    def torchrl_moe_masks(self, on: bool) -> None:
        """Report kept words, or not, to measure the cost."""
        self.model_runner.sampler.torchrl_moe_on = on

    def torchrl_moe_runner(self) -> str:
        """Return the class of the model runner."""
        kind = type(self.model_runner)
        return f"{kind.__module__}.{kind.__qualname__}"

    def torchrl_moe_follow(self, on: bool) -> None:
        """Follow, or route live, to measure the cost; do not leave an engine that reports that it follows at live."""
        self.model_runner.torchrl_moe_forced.drive(on)

    def torchrl_moe_stage(self, manifest: str, verify: bool, threads: int) -> bool:
        """Begin to stage a version; see ``WeightEngine.stage``."""
        began: bool = self.weight_transfer_engine.stage(manifest, verify=verify, threads=threads)
        return began

    def torchrl_moe_staged(self) -> dict[str, Any]:
        """Return how far staging is; see ``Staging.report``."""
        report: dict[str, Any] = self.weight_transfer_engine.staged()
        return report

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
