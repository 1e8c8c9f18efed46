"""``Learner``: the half of a run that trains: loss, optimizer, learning rate, scores."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from tensordict import TensorDictBase, lazy_stack

from torchrl_moe.modules.policies.transformers_wrapper import TransformersWrapper
from torchrl_moe.trainers.config import GRPOConfig, OptimConfig
from torchrl_moe.trainers.gradients import by_mesh
from torchrl_moe.trainers.loss_building import build_loss, build_reference
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.rollout_scores import RolloutScores
from torchrl_moe.trainers.token_stepper import TokenStepper

__all__ = ["Learner", "learning_rate"]

GAP = 0.1  # nats; rounding in float32 is below 1e-4


class Learner:
    """Updates a policy's weights.

    Args:
        actor: the policy.
        policy_model: its model.
        config: of the run.
        placement: the ranks that share the model, each with its own learner; default: one.

    Raises:
        ConfigError: the loss does not exist, or does not accept an argument.
    """

    def __init__(
        self,
        actor: TransformersWrapper,
        policy_model: PolicyModel,
        config: GRPOConfig,
        placement: Placement | None = None,
    ) -> None:
        optim, placement = config.optim, placement or Placement()
        self.actor, self.loss = actor, build_loss(actor, config)
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in by_mesh(policy_model.trained.values())],
            lr=optim.lr,
            betas=(optim.betas[0], optim.betas[1]),
            weight_decay=optim.weight_decay,
        )
        total = config.steps * optim.epochs * optim.minibatches
        self.stepper = TokenStepper(
            self.loss,
            self.optimizer,
            torch.optim.lr_scheduler.LambdaLR(self.optimizer, learning_rate(optim, total)),
            max_tokens=optim.max_tokens,
            max_grad_norm=optim.max_grad_norm,
            precision=policy_model.precision,
            placement=placement,
            max_bad_steps=optim.max_bad_steps,
        )
        # last, because it may start an engine
        reference, self._end_reference = build_reference(actor, policy_model, config, placement)
        self._scores = RolloutScores(
            actor,
            self.loss,
            reference,
            max_tokens=optim.max_tokens,
            precision=policy_model.precision,
            placement=placement,
        )

    def scores(self, batch: TensorDictBase, version: int, with_mismatch: bool) -> dict[str, float]:
        """Score a batch before its updates; see :class:`RolloutScores`."""
        return self._scores(batch, version, with_mismatch)

    @torch.no_grad()
    def first_gap(self, batch: TensorDictBase) -> str:
        """Describe the first sampled token of a batch whose log-prob here is another than the engine's by over 0.1."""
        for number, row in enumerate(batch.unbind(0)):
            sampled = row.get(("log_probs", "full"))
            scored = self.actor.score(lazy_stack([row]), entropy=False)[0][0].to(sampled.device)
            far = ((scored - sampled).abs() > GAP).nonzero()  # a prompt's are NaN, which is not far
            if len(far):
                place = int(far[0])
                token = int(row.get(("tokens", "full"))[place])
                return (
                    f"id {token} at place {place} of row {number}, log-prob {scored[place]:.4f} here and "
                    f"{sampled[place]:.4f} in the engine"
                )
        return f"none is off by more than {GAP}"

    def apply(self, optim: OptimConfig) -> None:
        """Apply the optimizer settings of the configuration; loading a checkpoint has restored the older ones."""
        schedule = self.stepper.schedule
        schedule.base_lrs = [optim.lr] * len(schedule.base_lrs)
        for group in self.optimizer.param_groups:
            group["betas"], group["weight_decay"] = (optim.betas[0], optim.betas[1]), optim.weight_decay
            group["initial_lr"] = optim.lr
            group["lr"] = optim.lr * schedule.lr_lambdas[0](schedule.last_epoch)

    def shutdown(self) -> None:
        """Shut down the reference's engine, if it has one."""
        self._end_reference()


def learning_rate(optim: OptimConfig, total: int) -> Callable[[int], float]:
    """Return the learning rate factor as a function of the optimizer step, counted from 0.

    Args:
        optim: the schedule, and the number of warm-up steps.
        total: steps of the run.

    >>> share = learning_rate(OptimConfig(schedule="linear", warmup_steps=2), total=6)
    >>> [round(share(step), 2) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """

    def share(step: int) -> float:
        if step < optim.warmup_steps:
            return (step + 1) / optim.warmup_steps
        done = min((step - optim.warmup_steps) / max(total - optim.warmup_steps, 1), 1.0)
        return {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1 + math.cos(math.pi * done))}[optim.schedule]

    return share
