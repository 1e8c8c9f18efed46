"""The process that owns one ``AsyncLLM``: it reads requests from a socket and writes completions to it.

Forked from a process that has imported vLLM (``fork_server_process.py``), or started as
``python -m torchrl_moe.modules.backends.vllm.engine_process FD DRIVER_PID``; in either case as the leader of a process
group. vLLM may import this module again in its own child processes, so its top level stays light. The group never
outlives the driver: end of file on the socket, or the end of the driver's process, ends it.

Messages in: ``("configure", pickle of arguments)``, ``("generate", packed)``, ``("abort", ids)``,
``("call", number, method, parcel of kwargs)``, ``("left", driver)``, ``("shutdown",)``.
Messages out: ``("ready", info)``, ``("failed", text)``, ``("completions", packed)``, ``("refused", id, kind, text)``,
``("result", number, parcel)``, ``("error", number, kind, text)``, ``("stats", stats)``, ``("died", text)``.
"""

from __future__ import annotations

import asyncio
import gc
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torchrl_moe import _compat, _compat_routing, _compat_sampling
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.process import packing, wire
from torchrl_moe.modules.backends.process.parent_watch import Inbox, end_group, end_group_later
from torchrl_moe.modules.backends.process.plain import Packed
from torchrl_moe.modules.backends.replica import Completion, PauseMode
from torchrl_moe.modules.backends.reports import ProbeReport, ReplicaInfo, ReplicaStats
from torchrl_moe.modules.backends.tokenizer_files import tokenizer_files
from torchrl_moe.modules.backends.vllm.engine_args import build_engine_args
from torchrl_moe.modules.backends.vllm.engine_requests import EngineRequests
from torchrl_moe.modules.backends.vllm.probe import EngineProbe
from torchrl_moe.modules.backends.vllm.request_routes import RequestRoutes
from torchrl_moe.modules.backends.vllm.sleeping import EngineSleep
from torchrl_moe.modules.backends.vllm.stats_feed import Load, StatsFeed
from torchrl_moe.modules.backends.vllm.weights.adapter_versions import AdapterVersions
from torchrl_moe.modules.backends.vllm.weights.checkpoint import checkpoint_folder, checkpoint_metadata
from torchrl_moe.modules.backends.vllm.weights.commands import WeightCommands
from torchrl_moe.modules.backends.vllm.weights.engine import EngineWeights

WATCH_SECONDS = 0.5
MESSAGE_BYTES = 64 << 20  # beyond which completions go on in another one
SMALL_BYTES = 1 << 10  # of what is not an array
SHUTDOWN_SECONDS = 1.0  # that vLLM's own processes get to end


def _size(message: tuple[Any, ...]) -> int:
    """Return about how many bytes a message holds until it is written."""
    if message[0] == "completion":
        return SMALL_BYTES + packing.completion_bytes(message[1])
    return SMALL_BYTES + (sum(array.nbytes for array in message[2]) if message[0] == "result" else 0)


def _frame(messages: list[tuple[Any, ...]]) -> list[wire.Frames]:
    """Put completions that are ready together into one message, or a few that are not too large."""
    batches: list[list[Completion]] = []
    size = MESSAGE_BYTES
    for message in messages:
        if message[0] == "completion":
            if size >= MESSAGE_BYTES:
                batches.append([])
                size = 0
            batches[-1].append(message[1])
            size += _size(message)
    others = [wire.encode(message) for message in messages if message[0] != "completion"]
    return [*(wire.encode(("completions", packing.pack_completions(batch))) for batch in batches), *others]


