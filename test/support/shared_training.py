"""A step of the trainer's learner in one process, and by ranks that share the model in several ways."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from transformers.distributed import DistributedConfig

from support.rollouts import byte_row
from support.routes import random_routes
from support.sharded import whole
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.trainers.config import GRPOConfig, OptimConfig, RolloutConfig
from torchrl_moe.trainers.learner import Learner
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Placement, join_ranks, shares

MODEL: Mapping[str, Any] = {"num_hidden_layers": 3, "vocab_size": 260}  # transformers 5.19 splits a head over TP evenly
SHAPES = ((3, 4), (3, 9), (2, 7), (2, 2), (5, 1), (5, 3), (1, 3), (1, 12))
"""Tokens of prompt and answer; two answers to each prompt."""
VERSION = 2
SHARES_IN_ALL_WAYS = "ep_implementation" in inspect.signature(DistributedConfig).parameters
"""Whether transformers splits experts by themselves, and makes copies of a sharded model."""


def possible(ways: Mapping[str, Any]) -> dict[str, Any]:
    """Those in which the installed transformers can share a model."""
    late = ("EP", "HSDP", "FSDP2, TP, EP")
    return {name: way for name, way in ways.items() if SHARES_IN_ALL_WAYS or name not in late}


def grouped_batch() -> TensorDictBase:
    """Answers to four prompts, with experts of their own and log-probs near the model's."""
    actor = TransformersWrapper(make_tiny_moe(**MODEL))
    rows = []
    for place, (prompt, answer) in enumerate(SHAPES):
        total = prompt + answer
        row = byte_row(prompt, answer, place)
        assert actor.router_replay is not None
        row |= {
            "group_id": torch.tensor(place // 2),
            "policy_versions": {"full": torch.where(row["masks"]["all_assistant_mask"], VERSION, -1).int()},
            "advantage": torch.tensor([[1.0 - 0.4 * place]]),
            "current_version": torch.tensor(VERSION),
            "routed_experts": {"full": random_routes(actor.router_replay, 1, total, seed=place)[0].to(torch.int8)},
            "sampling": {"temperature": torch.tensor(0.9)},
        }
        rows.append(TensorDict(row))
    batch = lazy_stack(rows)
    with torch.no_grad():
        scores = actor.score(batch, entropy=False)[0]
    noise = torch.Generator().manual_seed(3)
    for row, score in zip(rows, scores, strict=True):
        answered = row["masks", "all_assistant_mask"]
        sampled = score[-len(answered) :] + 0.1 * torch.randn(len(answered), generator=noise)
        row["log_probs"] = TensorDict({"full": sampled.masked_fill(~answered, math.nan)})
    return batch


def settings(folder: Path, changes: Mapping[str, Any] | None = None) -> GRPOConfig:
    config = GRPOConfig(steps=4, rollout=RolloutConfig(prompts_per_step=4, group_size=2))
    config.model.source = str(folder)
    config.optim = OptimConfig(lr=1e-2, max_grad_norm=None)
    return changed(config, changes or {})


def changed(config: GRPOConfig, changes: Mapping[str, Any]) -> GRPOConfig:
    """The same configuration, with other values by dotted names."""
    for name, value in changes.items():
        group, _, key = name.rpartition(".")
        setattr(config.get(group) if group else config, key, copy.deepcopy(value))
    return config


def learner_of(config: GRPOConfig, placement: Placement) -> tuple[Learner, PolicyModel]:
    policy_model = PolicyModel.load(None, None, config.model, placement)
    actor = TransformersWrapper(policy_model.model, replay=config.loss.replay)  # type: ignore[arg-type]
    return Learner(actor, policy_model, config, placement), policy_model


def one_step(config: GRPOConfig, batch: TensorDictBase) -> dict[str, Any]:
    """Gradients, weights after a step, and metrics, of this process or of the ranks that it is one of."""
    ranks = join_ranks(60.0)
    placement = Placement.of(ranks, config)
    learner, policy_model = learner_of(config, placement)
    share = placement.to_ranks(shares(batch, placement.data_size))[ranks.rank].clone()
    metrics = learner.scores(share, VERSION, True)
    gradients: dict[str, Tensor] = {}

    def note(*_: Any) -> None:
        found = {name: weight.grad for name, weight in policy_model.trained.items() if weight.grad is not None}
        gradients.update({name: whole(gradient).clone() for name, gradient in found.items()})

    learner.optimizer.register_step_pre_hook(note)
    learner.stepper.step(share)
    weights = {name: whole(weight.detach()).clone() for name, weight in policy_model.trained.items()}
    metrics |= learner.stepper.take_metrics()
    ranks.close()
    found = {"gradients": gradients, "weights": weights}
    arrays = {what: {name: value.cpu().numpy() for name, value in values.items()} for what, values in found.items()}
    return {**arrays, "metrics": metrics}


def steps(configs: Mapping[str, GRPOConfig], batch: TensorDictBase) -> dict[str, dict[str, Any]]:
    """One after another."""
    return {name: one_step(config, batch.clone()) for name, config in configs.items()}
