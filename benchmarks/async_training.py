"""Real vLLM and a real trainer, each pinned to a core: the same tokens trained synchronously and asynchronously.

GRPO on a tiny MoE with replay, a weight update after each batch. An answer ends at one of a few token ids, so lengths
are geometric: many short answers and a long tail. The synchronous arm uses our ``LLMCollector``, the asynchronous arm
``AsyncLLMCollector`` with ``max_staleness=2``. In both arms the engine has one core, and the trainer with its collector
the other; runs are paired.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from transformers import AutoModelForCausalLM

from benchmarks.report import Row, finish, median_range
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GRPOAdvantage, GRPOLoss
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme

GROUP, GROUPS, STEPS, PAIRS, LONGEST, ENDS, RATE = 8, 8, 12, 2, 192, 4, 5e-4
ANSWERS = GROUP * GROUPS
BAR, REWARD_SLACK = 1.3, 0.05
TOKENIZER = ByteTokenizer()


class Questions:
    """Without end."""

    batch_size = GROUPS

    def __iter__(self) -> Any:
        count = 0
        while True:
            yield {"query": [f"question {count + i:06d}" for i in range(self.batch_size)]}
            count += self.batch_size


class LowIds(Transform):
    """Rewards the share of an answer's tokens below 128: half of them at first."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        shares = [(row["tokens", "response"] < 128).float().mean() for row in tensordict.unbind(0)]
        return next_tensordict.set("reward", torch.stack(shares).reshape(-1, 1, 1))


def environment(count: int) -> EnvBase:
    """Batches of a fixed number of samples."""
    env = DatasetChatEnv.from_dataloader(Questions(), repeats=GROUP, batch_size=(count,), tokenizer=TOKENIZER)
    return env.append_transform(LowIds()).append_transform(StepCounter(max_steps=1))


def in_turns(**kwargs: Any) -> LLMCollector:
    """Generates all answers of a batch, then the next batch."""
    return LLMCollector(
        environment(ANSWERS), dialog_turns_per_batch=ANSWERS, yield_completed_trajectories=True, **kwargs
    )


def at_once(**kwargs: Any) -> AsyncLLMCollector:
    """Generates up to two updates ahead."""
    return AsyncLLMCollector(environment(GROUP), group_size=GROUP, groups_per_batch=GROUPS, max_staleness=2, **kwargs)


@dataclass
class Arm:
    """The result of a run; the first batch is not timed."""

    seconds: float
    """Seconds per 1000 trained tokens."""
    reward: float
    """Mean reward of the last quarter."""
    waiting: float
    """Share of the time that the trainer waited for a batch."""


def pin(process: psutil.Process, core: int) -> None:
    """Pin all threads of a process to a core; threads that they start stay there, too."""
    for thread in process.threads():
        os.sched_setaffinity(thread.id, {core})


def train(engine: AsyncVLLM, folder: Path, collect: Callable[..., Any]) -> Arm:
    """Train from the folder's weights."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actor = TransformersWrapper(model, tokenizer=TOKENIZER, replay="R3", temperature=1.0)
    loss = GRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
    sender.register_model(actor)
    sender.init_all_workers_group(None, vllm_engine=engine)
    sender.version = engine.replica_table.latest_version
    sender.update_weights()
    stops = list(range(100, 100 + ENDS))  # from the rewarded half: otherwise the policy would learn never to stop
    policy = vLLMWrapper(
        engine, generate_kwargs={"max_new_tokens": LONGEST, "temperature": 1.0, "stop_token_ids": stops}
    )
    buffer = ReplayBuffer(
        storage=LazyStackStorage(ANSWERS),
        sampler=SamplerWithoutReplacement(),
        batch_size=ANSWERS,
        transform=GRPOAdvantage(),
    )
    collector = collect(policy=policy)
    sender.register_collector(collector)
    rewards: list[float] = []
    began = waited = 0.0
    tokens = 0
    batches = iter(collector)
    for step in range(STEPS + 1):
        asked = time.perf_counter()
        batch = next(batches)
        waited += time.perf_counter() - asked
        buffer.empty()
        buffer.extend(batch)
        losses = loss(buffer.sample())
        optimizer.zero_grad()
        losses.loss_objective.backward()
        optimizer.step()
        sender.update_weights()
        rewards.append(float(batch["next", "reward"].mean()))
        if step:
            tokens += sum(len(row["tokens", "response"]) for row in batch.unbind(0))
        else:
            began, waited = time.perf_counter(), 0.0
    seconds = time.perf_counter() - began
    length, course = tokens / STEPS / ANSWERS, " ".join(f"{reward:.2f}" for reward in rewards)
    print(f"{type(collector).__name__}: {seconds:.0f} s, {length:.0f} tokens an answer, reward {course}", flush=True)
    collector.shutdown()
    sender.shutdown()
    return Arm(seconds / tokens * 1e3, statistics.mean(rewards[-STEPS // 4 :]), waited / seconds)


def main() -> None:
    """Pairs of both arms, over one engine."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("async_training needs two cores")
    arms: dict[str, list[Arm]] = {"in turns": [], "at once": []}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_tiny_moe("qwen3_moe").save_pretrained(folder)
        TOKENIZER.save_pretrained(folder)
        engine = AsyncVLLM.from_pretrained(
            folder, dtype="float32", enforce_eager=True, max_model_len=512, kv_cache_memory_bytes=1 << 26
        )
        try:
            own = psutil.Process()
            for child in own.children(recursive=True):
                pin(child, cores[1])
            pin(own, cores[0])
            for _ in range(PAIRS):
                for arm, collect in (("in turns", in_turns), ("at once", at_once)):
                    arms[arm].append(train(engine, folder, collect))
        finally:
            engine.shutdown()
    turns, once = arms["in turns"], arms["at once"]
    speed = [a.seconds / b.seconds for a, b in zip(turns, once, strict=True)]
    gap = statistics.median(b.reward - a.reward for a, b in zip(turns, once, strict=True))
    figures = {
        "seconds per 1000 trained tokens": "seconds",
        "share of the time that the trainer waits": "waiting",
        "reward at the end, from 0.5": "reward",
    }
    rows = [
        Row(claim=f"{arm}: {words}", value=median_range([getattr(one, name) for one in found]))
        for words, name in figures.items()
        for arm, found in arms.items()
    ]
    fast = statistics.median(speed)
    rows += [
        Row(
            claim="same tokens, asynchronous over synchronous",
            value=median_range(speed),
            target=f">= {BAR}",
            met=fast >= BAR,
        ),
        Row(
            claim="reward, asynchronous minus synchronous",
            value=f"{gap:+.3f}",
            target=f">= -{REWARD_SLACK}",
            met=gap >= -REWARD_SLACK,
        ),
    ]
    finish("async_training", rows)


if __name__ == "__main__":
    main()
