"""The only file that touches private names, or version differences, of vLLM; each function says why.

Imports stay inside the functions, so this file is light.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor, nn
    from vllm.config import SchedulerConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.lora_weights import LoRALayerWeights
    from vllm.lora.model_manager import LoRAModelManager
    from vllm.lora.request import LoRARequest
    from vllm.lora.worker_manager import WorkerLoRAManager
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerFactory
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner


def router_layer_ids(model: nn.Module) -> list[int]:
    """Return the sorted decoder-layer indices of ``model``'s MoE routers, in a vLLM worker.

    vLLM's own capture binds to these two kinds of module; it has no public list of them.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource

    kinds = (MoERunner, RoutedExpertsCaptureSource)
    return sorted({int(module.layer_id) for module in model.modules() if isinstance(module, kinds)})


def vllm_client_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions by which vLLM says that a request, not the engine, is at fault."""
    from vllm import exceptions

    client = getattr(exceptions, "VLLMClientError", None)
    return (ValueError, TypeError) if client is None else (ValueError, TypeError, client)


def retryable_error() -> type[Exception]:
    """Return the exception by which a paused vLLM asks for a request again later (0.33)."""
    from vllm.exceptions import RetryableRequestError

    error: type[Exception] = RetryableRequestError
    return error


def plain_tokenizer(tokenizer: Any) -> Any:
    """Return the transformers tokenizer inside vLLM's caching and pooling proxies, which can be saved.

    A proxy is a shallow copy under a subclass that is made on the fly and has no public way back.
    """
    # The first class that vLLM has not made is the tokenizer's own: an instance of it with the same attributes.
    not_a_tokenizer = {"builtins", "typing", "typing_extensions"}
    for kind in type(tokenizer).__mro__:
        if kind.__module__.startswith("vllm.") or kind.__module__ in not_a_tokenizer:
            continue
        plain: Any = object.__new__(kind)
        plain.__dict__.update(vars(tokenizer))
        return plain
    # a tokenizer that is vLLM's own (Mistral's) holds one of transformers
    return getattr(tokenizer, "transformers_tokenizer", tokenizer)


SCHEDULERS = "torchrl_moe.modules.backends.vllm.forced_routing"
METHOD_VARIABLE = "VLLM_WORKER_MULTIPROC_METHOD"
BIND_VARIABLE = "VLLM_CPU_OMP_THREADS_BIND"


def import_engine() -> str:
    """Import what the processes of an engine import (0.32); return why they may not be forked after that, or ""."""
    import torch
    import vllm.model_executor.layers.quantization.online.base  # which each start imports, to see whether it quantizes
    import vllm.v1.engine.async_llm
    from vllm.platforms import current_platform
    from vllm.plugins import DEFAULT_PLUGINS_GROUP, load_plugins_by_group

    load_plugins_by_group(DEFAULT_PLUGINS_GROUP)  # TorchRL's imports much of TorchRL
    if current_platform.is_cpu():
        import vllm.v1.worker.cpu.model_runner
        import vllm.v1.worker.cpu.shm  # before the runner, whose modules import by name what it replaces
        import vllm.v1.worker.cpu_worker  # noqa: F401

    return "importing vLLM has initialised CUDA" if torch.cuda.is_initialized() else ""


def make_async_llm(engine_args: AsyncEngineArgs, stat_loggers: list[StatLoggerFactory]) -> tuple[AsyncLLM, str]:
    """Make an ``AsyncLLM`` whose own processes are forked; return it, and why they are not, or "" (0.32).

    vLLM's CPU platform sets "spawn" while the configuration is made, so each process imports vLLM again, which takes
    ten seconds. It does so to bind threads to cores, with libraries that it preloads. Where threads are not bound,
    forking is as safe as on CUDA, where vLLM's own checks (CUDA initialised, WSL, a Ray actor) decide.
    """
    from multiprocessing import resource_tracker

    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    # Whether processes may be forked, and what forbids it if not.
    reason = ""
    binds = current_platform.is_cpu() and os.environ.get(BIND_VARIABLE) != "nobind"
    if os.environ.get(METHOD_VARIABLE) == "spawn":
        reason = f"{METHOD_VARIABLE}=spawn is set"
    elif binds:
        reason = f"{BIND_VARIABLE} is not 'nobind', and vLLM binds threads in processes that it starts"
    config = engine_args.create_engine_config()  # on a CPU this sets "spawn", which is undone here
    if not reason and current_platform.is_cpu():
        os.environ[METHOD_VARIABLE] = "fork"
        resource_tracker.ensure_running()  # one for all processes of the engine, as with spawned ones
    has_one_rank = config.parallel_config.world_size_across_dp == 1
    if engine_args.distributed_executor_backend == "uni" and has_one_rank and not binds:
        # vLLM's CPU platform has made it "mp", to bind threads in a process of the worker's own; then the worker and
        # the engine core wait for each other in loops that do not sleep. Of several ranks it must be "mp".
        config.parallel_config.distributed_executor_backend = "uni"
    # Our scheduler follows recorded experts; a scheduler of the user's own, and speculation, leave vLLM's in place.
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None and config.speculative_config is None:
        name = "AsyncMoEScheduler" if scheduling.async_scheduling else "MoEScheduler"
        scheduling.scheduler_cls = f"{SCHEDULERS}.{name}"
        reserve_check_slot(scheduling)
    engine = AsyncLLM.from_vllm_config(
        config,
        stat_loggers=stat_loggers,
        enable_log_requests=engine_args.enable_log_requests,
        disable_log_stats=engine_args.disable_log_stats,
    )
    return engine, reason


def reserve_check_slot(scheduling: SchedulerConfig) -> None:
    """Give an engine's model runner a slot more than requests may run, for the weight check beside a full engine."""
    scheduling.max_num_active_seqs = scheduling.max_num_active_seqs or scheduling.max_num_seqs
    scheduling.max_num_seqs += 1


