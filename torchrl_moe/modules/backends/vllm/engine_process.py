"""The process that owns one ``AsyncLLM``; ``process/engine_program.py`` has what any engine process does.

vLLM may import this module again in its own child processes, so its top level imports nothing heavy.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from torchrl_moe import _compat
from torchrl_moe._imports import without_collections
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.checkpoint import checkpoint_folder, checkpoint_metadata
from torchrl_moe.modules.backends.process import packing
from torchrl_moe.modules.backends.process.engine_program import EngineProgram, Send, run_engine, run_script
from torchrl_moe.modules.backends.process.parent_watch import Inbox
from torchrl_moe.modules.backends.process.plain import Packed
from torchrl_moe.modules.backends.process.stats_feed import Load
from torchrl_moe.modules.backends.replica import PauseMode, Request
from torchrl_moe.modules.backends.reports import ProbeReport, ReplicaInfo, ReplicaStats
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.modules.backends.tokenizer_files import tokenizer_files
from torchrl_moe.modules.backends.vllm import cpu_kernels
from torchrl_moe.modules.backends.vllm.engine_args import build_engine_args, check_vllm
from torchrl_moe.modules.backends.vllm.engine_requests import EngineRequests
from torchrl_moe.modules.backends.vllm.probe import EngineProbe
from torchrl_moe.modules.backends.vllm.prompt_scores import why_unscored
from torchrl_moe.modules.backends.vllm.sampling import SamplingParamsBuilder
from torchrl_moe.modules.backends.vllm.sampling_masks import lift_top_k_rule
from torchrl_moe.modules.backends.vllm.sleeping import EngineSleep
from torchrl_moe.modules.backends.vllm.weights.adapter_versions import AdapterVersions
from torchrl_moe.modules.backends.vllm.weights.commands import EngineWeightCommands
from torchrl_moe.modules.backends.vllm.weights.engine import EngineWeights

SHUTDOWN_SECONDS = 1.0  # that vLLM's own processes get to end


class EngineProcess(EngineProgram, EngineWeightCommands):
    """One engine process over vLLM.

    Args:
        engine: the ``AsyncLLM``.
        info: what the replica reports about itself.
        load: updated by the engine's :class:`LoadLogger`.
        inbox: what the driver sends.
        send: sends a message to the driver.
        sampling: builds vLLM's sampling parameters.
    """

    def __init__(
        self,
        engine: Any,
        info: ReplicaInfo,
        load: Load,
        inbox: Inbox,
        send: Send,
        sampling: SamplingParamsBuilder | None = None,
    ) -> None:
        EngineProgram.__init__(self, info, load, inbox, send)
        self.engine = engine
        self.probe = EngineProbe(engine)
        weights = EngineWeights(engine, lambda: checkpoint_metadata(checkpoint_folder(info.model)))
        requests = EngineRequests(
            engine,
            weights,
            lambda completion: send(("completion", completion)),
            self._refuse,
            sampling,
            routes=RequestRoutes(
                info.layout,
                info.why_live,
                why_unscored(engine.model_config),
                engine.model_config.get_vocab_size(),
            ),
        )
        weights.in_flight = requests
        self.sleeping = EngineSleep(engine, weights)
        adapters = AdapterVersions(engine, requests, self.sleeping.check_awake)
        EngineWeightCommands.__init__(self, weights, requests, adapters, self.sleeping.swap)
        self._client_errors = _compat.vllm_client_errors()

    # -- requests ---------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Start a request."""
        self.requests.start(request)

    def abort(self, request_ids: list[str]) -> None:
        """Cut requests short."""
        self.requests.abort(request_ids)

    def left(self, driver: str) -> None:
        """End the claim of a driver that is gone."""
        self.owner.left(driver)

    # -- commands ---------------------------------------------------------------------------------------------------

    async def command_pause(self, mode: PauseMode, clear_cache: bool) -> None:
        before = self.requests.in_flight()
        await self.sleeping.pause(mode, clear_cache)
        if mode == "abort":  # vLLM holds what it had not yet taken in
            self.requests.cut(before)

    async def command_resume(self) -> None:
        await self.sleeping.resume()

    async def command_sleep(self, level: int, mode: PauseMode) -> None:
        if self._sends_adapters:
            raise ValueError("sleep: lora='adapter' loads into memory that would be gone: use lora='merged'")
        before = self.requests.in_flight()
        await self.sleeping.sleep(level, mode)
        if mode == "abort":
            self.requests.cut(before)

    async def command_wake_up(self, tags: list[str] | None) -> None:
        await self.sleeping.wake_up(tags)

    async def command_reset_prefix_cache(self) -> bool:
        return bool(await self.engine.reset_prefix_cache())

    async def command_set_seed(self, seed: int) -> None:
        await self.engine.collective_rpc("torchrl_moe_set_seed", None, (seed,), None)

    async def command_collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        return await self.engine.collective_rpc(method, None, args, kwargs)

    async def command_tokenizer(self) -> Any:
        tokenizer = _compat.plain_tokenizer(self.engine.get_tokenizer())
        return tokenizer_files(tokenizer, self.engine.model_config.trust_remote_code)

    async def command_metadata(self) -> Any:
        return checkpoint_metadata(checkpoint_folder(self.info.model))

    async def command_snapshot(self) -> Packed:
        return packing.pack_completions(await self.requests.snapshot())

    async def command_probe(self, seconds: float) -> ProbeReport:
        return await self.probe.read(seconds)

    def _stats(self) -> ReplicaStats:
        # vLLM reports at each step, and an idle engine takes none
        load, busy = self.load, bool(self.requests)
        return ReplicaStats(
            running=load.running if busy else 0,
            waiting=load.waiting if busy else 0,
            cache_usage=load.cache_usage if busy else 0.0,
            generation_seconds=self.requests.seconds,
            cache_queries=load.cache_queries,
            cache_hits=load.cache_hits,
            preemptions=load.preemptions,
            steps=load.steps,
            step_at=load.step_at,
            weights_version=self.weights.proved_version,
            **self.requests.counts,
        )

    # -- life -------------------------------------------------------------------------------------------------------

    def _death(self) -> str:
        return f"vLLM's engine core died: {self.engine.dead_error}" if self.engine.errored else ""

    def close(self) -> None:
        """End vLLM's processes."""
        self.engine.shutdown(timeout=SHUTDOWN_SECONDS)


