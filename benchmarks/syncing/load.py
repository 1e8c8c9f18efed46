"""Tokens per second of two busy replicas with a rolling hot swap every twenty seconds, over none."""

from __future__ import annotations

import asyncio
import itertools
import statistics
import tempfile
import time
from typing import Any

import torch
from torch import nn

from benchmarks.report import Row, median_range
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme

REPLICAS, CONCURRENCY, NEW_TOKENS = 2, 32, 64
WINDOW_SECONDS, EVERY_SECONDS, PAIRS = 40.0, 20.0, 4
TARGET = 0.85
CONFIG: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 8,
    "num_experts": 32,
    "moe_intermediate_size": 256,
    "num_experts_per_tok": 4,
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_model_len": 256,
}
SAMPLING = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}


class Load:
    """As many concurrent requests as in a small training run."""

    def __init__(self, engine: AsyncVLLM) -> None:
        self.engine = engine
        self.tokens = 0
        self.numbers = itertools.count()

    async def for_seconds(self, seconds: float, sender: Any = None, model: nn.Module | None = None) -> float:
        """Return tokens per second; weights change every twenty of them if there is a sender."""
        stop = asyncio.Event()
        askers = [asyncio.create_task(self._ask(stop)) for _ in range(CONCURRENCY)]
        await asyncio.sleep(2.0)
        begun, before = time.perf_counter(), self.tokens
        if sender is not None and model is not None:
            for wait in (EVERY_SECONDS / 2, *[EVERY_SECONDS] * (int(seconds / EVERY_SECONDS) - 1)):
                await asyncio.sleep(max(wait, 0.0))
                await asyncio.to_thread(change_and_send, model, sender)
        await asyncio.sleep(max(begun + seconds - time.perf_counter(), 0.0))
        speed = (self.tokens - before) / (time.perf_counter() - begun)
        stop.set()
        await asyncio.gather(*askers)
        return speed

    async def _ask(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            number = next(self.numbers)
            prompt = [97 + (number * step) % 26 for step in range(1, 25)]
            answer = await self.engine.agenerate(prompt_token_ids=prompt, sampling_params=SAMPLING)
            self.tokens += len(answer.outputs[0].token_ids)


def change_and_send(model: nn.Module, sender: Any) -> None:
    """Take a small step, and sync it to all replicas."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0001)
    report = sender.update_weights()
    assert not report.failed, report.failed
    print(report, flush=True)


def under_load() -> list[Row]:
    """Return tokens per second with syncs over those without, window by window."""
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_moe(folder, "qwen3_moe", **CONFIG)
        model = make_tiny_moe("qwen3_moe", **CONFIG)
        size = sum(parameter.numel() * 4 for parameter in model.parameters())
        with AsyncVLLM.from_pretrained(path, num_replicas=REPLICAS, **ENGINE) as engine:
            sender = VLLMWeightSyncScheme().create_sender()
            sender.register_model(model)
            sender.init_all_workers_group(None, vllm_engine=engine)
            sender.update_weights()
            load = Load(engine)
            quiet, synced = [], []
            for _ in range(PAIRS):
                quiet.append(asyncio.run(load.for_seconds(WINDOW_SECONDS)))
                synced.append(asyncio.run(load.for_seconds(WINDOW_SECONDS, sender, model)))
            sender.shutdown()
    ratios = [a / b for a, b in zip(synced, quiet, strict=True)]
    name = f"{REPLICAS} replicas of {size / 1e6:.0f} MB, {CONCURRENCY} requests"
    return [
        Row(
            claim=f"{name}: tokens/s without a sync; with one every {EVERY_SECONDS:.0f} s",
            value=f"{median_range(quiet, 0)}; {median_range(synced, 0)}",
        ),
        Row(
            claim=f"{name}: with / without",
            value=median_range(ratios),
            target=f">= {TARGET:.2f}",
            met=statistics.median(ratios) >= TARGET,
        ),
    ]
