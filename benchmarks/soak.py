"""Nothing is lost: a long run of steady requests over replicas that are killed and stopped.

A driver sends requests at a steady rate. Each time all replicas have served for ten seconds, one process of one replica
(owner or engine core, in turn) is killed; at random moments one is stopped and never continued. Every request
must be answered exactly once, with the requested number of tokens and rows of routes; at the end the log-probs of a
sample are compared with those of the stock transformers model. ``python -m benchmarks.soak [--bounded]``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import tempfile
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from benchmarks.report import Row, finish
from torchrl_moe.errors import TorchRLMoEError
from torchrl_moe.modules import AsyncVLLM, FaultPolicy
from torchrl_moe.modules.serving.replica_table import ReplicaState
from torchrl_moe.testing.tiny_moe import save_tiny_moe

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 256,
}
# stalls are noticed after 15 s, a stopped start after 180 s, and there is no limit on restarts
FAULTS = FaultPolicy(probe=5.0, patience=15.0, start=180.0, max_restarts=1000)
SERVED_SECONDS = 10.0
DEADLINE_SECONDS = 600.0
SAMPLE = 200
LOG_PROB_BOUND = 1e-5
GROWTH_BOUND = 0.02
WARM_SHARE = 0.2
PARTS = ("owner", "core")  # which holds the worker
MOST = 5  # greatest multiple of the planned requests, while replicas that do not recover delay the kills


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How long and how hard."""

    requests: int
    replicas: int
    kills: int
    stalls: int
    per_second: float


FULL = Plan(requests=12_000, replicas=2, kills=20, stalls=5, per_second=12.0)
BOUNDED = Plan(requests=1_500, replicas=2, kills=3, stalls=1, per_second=12.0)


@dataclass(slots=True)
class Tally:
    """The outcome of the requests, and what was done to the replicas. All memory is allocated at the beginning."""

    answered: NDArray[np.uint8]  # number of answers, by request
    seconds: NDArray[np.float64]
    asked: int = 0
    wrong: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    sample: list[Any] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)
    blows: list[str] = field(default_factory=list)
    downtimes: list[float] = field(default_factory=list)


def processes_of(owner: psutil.Process) -> dict[str, psutil.Process]:
    """Return the processes of a replica by their role."""
    found = {"owner": owner}
    for process in owner.children(recursive=True):
        if "EngineCore" in process.name() + " ".join(process.cmdline()):
            found["core"] = process
    return found