def keep_prefix_cache_with_latents() -> None:
    """Have vLLM's CPU platform leave the prefix cache on for models with latent attention (MLA). Idempotent.

    Its kernel for CPUs without AMX cannot continue from a cached prefix, so it turns the cache off, without which vLLM
    records no routes. Here the cache stays, and requests do not read it: see :func:`reads_prefix_cache`. CPUs with AMX
    take that kernel too: the other one has no float32 and drops weights that a reload needs (0.32).
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    platform = type(current_platform)
    update = platform.check_and_update_config
    if not current_platform.is_cpu() or hasattr(update, "torchrl_moe"):
        return

    # vLLM's own decision is made, and taken back only where it was about this kernel
    def update_and_keep(config: VllmConfig) -> None:
        asked = config.cache_config.enable_prefix_caching
        model, attention = config.model_config, config.attention_config
        is_plain_mla = model is not None and model.use_mla and model.hf_config.model_type != "deepseek_v4"
        if is_plain_mla and attention.backend is None:
            attention.backend = AttentionBackendEnum.CPU_MLA
        update(config)
        if not reads_prefix_cache(config):
            config.cache_config.enable_prefix_caching = asked

    update_and_keep.torchrl_moe = True  # type: ignore[attr-defined]
    platform.check_and_update_config = staticmethod(update_and_keep)


def reads_prefix_cache(config: VllmConfig) -> bool:
    """Whether requests to an engine may read cached prefixes; false for latent attention on vLLM's plain CPU kernel."""
    model = config.model_config
    is_cpu = config.device_config.device_type == "cpu"
    return not (is_cpu and model is not None and model.use_mla and not config.scheduler_config.enable_chunked_prefill)


def inspect_models_here() -> None:
    """Have vLLM inspect a model's class in this process; on a CPU that initialises no device (0.32).

    Otherwise it starts another process, which imports vLLM. Call this before the first model configuration is made.
    """
    from vllm.model_executor.models import registry
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        registry._run_in_subprocess = lambda function: function()


WEIGHT_BACKEND = "torchrl_moe"