class EngineProcess(WeightCommands):
    """One engine, its requests in flight, and the commands that the driver may call by name.

    Args:
        engine: the ``AsyncLLM``.
        info: what the replica said of itself.
        load: kept by the engine's :class:`LoadLogger`.
        inbox: what the driver sends.
        send: takes a message to the driver.
    """

    def __init__(
        self, engine: Any, info: ReplicaInfo, load: Load, inbox: Inbox, send: Callable[[tuple[Any, ...]], None]
    ) -> None:
        self.engine = engine
        self.info = info
        self.load = load
        self.probe = EngineProbe(engine)
        weights = EngineWeights(engine, lambda: checkpoint_metadata(checkpoint_folder(info.model)))
        requests = EngineRequests(
            engine,
            weights,
            lambda completion: send(("completion", completion)),
            self._refuse,
            names_words=_compat_sampling.carries_masks(engine.vllm_config),
            logprobs_mode=engine.model_config.logprobs_mode,
            routes=RequestRoutes(
                info.layout,
                info.why_live,
                _compat_sampling.why_unscored(engine.vllm_config),
                engine.model_config.get_vocab_size(),
            ),
        )
        weights.in_flight = requests
        self.sleeping = EngineSleep(engine, weights)
        adapters = AdapterVersions(engine, requests, self.sleeping.check_awake)
        super().__init__(weights, requests, adapters, self.sleeping.swap)
        self._inbox = inbox
        self._send = send
        self._death_reported = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._errors = _compat.vllm_client_errors()
        self._feed = StatsFeed(load, self._stats, send)

    # -- requests ---------------------------------------------------------------------------------------------------

    def generate(self, packed: Packed) -> None:
        """Start requests."""
        for request in packing.unpack_requests(packed):
            self.requests.start(request)

    def _refuse(self, request_id: str, error: BaseException) -> None:
        if not self._report_death():
            self._send(("refused", request_id, *self._described(error)))

    def _described(self, error: BaseException) -> tuple[str, str]:
        """Return whose fault an error is, and its words.

        What vLLM did not expect in a request, it wraps in an error without words: then its cause says more.
        """
        cause = error if error.__cause__ is None or str(error) else error.__cause__
        if isinstance(cause, self._errors):
            return "value", str(cause)
        return "engine", f"{type(cause).__name__}: {cause}"

    # -- commands ---------------------------------------------------------------------------------------------------

    def call(self, number: Any, method: str, kwargs: wire.Parcel) -> None:
        """Start a command; its value or its error is sent when it is done."""
        task = asyncio.get_running_loop().create_task(self._answer(method, kwargs))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(partial(self._send_result, number))

    async def _answer(self, method: str, kwargs: wire.Parcel) -> wire.Parcel:
        """Run a command. Arguments are read here, the value by the caller: a failure concerns only the caller."""
        command = getattr(self, f"command_{method}", None)
        if command is None:
            known = sorted(name.removeprefix("command_") for name in dir(self) if name.startswith("command_"))
            raise ValueError(f"an engine process has no command {method!r}; known: {', '.join(known)}")
        return wire.parcel(await command(**wire.open_parcel(kwargs)))

    def _send_result(self, number: Any, task: asyncio.Task[wire.Parcel]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self._send(("result", number, task.result()))
        elif not self._report_death():
            self._send(("error", number, *self._described(error)))

    async def command_pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self.sleeping.pause(mode, clear_cache)

    async def command_resume(self) -> None:
        await self.sleeping.resume()

    async def command_sleep(self, level: int, mode: PauseMode) -> None:
        if self._sends_adapters:
            raise ValueError("sleep: lora='adapter' loads into memory that would be gone: use lora='merged'")
        await self.sleeping.sleep(level, mode)

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

    async def command_stats(self) -> ReplicaStats:
        return self._feed.stats()

    def _stats(self) -> ReplicaStats:
        # vLLM reports with each step, and an engine that has nothing to do makes none
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

    async def serve(self) -> None:
        """Handle messages until the driver says so, goes away, or the engine dies."""
        loop = asyncio.get_running_loop()
        background = [loop.create_task(self._watch_engine()), loop.create_task(self._feed.run())]
        while True:
            kind, *rest = await self._inbox.messages.get()
            if kind == "generate":
                self.generate(*rest)
            elif kind == "abort":
                self.requests.abort(*rest)
            elif kind == "call":
                self.call(*rest)
            elif kind == "left":
                self.owner.left(*rest)
            else:
                for task in background:
                    task.cancel()
                return

    async def _watch_engine(self) -> None:
        while not self._report_death():
            await asyncio.sleep(WATCH_SECONDS)

    def _report_death(self) -> bool:
        """Tell the driver if the engine is dead, and end: then every error is but a consequence of that."""
        if self.engine.errored and not self._death_reported:
            self._death_reported = True
            self._send(("died", f"vLLM's engine core died: {self.engine.dead_error}"))
            self._inbox.put("shutdown")
        return self._death_reported


async def _start_engine(arguments: dict[str, Any]) -> tuple[Any, ReplicaInfo, Load]:
    import vllm

    from torchrl_moe.modules.backends.vllm.load_logger import LoadLogger

    _compat.inspect_models_here()
    engine_args = build_engine_args(arguments)
    logger = LoadLogger()
    engine, reason = _compat.make_async_llm(engine_args, [logger.factory])
    if reason:
        print(f"torchrl_moe: vLLM's own processes import vLLM again: {reason}", flush=True)
    if _compat_sampling.carries_masks(engine.vllm_config):
        _compat_sampling.keep_masks_as_arrays()
        await engine.collective_rpc("torchrl_moe_name_kept_words")
    if not _compat_sampling.why_unscored(engine.vllm_config):
        await engine.collective_rpc("torchrl_moe_adjust_scores")
    why_live = _compat_routing.why_live(engine.vllm_config)
    if not why_live:
        why_live = (await engine.collective_rpc("torchrl_moe_follow_routes"))[0]
    model_config = engine.model_config
    layout = None
    if engine_args.enable_return_routed_experts:
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
        why_live=why_live,
    )
    return engine, info, logger.load


