"""Seconds of a GRPO step, phase by phase: our trainer, and TorchRL's recipe with TorchRL's own classes.

The same model, prompts, rewards and lengths, real vLLM in both; one optimizer step on each batch. TorchRL's recipe is
``LLMCollector`` over ``AsyncVLLM`` and ``vLLMWrapper``, ``MCAdvantage`` in a ``ReplayBuffer``, ``TransformersWrapper``
and ``GRPOLoss``. Ours replays the engine's experts, theirs cannot. TorchRL's weight sync does not work with this vLLM
(its NCCL path needs names that no longer exist, its file loader loads none of the weights), so steps are compared
without it; ours is a separate row. The arms take turns, and the other engine is stopped meanwhile. ``python -m
benchmarks.trainer_step``.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.generation import SETTINGS

if __name__ == "__main__":
    os.environ.update(SETTINGS)

import psutil
import torch
from tensordict import TensorDictBase, set_list_to_stack

from benchmarks.engines.turns import Turns, engine_processes
from benchmarks.report import Row, finish, median_range

GROUP, GROUPS, STEPS, PAIRS, NEW_TOKENS = 8, 16, 6, 3, 64
ANSWERS = GROUP * GROUPS
BAR = 2.3
PHASES = ("generate", "train")
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 27,
    "max_model_len": 512,
    "max_num_seqs": ANSWERS,
}
Steps = list[dict[str, float]]
"""Phase -> seconds of each step, without the first step."""


def low_ids(completion_ids: list[int]) -> float:
    """Reward the share of an answer's tokens below 128: half of them at first, and another one in each answer."""
    return sum(token < 128 for token in completion_ids) / len(completion_ids)


def questions() -> list[dict[str, str]]:
    """Return prompts of one length."""
    return [{"prompt": f"question {i:06d}"} for i in range(GROUPS * (STEPS + 2))]


def ours(engine: Any, path: str, folder: Path) -> Steps:
    """Run our trainer."""
    from torchrl_moe.trainers import GRPOConfig, MoEGRPOTrainer

    config = GRPOConfig(out=str(folder), steps=STEPS + 1, overwrite=True)
    rollout = config.rollout
    rollout.prompts_per_step, rollout.group_size, rollout.max_new_tokens = GROUPS, GROUP, NEW_TOKENS
    rollout.sampling = {"ignore_eos": True}
    config.eval.every = config.eval.mismatch_every = config.checkpoint.every = config.log.samples = 0
    config.log.progress = False
    with MoEGRPOTrainer(path, dataset=questions(), rewards=low_ids, config=config, engine=engine) as trainer:
        trainer.train()
        rows = trainer.record.rows
    return [
        {name: row[f"seconds_{name}"] for name in ("generate", "score", "train", "sync")} | {"tokens": row["length"]}
        for row in rows[1:]
    ]


