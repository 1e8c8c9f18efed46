"""An ``AsyncLLM`` without vLLM, for an engine process that starts at once; ``toy_kind.py`` has that.

The engine argument ``start`` says how it starts: ``seconds`` it blocks, ``error`` it fails with, ``print`` for the log,
``sleeper`` a grandchild in the process group, ``shared`` a shared memory that it never removes, named in its info. A
prompt is answered with its own ids plus one, after ``sampling_params["seconds"]``, and not while the engine is paused;
it is registered after ``sampling_params["read_seconds"]``, as vLLM tokenizes first.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import subprocess
import time
from collections.abc import AsyncIterator
from multiprocessing.shared_memory import SharedMemory
from types import SimpleNamespace
from typing import Any, ClassVar

from torchrl_moe import _compat
from torchrl_moe.modules.backends.process.engine_program import Load
from torchrl_moe.modules.backends.replica import ReplicaInfo
from torchrl_moe.modules.backends.vllm import engine_process, engine_requests

TICK_SECONDS = 0.01
KEPT: list[SharedMemory] = []


class WrappedError(Exception):
    """As vLLM's ``EngineGenerateError``: no words of its own."""


class ToyParams(dict[str, Any]):
    """A mapping that answers as vLLM's ``SamplingParams``, too."""

    DEFAULTS: ClassVar[dict[str, Any]] = dict.fromkeys(("seed", "max_tokens")) | {"n": 1, "min_tokens": 0}
    DEFAULTS |= {"detokenize": False}

    def __getattr__(self, name: str) -> Any:
        if name not in self.DEFAULTS:
            raise AttributeError(name)
        return self.get(name, self.DEFAULTS[name])

    def clone(self) -> ToyParams:
        return ToyParams(self)


class ToyEngine:
    """Does what ``EngineProcess`` asks of an engine."""

    def __init__(self) -> None:
        self.errored = False
        self.model_config = SimpleNamespace(enable_sleep_mode=True, trust_remote_code=False, get_vocab_size=lambda: 259)
        self.model_config.logprobs_mode = "processed_logprobs"
        scheduler = SimpleNamespace(scheduler_cls=None)
        self.vllm_config = SimpleNamespace(model_config=self.model_config, scheduler_config=scheduler)
        self.vllm_config.use_v2_model_runner = False
        self.dead_error = "the toy is broken"
        self.known: dict[str, asyncio.Event] = {}
        self.aborts: list[list[str]] = []
        self.calls: list[tuple[Any, ...]] = []
        self.output_processor = SimpleNamespace(request_states={})  # an answer comes whole: none is ever half made
        self.going = asyncio.Event()
        self.going.set()

    async def generate(
        self, prompt: Any, params: Any, request_id: str, *, lora_request: Any, priority: int
    ) -> AsyncIterator[SimpleNamespace]:
        params = params or {}
        await asyncio.sleep(params.get("read_seconds", 0))
        if "refuse" in params:
            raise ValueError(params["refuse"])
        if "wrap" in params:
            name, words = params["wrap"]
            raise WrappedError from getattr(builtins, name)(words)
        self.known[request_id] = aborted = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(aborted.wait(), params.get("seconds", 0))
        while not self.going.is_set() and not aborted.is_set():
            await asyncio.sleep(TICK_SECONDS)
        del self.known[request_id]
        if self.errored:
            raise RuntimeError("the consequence of a death")
        if params.get("silent"):
            return
        text = prompt.get("prompt")
        ids = prompt["prompt_token_ids"] if text is None else list(text.encode())
        made = ([], "abort") if aborted.is_set() else ([token + 1 for token in ids], "stop")
        nothing = dict.fromkeys(("stop_reason", "logprobs", "routed_experts", "sampling_mask"))
        answer = SimpleNamespace(index=0, token_ids=made[0], text="", finish_reason=made[1], **nothing)
        given = {"prompt": text, "prompt_token_ids": ids, "num_cached_tokens": 1, "metrics": None}
        yield SimpleNamespace(outputs=[answer], **given)

    async def abort(self, request_ids: list[str]) -> None:
        self.aborts.append(request_ids)
        for request_id in request_ids:
            if request_id in self.known:
                self.known[request_id].set()

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))
        while mode == "wait" and self.known:
            await asyncio.sleep(TICK_SECONDS)
        self.going.clear()
        if mode == "abort":
            await self.abort(list(self.known))

    async def resume_generation(self) -> None:
        self.calls.append(("resume",))
        self.going.set()

    async def is_paused(self) -> bool:
        return not self.going.is_set()

    async def sleep(self, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))

    async def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake_up", tags))

    async def reset_prefix_cache(self) -> int:
        return 1

    async def collective_rpc(self, method: str, timeout: None, args: tuple[Any, ...], kwargs: Any) -> Any:
        if method == "die":
            self.errored = True
        elif method == "sleep":
            await asyncio.sleep(*args)
        elif method == "block":
            time.sleep(*args)
        elif method == "fail":
            raise RuntimeError(*args)
        elif method == "not_plain":
            return lambda: None
        return [[method, list(args), kwargs]]

    def get_tokenizer(self) -> Any:
        from torchrl_moe.testing import ByteTokenizer  # imports transformers: few ask

        return ByteTokenizer()

    def shutdown(self, timeout: float) -> None:
        """Nothing to end."""


async def start(arguments: dict[str, Any]) -> tuple[ToyEngine, ReplicaInfo, Load]:
    how = arguments.get("start", {})
    print(how.get("print", "toy: started"), flush=True)
    if how.get("sleeper"):
        subprocess.Popen(["sleep", "600"])
    time.sleep(how.get("seconds", 0))
    if "error" in how:
        raise ValueError(how["error"])
    name = arguments["model"]
    if how.get("shared"):
        KEPT.append(SharedMemory(create=True, size=1 << 12))
        name = KEPT[0].name
    why = "the engine captures no routes"
    info = ReplicaInfo(model=name, layout=None, max_model_len=8, forced_routing_unavailable_reason=why)
    return ToyEngine(), info, Load(3, 2, 0.5), None


def without_vllm(set_attribute: Any = setattr) -> None:
    """Put toys in the place of what imports vLLM."""
    set_attribute(_compat, "vllm_client_errors", lambda: (ValueError, TypeError))
    set_attribute(_compat, "retryable_error", lambda: InterruptedError)
    set_attribute(
        engine_requests, "SamplingParamsBuilder", lambda *how: lambda spec, guided_options: ToyParams(spec or {})
    )


async def bring(process: engine_process.EngineProcess, version: int) -> None:
    """A verb: have weights of a version, as if a sender had brought them."""
    process.weights.version = process.weights.proved_version = version


def use_toys() -> None:
    """Have this process's engine process be one over the toy engine."""
    engine_process.EngineProcess.bring = bring  # type: ignore[attr-defined]
    without_vllm()
    engine_process._start_engine = start