async def _start_configured(arguments: bytes) -> tuple[Any, ReplicaInfo, Load]:
    return await _start_engine(pickle.loads(arguments))


async def _main(connection: Connection, driver_is_gone: Callable[[], bool]) -> None:
    outbox = wire.Outbox(connection, _frame, _size, reader="the driver")
    inbox = Inbox(connection, driver_is_gone, asyncio.get_running_loop())
    _, arguments = await inbox.messages.get()
    started: tuple[Any, ReplicaInfo, Load] | BaseException
    (started,) = await asyncio.gather(_start_configured(arguments), return_exceptions=True)
    if isinstance(started, BaseException):
        traceback.print_exception(started)
        outbox.put(("failed", f"{type(started).__name__}: {started}"))
        outbox.close()
        return
    engine, info, load = started
    gc.collect()
    gc.freeze()  # what vLLM brings are 600 000 objects: looking through them all takes 0.3 s
    inbox.serving = True
    process = EngineProcess(engine, info, load, inbox, outbox.put)
    try:
        outbox.put(("ready", info))
        await process.serve()
    finally:
        end_group_later()
        outbox.close()
        engine.shutdown(timeout=SHUTDOWN_SECONDS)
        if process.weights.reader is not None:
            process.weights.reader.close()  # the workers have ended: copies that only they needed go


def run(connection: Connection, driver_is_gone: Callable[[], bool]) -> None:
    """Run to the end, which is the process's. Nothing may hold it back: vLLM leaves threads, and the driver waits.

    Args:
        connection: the socket to the driver.
        driver_is_gone: whether the driver's process has ended.
    """
    # Without a driver the group is orphaned; if a member is stopped, the kernel then hangs up on all of them, and who
    # cleans up would be gone. Ctrl-C and the like do not reach the group, so nothing is lost.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # a forked engine core would hold the socket open after this process has been killed
    os.register_at_fork(after_in_child=connection.close)
    code = 1
    try:
        asyncio.run(_main(connection, driver_is_gone))
        code = 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        end_group(code)


def preload() -> str:
    """Import what an engine's processes import; return why they may not be forked then, or ""."""
    return _compat.import_engine()


def main() -> None:
    """Run as a child of the driver."""
    descriptor, driver = map(int, sys.argv[1:])
    run(Connection(descriptor), lambda: os.getppid() != driver)


if __name__ == "__main__":
    main()
