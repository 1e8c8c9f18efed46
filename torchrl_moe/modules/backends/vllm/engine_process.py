"""The process that owns one ``AsyncLLM``; ``process/engine_program.py`` has what any engine process does.

vLLM may import this module again in its own child processes, so its top level imports nothing heavy.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from torchrl_moe import _compat
from torchrl_moe._lazy import without_collections
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.checkpoint import checkpoint_folder, checkpoint_metadata, tokenizer_files
from torchrl_moe.modules.backends.process.engine_program import EngineProgram, Inbox, Load, Send, run_engine, run_script
from torchrl_moe.modules.backends.process.link import SocketStream
from torchrl_moe.modules.backends.replica import Completion, PauseMode, ProbeReport, ReplicaInfo, ReplicaStats, Request
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.modules.backends.vllm import cpu_kernels
from torchrl_moe.modules.backends.vllm.engine_args import ROUTER_DTYPE, build_engine_args, check_vllm
from torchrl_moe.modules.backends.vllm.engine_requests import EngineRequests
from torchrl_moe.modules.backends.vllm.sampling import SamplingParamsBuilder, lift_top_k_rule, why_unscored
from torchrl_moe.modules.backends.vllm.weights import AdapterVersions, EngineWeights, Updates

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.metrics.loggers import StatLoggerBase
    from vllm.v1.metrics.stats import IterationStats, SchedulerStats


SHUTDOWN_SECONDS = 1.0  # that vLLM's own processes get to end


class EngineProcess(EngineProgram):
    """One engine process over vLLM."""

    def __init__(
        self,
        engine: AsyncLLM,
        info: ReplicaInfo,
        load: Load,
        inbox: Inbox,
        send: Send,
        sampling: SamplingParamsBuilder | None = None,
    ) -> None:
        super().__init__(info, load, inbox, send)
        self.engine = engine
        self._probe = EngineProbe(engine)
        self.weights = EngineWeights(engine, lambda: checkpoint_metadata(checkpoint_folder(info.model)))
        self.requests = self.weights.in_flight = EngineRequests(
            engine,
            self.weights,
            self.deliver,
            self.refuse,
            sampling,
            routes=RequestRoutes(
                info.layout,
                info.forced_routing_unavailable_reason,
                why_unscored(engine.model_config),
                engine.model_config.get_vocab_size(),
            ),
            tell=self.tell,
            load=load,
        )
        adapters = AdapterVersions(engine, self.requests, self.weights.check_awake)
        self.updates = self.sync = Updates(self.weights, self.requests, adapters)
        self._client_errors = _compat.vllm_client_errors()

    # -- requests ---------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        self.requests.start(request)

    def abort(self, request_ids: Sequence[str]) -> None:
        self.requests.abort(request_ids)

    async def _snapshot(self) -> list[Completion]:
        return await self.requests.snapshot()

    # -- verbs, which ``Engine`` describes --------------------------------------------------------------------------

    async def probe(self, seconds: float) -> ProbeReport:
        return await self._probe.read(seconds)

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        before = self.requests.in_flight()
        self.requests.cuts_all = mode == "abort"
        await self.weights.pause(mode, clear_cache)
        if mode == "abort":  # vLLM holds what it had not yet taken in
            self.requests.cut(before)

    async def resume(self) -> None:
        await self.weights.resume()
        self.requests.cuts_all = False

    async def sleep(self, level: int, mode: PauseMode) -> None:
        if self.sync.sends_adapters:
            raise ValueError("sleep: lora='adapter' loads into memory that would be gone: use lora='merged'")
        before = self.requests.in_flight()
        self.requests.cuts_all = mode == "abort"
        await self.weights.sleep(level, mode)
        if mode == "abort":
            self.requests.cut(before)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self.weights.wake_up(tags)
        self.requests.cuts_all = False

    async def reset_prefix_cache(self) -> bool:
        return bool(await self.engine.reset_prefix_cache())

    async def set_seed(self, seed: int) -> None:
        await self.engine.collective_rpc("torchrl_moe_set_seed", None, (seed,), None)

    async def collective_rpc(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object] | None
    ) -> list[Any]:
        values: list[Any] = await self.engine.collective_rpc(method, None, tuple(args), kwargs)
        return values

    async def tokenizer(self) -> dict[str, object]:
        tokenizer = _compat.plain_tokenizer(self.engine.get_tokenizer())
        return tokenizer_files(tokenizer, self.engine.model_config.trust_remote_code)

    async def metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        import torch

        # a checkpoint's dtype says nothing of what the model was loaded in: a trainer is told what is kept here
        found = await asyncio.to_thread(lambda: checkpoint_metadata(checkpoint_folder(self.info.model)))
        workers: list[dict[str, str]] = await self.engine.collective_rpc("torchrl_moe_dtypes", args=(list(found),))
        for worker in workers:  # a pipeline's have other layers
            for name, held in worker.items():
                dtype: torch.dtype = getattr(torch, held)
                if dtype.is_floating_point and dtype.itemsize > 1:  # else quantised, and sent as the checkpoint has it
                    found[name] = dtype, found[name][1]
        return found

    async def weights_version(self) -> int:
        return self.weights.version

    # -- life -------------------------------------------------------------------------------------------------------

    def _stats(self) -> ReplicaStats:
        return self.load.stats(self.weights.proved_version, busy=bool(self.requests))

    def _death(self) -> str:
        return f"vLLM's engine core died: {self.engine.dead_error}" if self.engine.errored else super()._death()

    def close(self) -> None:
        self.engine.shutdown(timeout=SHUTDOWN_SECONDS)


class EngineProbe:
    """Pings an engine core, and reads the state and CPU time of its processes, the descendants of this one."""

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._ping: asyncio.Task[bool] | None = None

    async def read(self, seconds: float) -> ProbeReport:
        """Ping the core, which gets ``seconds`` to answer. While a ping is unanswered, no other is sent.

        Several drivers may ask at the same time; they share the ping.
        """
        ping = self._ping
        if ping is None:
            self._ping = ping = asyncio.get_running_loop().create_task(self._engine.is_paused())
        await asyncio.wait({ping}, timeout=seconds)
        answered = ping.done()
        if answered:
            ping.exception()  # an error is a reply, too
            if self._ping is ping:
                self._ping = None
        stopped, cpu_seconds = False, 0.0
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
                times = process.cpu_times()
                cpu_seconds += times.user + times.system
                stopped |= process.status() == psutil.STATUS_STOPPED
        return ProbeReport(core_answered=answered, stopped=stopped, cpu_seconds=cpu_seconds)


def load_logger(load: Load) -> StatLoggerBase:
    """Return a stat logger of vLLM's that keeps a :class:`Load`; it is its own factory, which is what vLLM takes.

    A function, since its base class is vLLM's, which only an engine process may import.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadLogger(StatLoggerBase):
        """The scheduler's own stats, summed over the data-parallel engines."""

        def __init__(self) -> None:
            self._latest: dict[int, SchedulerStats] = {}

        def __call__(self, vllm_config: VllmConfig, engine_index: int = 0) -> LoadLogger:
            del vllm_config, engine_index
            return self

        def record(
            self,
            scheduler_stats: SchedulerStats | None,
            iteration_stats: IterationStats | None,
            mm_cache_stats: object = None,
            engine_idx: int = 0,
        ) -> None:
            """Take the stats of one step: the scheduler's, and those of the tokens that came out."""
            del mm_cache_stats
            if scheduler_stats is not None:
                self._latest[engine_idx] = scheduler_stats
                engines = self._latest.values()
                load.running = sum(one.num_running_reqs for one in engines)
                load.waiting = sum(one.num_waiting_reqs for one in engines)
                load.cache_usage = sum(one.kv_cache_usage for one in engines) / len(engines)
                load.cache_queries += scheduler_stats.prefix_cache_stats.queries
                load.cache_hits += scheduler_stats.prefix_cache_stats.hits
            if iteration_stats is not None:
                load.tokens += iteration_stats.num_generation_tokens
                load.preemptions += iteration_stats.num_preempted_reqs
                load.steps += 1
                load.step_at = iteration_stats.iteration_timestamp

        def log_engine_initialized(self) -> None:
            """Say nothing: vLLM's own loggers do."""

    return LoadLogger()