def register_weight_engine() -> None:
    """Register our weight engine with vLLM, in a worker process. Idempotent.

    The factory cannot be asked whether it knows a name.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    with contextlib.suppress(ValueError):  # registered already
        WeightTransferEngineFactory.register_engine(
            WEIGHT_BACKEND, "torchrl_moe.modules.backends.vllm.worker", "WeightEngine"
        )


def take_moe_kernels(model: nn.Module) -> list[tuple[Any, Any]]:
    """Take the packed expert kernel off every MoE layer; return the owners and their kernels.

    vLLM packs the experts for the CPU only while there is no kernel: reloaded weights would stay unpacked and be
    read in the wrong layout.
    """
    taken: list[tuple[Any, Any]] = []
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        kernel = getattr(method, "moe_kernel", None)
        if kernel is not None:  # layers may share one, which is taken once
            taken.append((method, kernel))
            method.moe_kernel = None
    return taken


def restore_moe_kernels(taken: list[tuple[Any, Any]]) -> None:
    """Give kernels back to the layers that were not reloaded, and so did not make new ones."""
    for method, kernel in taken:
        if method.moe_kernel is None:
            method.moe_kernel = kernel


def keep_cpu_experts_with_lora() -> None:
    """Have vLLM choose its CPU kernel for the experts of a CPU worker, LoRA or not (0.32).

    With LoRA on, it takes the Triton kernel on every platform, and the first step fails. Experts have no adapter on a
    CPU, by :func:`~torchrl_moe.modules.backends.vllm.engine_args.build_engine_args`.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method

    choose = method.select_unquantized_moe_backend

    # the choice is made from a copy: other readers of the configuration still see that LoRA is on
    def choose_for_cpu(moe_config: Any) -> Any:
        return choose(dataclasses.replace(moe_config, is_lora_enabled=False))

    method.select_unquantized_moe_backend = choose_for_cpu


def apply_adapters_on_cpu() -> None:
    """Give each token of a CPU worker its own adapter (0.32).

    Tokens without one have the index -1 there, by which vLLM's torch functions take the last slot's adapter. They also
    copy a pair of factors for every token, which takes as long as all the rest of a small model's forward pass.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import torch
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    def product(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor) -> Tensor:
        """Return inputs ``[N, I]`` times the weights ``[O, I]`` of each one's slot, ``[N, O]``; 0 where that is -1."""
        inputs, found = inputs.to(output.dtype), output.new_zeros(())
        # over all slots, which are few, and not over those in use: a compiled model cannot ask which they are
        for slot, weight in enumerate(weights.to(output.dtype)):
            found = torch.where((slots == slot)[:, None], inputs @ weight.view(weight.shape[-2:]).T, found)
        return found

    def shrink(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, scaling: float = 1.0) -> None:
        output[:, : weights.shape[-2]] = scaling * product(inputs, weights, output, slots)

    def expand(inputs: Tensor, weights: Tensor, output: Tensor, slots: Tensor, add_inputs: bool = True) -> None:
        expand_slice(inputs, weights, output, slots, 0, min(weights.shape[-2], output.shape[1]), add_inputs)

    def expand_slice(
        inputs: Tensor,
        weights: Tensor,
        output: Tensor,
        slots: Tensor,
        slice_offset: int,
        slice_size: int,
        add_inputs: bool = True,
    ) -> None:
        part = output[:, slice_offset : slice_offset + slice_size]
        added = product(inputs, weights, output, slots)[:, :slice_size]
        part.copy_(part + added if add_inputs else added)

    for module in (lora_ops, punica_cpu):  # the second has the names of the first
        module.bgmv_shrink, module.bgmv_expand, module.bgmv_expand_slice = shrink, expand, expand_slice


def refuse_bad_adapters() -> None:
    """Have vLLM's workers refuse an adapter with numbers that are not finite, or another size than its place (0.32).

    vLLM copies what is too small into a part of the place. Idempotent.
    """
    from vllm.lora.worker_manager import WorkerLoRAManager

    # At the load, in the worker: before it, nothing has read the adapter's files; after it, requests may use it.
    load = WorkerLoRAManager._load_adapter
    if hasattr(load, "torchrl_moe"):
        return

    def load_and_check(manager: WorkerLoRAManager, lora_request: LoRARequest) -> LoRAModel:
        lora = load(manager, lora_request)
        if not lora.loras:
            raise ValueError("it has no tensors that vLLM knows")
        sizes = _adapted_sizes(manager._adapter_manager)
        for name, layer in lora.loras.items():
            _check_adapter(name, layer, sizes.get(name.removesuffix(".base_layer")))
        return lora

    load_and_check.torchrl_moe = True  # type: ignore[attr-defined]
    WorkerLoRAManager._load_adapter = load_and_check


