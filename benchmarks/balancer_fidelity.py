"""Whether the simulator of ``balancer_quality`` is accurate: its prefix-hit rate against that of real vLLM.

The same jobs, from the same seed, run on two replicas of a tiny model and on a simulated fleet of the same KV capacity
and block size, both behind our balancer; once with room for all prefixes, and once with so little that most are
evicted.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import tempfile
from collections.abc import Iterator
from typing import Any

# before vllm and torch are imported: their processes inherit these
SETTINGS = {
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}
if __name__ == "__main__":
    os.environ.update(SETTINGS)

import numpy as np  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from benchmarks.balancer_quality import bound  # noqa: E402
from benchmarks.balancing.fleet import Fleet, FleetSpec, Job  # noqa: E402
from benchmarks.balancing.rivals import Ours  # noqa: E402
from benchmarks.balancing.workloads import WORKLOADS, Shape  # noqa: E402
from benchmarks.report import Row, finish  # noqa: E402

REPLICAS, CONCURRENCY, REQUESTS, BLOCK = 2, 8, 240, 32
BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # layers, key and value, heads, width, float32: the tiny model's
SHAPE = Shape(
    template=192, question=(64, 320), answer=30, group=4, turns=(3, 7), observation=(32, 128), pause=0.05, document=512
)
KV_TOKENS = {"room for all": 1 << 16, "little room": 1 << 12}
KINDS = ("groups", "agents", "mixed")
TARGET = 0.05


def jobs_of(kind: str) -> Iterator[Job]:
    """Return the same jobs each time."""
    return WORKLOADS[kind](SHAPE, random.Random(21), itertools.count(1))


def simulated(kind: str, kv_tokens: int) -> float:
    """Return the simulator's share of prompt tokens that were cached."""
    spec = FleetSpec(
        replicas=REPLICAS, kv_tokens=kv_tokens, block=BLOCK, prefill=1 / 8000, step=0.012, step_per_request=0.0005
    )
    fleet = Fleet(spec, jobs_of(kind), CONCURRENCY * REPLICAS, bound)
    return fleet.run(Ours(fleet), REQUESTS).hits


class Real:
    """The jobs on real engines: a segment's tokens come from its name, an answer's from the engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.answers: dict[int, NDArray[np.int64]] = {}
        self.over = self.prompted = self.cached = 0

    def ids(self, name: int, tokens: int) -> NDArray[np.int64]:
        """Return a segment's tokens."""
        if name in self.answers:
            return self.answers[name]
        return np.random.default_rng(name).integers(3, 250, tokens)

    async def work(self, jobs: Iterator[Job]) -> None:
        """Run one job after another until enough requests are finished."""
        for job in jobs:
            for prompt, (name, tokens), pause in job.turns:
                await asyncio.sleep(pause)
                if self.over >= REQUESTS:
                    return
                ids = np.concatenate([self.ids(*segment) for segment in prompt])
                params = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False}
                completion = await self.engine.agenerate(prompt_token_ids=ids, sampling_params=params)
                self.answers[name] = completion.outputs[0].token_ids
                self.over += 1
                self.prompted += len(ids)
                self.cached += completion.num_cached_tokens

    async def run(self, kind: str) -> float:
        """Return the share of prompt tokens that were cached."""
        jobs = jobs_of(kind)
        await asyncio.gather(*(self.work(jobs) for _ in range(CONCURRENCY * REPLICAS)))
        return self.cached / self.prompted


def main() -> None:
    """Run each kind of job with much and with little KV cache."""
    from torchrl_moe.modules import AsyncVLLM
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder))
        for room, kv_tokens in KV_TOKENS.items():
            arguments: dict[str, Any] = {
                "dtype": "float32",
                "enforce_eager": True,
                "kv_cache_memory_bytes": kv_tokens * BYTES_PER_TOKEN,
                "max_model_len": 2560,
                "block_size": BLOCK,
            }
            with AsyncVLLM.from_pretrained(path, num_replicas=REPLICAS, **arguments) as engine:
                for kind in KINDS:
                    engine.reset_prefix_cache()
                    engine.create_load_balancer()
                    real = asyncio.run(Real(engine).run(kind))
                    model = simulated(kind, kv_tokens)
                    rows.append(
                        Row(
                            claim=f"{kind}, {room}: prefix hits, simulated - real",
                            value=f"{model - real:+.3f} ({model:.3f} - {real:.3f})",
                            target=f"within {TARGET:.2f}",
                            met=abs(model - real) <= TARGET,
                        )
                    )
    finish("balancer_fidelity", rows)


if __name__ == "__main__":
    main()