async def _start_engine(arguments: dict[str, object]) -> tuple[AsyncLLM, ReplicaInfo, Load, SamplingParamsBuilder]:
    check_vllm(os.environ)
    with without_collections():
        _compat.import_engine()
    import vllm

    from torchrl_moe.modules.backends.vllm.forced_routing import forced_routing_unavailable_reason

    # before vLLM reads its configuration
    cpu_kernels.register()  # VLLM_PLUGINS may leave our plugin out
    _compat.keep_prefix_cache_with_latents()
    _compat.inspect_models_here()
    engine_args = build_engine_args(arguments)
    load = Load()
    engine, reason = _compat.make_async_llm(engine_args, [load_logger(load)])
    if reason:
        print(f"torchrl_moe: vLLM's own processes import vLLM again: {reason}", flush=True)
    # what the workers found out about themselves
    reports_masks = lift_top_k_rule(engine)
    of_worker = (await engine.collective_rpc("torchrl_moe_report", args=(reports_masks,)))[0]
    live = forced_routing_unavailable_reason(engine.vllm_config) or of_worker
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
    await check_routers(engine)
    # what the driver learns of it
    info = ReplicaInfo(
        model=engine_args.model,
        layout=layout,
        max_model_len=model_config.max_model_len,
        tensor_parallel_size=engine_args.tensor_parallel_size,
        pipeline_parallel_size=engine_args.pipeline_parallel_size,
        data_parallel_size=engine_args.data_parallel_size,
        engine_version=vllm.__version__,
        dtype=str(model_config.dtype).removeprefix("torch."),
        forced_routing_unavailable_reason=live,
    )
    sampling = SamplingParamsBuilder(
        reports_masks, model_config.logprobs_mode, _compat.reads_prefix_cache(engine.vllm_config)
    )
    return engine, info, load, sampling


async def check_routers(engine: AsyncLLM) -> None:
    """Refuse ``router_dtype`` for a family that does not make its routers from the layer that we replace."""
    if ROUTER_DTYPE not in engine.vllm_config.additional_config:
        return
    workers: list[list[str]] = await engine.collective_rpc("torchrl_moe_narrow_routers")
    if narrow := sorted(set().union(*workers)):
        kind = ", ".join(engine.model_config.hf_config.architectures or ())
        raise ValueError(
            f"router_dtype='float32': vLLM's code for {kind} makes the routers of {len(narrow)} layer(s), such as "
            f"{narrow[0]}, in its own way, and not in float32. Leave router_dtype out, or set dtype='float32'."
        )


async def _open(arguments: dict[str, object], inbox: Inbox, send: Send) -> EngineProcess:
    engine, info, load, sampling = await _start_engine(arguments)
    return EngineProcess(engine, info, load, inbox, send, sampling)


def run(stream: SocketStream, driver_is_gone: Callable[[], bool]) -> None:
    """Run the engine, then end the process."""
    run_engine(stream, driver_is_gone, _open)


def preload() -> str:
    """Import what an engine's processes import; return why they may not be forked after that, or ""."""
    unsafe = _compat.import_engine()
    cpu_kernels.preload()
    return unsafe


if __name__ == "__main__":
    run_script(run)