def owners() -> list[psutil.Process]:
    """Return the processes that own a replica's engine, in the order of their start."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words = " ".join(process.cmdline())
            if "torchrl_moe::Replica" in words or "engine_process" in words:  # forked, or started by itself
                found.append(process)
    return sorted(found, key=lambda process: process.create_time())


class Soak:
    """One run.

    Args:
        plan: of the run.
        engine: the service.
        seed: of prompts, lengths, moments and victims.
    """

    def __init__(self, plan: Plan, engine: AsyncVLLM, seed: int = 0) -> None:
        self.plan, self.engine = plan, engine
        self.rng = random.Random(seed)
        most = MOST * plan.requests
        self.tally = Tally(np.zeros(most, np.uint8), np.full(most, np.nan))
        self.done = False

    async def run(self) -> None:
        """Send requests and inject faults, until all are answered."""
        tasks = [asyncio.create_task(task) for task in (self._harm(), self._stall(), self._watch_memory())]
        open_: set[asyncio.Task[None]] = set()
        begun, tally = time.monotonic(), self.tally
        while tally.asked < self.plan.requests or not (self._harmed_enough() or tally.asked == len(tally.answered)):
            open_.add(task := asyncio.create_task(self._ask(tally.asked)))
            task.add_done_callback(open_.discard)
            tally.asked += 1
            await asyncio.sleep(max(begun + tally.asked / self.plan.per_second - time.monotonic(), 0.0))
        await asyncio.gather(*open_)
        self.done = True
        await asyncio.gather(*tasks)

    def _harmed_enough(self) -> bool:
        kinds = [blow.split()[0] for blow in self.tally.blows]
        return kinds.count("kill") >= self.plan.kills and kinds.count("stop") >= self.plan.stalls

    async def _ask(self, number: int) -> None:
        name = f"soak-{number}"
        prompt = [self.rng.randrange(97, 123) for _ in range(self.rng.randrange(4, 32))]
        tokens = self.rng.randrange(8, 64)
        params = {"max_tokens": tokens, "temperature": 1.0, "logprobs": 0, "ignore_eos": True, "detokenize": False}
        begun = time.monotonic()
        try:
            answer = await self.engine.agenerate(
                prompt_token_ids=prompt, sampling_params=params, request_id=name, timeout_seconds=DEADLINE_SECONDS
            )
        except (TorchRLMoEError, RuntimeError, ValueError) as error:
            self.tally.failed.append(f"{name}: {type(error).__name__}: {error}")
            return
        tally = self.tally
        tally.answered[number] += 1
        tally.seconds[number] = time.monotonic() - begun
        output = answer.outputs[0]
        rows = None if output.routed_experts is None else len(output.routed_experts)
        right = answer.prompt_token_ids.tolist() == prompt and len(output.token_ids) == tokens
        if not (right and rows == len(prompt) + tokens - 1 and output.finish_reason == "length"):
            tally.wrong.append(f"{name}: {len(output.token_ids)} of {tokens} tokens, {rows} rows")
        if len(tally.sample) < SAMPLE or self.rng.random() < SAMPLE / self.plan.requests:
            tally.sample.append(answer)
            tally.sample = tally.sample[-SAMPLE:]

    async def _all_serving(self, seconds: float) -> None:
        since = time.monotonic()
        while time.monotonic() - since < seconds and not self.done:
            if any(entry.state is not ReplicaState.SERVING for entry in self.engine.replica_table):
                since = time.monotonic()
            await asyncio.sleep(0.25)

    async def _harm(self) -> None:
        for blow in range(self.plan.kills):
            await self._all_serving(SERVED_SECONDS)
            if self.done:
                return
            begun = time.monotonic()
            await self._hit(PARTS[blow % len(PARTS)], signal.SIGKILL, "kill")
            await asyncio.sleep(1.0)
            await self._all_serving(0.5)
            self.tally.downtimes.append(time.monotonic() - begun)

    async def _stall(self) -> None:
        for blow in range(self.plan.stalls):
            await asyncio.sleep(self.rng.uniform(20.0, 60.0))
            if self.done:
                return
            await self._hit(PARTS[(blow + 1) % len(PARTS)], signal.SIGSTOP, "stop")

    async def _hit(self, part: str, signal_: signal.Signals, word: str) -> None:
        """Send a signal to a process of the given role in some replica, as soon as there is one."""
        victim = None
        while victim is None and not self.done:
            await asyncio.sleep(0.1)
            with contextlib.suppress(psutil.NoSuchProcess):  # of a replica that is being shut down
                victims = [parts[part] for owner in owners() if part in (parts := processes_of(owner))]
                if victims:
                    victim = self.rng.choice(victims)
                    victim.send_signal(signal_)
        if victim is None:
            return
        self.tally.blows.append(f"{word} {part}")
        answered = int(np.count_nonzero(self.tally.answered))
        print(f"{time.strftime('%X')} {word} {part} {victim.pid}; {answered} answered", flush=True)

    async def _watch_memory(self) -> None:
        me = psutil.Process()
        while not self.done:
            self.tally.memory.append((time.monotonic(), me.memory_info().rss))
            await asyncio.sleep(2.0)


def worst_difference(sample: list[Any], path: str) -> float:
    """Return the largest |dlogp| of sampled answers against the stock model."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    worst = 0.0
    for answer in sample:
        output = answer.outputs[0]
        ids = torch.from_numpy(np.concatenate([answer.prompt_token_ids, output.token_ids]))[None]
        with torch.no_grad():
            log_probs = model(ids).logits[0].log_softmax(-1)
        given = log_probs[:-1].gather(-1, ids[0, 1:, None])[-len(output.token_ids) :, 0]
        worst = max(worst, float((given - torch.tensor(output.logprobs)).abs().max()))
    return worst