class TorchRLRecipe:
    """TorchRL's classes, combined as in its GRPO script.

    Args:
        path: of the model.
    """

    def __init__(self, path: str) -> None:
        import ray
        from torchrl.modules.llm.backends.vllm import AsyncVLLM
        from transformers import AutoTokenizer

        # its placement groups request a GPU, which the CPU engine never uses
        options: dict[str, Any] = {"include_dashboard": False, "log_to_driver": False}
        # its actors do not load vLLM's plugins, among them the CPU's kernels
        kernels = "torchrl_moe.modules.backends.vllm.cpu_kernels.register"
        environment = {"env_vars": SETTINGS, "worker_process_setup_hook": kernels}
        ray.init(num_cpus=2, num_gpus=1, runtime_env=environment, **options)
        arguments = {**ENGINE, "distributed_executor_backend": "uni", "disable_log_stats": True}
        self.engine = AsyncVLLM.from_pretrained(path, compile=False, verbose=False, **arguments)
        self.path, self.tokenizer = path, AutoTokenizer.from_pretrained(path)

    def environment(self) -> Any:
        """Return a chat environment over the same prompts, with the same reward."""
        from torchrl.envs import StepCounter, Transform
        from torchrl.envs.llm import DatasetChatEnv

        class LowIds(Transform):
            def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
                shares = [low_ids(row["tokens", "response"].tolist()) for row in tensordict.unbind(0)]
                return next_tensordict.set("reward", torch.tensor(shares).reshape(-1, 1, 1))

        rows = questions()
        loader = [{"query": [row["prompt"] for row in rows[i : i + GROUPS]]} for i in range(0, len(rows), GROUPS)]
        env = DatasetChatEnv.from_dataloader(
            Batches(loader), repeats=GROUP, batch_size=(ANSWERS,), tokenizer=self.tokenizer
        )
        return env.append_transform(LowIds()).append_transform(StepCounter(max_steps=1))

    def __call__(self) -> Steps:
        """Run a few steps."""
        from torchrl.collectors.llm import LLMCollector
        from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
        from torchrl.modules.llm.policies import TransformersWrapper, vLLMWrapper
        from torchrl.objectives.llm import GRPOLoss, MCAdvantage
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=torch.float32)
        actor = TransformersWrapper(
            model, tokenizer=self.tokenizer, input_mode="tokens", generate=False, return_log_probs=True,
            pad_model_input=True, pad_output=False,
        )  # fmt: skip
        loss = GRPOLoss(actor_network=actor, entropy_bonus=False, masking_strategy="sft")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        sampling = {"max_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True}
        policy = vLLMWrapper(self.engine, tokenizer=self.tokenizer, input_mode="history", generate_kwargs=sampling)
        buffer = ReplayBuffer(
            storage=LazyStackStorage(ANSWERS),
            sampler=SamplerWithoutReplacement(),
            batch_size=ANSWERS,
            transform=MCAdvantage(grpo_size=GROUP),
        )
        collector = LLMCollector(
            self.environment(),
            policy=policy,
            dialog_turns_per_batch=ANSWERS,
            total_dialog_turns=-1,
            yield_completed_trajectories=True,
        )
        batches, found = iter(collector), []
        for _ in range(STEPS + 1):
            began = time.perf_counter()
            batch = next(batches)
            received = time.perf_counter()
            buffer.empty()
            buffer.extend(batch.reshape(-1))
            out = loss(buffer.sample())
            optimizer.zero_grad()
            out.loss_objective.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            tokens = sum(len(row["tokens", "response"]) for row in batch.reshape(-1).unbind(0)) / ANSWERS
            found.append(
                {"generate": received - began, "train": time.perf_counter() - received, "tokens": float(tokens)}
            )
        collector.shutdown()
        return found[1:]

    def shutdown(self) -> None:
        """End the engine."""
        import ray

        self.engine.shutdown()
        ray.shutdown()


class Batches:
    """Batches of prompts, without end."""

    batch_size = GROUPS

    def __init__(self, batches: list[dict[str, list[str]]]) -> None:
        self._batches = batches

    def __iter__(self) -> Any:
        while True:
            yield from self._batches


def rows_of(runs: dict[str, list[Steps]]) -> list[Row]:
    """Compare the arms, pair by pair."""

    def seconds(steps: Steps, phases: tuple[str, ...]) -> float:
        return statistics.median(sum(step.get(phase, 0.0) for phase in phases) for step in steps)

    rows = []
    parts = {"generate": ("generate",), "train": ("score", "train"), "step": ("generate", "score", "train")}
    for name, phases in parts.items():
        ours, theirs = ([seconds(steps, phases) for steps in runs[arm]] for arm in ("ours", "TorchRL"))
        ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
        medians = f"{statistics.median(theirs):.2f} -> {statistics.median(ours):.2f}"
        goal = {"target": f">= {BAR:g}", "met": statistics.median(ratios) >= BAR} if name == "step" else {}
        rows.append(
            Row(
                claim=f"{name}: seconds, TorchRL's recipe -> ours",
                value=f"{medians}: {median_range(ratios)} times faster",
                **goal,  # type: ignore[arg-type]
            )
        )
    sync = [seconds(steps, ("sync",)) for steps in runs["ours"]]
    rows.append(Row(claim="weight sync, ours, seconds of a step", value=median_range(sync)))
    lengths = {arm: statistics.mean(step["tokens"] for steps in found for step in steps) for arm, found in runs.items()}
    rows.append(Row(claim="tokens of an answer", value=", ".join(f"{arm} {n:.0f}" for arm, n in lengths.items())))
    return rows


def main() -> None:
    """Start both engines, and run the arms in turn."""
    from torchrl_moe.modules import AsyncVLLM
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, set_list_to_stack(True):
        path = str(save_tiny_moe(Path(folder) / "model"))
        before = set(psutil.pids())
        recipe = TorchRLRecipe(path)
        processes = {"TorchRL": engine_processes(before)}
        with AsyncVLLM.from_pretrained(path, **ENGINE) as engine:
            processes["ours"] = engine_processes(before)
            arms: dict[str, Callable[[], Steps]] = {
                "ours": lambda: ours(engine, path, Path(folder) / "run"),
                "TorchRL": recipe,
            }
            runs: dict[str, list[Steps]] = {name: [] for name in arms}
            with Turns(processes) as turns:
                for pair in range(PAIRS):
                    for name in list(arms) if pair % 2 else list(arms)[::-1]:
                        turns.give(name)
                        runs[name].append(arms[name]())
                        print(name, [round(sum(list(step.values())[:-1]), 2) for step in runs[name][-1]], flush=True)
        recipe.shutdown()
    finish("trainer_step", rows_of(runs))


if __name__ == "__main__":
    main()
