"""What a run makes of the mismatch: GRPO with a noisy copy in the engine's place, with replay and without.

Collapse, by the criterion that was fixed before the first run: the mean reward of 20 steps in a row is below half of
the best such mean before it; or the KL of a step is above 1 nat a token; or a gradient or loss is not finite. A run
that never collapses says so with ``collapsed=-1``. One row holds 20 steps.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import Tokens

from benchmarks.evidence.tasks import TASKS, Problem
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.objectives import GRPOLoss, MismatchMetrics
from torchrl_moe.testing import Noise, NoisyModel

PROMPTS, GROUP, WINDOW = 8, 8, 20
GREATEST_KL, FALL = 1.0, 0.5
# "tis" is decoupled too: with one update a step, the ratio to the policy of its start is 1, and nothing is clipped
ARMS: Mapping[str, Mapping[str, Any]] = {
    "live": {"replay": "none"},
    "R3": {"replay": "R3"},
    "live, mis": {"replay": "none", "correction": "mis"},
    "live, seq_mis": {"replay": "none", "correction": "seq_mis"},
    "live, decoupled": {"replay": "none", "proximal_policy": "recomputed"},
    "live, tis": {"replay": "none", "correction": "tis", "proximal_policy": "recomputed"},
    "R3, tis": {"replay": "R3", "correction": "tis", "proximal_policy": "recomputed"},
    "live, router shift": {"replay": "none", "router_shift": True},
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
WANTED: Mapping[str, Sequence[tuple[str, int, Sequence[str]]]] = {
    "sums": [
        ("none", 0, BOTH), ("random flips 1", 0, BOTH), ("none", 64, BOTH), ("bfloat16", 0, BOTH), ("none", 16, BOTH),
        ("nearest flips 1", 0, BOTH), ("random flips 1", 16, BOTH), ("random flips 1", 0, ("live, mis", "live, tis")),
        ("none", 64, ("live, mis", "live, decoupled", "live, tis", "live, router shift", "R3, tis")),
        ("int8 and bfloat16", 0, BOTH),
        ("random flips 0.3", 0, BOTH), ("nearest flips 0.3", 0, BOTH), ("nearest flips 1", 0, ("live, tis",)),
        ("none", 16, ("live, tis", "R3, tis")),
    ],
    "countdown": [
        ("none", 0, ("live",)), ("nearest flips 1", 0, BOTH), ("none", 16, ("live", "live, tis", "R3")),
        ("bfloat16", 0, BOTH), ("int8 and bfloat16", 0, BOTH), ("nearest flips 0.3", 0, ("live",)),
        ("none", 16, ("live, router shift", "R3, tis")),
    ],
}  # fmt: skip
"""By task: noise, updates that the copy is behind, arms."""
STEPS = 300
ROUTER_SHIFT_FLOOR = 0.8


def measured(
    task: str, noise: str, stale: int, arm: str, lr: float, seed: int, steps: int
) -> Iterator[dict[str, object]]:
    """Train once; yield a row for every 20 steps."""
    wanted = TASKS[task](seed)
    warnings.filterwarnings("ignore", message="the batch has the experts|.*warm-up")
    trainer, tokenizer = wanted.start(task, seed)
    rollouts = NoisyModel(trainer, dataclasses.replace(NOISES[noise], stale=stale, seed=seed))
    options = dict(ARMS[arm])
    weighs_router_shift = options.pop("router_shift", False)
    actor = TransformersWrapper(trainer, tokenizer=tokenizer, input_mode="tokens", replay=options.pop("replay"))
    loss = GRPOLoss(actor, clip_epsilon=(0.2, 0.28), entropy_bonus=False, **options)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=lr, weight_decay=0.0)
    policy = TransformersWrapper(
        rollouts.model,
        tokenizer=tokenizer,
        input_mode="tokens",
        generate=True,
        num_samples=GROUP,
        generate_kwargs={"max_new_tokens": wanted.new_tokens, "temperature": 1.0},
        return_routed_experts=True,
    )
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    curve: list[dict[str, float]] = []
    for _ in range(steps):
        chosen = [wanted.problems[int(i)] for i in torch.randint(len(wanted.problems), (PROMPTS,), generator=generator)]
        with rollouts.running():
            batch = answered(policy, tokenizer, chosen)
        curve.append(trained(batch, actor, loss, optimizer, trainer, rollouts.model if weighs_router_shift else None))
        rollouts.take_weights(trainer)
        if not all(map(math.isfinite, curve[-1].values())):
            break
    # the last row is shorter where a run ended on a figure that is not finite
    for begin in range(0, len(curve), WINDOW):
        part = curve[begin : begin + WINDOW]
        row = {name: f"{sum(one[name] for one in part) / len(part):.5g}" for name in part[0]}
        yield {"step": begin + len(part), **row, "collapsed": collapsed(curve[: begin + len(part)])}


def answered(policy: TransformersWrapper, tokenizer: Any, chosen: Sequence[Problem]) -> TensorDictBase:
    """Answers ``[B]`` to problems, with rewards and advantages."""
    chats = [[{"role": "user", "content": query}] for query, _ in chosen]
    ids = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    prompts = lazy_stack([TensorDict(tokens=Tokens(prompt=torch.tensor(row))) for row in ids])
    groups = policy(prompts)
    rows = []
    for group, (_, right) in zip(groups.unbind(0), chosen, strict=True):
        samples = list(group.unbind(0))
        texts = [tokenizer.decode(one["tokens", "response"], skip_special_tokens=True) for one in samples]
        rewards = torch.tensor([float(text in right) for text in texts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        for one, reward, advantage in zip(samples, rewards, advantages, strict=True):
            rows.append(one.set("reward", reward.view(1, 1)).set("advantage", advantage.view(1, 1)))
    return lazy_stack(rows)


@torch.no_grad()
def weigh_router_shift(batch: TensorDictBase, sampled: Any, trainer: Any) -> None:
    """Multiply the ratios of tokens by how little their routers have moved, as RSPO does before it clips.

    ``gamma = exp(-mean of |log r - log r_old|)`` over layers and the experts that the old router chose, at least 0.8,
    at the position that predicts the token (arXiv 2510.23027, GRPO with router shift). ``pi gamma / mu`` is the ratio
    to ``mu / gamma``, so the loss stays as it is.
    """
    rows = batch.unbind(0)
    ids = torch.nn.utils.rnn.pad_sequence([row["tokens", "full"] for row in rows], batch_first=True)
    now, old = (
        [logits.view(*ids.shape, -1).log_softmax(-1) for logits in model(ids, output_router_logits=True).router_logits]
        for model in (trainer, sampled)
    )
    gaps = []
    for one, other in zip(now, old, strict=True):
        chosen = other.topk(sampled.config.num_experts_per_tok, -1).indices
        gaps.append((one.gather(-1, chosen) - other.gather(-1, chosen)).abs().mean(-1))
    log_gamma = (-torch.stack(gaps).mean(0)).clamp(min=math.log(ROUTER_SHIFT_FLOOR))
    for row, one in zip(rows, log_gamma, strict=True):
        log_probs = row["log_probs", "full"]
        log_probs[1:] -= one[: len(log_probs) - 1]


def trained(
    batch: TensorDictBase, actor: TransformersWrapper, loss: GRPOLoss, optimizer: Any, trainer: Any, sampled: Any
) -> dict[str, float]:
    """Make one update, weighed by the routers' shift from ``sampled`` if that is given; return the step's figures."""
    metrics = MismatchMetrics(thresholds=None)
    with torch.no_grad():
        log_probs = actor.score(batch.copy(), entropy=False)[0]
    metrics.update(batch, log_probs)
    if loss.proximal_policy == "recomputed":
        key = loss.tensor_keys.prox_log_prob
        for row, values in zip(batch.unbind(0), log_probs, strict=True):
            row.set(key, values[len(values) - len(row["tokens", "full"]) :])
    if sampled is not None:
        weigh_router_shift(batch, sampled, trainer)
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
