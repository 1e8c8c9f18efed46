"""The weight check of a hot swap in an engine with a thousand waiting requests: it is served before all of them.

One engine and its event loop run in this process, with the model of ``pause.py`` and 32 slots. The time from the start
of a swap to the answer of its weight check, before which no answer leaves the engine, is measured in the idle engine
and in the full one.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.report import Row, median_range
from benchmarks.syncing.pause import ENGINE, MODEL
from torchrl_moe.modules.backends.checkpoint import checkpoint_metadata
from torchrl_moe.modules.backends.vllm.engine_process import _start_engine
from torchrl_moe.modules.backends.vllm.weights import EngineWeights
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.store import WeightStoreWriter
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

ROUNDS, PLACES, QUEUED, TOKENS = 5, 32, 1024, 400


async def _ask(engine: Any, number: int, gaps: list[float]) -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    params = SamplingParams(max_tokens=TOKENS, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA)
    last = 0.0
    async for _ in engine.generate({"prompt_token_ids": [number % 200, 7]}, params, f"queued-{number}"):
        now = time.perf_counter()
        if last:
            gaps.append(now - last)
        last = now


async def _swaps(weights: EngineWeights, writer: WeightStoreWriter, tensors: dict[str, Tensor]) -> list[float]:
    """Return the seconds until swaps release answers; each swap must pass its weight check."""
    seconds = []
    for _ in range(ROUNDS):
        version = weights.version + 1
        await asyncio.to_thread(writer.publish, tensors.items(), version)
        await weights.stage(version, "digest", 1, None)
        started = time.perf_counter()
        swapping = asyncio.create_task(weights.swap(version, "keep", False))
        while weights._proved.is_set() and not swapping.done():
            await asyncio.sleep(0.001)
        await weights._proved.wait()
        seconds.append(time.perf_counter() - started)
        report = await swapping
        assert (report.error, report.unproved) == (None, ""), report
    return seconds


async def measure(folder: Path, tensors: dict[str, Tensor]) -> tuple[list[float], list[float], float]:
    """Return the seconds of swaps in the idle and in the full engine, and of a full step."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as store, contextlib.ExitStack() as stack:
        writer = WeightStoreWriter(store)
        engine, _, load, _ = await _start_engine({"model": str(folder), **ENGINE, "max_num_seqs": PLACES})
        stack.callback(engine.shutdown)
        weights = EngineWeights(engine, lambda: checkpoint_metadata(folder))
        await weights.init("memmap", {"folder": store})
        idle = await _swaps(weights, writer, tensors)
        gaps: list[float] = []
        tasks = [asyncio.create_task(_ask(engine, number, gaps)) for number in range(QUEUED + 4 * PLACES)]
        while load.running < PLACES or load.waiting < QUEUED or len(gaps) < 10 * PLACES:
            await asyncio.sleep(0.01)
        step = statistics.median(gaps)
        full = await _swaps(weights, writer, tensors)
        assert load.waiting >= QUEUED
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return idle[1:], full[1:], step  # the first one warms up


def behind_a_queue() -> list[Row]:
    """Return the seconds until a swap passes its weight check, idle and full."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_moe("qwen3_moe", **MODEL)
        model.save_pretrained(folder)
        ByteTokenizer().save_pretrained(folder)
        idle, full, step = asyncio.run(measure(Path(folder), dict(checkpoint_tensors(model))))
    limit = statistics.median(idle) + 2 * step
    return [
        Row(claim="from the start of a swap to its weight check, idle engine, seconds", value=median_range(idle, 3)),
        Row(
            claim=f"the same, {PLACES} requests running and {QUEUED} waiting, seconds (a full step takes {step:.3f})",
            value=median_range(full, 3),
            target=f"<= idle + two full steps = {limit:.3f}",
            met=statistics.median(full) <= limit,
        ),
    ]
