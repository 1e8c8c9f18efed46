"""What the service itself costs on a fleet: time, event-loop lag, memory of waiting calls, CPU per request.

The replicas are in this process and answer at once: either with a prepared answer, so that only the service is
measured, or as fakes that generate tokens. Their own cost is measured in the same run, by sending them the same
requests without the service. Lag is how late a task in the service's event loop runs that is due every millisecond; the
garbage collector is on, and its share is a separate row. Memory is measured in fresh processes.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import psutil

from benchmarks.report import Row, finish, median_range
from torchrl_moe.modules.backends.replica import Completion, Request
from torchrl_moe.modules.serving.replica_table import ReplicaState
from torchrl_moe.testing import FakeAsyncVLLM

REPLICAS, PROMPTS, TOKENS, ROUNDS = 1024, 20_000, 32, 9
SECONDS, LAG_MS = 1.5, 20.0
WAITING, WAITING_MB = 100_000, 600.0
FLEETS, REQUESTS, BATCH, GROWTH = (16, 256), 200_000, 10_000, 1.2
PARAMS = {"max_tokens": 1}


def prompts_of(count: int) -> list[list[int]]:
    """Return distinct prompts."""
    rng = random.Random(0)
    return [[rng.randrange(256) for _ in range(TOKENS)] for _ in range(count)]


def forget(engine: FakeAsyncVLLM) -> None:
    """Make the fakes forget past requests, and collect garbage."""
    for replica in engine.replicas:
        replica.submitted.clear()
    gc.collect()


def answer_at_once(engine: FakeAsyncVLLM) -> None:
    """Make the fakes return a prepared answer."""
    (made,) = engine.replicas[0].submit([Request(request_id="", sampling_params=PARAMS, prompt="a")])
    outputs = made.result().outputs

    def submit(requests: Sequence[Request]) -> list[Future[Completion]]:
        futures: list[Future[Completion]] = []
        for request in requests:
            ids = request.prompt_token_ids
            assert ids is not None
            futures.append(Future())
            futures[-1].set_result(
                Completion(
                    request_id=request.request_id,
                    prompt=None,
                    prompt_token_ids=ids,  # type: ignore[arg-type]
                    num_cached_tokens=0,
                    outputs=outputs,
                )
            )
        return futures

    for replica in engine.replicas:
        replica.submit = submit  # type: ignore[method-assign]


class LoopClock:
    """A task in the service's loop that is due every millisecond; records how late it ran, in ms.

    It starts when the service first calls a replica, which happens in its loop.
    """

    def __init__(self, replica: Any) -> None:
        self.late: list[float] = []
        self._replica, self._submit = replica, replica.submit
        self._task: asyncio.Task[None] | None = None
        replica.submit = self._begin

    def _begin(self, requests: Any) -> Any:
        self._replica.submit = self._submit
        self._task = asyncio.get_running_loop().create_task(self._beat())
        return self._submit(requests)

    async def _beat(self) -> None:
        while True:
            began = time.perf_counter()
            await asyncio.sleep(0.001)
            self.late.append((time.perf_counter() - began) * 1e3 - 1.0)

    def stop(self) -> None:
        """End it."""
        if self._task is not None:
            self._task.get_loop().call_soon_threadsafe(self._task.cancel)


class Collections:
    """How long Python's garbage collector has paused the process."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._began = 0.0
        gc.callbacks.append(self._note)

    def _note(self, phase: str, _: dict[str, int]) -> None:
        now = time.perf_counter()
        if phase == "start":
            self._began = now
        else:
            self.seconds += now - self._began


def speed(are_ready: bool) -> list[Row]:
    """Many prompts over many replicas, whose answers are prepared or generated."""
    prompts, collections = prompts_of(PROMPTS), Collections()
    requests = [
        Request(request_id=str(i), sampling_params=PARAMS, prompt_token_ids=np.array(prompt, np.int32))
        for i, prompt in enumerate(prompts)
    ]
    direct, through, cpu, paused, late = [], [], [], [], []
    with FakeAsyncVLLM(REPLICAS, layout=None) as engine:
        if are_ready:
            answer_at_once(engine)
        for _ in range(ROUNDS):
            forget(engine)
            began = time.perf_counter()
            answers = []
            for i, replica in enumerate(engine.replicas):
                answers += [future.result() for future in replica.submit(requests[i::REPLICAS])]
            direct.append(time.perf_counter() - began)
            del answers
            forget(engine)
            loop_clock, before = LoopClock(engine.replicas[0]), collections.seconds
            began, busy = time.perf_counter(), time.process_time()
            completions = engine.generate(prompts, PARAMS, use_tqdm=False)
            through.append(time.perf_counter() - began)
            cpu.append(time.process_time() - busy)
            loop_clock.stop()
            paused.append(collections.seconds - before)
            late.append(loop_clock.late)
            del completions
    name = f"{PROMPTS} prompts, {REPLICAS} {'replicas with a prepared answer' if are_ready else 'fake replicas'}"
    p99 = [float(np.quantile(run, 0.99)) for run in late]
    return [
        Row(
            claim=f"{name}, through generate, s",
            value=median_range(through),
            target=f"<= {SECONDS}",
            met=statistics.median(through) <= SECONDS,
        ),
        Row(claim=f"{name}, through generate, CPU s", value=median_range(cpu)),
        Row(claim=f"{name}, sent to replicas without a service, s", value=median_range(direct)),
        Row(
            claim=f"{name}, through generate / without a service",
            value=median_range([a / b for a, b in zip(through, direct, strict=True)]),
        ),
        Row(claim=f"{name}, garbage collector's share of generate, s", value=median_range(paused)),
        Row(
            claim=f"{name}, lag of the service's loop, p99, ms",
            value=median_range(p99, 1),
            target=f"<= {LAG_MS:.0f}",
            met=statistics.median(p99) <= LAG_MS,
        ),
        Row(claim=f"{name}, lag of the service's loop, longest, ms", value=median_range([max(run) for run in late], 0)),
    ]