async def _start_engine(arguments: dict[str, Any]) -> tuple[Any, ReplicaInfo, Load, SamplingParamsBuilder]:
    check_vllm(os.environ)
    with without_collections():
        _compat.import_engine()
    import vllm

    from torchrl_moe.modules.backends.vllm.forced_routing import why_live
    from torchrl_moe.modules.backends.vllm.load_logger import LoadLogger

    cpu_kernels.register()  # VLLM_PLUGINS may leave our plugin out
    _compat.keep_prefix_cache_with_latents()
    _compat.inspect_models_here()
    engine_args = build_engine_args(arguments)
    logger = LoadLogger()
    engine, reason = _compat.make_async_llm(engine_args, [logger.factory])
    if reason:
        print(f"torchrl_moe: vLLM's own processes import vLLM again: {reason}", flush=True)
    reports_masks = lift_top_k_rule(engine)
    of_worker = (await engine.collective_rpc("torchrl_moe_report", args=(reports_masks,)))[0]
    live = why_live(engine.vllm_config) or of_worker
    model_config = engine.model_config
    layout = None
    if engine.vllm_config.aux_output_config.enabled:
        layers = (await engine.collective_rpc("torchrl_moe_router_layers"))[0]
        layout = RoutingLayout(
            num_layers=model_config.get_total_num_hidden_layers(),
            moe_layers=tuple(layers),
            top_k=model_config.get_num_experts_per_tok(),
            num_experts=model_config.get_num_experts(),
        )
    info = ReplicaInfo(
        model=engine_args.model,
        layout=layout,
        max_model_len=model_config.max_model_len,
        tensor_parallel_size=engine_args.tensor_parallel_size,
        pipeline_parallel_size=engine_args.pipeline_parallel_size,
        data_parallel_size=engine_args.data_parallel_size,
        engine_version=vllm.__version__,
        dtype=str(model_config.dtype).removeprefix("torch."),
        why_live=live,
    )
    sampling = SamplingParamsBuilder(
        reports_masks, model_config.logprobs_mode, _compat.reads_prefix_cache(engine.vllm_config)
    )
    return engine, info, logger.load, sampling


async def _open(arguments: dict[str, Any], inbox: Inbox, send: Send) -> EngineProcess:
    engine, info, load, sampling = await _start_engine(arguments)
    return EngineProcess(engine, info, load, inbox, send, sampling)


def run(connection: Connection, driver_is_gone: Callable[[], bool]) -> None:
    """Run the engine, then end the process."""
    run_engine(connection, driver_is_gone, _open)


def preload() -> str:
    """Import what an engine's processes import; return why they may not be forked after that, or ""."""
    unsafe = _compat.import_engine()
    cpu_kernels.preload()
    return unsafe


def main() -> None:
    """Run as a child of the driver."""
    run_script(run)


if __name__ == "__main__":
    main()
