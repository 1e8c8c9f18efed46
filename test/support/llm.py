"""A fake of vLLM's ``AsyncLLM`` that takes weights and adapters: it makes no tokens but those that try its weights."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def report(**changes: Any) -> dict[str, Any]:
    """What a worker says that has staged a version."""
    return {"running": False, "fetched": 0.0, "error": None, **changes}


class FakeLLM:
    """Does what a weight update asks of an ``AsyncLLM``, keeps a log, and fails at the steps that have an error."""

    def __init__(
        self, logprob: float = -1.0, prompt_logprobs: tuple[float, ...] = (-1.0, -2.0), lora: bool = True
    ) -> None:
        self.log: list[Any] = []
        self.fail: dict[str, Exception] = {}
        self.logprob, self.prompt_logprobs = logprob, prompt_logprobs
        self.hangs = False  # whether a prompt is never answered
        self.prompts: list[Any] = []
        self.counts: dict[str, tuple[str, int, int]] = {}  # state -> request, answer, tokens
        self.arriving: list[tuple[str, int]] = []  # tokens that come in after the pause, one per look
        self.begins: list[list[bool]] = []  # what workers answer when they are to stage, if not yes
        self.reports: list[list[dict[str, Any]]] = [[report()]]  # of staging, one per look; the last stays
        self.whole: Any = [True]  # or why the workers do not say
        self.model_config = SimpleNamespace(enable_sleep_mode=True)
        self.vllm_config = SimpleNamespace(lora_config=SimpleNamespace() if lora else None)
        self.adapters: dict[int, str] = {}  # number -> the file, of those that are loaded
        self.unused: list[list[str]] = [[]]  # what each worker does not take of the next

    @property
    def output_processor(self) -> Any:
        states = {}
        for name, (request, index, count) in self.counts.items():
            tokens = SimpleNamespace(num_output_tokens=lambda n=count: n)
            ids = {"external_req_id": request, "request_index": index, "parent_req": None}
            states[name] = SimpleNamespace(detokenizer=tokens, **ids)
        if self.arriving:
            name, count = self.arriving.pop(0)
            self.counts[name] = (*self.counts[name][:2], count)
        return SimpleNamespace(request_states=states)

    async def _step(self, name: str, *details: Any) -> None:
        self.log.append((name, *details) if details else name)
        if name in self.fail:
            raise self.fail[name]

    async def init_weight_transfer_engine(self, request: Any) -> None:
        await self._step("init", request.init_info)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        await self._step("pause", mode, clear_cache)

    async def resume_generation(self) -> None:
        await self._step("resume")

    async def sleep(self, level: int, mode: str) -> None:
        await self._step("sleep", level, mode)

    async def wake_up(self, tags: list[str]) -> None:
        await self._step("wake_up", tags)

    async def abort(self, request_ids: list[str]) -> None:
        await self._step("abort", sorted(request_ids))
        self.counts = {}

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> Any:
        name = method.removeprefix("torchrl_moe_")
        if name == "whole":
            if isinstance(self.whole, Exception):
                raise self.whole
            return self.whole
        if name == "staged":
            return self.reports.pop(0) if len(self.reports) > 1 else self.reports[0]
        await self._step(name, *args)
        if name == "load_adapter":
            file = Path(args[0]["lora_path"]) / "adapter_model.safetensors"
            self.adapters[args[0]["lora_int_id"]] = file.read_text() if file.exists() else ""
            return self.unused
        return self.begins.pop(0) if name == "stage" and self.begins else [True]

    async def remove_lora(self, number: int) -> bool:
        return self.adapters.pop(number, None) is not None

    async def start_weight_update(self) -> None:
        await self._step("start")

    async def update_weights(self, request: Any) -> None:
        await self._step("update", request.update_info)

    async def finish_weight_update(self, version: str) -> None:
        await self._step("finish", version)

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> Any:
        """Take a question; what it gives has one token, and the prompt's from the second on if they are asked for."""
        self.prompts.append((prompt, params, request_id))
        await self._step("probe")
        tokens = prompt["prompt_token_ids"][1:]
        values = zip(tokens, self.prompt_logprobs, strict=False)
        rows = [{token: SimpleNamespace(logprob=value)} for token, value in values]
        output = SimpleNamespace(logprobs=[{9: SimpleNamespace(logprob=self.logprob)}])
        asked = params.prompt_logprobs is not None
        final = SimpleNamespace(outputs=[output], prompt_logprobs=[None, *rows] if asked else None)

        async def get() -> Any:
            if self.hangs:
                await asyncio.Event().wait()
            return final

        return SimpleNamespace(get=get)
