"""What a run makes of the mismatch: GRPO on sums with a noisy copy in the engine's place, with replay and without.

Collapse, by the criterion that was fixed before the first run: the mean reward of 20 steps in a row is below half of
the best such mean before it; or the KL of a step is above 1 nat a token; or a gradient or loss is not finite. A run
that never collapses says so with ``collapsed=-1``. One row holds 20 steps.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens

from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.objectives import GRPOLoss, MismatchMetrics
from torchrl_moe.testing import Noise, NoisyModel
from torchrl_moe.testing.arithmetic import ArithmeticTask, exact_answer
from torchrl_moe.testing.tiny_moe import practised_tiny_moe

SIZES: Mapping[str, Any] = {"num_hidden_layers": 3, "num_experts": 16, "num_experts_per_tok": 4}
WARM_UP: Mapping[str, Any] = {
    "mistake": "random", "noise": 0.8, "noisy_lr": 1e-3, "noisy_target": 0.15, "batch_size": 128, "max_steps": 400,
}  # fmt: skip
PROMPTS, GROUP, NEW_TOKENS, WINDOW = 8, 8, 4, 20
GREATEST_KL, FALL = 1.0, 0.5
STARTS = Path("runs/evidence")
ARMS: Mapping[str, Mapping[str, Any]] = {
    "live": {"replay": "none"},
    "R3": {"replay": "R3"},
    "live, mis": {"replay": "none", "correction": "mis"},
    "live, seq_mis": {"replay": "none", "correction": "seq_mis"},
    "live, tis": {"replay": "none", "correction": "tis", "proximal_policy": "recomputed"},
    "R3, tis": {"replay": "R3", "correction": "tis", "proximal_policy": "recomputed"},
}
NOISES: Mapping[str, Noise] = {
    "none": Noise(),
    **{f"nearest flips {rate:g}": Noise(flips=rate) for rate in (0.03, 0.1, 0.3, 1.0)},
    **{f"random flips {rate:g}": Noise(flips=rate, nearest=False) for rate in (0.1, 0.3, 1.0)},
    "bfloat16": Noise(dtype=torch.bfloat16),
    "int8 and bfloat16": Noise(weights="int8", dtype=torch.bfloat16),
    "float8 and bfloat16": Noise(weights="float8", dtype=torch.bfloat16),
}
BOTH = ("live", "R3")
WANTED: Sequence[tuple[str, int, Sequence[str]]] = [
    ("none", 0, BOTH), ("random flips 1", 0, BOTH), ("none", 64, BOTH), ("bfloat16", 0, BOTH), ("none", 16, BOTH),
    ("nearest flips 1", 0, BOTH),
]  # fmt: skip
"""(noise, updates that the copy is behind, arms)"""
FURTHER: Sequence[tuple[str, int, Sequence[str]]] = [
    ("random flips 1", 16, BOTH), ("random flips 1", 0, ("live, mis", "live, tis")),
    ("none", 64, ("live, mis", "live, tis")), ("int8 and bfloat16", 0, BOTH), ("random flips 0.3", 0, BOTH),
]  # fmt: skip
STEPS, LR = 300, 1e-4


def start(task: ArithmeticTask, seed: int) -> tuple[Any, Any]:
    """The model that all arms of a seed begin with; warmed up once, then read from a file."""
    file = STARTS / f"start-{'-'.join(map(str, SIZES.values()))}-{seed}.pt"
    warm_up = dict(WARM_UP)
    if file.exists():
        warm_up = {**warm_up, "max_steps": 1}
    model, tokenizer = practised_tiny_moe(task, warm_up, seed, **SIZES)
    if file.exists():
        model.load_state_dict(torch.load(file))
    else:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    return model, tokenizer


def measured(noise: str, stale: int, arm: str, lr: float, seed: int, steps: int) -> Iterator[dict[str, object]]:
    """Train once; yield a row for every 20 steps."""
    task = ArithmeticTask(operation="sum", digits=1, held_out=20, seed=seed)
    warnings.filterwarnings("ignore", message="the batch has the experts|.*warm-up")
    trainer, tokenizer = start(task, seed)
    rollouts = NoisyModel(trainer, dataclasses.replace(NOISES[noise], stale=stale, seed=seed))
    options = dict(ARMS[arm])
    actor = TransformersWrapper(trainer, tokenizer=tokenizer, input_mode="tokens", replay=options.pop("replay"))
    loss = GRPOLoss(actor, clip_epsilon=(0.2, 0.28), entropy_bonus=False, **options)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0)
    policy = TransformersWrapper(
        rollouts.model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=True,
        num_samples=GROUP,
        generate_kwargs={"max_new_tokens": NEW_TOKENS, "temperature": 1.0},
        return_routed_experts=True,
    )
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    curve: list[dict[str, float]] = []
    for _ in range(steps):
        chosen = [task.train[int(i)] for i in torch.randint(len(task.train), (PROMPTS,), generator=generator)]
        with rollouts.running():
            batch = answered(policy, tokenizer, chosen)
        curve.append(trained(batch, actor, loss, optimizer, trainer))
        rollouts.take_weights(trainer)
        if not all(map(math.isfinite, curve[-1].values())):
            break
    # the last row is shorter where a run ended on a figure that is not finite
    for begin in range(0, len(curve), WINDOW):
        part = curve[begin : begin + WINDOW]
        row = {name: f"{sum(one[name] for one in part) / len(part):.5g}" for name in part[0]}
        yield {"step": begin + len(part), **row, "collapsed": collapsed(curve[: begin + len(part)])}


def answered(policy: TransformersWrapper, tokenizer: Any, chosen: list[tuple[str, str]]) -> TensorDictBase:
    """Answers ``[B]`` to problems, with rewards and advantages."""
    chats = [[{"role": "user", "content": query}] for query, _ in chosen]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    prompts = lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in ids])
    groups = policy(prompts)
    rows = []
    for group, (_, answer) in zip(groups.unbind(0), chosen, strict=True):
        samples = list(group.unbind(0))
        texts = [tokenizer.decode(one["tokens", "response"], skip_special_tokens=True) for one in samples]
        rewards = torch.tensor([exact_answer(text, answer) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for one, reward, advantage in zip(samples, rewards, advantages, strict=True):
            rows.append(one.set("reward", reward.view(1, 1)).set("advantage", advantage.view(1, 1)))
    return lazy_stack(rows)


def trained(
    batch: TensorDictBase, actor: TransformersWrapper, loss: GRPOLoss, optimizer: Any, trainer: Any
) -> dict[str, float]:
    """Make one update; return the step's figures."""
    metrics = MismatchMetrics(thresholds=None)
    with torch.no_grad():
        log_probs = actor.score(batch.copy(), entropy=False)[0]
    metrics.update(batch, log_probs)
    if loss.proximal_policy == "recomputed":
        key = loss.tensor_keys.prox_log_prob
        for row, values in zip(batch.unbind(0), log_probs, strict=True):
            row.set(key, values[len(values) - len(row["tokens", "full"]) :])
    out = loss(batch)
    optimizer.zero_grad()
    out.loss_objective.backward()
    norm = torch.nn.utils.clip_grad_norm_(trainer.parameters(), 1.0)
    if bool(norm.isfinite()):
        optimizer.step()
    found = metrics.compute()
    return {
        "reward": float(torch.stack([row["reward"] for row in batch.unbind(0)]).mean()),
        "kl": found["mismatch/k3"],
        "ess": found["mismatch/ess"],
        "clipped": float(out.clip_fraction),
        "grad_norm": float(norm),
    }


def collapsed(curve: list[dict[str, float]]) -> int:
    """The step by which a run has collapsed; -1 if it has not."""
    means = [sum(one["reward"] for one in curve[end - WINDOW : end]) / WINDOW for end in range(WINDOW, len(curve) + 1)]
    for step, one in enumerate(curve):
        if not all(map(math.isfinite, one.values())) or one["kl"] > GREATEST_KL:
            return step
        end = step + 1 - WINDOW
        if end > 0 and means[end] < FALL * max(means[:end]):
            return step
    return -1
