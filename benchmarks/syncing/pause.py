"""How long generation is paused for a weight update: vLLM's bare reload, and ours.

One engine and its event loop run in this process, with eight requests generating throughout. Each round runs both, and
the ratio is computed per round. Bare is pause, start, load, finish, resume; the expert kernels are dropped first,
without which vLLM computes wrongly on CPU. Digests are checked before any pause. A patch of that version comes last.
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
from torchrl_moe.modules.backends.checkpoint import checkpoint_metadata
from torchrl_moe.modules.backends.vllm.engine_process import _start_engine
from torchrl_moe.modules.backends.vllm.weights import EngineWeights
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.store import WeightStoreWriter
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

ROUNDS, REQUESTS, SHARE = 5, 8, 0.01
QUIET_SECONDS = 3.0
MOST_RATIO = 1.2
MODEL: dict[str, Any] = {
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 512,
    "mlp_only_layers": [],
}
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_model_len": 512,
}


class Traffic:
    """Requests that generate throughout; ``gaps`` holds the seconds between tokens, by concurrent activity.

    Args:
        engine: the ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self.gaps: dict[str, list[float]] = {}
        self.beside = "nothing"
        self._engine = engine
        self._tasks = [asyncio.create_task(self._ask(number)) for number in range(REQUESTS)]

    async def _ask(self, number: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(max_tokens=400, ignore_eos=True, logprobs=0, output_kind=RequestOutputKind.DELTA)
        for turn in range(1_000_000):
            prompt = {"prompt_token_ids": [number, turn % 200], "cache_salt": f"{number}-{turn}"}
            last, beside = 0.0, ""
            async for _ in self._engine.generate(prompt, params, f"traffic-{number}-{turn}"):
                now = time.perf_counter()
                if beside == self.beside:  # both ends of the gap
                    self.gaps.setdefault(beside, []).append(now - last)
                last, beside = now, self.beside

    async def stop(self) -> None:
        """End all requests."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


async def bare(weights: EngineWeights, traffic: Traffic, version: int) -> dict[str, float]:
    """Update to a version with nothing but vLLM's reload; return the seconds paused."""
    await weights.stage(version, "digest", 1, None)
    traffic.beside = "a swap"
    started = time.perf_counter()
    await weights.engine.pause_generation(mode="keep", clear_cache=False)
    await weights._load(version)
    await weights.engine.resume_generation()
    return {"bare": time.perf_counter() - started}


async def ours(weights: EngineWeights, traffic: Traffic, version: int) -> dict[str, float]:
    """Update to a version; return the seconds paused, and those of staging."""
    traffic.beside = "staging"
    report = await weights.stage(version, "digest", 1, None)
    traffic.beside = "a swap"
    swap = await weights.swap(version, "keep", False)
    assert swap.error is None, swap.error
    return {"ours": swap.paused_seconds, "staging": report.seconds}


async def patched(weights: EngineWeights, traffic: Traffic, version: int) -> dict[str, float]:
    """Update to a version that is a patch of the one before; return the seconds paused."""
    return {"patched": (await ours(weights, traffic, version))["ours"]}


async def measure_round(weights: EngineWeights, traffic: Traffic, version: int) -> dict[str, float]:
    """Update to a version in both ways, and return the seconds of each; they take turns to be the first."""
    seconds = {}
    for way in (bare, ours) if version % 2 else (ours, bare):
        seconds |= await way(weights, traffic, version)
        traffic.beside = "nothing"
        await asyncio.sleep(0.2)
    return seconds


async def measure(folder: Path, tensors: dict[str, Tensor]) -> tuple[list[dict[str, float]], dict[str, list[float]]]:
    """Return the seconds of each round, and the token gaps."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as store, contextlib.ExitStack() as stack:
        writer = WeightStoreWriter(store, delta=True)
        engine, *_ = await _start_engine({"model": str(folder), **ENGINE})
        stack.callback(engine.shutdown)
        weights = EngineWeights(engine, lambda: checkpoint_metadata(folder))
        await weights.init("memmap", {"folder": store})
        traffic = Traffic(engine)
        rounds = []
        for number in range(ROUNDS + 1):
            traffic.beside = "publishing"
            changed = ((name, tensor * (1 + 0.01 * number)) for name, tensor in tensors.items())
            version = 2 * number + 1
            await asyncio.to_thread(writer.publish, changed, version)
            traffic.beside = "nothing"
            rounds.append(await measure_round(weights, traffic, version))
            # one element of a hundred, of the version that is there
            few = {name: tensor * (1 + 0.01 * number) for name, tensor in tensors.items()}
            for tensor in few.values():
                tensor.view(-1)[:: round(1 / SHARE)] += 0.01
            manifest = await asyncio.to_thread(writer.publish, few.items(), version + 1)
            assert manifest.base == version
            rounds[-1] |= await patched(weights, traffic, version + 1)
        await asyncio.sleep(QUIET_SECONDS)
        await traffic.stop()
        return rounds[1:], traffic.gaps  # the first round warms up


def pauses() -> list[Row]:
    """Return the seconds paused in both ways, on a model of 0.8 GB, and the cost of staging to concurrent requests."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_moe("qwen3_moe", **MODEL)
        model.save_pretrained(folder)
        ByteTokenizer().save_pretrained(folder)
        tensors = dict(checkpoint_tensors(model))
        gigabytes = sum(tensor.nbytes for tensor in tensors.values()) / 1e9
        rounds, gaps = asyncio.run(measure(Path(folder), tensors))
    size = f"{gigabytes:.2f} GB, {len(tensors)} tensors"
    ratios = [seconds["ours"] / seconds["bare"] for seconds in rounds]
    quiet, staging = (statistics.median(gaps[beside]) for beside in ("nothing", "staging"))
    rows = [
        Row(claim=f"{name}, seconds ({size})", value=median_range([seconds[key] for seconds in rounds], 3))
        for key, name in (
            ("bare", "paused, vLLM's bare reload"),
            ("ours", "paused, ours"),
            ("staging", "staging beside generation"),
            ("patched", f"paused, ours, a patch of {100 * SHARE:g} % of the elements"),
        )
    ]
    rows += [
        Row(
            claim="token gap that one in a hundred exceeds, staging / nothing, ms",
            value=" / ".join(
                f"{statistics.quantiles(gaps[beside], n=100)[-1] * 1e3:.0f}" for beside in ("staging", "nothing")
            ),
        ),
        Row(
            claim="paused, ours / bare",
            value=median_range(ratios, 3),
            target=f"<= {MOST_RATIO:g}",
            met=statistics.median(ratios) <= MOST_RATIO,
        ),
        Row(
            claim="median token gap, staging / nothing, ms",
            value=f"{staging * 1e3:.1f} / {quiet * 1e3:.1f} ({len(gaps['staging'])} gaps)",
            target="<= 2x",
            met=staging <= 2 * quiet,
        ),
    ]
    return rows