def _adapted_sizes(manager: LoRAModelManager) -> dict[str, tuple[int, int | None]]:
    """Return the inputs and outputs of each linear layer that may be adapted; ``None`` if they are split over GPUs."""
    sizes: dict[str, tuple[int, int | None]] = {}
    for name, module in manager.modules.items():
        linear: Any = module  # or another layer
        base: Any = getattr(linear, "base_layer", None)
        stacked = getattr(linear, "lora_b_stacked", None)
        if not isinstance(getattr(base, "input_size", None), int) or not isinstance(stacked, tuple):
            continue
        # q, k and v are one layer in vLLM and three in an adapter
        parts = manager.packed_modules.get(name) or [name]
        if len(parts) == len(stacked):
            is_whole = getattr(base, "tp_size", 1) == 1
            outputs = [one.shape[2] if is_whole else None for one in stacked]
            sizes |= {part: (base.input_size, one) for part, one in zip(parts, outputs, strict=True)}
    return sizes


def _check_adapter(name: str, layer: LoRALayerWeights, size: tuple[int, int | None] | None) -> None:
    parts = {"lora_A": layer.lora_a, "lora_B": layer.lora_b}
    if missing := [part for part, tensor in parts.items() if tensor is None]:
        raise ValueError(f"its {name} has no {missing[0]}: save the adapter again with peft's save_pretrained")
    down, up = parts.values()
    shapes = f"lora_A {list(down.shape)} and lora_B {list(up.shape)}"
    is_whole = down.ndim == up.ndim == 2 and len(down) == up.shape[1]
    # tensors of all experts have a multiple
    if not is_whole or len(down) % layer.rank or (".experts" not in name and len(down) != layer.rank):
        raise ValueError(
            f"its {name} has {shapes}, and its configuration says rank {layer.rank}: they do not belong together"
        )
    if size is not None and (down.shape[1] != size[0] or size[1] not in (None, len(up))):
        raise ValueError(
            f"its {name} has {shapes}, but the engine's layer has {size[0]} inputs and {size[1] or 'other'} outputs: "
            "it is for another model"
        )
    if not (down.isfinite().all() and (up * layer.scaling).isfinite().all()):
        raise ValueError(
            f"its {name} has numbers that are NaN or infinite in {up.dtype}, or its lora_alpha makes them so: train it "
            "again, or from an earlier checkpoint"
        )


def zero_new_blocks() -> None:
    """Have vLLM zero a block of the KV cache when a request gets it, as it does for hybrid models (0.32). Idempotent.

    Attention multiplies what lies in a block behind a request's tokens by zero, and NaN times zero is NaN. So numbers
    that are not finite would outlive the weights, or the adapter, that made them.
    """
    from vllm.v1.kv_cache_interface import KVCacheConfig

    KVCacheConfig.needs_kv_cache_zeroing = property(lambda _: True)


def unused_adapter_modules(model_runner: GPUModelRunner, number: int) -> list[str]:
    """Return the modules of a loaded adapter that a worker's model does not adapt: vLLM ignores them (0.32)."""
    manager = model_runner.lora_manager._adapter_manager
    named = {name.removesuffix(".base_layer") for name in manager.list_adapters()[number].loras}
    return sorted(named - set(manager.modules))


def forget_half_loads(model: nn.Module) -> None:
    """Drop what a failed update left pending in vLLM's layerwise reload.

    A new start skips layers taken apart and counts their tensors twice: they would be complete before the last arrive.
    """
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():  # a reload of it has begun
            info.load_numel = 0
            info.loaded_weights.clear()


PACKED_HANDLE = "cpu_linear"  # a linear layer's kernel on CPU: a function that owns the packed weight


def pack_tied(model: nn.Module) -> None:
    """Pack again the linear layers whose parameter belongs to an earlier layer, such as a head tied to the embeddings.

    vLLM's reload packs a layer when its tensors arrive. The tensors of such a layer arrive at the other one, so its own
    packed copy would stay old.
    """
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        weight = vars(module)["_parameters"].get("weight")
        if weight is None or not has_packed(module):
            continue
        # the first layer with this parameter was packed by the reload itself
        if owners.setdefault(id(weight), module) is not module:
            method: Any = module.quant_method
            method.process_weights_after_loading(module)