def resident() -> float:
    """Return this process' memory, MB."""
    return float(psutil.Process().memory_info().rss) / 1e6


async def grown(begin: Callable[[list[int]], Any], all_wait: Callable[[], bool], go_on: Callable[[], None]) -> float:
    """Start many tasks, each with its own prompt; return the memory that they take while all wait, in MB."""
    prompts = prompts_of(WAITING)
    gc.collect()
    before = resident()
    tasks = [asyncio.create_task(begin(prompt)) for prompt in prompts]
    while not all_wait():
        await asyncio.sleep(0.1)
    after = resident()
    await asyncio.to_thread(go_on)
    await asyncio.gather(*tasks)
    return after - before


def waiting_calls(why: str) -> float:
    """Return the memory of calls that wait because the service is full, or because no replica serves, in MB."""
    with FakeAsyncVLLM(16, layout=None, max_concurrent_requests=1 if why == "full" else None) as engine:
        table = engine.replica_table

        def go_on() -> None:
            engine.resume()
            for entry in table:
                if entry.state is ReplicaState.SYNCING:
                    table.set_state(entry.index, ReplicaState.SERVING)

        def all_wait() -> bool:
            return bool(engine.metrics.summary()["requests"] == WAITING)

        if why == "full":
            engine.pause()
        else:
            for entry in table:
                table.set_state(entry.index, ReplicaState.SYNCING)
        return asyncio.run(grown(lambda ids: engine.agenerate(ids, PARAMS), all_wait, go_on))


def raw(_: str) -> float:
    """Return the memory of as many tasks that each wait for a future, in MB."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        waiting: list[asyncio.Future[None]] = []

        async def wait(_: list[int]) -> None:
            waiting.append(loop.create_future())
            await waiting[-1]

        def go_on() -> None:
            loop.call_soon_threadsafe(lambda: [future.set_result(None) for future in waiting])

        return await grown(wait, lambda: len(waiting) == WAITING, go_on)

    return asyncio.run(main())


def memory() -> list[Row]:
    """Measure the memory of waiting calls, each kind in its own process."""
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        least = pool.apply(raw, ("",))
        for why, words in (("full", "the service is full"), ("none", "no replica serves")):
            mb = pool.apply(waiting_calls, (why,))
            rows.append(
                Row(
                    claim=f"{WAITING} calls of agenerate that wait because {words}, MB",
                    value=f"{mb:.0f} ({mb / least:.1f} times as many bare asyncio tasks)",
                    target=f"<= {WAITING_MB:.0f}",
                    met=mb <= WAITING_MB,
                )
            )
    return rows


def growth() -> list[Row]:
    """Measure the CPU time of this process per request, alternating small and large fleets."""
    prompts = prompts_of(BATCH)
    engines = {count: FakeAsyncVLLM(count, layout=None) for count in FLEETS}
    micro: dict[int, list[float]] = {count: [] for count in FLEETS}
    for _ in range(REQUESTS // BATCH):
        for count, engine in engines.items():
            forget(engine)
            began = time.process_time()
            engine.generate(prompts, PARAMS, use_tqdm=False)
            micro[count].append((time.process_time() - began) / BATCH * 1e6)
    for engine in engines.values():
        engine.shutdown()
    small, large = (statistics.median(micro[count]) for count in FLEETS)
    return [
        *(
            Row(claim=f"{REQUESTS} requests, {count} fake replicas, CPU per request, us", value=median_range(values, 1))
            for count, values in micro.items()
        ),
        Row(
            claim=f"CPU per request, {FLEETS[1]} replicas / {FLEETS[0]}",
            value=f"{large / small:.2f}",
            target=f"<= {GROWTH}",
            met=large / small <= GROWTH,
        ),
    ]


def main() -> None:
    """Measure all."""
    rows = [*memory(), *speed(are_ready=True), *speed(are_ready=False), *growth()]
    finish("fleet", [*rows, Row(claim="load of the machine, one minute", value=f"{os.getloadavg()[0]:.1f}")])


if __name__ == "__main__":
    main()
