"""Tokens per second of two replicas through the service, against two raw ``AsyncLLM``s driven directly.

Each raw engine runs in its own process, as our replicas do; both get half of the prompts at the same time. The
contenders take turns within each round, ratios are computed per round, and engines that wait for their turn are
stopped, so the CPU time of an engine's processes is that of its own rounds.
``python -m benchmarks.service_overhead [local] [ray]``.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.generation import ENGINE, NEW_TOKENS, PROMPT_TOKENS, PROMPTS, SAMPLING, SETTINGS

if __name__ in ("__main__", "__mp_main__"):  # before vllm, torch or ray are imported
    os.environ.update(SETTINGS)

import psutil
import torch

from benchmarks.engines.turns import engine_processes
from benchmarks.generation import RawEngine, race
from benchmarks.report import Row, finish, median_range

REPLICAS = 2
TARGET = 0.9
Contender = Callable[[torch.Tensor], Any]


def drive(connection: Connection, path: str) -> None:
    """Run a raw engine: take prompts, and reply when all are finished."""
    torch.set_num_threads(1)
    started = time.perf_counter()
    engine = RawEngine(path)
    connection.send(time.perf_counter() - started)
    while (prompts := connection.recv()) is not None:
        engine(prompts)
        connection.send(len(prompts))
    engine.shutdown()


class RawEngines:
    """Raw engines in processes of their own, driven at the same time."""

    def __init__(self, path: str) -> None:
        context = multiprocessing.get_context("spawn")
        self.ends: list[Connection] = []
        for _ in range(REPLICAS):
            ours, theirs = context.Pipe()
            context.Process(target=drive, args=(theirs, path)).start()
            self.ends.append(ours)
        self.seconds = [end.recv() for end in self.ends]

    def __call__(self, prompts: torch.Tensor) -> int:
        for end, part in zip(self.ends, prompts.chunk(REPLICAS), strict=True):
            end.send(part)
        return sum(end.recv() for end in self.ends)

    def shutdown(self) -> None:
        """End all."""
        for end in self.ends:
            end.send(None)


def through(engine: Any) -> Contender:
    """Return a service as a contender."""
    return lambda prompts: engine.generate(prompts.tolist(), SAMPLING, use_tqdm=False)


def started(path: str, backend: Any, replicas: int) -> tuple[Any, float]:
    """Start a service; return it and its start-up time in seconds."""
    from torchrl_moe.modules import AsyncVLLM, FaultPolicy

    begun = time.perf_counter()
    # no probes: an engine that is stopped until its turn would look stalled
    faults = FaultPolicy(probe=math.inf)
    engine = AsyncVLLM.from_pretrained(path, num_replicas=replicas, backend=backend, faults=faults, **ENGINE)
    return engine, time.perf_counter() - begun


def cpu_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return what processes have used so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def measure(backend: str, path: str) -> list[Row]:
    """Race a backend against raw engines."""
    single, alone = started(path, backend, 1)
    single.shutdown()
    before = set(psutil.pids())
    raw = RawEngines(path)
    processes = {"raw": engine_processes(before)}
    try:
        engine, together = started(path, backend, REPLICAS)
        with engine:
            processes["service"] = engine_processes(before)
            used = {name: -cpu_seconds(group) for name, group in processes.items()}
            speeds = race({"raw": raw, "service": through(engine)}, processes)
            used = {name: used[name] + cpu_seconds(group) for name, group in processes.items()}
    finally:
        raw.shutdown()
    ratios = [ours / theirs for ours, theirs in zip(speeds["service"], speeds["raw"], strict=True)]
    return [
        *(Row(claim=f"{backend}: {name}, tokens/s", value=median_range(values, 0)) for name, values in speeds.items()),
        Row(
            claim=f"{backend}: {REPLICAS} replicas through the service / {REPLICAS} raw engines",
            value=median_range(ratios),
            target=f">= {TARGET:.2f}",
            met=statistics.median(ratios) >= TARGET,
        ),
        Row(
            claim=f"{backend}: CPU seconds of the engines for all rounds, service / raw",
            value=f"{used['service']:.0f} / {used['raw']:.0f} = {used['service'] / used['raw']:.2f}",
        ),
        Row(
            claim=f"{backend}: seconds to start 1 replica, {REPLICAS} at the same time, {REPLICAS} raw engines",
            value=f"{alone:.1f}, {together:.1f}, {max(raw.seconds):.1f}",
        ),
    ]


def main(backends: list[str]) -> None:
    """Measure the backends."""
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder))
        rows = [row for backend in backends or ("local", "ray") for row in measure(backend, path)]
    note = f"{PROMPTS} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new ones each, routes and log-probs on"
    finish("service_overhead", [Row(claim="work of a round", value=note), *rows])


if __name__ == "__main__":
    main(sys.argv[1:])
