"""Tokens per second of ``engine="transformers"`` beside ``engine="vllm"``, one replica each, in one run.

Both are asked through the service for the same prompts, with routes and log-probs; they take turns within each round,
the ratio is taken round by round, and vLLM's processes are stopped while the other works.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
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


def start(path: str, which: Any) -> tuple[Any, float]:
    """Start an engine; return it, and its seconds."""
    from torchrl_moe.modules import AsyncVLLM, FaultPolicy

    arguments = {name: value for name, value in ENGINE.items() if which == VLLM or name != "enable_prefix_caching"}
    began = time.perf_counter()
    # no probes: an engine that is stopped until its turn is not stalled
    engine = AsyncVLLM.from_pretrained(path, engine=which, faults=FaultPolicy(probe=math.inf), **arguments)
    return engine, time.perf_counter() - began


def main() -> None:
    """Start both, race, and compare."""
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder))
        before = set(psutil.pids())
        engines, seconds, processes = {}, {}, {}
        try:
            for which in (VLLM, PLAIN):
                engines[which], seconds[which] = start(path, which)
                # of the second one there is one process, which waits for requests and does not poll
                processes[which] = engine_processes(before) if which == VLLM else set()
            speeds = race({name: through(engine) for name, engine in engines.items()}, processes)
        finally:
            for engine in engines.values():
                engine.shutdown()
    ratios = [slow / fast for slow, fast in zip(speeds[PLAIN], speeds[VLLM], strict=True)]
    note = f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones each, routes and log-probs on, float32"
    rows = [
        Row(claim="work of a round", value=note),
        *(Row(claim=f"{name}: tokens/s", value=median_range(values, 0)) for name, values in speeds.items()),
        Row(claim=f"{PLAIN} / {VLLM}", value=median_range(ratios)),
        *(Row(claim=f"{name}: seconds to start", value=f"{value:.1f}") for name, value in seconds.items()),
    ]
    finish("second_engine", rows)


if __name__ == "__main__":
    main()