def growth(memory: list[tuple[float, int]]) -> float:
    """Return the relative growth of the median memory, from the tenth after warm-up to the last tenth."""
    sizes = [size for _, size in memory]
    tenth = max(len(sizes) // 10, 1)
    first = int(len(sizes) * WARM_SHARE)
    return float(np.median(sizes[-tenth:]) / np.median(sizes[first : first + tenth]) - 1.0)


def rows_of(soak: Soak, path: str, minutes: float) -> list[Row]:
    """Report the results."""
    tally, plan = soak.tally, soak.plan
    asked, lost = tally.asked, tally.asked - int(np.count_nonzero(tally.answered))
    twice = int(np.count_nonzero(tally.answered > 1))
    seconds = tally.seconds[~np.isnan(tally.seconds)]
    grown, worst = growth(tally.memory), worst_difference(tally.sample, path)
    kills = sum(blow.startswith("kill") for blow in tally.blows)
    return [
        Row(
            claim=f"requests over {minutes:.0f} min, {plan.replicas} replicas",
            value=str(asked),
            target=f">= {plan.requests}",
            met=asked >= plan.requests,
        ),
        Row(
            claim="processes killed; stopped",
            value=f"{kills}; {len(tally.blows) - kills}",
            target=f">= {plan.kills}; {plan.stalls}",
            met=kills >= plan.kills and len(tally.blows) - kills >= plan.stalls,
        ),
        Row(claim="lost", value=str(lost), target="0", met=lost == 0),
        Row(claim="answered twice", value=str(twice), target="0", met=twice == 0),
        Row(
            claim="answers with another number of tokens or rows of routes",
            value=str(len(tally.wrong)),
            target="0",
            met=not tally.wrong,
        ),
        Row(
            claim=f"|dlogp| of {len(tally.sample)} answers against transformers, max",
            value=f"{worst:.1e}",
            target=f"<= {LOG_PROB_BOUND:.0e}",
            met=worst <= LOG_PROB_BOUND,
        ),
        Row(
            claim="driver's memory after warm-up",
            value=f"{grown:+.1%} ({tally.memory[-1][1] / 1e6:.0f} MB)",
            target=f"<= {GROWTH_BOUND:+.0%}",
            met=grown <= GROWTH_BOUND,
        ),
        Row(
            claim="seconds until all replicas served again after a kill, median",
            value=f"{np.median(tally.downtimes or [0]):.1f}",
        ),
        Row(
            claim="seconds of a request: median, p99, max",
            value=", ".join(f"{np.quantile(seconds, q):.2f}" for q in (0.5, 0.99, 1.0)),
        ),
        Row(claim="restarts by replica", value=str([row.get("restarts") for row in soak.engine.stats()])),
    ]


def main() -> None:
    """Run the plan; exit with code 1 if a target was missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bounded", action="store_true", help="a few minutes instead of the whole plan")
    plan = BOUNDED if parser.parse_args().bounded else FULL
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder))
        begun = time.monotonic()
        with AsyncVLLM.from_pretrained(path, num_replicas=plan.replicas, faults=FAULTS, **ENGINE) as engine:
            soak = Soak(plan, engine)
            asyncio.run(soak.run())
            rows = rows_of(soak, path, (time.monotonic() - begun) / 60)
        for line in [*soak.tally.failed[:5], *soak.tally.wrong[:5]]:
            print(line)
    finish("soak", rows)
    raise SystemExit(any(row.met is False for row in rows))


if __name__ == "__main__":
    main()