def has_packed(module: nn.Module) -> bool:
    """Whether a module is a linear layer that holds its weight packed."""
    return PACKED_HANDLE in vars(module)


@contextlib.contextmanager
def environment_kept() -> Iterator[None]:
    """Put back what vLLM writes into the environment of a process that makes a configuration, and has no engine."""
    before = dict(os.environ)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def delivered_tokens(engine: AsyncLLM) -> dict[str, dict[int, int]]:
    """Return, for each request that an ``AsyncLLM`` runs, answer -> tokens that its output processor has (0.32).

    With ``FINAL_ONLY`` there is no other source; vLLM >= 0.32 reports a version with each token.
    """
    counts: dict[str, dict[int, int]] = {}
    for state in engine.output_processor.request_states.values():
        if state.detokenizer is not None:
            had = counts.setdefault(state.external_req_id, {})
            had[state.request_index] = state.detokenizer.num_output_tokens()
            if state.parent_req is not None:  # finished answers wait there for the other answers of the request
                for output in state.parent_req.output_aggregator:
                    if output is not None:
                        had.setdefault(output.index, len(output.token_ids))
    return counts


def running_outputs(
    engine: AsyncLLM, names: Collection[str] | None = None, since: Mapping[str, Mapping[int, int]] | None = None
) -> dict[str, Any]:
    """Return the partial ``RequestOutput`` of each request that an ``AsyncLLM`` runs, by request (0.32).

    It contains the answers that have started. With ``names`` only those requests, without routes. ``since`` (request ->
    answer -> number of tokens) leaves out what is known already; texts, and answers that are over, are whole.
    """
    # vLLM's states are one per answer; here they are put together by request, in the form of a RequestOutput.
    found: dict[str, Any] = {}
    for state in engine.output_processor.request_states.values():
        if state.detokenizer is None or (names is not None and state.external_req_id not in names):
            continue
        known = {} if since is None else since.get(state.external_req_id, {})
        one = found.setdefault(
            state.external_req_id,
            SimpleNamespace(
                prompt=state.prompt,
                prompt_token_ids=state.prompt_token_ids,
                num_cached_tokens=state.num_cached_tokens,
                prompt_token_id_logprobs=None,
                metrics=state.stats,
                outputs=[],
            ),
        )
        if state.parent_req is not None and not one.outputs:  # finished answers wait there for the others
            one.outputs += [output for output in state.parent_req.output_aggregator if output is not None]
        had = known.get(state.request_index, 0)
        token_ids, logprobs = state.detokenizer.output_token_ids[had:], state.logprobs_processor.logprobs
        rows = state.routed_experts_chunks if names is None else []  # of each step; vLLM joins them only at the end
        one.outputs.append(
            SimpleNamespace(
                index=state.request_index,
                text=state.detokenizer.get_next_output_text(True, False),
                token_ids=token_ids,
                logprobs=None if logprobs is None else logprobs[had:],
                routed_experts=np.concatenate(rows) if rows else None,
                sampling_mask=SimpleNamespace(token_ids=_last_masks(state.sampling_mask_chunks, len(token_ids))),
                finish_reason="abort",
                stop_reason=None,
            )
        )
    return found


def _last_masks(steps: Sequence[Any], tokens: int) -> list[list[int]]:
    """Return the kept ids of the last tokens; a step has one token, or several if it speculates."""
    found: list[list[int]] = []
    for step in reversed(steps):
        if len(found) >= tokens:
            break
        found = [*step.to_nested_list(), *found]
    return found[len(found) - tokens :] if found else []


async def abort_answers(engine: AsyncLLM, wanted: Mapping[str, set[int]]) -> dict[str, set[int]]:
    """Abort some of the answers that an ``AsyncLLM`` generates, by request and index; return those that it knew.

    Its public ``abort`` takes whole requests only; only its output processor knows the ids of the answers.
    """
    found: dict[str, set[int]] = {}
    internal = []
    for name, state in engine.output_processor.request_states.items():
        if state.request_index in wanted.get(state.external_req_id, ()):
            internal.append(name)
            found.setdefault(state.external_req_id, set()).add(state.request_index)
    if internal:
        await engine.abort(internal, internal=True)
    return found
