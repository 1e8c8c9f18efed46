"""Every name of vLLM that we reach for is in each release that ``pyproject.toml`` allows; ``make compat``.

The releases' sources are read, not run: vLLM for CUDA cannot be imported here. So this proves that names, members and
parameters are there, and not that they do what they did.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

from test.support.vllm_source import VLLMSource, download

ROOT = Path(__file__).parents[1]
CACHE = Path.home() / ".cache" / "torchrl_moe"
VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")

NAMES = {  # of modules, reached as attributes
    "vllm.model_executor.models.registry": "_run_in_subprocess",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method": "select_unquantized_moe_backend",
    "vllm.v1.core.kv_cache_utils": "generate_block_hash_extra_keys",
    "vllm.v1.core.block_pool": "generate_block_hash_extra_keys",
}
MEMBERS = {
    "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator": "disabled",
    "vllm.distributed.device_communicators.pynccl_wrapper.NCCLLibrary": "ncclGetUniqueId",
    "vllm.v1.engine.async_llm.AsyncLLM": "output_processor from_vllm_config abort engine_core add_request",
    "vllm.v1.engine.output_processor.RequestOutputCollector": "get",
    "vllm.v1.engine.output_processor.OutputProcessor": "request_states",
    "vllm.v1.engine.output_processor.RequestState": (
        "detokenizer external_req_id request_index parent_req prompt prompt_token_ids num_cached_tokens stats"
        " logprobs_processor routed_experts_chunks sampling_mask_chunks _new_completion_output"
    ),
    "vllm.config.vllm.VllmConfig": "scheduler_config speculative_config use_v2_model_runner",
    "vllm.config.parallel.ParallelConfig": "data_parallel_size use_ubatching",
    "vllm.config.scheduler.SchedulerConfig": "scheduler_cls async_scheduling",
    "vllm.v1.core.sched.scheduler.Scheduler": (
        "return_sampling_mask vllm_config kv_cache_manager requests schedule update_from_output _preempt_request"
        " add_request running waiting policy max_num_running_reqs kv_cache_config"
    ),
    "vllm.v1.core.sched.output.SchedulerOutput": "scheduled_new_reqs scheduled_cached_reqs finished_req_ids",
    "vllm.v1.core.sched.output.CachedRequestData": "resumed_req_ids",
    "vllm.v1.core.sched.request_queue.RequestQueue": "add_request remove_request prepend_request",
    "vllm.v1.core.sched.request_queue.SchedulingPolicy": "PRIORITY",
    "vllm.v1.core.kv_cache_manager.KVCacheManager": "get_block_ids block_pool",
    "vllm.v1.core.block_pool.BlockPool": "get_num_free_blocks",
    "vllm.v1.request.Request": (
        "num_tokens num_output_tokens num_in_flight_tokens num_stale_output_tokens block_hashes update_block_hashes"
        " num_computed_tokens priority arrival_time sampling_params"
    ),
    "vllm.model_executor.layers.fused_moe.router.base_router.BaseRouter": "_compute_routing top_k global_num_experts",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler": "return_sampling_mask",
    "vllm.v1.outputs.SamplingMaskLists": "token_ids offsets slice_request",
    "vllm.v1.outputs.ModelRunnerOutput": "sampling_masks",
    "vllm.v1.worker.gpu_model_runner.AsyncGPUModelRunnerOutput": "_model_runner_output",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": (
        "sampler sample_tokens requests input_batch _prepare_inputs _update_states _model_forward"
        " _get_prompt_logprobs_dict num_prompt_logprobs"
    ),
    "vllm.v1.worker.gpu_input_batch.CachedRequestState": "output_token_ids",
    "vllm.v1.worker.gpu_input_batch.InputBatch": "req_ids num_computed_tokens_cpu",
    "vllm.v1.sample.sampler.Sampler": "compute_logprobs",
    "vllm.sampling_params.SamplingParams": "extra_args prompt_logprobs flat_logprobs skip_reading_prefix_cache",
    "vllm.v1.sample.metadata.SamplingMetadata": (
        "top_k top_p allowed_token_ids_mask bad_words_token_ids logitsprocs max_num_logprobs"
    ),
    "vllm.v1.sample.logits_processor.LogitsProcessors": "argmax_invariant non_argmax_invariant",
    "vllm.v1.sample.logits_processor.MinPLogitsProcessor": "min_p_count",
    "vllm.v1.sample.logits_processor.LogitBiasLogitsProcessor": "biases",
    "vllm.v1.sample.logits_processor.MinTokensLogitsProcessor": "min_toks",
    "vllm.outputs.CompletionOutput": "sampling_mask",
    "vllm.v1.engine.detokenizer.IncrementalDetokenizer": "num_output_tokens output_token_ids",
    "vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer": "get_next_output_text",
    "vllm.v1.engine.logprobs.LogprobsProcessor": "logprobs prompt_logprobs",
    "vllm.v1.engine.parallel_sampling.ParentRequest": "output_aggregator",
    "vllm.v1.worker.lora_model_runner_mixin.LoRAModelRunnerMixin": "lora_manager",
    "vllm.lora.worker_manager.WorkerLoRAManager": "_adapter_manager",
    "vllm.lora.model_manager.LoRAModelManager": "list_adapters modules",
    "vllm.model_executor.model_loader.reload.types.LayerReloadingInfo": "can_load load_numel loaded_weights",
    "vllm.model_executor.layers.fused_moe.layer.MoERunner": "layer_id router _quant_method",
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer.RoutedExpertsCaptureSource": "layer_id",
    "vllm.entrypoints.llm.LLM": "llm_engine get_tokenizer apply_model generate",
    "vllm.v1.engine.llm_engine.LLMEngine": "vllm_config",
}
FIRST_ONLY = {  # forced routing: later releases keep recorded rows elsewhere, where it says so and routes live
    "vllm.v1.core.sched.scheduler.Scheduler": "routed_experts_mgr",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner": "routed_experts_capturer",
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer.RoutedExpertsManager": "attn_gid get",
    "vllm.model_executor.layers.fused_moe.routed_experts_capturer.RoutedExpertsCapturer": "get_device_buffer",
}
PARAMETERS = {
    "vllm.distributed.weight_transfer.nccl_common.uid_init_process_group": "rank world_size device",
    "vllm.distributed.device_communicators.pynccl.PyNcclCommunicator.broadcast": "tensor src stream",
    "vllm.entrypoints.llm.LLM.generate": "prompts sampling_params use_tqdm lora_request priority",
    "vllm.v1.engine.async_llm.AsyncLLM.from_vllm_config": "stat_loggers enable_log_requests disable_log_stats",
    "vllm.v1.engine.async_llm.AsyncLLM.abort": "request_id internal",
    "vllm.v1.engine.async_llm.AsyncLLM.pause_generation": "mode clear_cache",
    "vllm.v1.sample.sampler.Sampler.sample": "logits sampling_metadata",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner.sample_tokens": "grammar_output",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._prepare_inputs": "scheduler_output num_scheduled_tokens",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states": "scheduler_output",
    "vllm.v1.worker.gpu_model_runner.GPUModelRunner._get_prompt_logprobs_dict": "hidden_states num_scheduled_tokens",
    "vllm.v1.core.sched.scheduler.Scheduler._preempt_request": "request timestamp drop_stale_output",
    "vllm.v1.core.kv_cache_utils.generate_block_hash_extra_keys": "request start_token_idx end_token_idx start_mm_idx",
    "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory.register_engine": "name",
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method.select_unquantized_moe_backend": "moe_config",
}


def reached() -> Iterator[tuple[str, str]]:
    """Every ``module, name`` that must be there."""
    yield from imported()
    yield from ((module, name) for module, names in NAMES.items() for name in names.split())


def imported() -> Iterator[tuple[str, str]]:
    """Every ``module, name`` of vLLM that the package imports."""
    for path in sorted(ROOT.joinpath("torchrl_moe").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm":
                yield from ((str(node.module), alias.name) for alias in node.names)
            if isinstance(node, ast.Import):
                yield from ((alias.name, "") for alias in node.names if alias.name.split(".")[0] == "vllm")


@functools.cache
def release(version: str) -> VLLMSource:
    return download(version, CACHE)


@pytest.mark.compat
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("module", "name"), sorted(set(reached())))
def test_a_name_is_in_the_release(version: str, module: str, name: str) -> None:
    assert release(version).has(module, name)


@pytest.mark.compat
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", MEMBERS)
def test_a_class_of_the_release_has_the_members(version: str, path: str) -> None:
    module, _, name = path.rpartition(".")
    assert set(MEMBERS[path].split()) <= release(version).members(module, name)


@pytest.mark.compat
@pytest.mark.parametrize("path", FIRST_ONLY)
def test_a_class_of_the_first_release_has_what_later_ones_keep_elsewhere(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert set(FIRST_ONLY[path].split()) <= release(VERSIONS[0]).members(module, name)


@pytest.mark.compat
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("path", PARAMETERS)
def test_a_function_of_the_release_takes_the_parameters(version: str, path: str) -> None:
    module, _, name = path.rpartition(".")
    if module.rpartition(".")[2][:1].isupper():
        module, _, owner = module.rpartition(".")
        name = f"{owner}.{name}"
    assert set(PARAMETERS[path].split()) <= release(version).parameters(module, name)
