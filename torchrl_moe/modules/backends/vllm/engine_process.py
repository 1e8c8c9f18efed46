"""The process that owns one ``AsyncLLM``: it reads requests from a socket and writes completions to it.

Started by :class:`LocalReplica` as ``python -m torchrl_moe.modules.backends.vllm.engine_process FD``. vLLM imports this
module again in its own child processes, so its top level stays light. It never outlives its driver: end of file on the
socket, or a new parent process, ends it.

Messages in: ``("configure", arguments)``, ``("generate", packed)``, ``("abort", ids)``,
``("call", number, method, kwargs)``, ``("shutdown",)``.
Messages out: ``("ready", info)``, ``("failed", text)``, ``("completions", packed)``,
``("refused", [(id, kind, text)])``,
``("result", number, value)``, ``("error", number, kind, text)``, ``("died", text)``.
"""

from __future__ import annotations

import asyncio
import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from torchrl_moe import _compat
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import Completion, ReplicaInfo, ReplicaStats, Request
from torchrl_moe.modules.backends.vllm import wire
from torchrl_moe.modules.backends.vllm.checkpoint import checkpoint_metadata
from torchrl_moe.modules.backends.vllm.engine_args import build_engine_args
from torchrl_moe.modules.backends.vllm.outputs import completion_from_vllm
from torchrl_moe.modules.backends.vllm.sampling import SamplingParamsBuilder

WATCH_SECONDS = 0.5
SHUTDOWN_SECONDS = 1.0


