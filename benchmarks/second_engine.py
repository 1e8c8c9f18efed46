"""Tokens per second of ``engine="transformers"`` beside ``engine="vllm"``, one replica each, in one run.

Both get the same prompts through the service, with routes and log-probs; they take turns within each round, the ratio
is computed per round, and vLLM's processes are stopped while the other engine works. The smaller the model, the more of
the time is overhead, and the less these ratios say about real models.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from benchmarks.generation import ENGINE, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, SETTINGS

if __name__ == "__main__":  # before vllm or torch are imported
    os.environ.update(SETTINGS)

import psutil
import torch

from benchmarks.engines.turns import engine_processes
from benchmarks.generation import race
from benchmarks.report import Row, finish, median_range
from benchmarks.service_overhead import through

VLLM, PLAIN = "vllm", "transformers"
MODELS: dict[str, dict[str, Any]] = {
    "4 layers, 16 experts": {},
    "8 layers, 64 experts, wider": {
        "num_hidden_layers": 8,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "hidden_size": 256,
    },
}


def start(path: str, which: Any) -> tuple[Any, float]:
    """Start an engine; return it, and its start-up time in seconds."""
    from torchrl_moe.modules import AsyncVLLM, FaultPolicy

    arguments = {name: value for name, value in ENGINE.items() if which == VLLM or name != "enable_prefix_caching"}
    began = time.perf_counter()
    # no probes: an engine that is stopped until its turn would look stalled
    engine = AsyncVLLM.from_pretrained(path, engine=which, faults=FaultPolicy(probe=math.inf), **arguments)
    return engine, time.perf_counter() - began


def measure(name: str, config: dict[str, Any]) -> Iterator[Row]:
    """Race the two over one model."""
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    engines: dict[str, Any] = {}
    seconds: dict[str, float] = {}
    processes: dict[str, set[psutil.Process]] = {}
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder, **config))
        before = set(psutil.pids())
        try:
            for which in (VLLM, PLAIN):
                engines[which], seconds[which] = start(path, which)
                # the second engine is one process, which waits for requests without polling
                processes[which] = engine_processes(before) if which == VLLM else set()
            speeds = race({which: through(engine) for which, engine in engines.items()}, processes)
        finally:
            for engine in engines.values():
                engine.shutdown()
    ratios = [slow / fast for slow, fast in zip(speeds[PLAIN], speeds[VLLM], strict=True)]
    for which, values in speeds.items():
        yield Row(claim=f"{name}: {which}, tokens/s", value=median_range(values, 0))
    yield Row(claim=f"{name}: {PLAIN} / {VLLM}", value=median_range(ratios))
    starts = ", ".join(f"{which} {value:.1f}" for which, value in seconds.items())
    yield Row(claim=f"{name}: seconds to start", value=starts)


def main() -> None:
    """Start both, race, and compare."""
    torch.set_num_threads(1)
    note = f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones each, routes and log-probs on, float32"
    rows = [row for name, config in MODELS.items() for row in measure(name, config)]
    finish("second_engine", [Row(claim="work of a round", value=note), *rows])


if __name__ == "__main__":
    main()
