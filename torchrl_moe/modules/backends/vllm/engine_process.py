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
from torchrl_moe.errors import EngineError, WeightSyncError
from torchrl_moe.modules.backends.checkpoint import checkpoint_folder, checkpoint_metadata, tokenizer_files
from torchrl_moe.modules.backends.process.engine_program import EngineProgram, Inbox, Load, Send, run_engine, run_script
from torchrl_moe.modules.backends.process.link import SocketStream
from torchrl_moe.modules.backends.replica import (
    Completion,
    PauseMode,
    ProbeReport,
    ReplicaInfo,
    ReplicaStats,
    Request,
    SwapReport,
)
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


# An engine that gives its GPU's memory to the trainer, and takes it back: vLLM's sleep mode.
#
# Requests that arrive while it sleeps wait here, before vLLM has seen them. A weight update wakes the weights, and
# nothing else. Weights that level 2 has dropped must be updated before the rest may wake.
#
# vLLM has sleep mode on GPUs only, and this has never run on one.


WEIGHTS, REST = "weights", "kv_cache"  # vLLM's names of what sleeps


class EngineSleep:
    """Which parts of an ``AsyncLLM`` sleep, and which commands it takes meanwhile."""

    def __init__(self, engine: AsyncLLM, weights: EngineWeights) -> None:
        self._engine, self._weights = engine, weights
        self._asleep: set[str] = set()
        self._level = 0
        self._weights_lost = False
        self._was_paused = False
        self._asked = 0  # counts calls of sleep and wake_up: the last one holds
        self._turn = asyncio.Lock()  # no sleep during a swap

    def check_awake(self, what: str) -> None:
        """Raise an ``EngineError`` if it sleeps, or a part of it does."""
        if self._asleep:
            raise EngineError(f"{what}: the engine sleeps; wake_up() first")

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause the engine for the user; ``EngineError`` if it sleeps."""
        self.check_awake("pause")
        await self._weights.pause(mode, clear_cache)

    async def resume(self) -> None:
        """Resume the engine for the user; ``EngineError`` if it sleeps."""
        self.check_awake("resume")
        await self._weights.resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Free the memory of weights and cache. Does nothing if it sleeps at that level already."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level must be 1 (weights go to host memory) or 2 (they are dropped), got {level}")
        if not self._engine.model_config.enable_sleep_mode:
            raise ValueError("sleep: start the engine with enable_sleep_mode=True; vLLM has it on GPUs only")
        if self._asleep == {WEIGHTS, REST} and level == self._level:
            return
        self.check_awake("sleep")
        self._asked = mine = self._asked + 1
        await self._weights.no_swap()  # whose pause is not the user's
        self._was_paused = self._weights.user_paused
        self._weights.awake.clear()
        try:
            await self._weights.pause(mode, True)
            async with self._turn:
                if mine != self._asked:
                    raise EngineError("sleep: the engine was woken before its requests had finished")
                await self._engine.sleep(level, "keep")
                self._asleep, self._level, self._weights_lost = {WEIGHTS, REST}, level, level == 2
        except BaseException:
            if mine == self._asked:
                await self._go_on()
            raise

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back; once all of it is back, continue as before. Idempotent."""
        wanted = {WEIGHTS, REST} if tags is None else set(tags)
        if not wanted <= {WEIGHTS, REST}:
            raise ValueError(f"wake_up: tags must be of 'weights' and 'kv_cache', got {list(tags or ())!r}")
        if REST in wanted and self._weights_lost:
            raise WeightSyncError("wake_up: sleep of level 2 has dropped the weights; update them first")
        self._asked += 1
        async with self._turn:
            await self._wake(wanted)
            if not self._asleep and not self._weights.awake.is_set():
                await self._go_on()

    async def _wake(self, wanted: set[str]) -> None:
        if tags := sorted(wanted & self._asleep):
            await self._engine.wake_up(tags)
            self._asleep -= wanted

    async def _go_on(self) -> None:
        """Serve, or stay paused if the engine was paused before it slept."""
        if self._was_paused:  # vLLM resumes by itself once nothing sleeps
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        else:
            await self._weights.resume()
        self._weights.awake.set()

    async def swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, object] | None, patience: float
    ) -> SwapReport:
        """Replace the weights, as :meth:`EngineWeights.swap` does; if they sleep they are woken, and stay awake."""
        async with self._turn:
            await self._wake({WEIGHTS})
            report = await self._weights.swap(version, pause, clear_cache, canary, patience)
            self._weights_lost = self._weights_lost and report.error is not None
            return report


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
        self.sleeping = EngineSleep(engine, self.weights)
        adapters = AdapterVersions(engine, self.requests, self.sleeping.check_awake)
        self.sync = self.updates = Updates(self.weights, self.requests, adapters, self.sleeping.swap)
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
        await self.sleeping.pause(mode, clear_cache)
        if mode == "abort":  # vLLM holds what it had not yet taken in
            self.requests.cut(before)

    async def resume(self) -> None:
        await self.sleeping.resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        if self.sync.sends_adapters:
            raise ValueError("sleep: lora='adapter' loads into memory that would be gone: use lora='merged'")
        before = self.requests.in_flight()
        await self.sleeping.sleep(level, mode)
        if mode == "abort":
            self.requests.cut(before)

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        await self.sleeping.wake_up(tags)

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
        # a checkpoint's dtype says nothing of what the model was loaded in: a trainer is told what is kept here
        found = await asyncio.to_thread(lambda: checkpoint_metadata(checkpoint_folder(self.info.model)))
        workers: list[dict[str, str]] = await self.engine.collective_rpc("torchrl_moe_dtypes", args=(list(found),))
        held = {name: dtype for worker in workers for name, dtype in worker.items()}  # a pipeline's have other layers
        return {name: (_held(dtype, held.get(name)), shape) for name, (dtype, shape) in found.items()}

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
        stopped, cpu_seconds = _what_they_do()
        return ProbeReport(core_answered=answered, stopped=stopped, cpu_seconds=cpu_seconds)


def _what_they_do() -> tuple[bool, float]:
    """Return whether one of this process's descendants is stopped, and the CPU seconds of all."""
    stopped, seconds = False, 0.0
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended
            times = process.cpu_times()
            seconds += times.user + times.system
            stopped |= process.status() == psutil.STATUS_STOPPED
    return stopped, seconds


def load_logger(load: Load) -> StatLoggerBase:
    """Return a stat logger of vLLM's that keeps a :class:`Load`; it is its own factory, which is what vLLM takes.

    A function, since its base class is vLLM's, which only an engine process may import.
    """
    from vllm.v1.metrics.loggers import StatLoggerBase

    class LoadLogger(StatLoggerBase):
        """The scheduler's own stats, summed over the data-parallel engines."""

        def __init__(self) -> None:
            self._of_engines: dict[int, tuple[int, int, float]] = {}

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
                of_engine = (
                    scheduler_stats.num_running_reqs,
                    scheduler_stats.num_waiting_reqs,
                    scheduler_stats.kv_cache_usage,
                )
                self._of_engines[engine_idx] = of_engine
                running, waiting, usages = zip(*self._of_engines.values(), strict=True)
                load.running, load.waiting = sum(running), sum(waiting)
                load.cache_usage = sum(usages) / len(usages)
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


def _held(stored: torch.dtype, name: str | None) -> torch.dtype:
    import torch

    held: torch.dtype | None = None if name is None else getattr(torch, name)
    # a quantised tensor is sent as the checkpoint has it
    return held if held is not None and held.is_floating_point and held.itemsize > 1 else stored


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