class Outbox:
    """Writes messages from a thread of its own, and puts completions that are ready together into one message."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: queue.SimpleQueue[tuple[Any, ...] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="outbox", daemon=True)
        self._thread.start()

    def put(self, *message: Any) -> None:
        self._queue.put(message)

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(timeout=5.0)

    def _write(self) -> None:
        while (message := self._queue.get()) is not None:
            batch = [message]
            while not self._queue.empty() and batch[-1] is not None:
                batch.append(self._queue.get())  # type: ignore[arg-type]
            try:
                self._write_batch([item for item in batch if item is not None])
            except OSError:  # the driver is gone: the reader sees it too and ends the process
                return
            if batch[-1] is None:
                return

    def _write_batch(self, batch: list[tuple[Any, ...]]) -> None:
        completions = [message[1] for message in batch if message[0] == "completion"]
        if completions:
            wire.send(self._connection, ("completions", wire.pack_completions(completions)))
        for message in batch:
            if message[0] != "completion":
                wire.send(self._connection, message)


class EngineProcess:
    """One engine, its requests in flight, and the commands that the driver may call by name."""

    def __init__(self, engine: Any, info: ReplicaInfo, outbox: Outbox, load: Any) -> None:
        self.engine = engine
        self.info = info
        self.outbox = outbox
        self.load = load
        self.version = 0
        self.counts = dict.fromkeys(("requests", "completions", "prompt_tokens", "cached_tokens"), 0)
        self.counts["generated_tokens"] = 0
        self.seconds = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._errors = _compat.vllm_client_errors()
        self._sampling = SamplingParamsBuilder()

    # -- requests ---------------------------------------------------------------------------------------------------

    def generate(self, packed: dict[str, Any]) -> None:
        """Start one task per request of a message."""
        for request in wire.unpack_requests(packed):
            self._spawn(self._run(request), partial(self._send_completion, request, time.monotonic()))

    def _spawn(self, coroutine: Any, on_done: Callable[[asyncio.Task[Any]], None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(on_done)

    def _send_completion(self, request: Request, started: float, task: asyncio.Task[Completion]) -> None:
        if task.cancelled():  # the process is ending: the driver fails what is open
            return
        error = task.exception()
        if error is None:
            self._count(task.result(), time.monotonic() - started)
            self.outbox.put("completion", task.result())
        elif isinstance(error, self._errors):
            self.outbox.put("refused", [(request.request_id, "value", str(error))])
        else:
            self.outbox.put("refused", [(request.request_id, "engine", repr(error.__cause__ or error))])

    async def _run(self, request: Request) -> Completion:
        params = self._sampling(request.sampling_params, request.guided_options)
        prompt: Any = request.prompt
        if request.prompt_token_ids is not None:
            prompt = {"prompt_token_ids": request.prompt_token_ids.tolist()}
        final = None
        async for output in self.engine.generate(
            prompt, params, request.request_id, lora_request=request.lora_request, priority=request.priority
        ):
            final = output
        if final is None:
            raise RuntimeError(f"vLLM ended request {request.request_id!r} without an output")
        return completion_from_vllm(final, request, self.version)

    def _count(self, completion: Completion, seconds: float) -> None:
        self.counts["requests"] += 1
        self.counts["completions"] += len(completion.outputs)
        self.counts["prompt_tokens"] += len(completion.prompt_token_ids)
        self.counts["cached_tokens"] += completion.num_cached_tokens
        self.counts["generated_tokens"] += sum(len(output.token_ids) for output in completion.outputs)
        self.seconds += seconds

    # -- commands ---------------------------------------------------------------------------------------------------

    def call(self, number: int, method: str, kwargs: dict[str, Any]) -> None:
        """Start a command; its value or its error is sent when it is done."""
        self._spawn(getattr(self, f"command_{method}")(**kwargs), partial(self._send_result, number))

    def _send_result(self, number: int, task: asyncio.Task[Any]) -> None:
        if task.cancelled():
            return
        error = task.exception()
        if error is None:
            self.outbox.put("result", number, task.result())
        else:
            kind = "value" if isinstance(error, self._errors) else "engine"
            self.outbox.put("error", number, kind, f"{type(error).__name__}: {error}")

    async def command_pause(self, mode: str, clear_cache: bool) -> None:
        await self.engine.pause_generation(mode=mode, clear_cache=clear_cache)

    async def command_resume(self) -> None:
        await self.engine.resume_generation()

    async def command_reset_prefix_cache(self) -> bool:
        return bool(await self.engine.reset_prefix_cache())

    async def command_collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        return await self.engine.collective_rpc(method, None, args, kwargs)

    async def command_tokenizer(self) -> Any:
        return _compat.plain_tokenizer(self.engine.get_tokenizer())

    async def command_metadata(self) -> Any:
        return checkpoint_metadata(_checkpoint_folder(self.info.model))

    async def command_stats(self) -> ReplicaStats:
        return ReplicaStats(
            running=self.load.running,
            waiting=self.load.waiting,
            cache_usage=self.load.cache_usage,
            generation_seconds=self.seconds,
            **self.counts,
        )

    # -- life -------------------------------------------------------------------------------------------------------

    async def serve(self, connection: Connection) -> None:
        """Handle messages until the driver says so, goes away, or the engine dies."""
        loop = asyncio.get_running_loop()
        inbox: asyncio.Queue[tuple[Any, ...]] = asyncio.Queue()
        reader = threading.Thread(target=_read, args=(connection, loop, inbox), name="inbox", daemon=True)
        reader.start()
        watch = loop.create_task(self._watch(inbox))
        while True:
            kind, *rest = await inbox.get()
            if kind == "generate":
                self.generate(*rest)
            elif kind == "abort":
                await self.engine.abort(rest[0])
            elif kind == "call":
                self.call(*rest)
            else:
                if kind == "died":
                    self.outbox.put("died", *rest)
                watch.cancel()
                return

    async def _watch(self, inbox: asyncio.Queue[tuple[Any, ...]]) -> None:
        parent = os.getppid()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            if self.engine.errored:
                inbox.put_nowait(("died", f"vLLM's engine core died: {self.engine.dead_error}"))
            elif os.getppid() != parent:
                inbox.put_nowait(("shutdown",))


def _read(connection: Connection, loop: asyncio.AbstractEventLoop, inbox: asyncio.Queue[tuple[Any, ...]]) -> None:
    while True:
        try:
            message = wire.receive(connection)
        except (EOFError, OSError):
            message = ("shutdown",)
        loop.call_soon_threadsafe(inbox.put_nowait, message)
        if message[0] == "shutdown":
            return


def _checkpoint_folder(model: str) -> str:
    if os.path.isdir(model):
        return model
    from huggingface_hub import snapshot_download

    return str(snapshot_download(model, local_files_only=True))


async def _start_engine(arguments: dict[str, Any]) -> tuple[Any, ReplicaInfo, Any]:
    import vllm
    from vllm.v1.engine.async_llm import AsyncLLM

    from torchrl_moe.modules.backends.vllm.load_logger import LoadLogger

    engine_args = build_engine_args(arguments)
    load = LoadLogger()
    engine = AsyncLLM.from_engine_args(engine_args, stat_loggers=[load.factory])
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
        engine_version=vllm.__version__,
    )
    return engine, info, load


async def _main(connection: Connection) -> int:
    outbox = Outbox(connection)
    _, arguments = wire.receive(connection)
    started: tuple[Any, ReplicaInfo, Any] | BaseException
    (started,) = await asyncio.gather(_start_engine(arguments), return_exceptions=True)
    if isinstance(started, BaseException):
        traceback.print_exception(started)
        outbox.put("failed", f"{type(started).__name__}: {started}")
        outbox.close()
        return 1
    engine, info, load = started
    try:
        outbox.put("ready", info)
        await EngineProcess(engine, info, outbox, load).serve(connection)
    finally:
        outbox.close()
        engine.shutdown(timeout=SHUTDOWN_SECONDS)
    return 0


if __name__ == "__main__":
    # Nothing may hold the exit back: vLLM leaves threads behind, and the driver waits for this process.
    code = asyncio.run(_main(Connection(int(sys.argv[1]))))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
