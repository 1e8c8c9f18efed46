"""``TokenStepper``: one optimizer step on a minibatch, in micro-batches of bounded token count."""

from __future__ import annotations

import logging
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor
from torchrl.trainers import OptimizationStepper, Trainer

from torchrl_moe._errors import DivergedError
from torchrl_moe.objectives.grpo import GRPOLoss
from torchrl_moe.trainers.gradients import by_mesh, clip_gradients, total_norm
from torchrl_moe.trainers.micro_batches import in_rows, micro_batches_of_ranks
from torchrl_moe.trainers.placement import Placement

__all__ = ["TokenStepper", "lengths_of"]

LOG = logging.getLogger(__name__)


def lengths_of(batch: TensorDictBase) -> list[int]:
    """Return the number of tokens of each sample, its prompt included."""
    return [len(sample.get(("tokens", "full"))) for sample in batch.unbind(0)]


class TokenStepper(OptimizationStepper):
    """Steps on the gradient of a whole minibatch, however it is split.

    The loss of every part is divided by the tokens of the whole minibatch, so the gradients of the parts add up to its
    gradient, to rounding. The same holds if each rank has a share of it. Samples without an advantage are skipped if
    the loss gives them no gradient. A step whose gradient is not finite is skipped, logged, and counted.

    Args:
        loss: the policy's.
        optimizer: of float32 weights.
        schedule: of the learning rate; stepped once for each optimizer step that is not skipped.
        max_tokens: of a micro-batch, padding included; ``None``: a minibatch is one micro-batch.
        max_grad_norm: the gradient is clipped to this norm; ``None``: it is not.
        precision: makes the context of a forward pass.
        placement: the ranks that share the model, each with its own minibatch; default: one.
        max_bad_steps: steps in a row that may be skipped.
    """

    def __init__(
        self,
        loss: GRPOLoss,
        optimizer: torch.optim.Optimizer,
        schedule: torch.optim.lr_scheduler.LambdaLR,
        *,
        max_tokens: int | None,
        max_grad_norm: float | None,
        precision: Callable[[], AbstractContextManager[Any]],
        placement: Placement | None = None,
        max_bad_steps: int = 10,
    ) -> None:
        self._placement = placement or Placement()
        self.ranks = self._placement.ranks
        self.loss, self.optimizer, self.schedule = loss, optimizer, schedule
        self.max_tokens, self.max_grad_norm, self.precision = max_tokens, max_grad_norm, precision
        self.skipped, self.max_bad_steps, self._bad = 0, max_bad_steps, 0
        self._metrics: list[dict[str, float]] = []

    def step(self, trainer: Trainer, sub_batch: TensorDictBase) -> TensorDictBase:
        """Make one step; return the loss terms, summed over parts, and the means of metrics over their tokens.

        Raises:
            DivergedError: too many steps in a row were skipped, or a weight is not finite after the step.
        """
        del trainer
        lr = self.lr
        self.ranks.meet("a step")
        metrics = self.accumulate(sub_batch)
        weights = [weight for group in self.optimizer.param_groups for weight in group["params"]]
        norm = clip_gradients(weights, self.max_grad_norm, self.ranks)
        if math.isfinite(norm):
            self._bad = 0
            self.optimizer.step()
            self.schedule.step()
            # they would go to the engine, and into a checkpoint
            if not math.isfinite(total_norm(by_mesh(weight.detach() for weight in weights), self.ranks)):
                raise DivergedError(
                    "the weights are not finite after this step: resume from the last checkpoint with a lower optim.lr"
                )
        else:
            self.skipped, self._bad = self.skipped + 1, self._bad + 1
            LOG.warning("a gradient of norm %s: the step is skipped, %d so far", norm, self.skipped)
            if self._bad >= self.max_bad_steps:
                raise DivergedError(
                    f"optim.max_bad_steps={self.max_bad_steps} gradients in a row are not finite: the rewards, the "
                    "coefficients of the loss or the weights are, resume from the last checkpoint with others"
                )
        self.optimizer.zero_grad(set_to_none=True)
        metrics |= {"grad_norm": torch.tensor(norm), "lr": torch.tensor(lr)}
        self._metrics.append({name: float(value) for name, value in metrics.items()})
        return TensorDict(metrics, batch_size=[])

    def take_metrics(self) -> dict[str, float]:
        """Return the means over all steps since the last call; ``loss`` is the sum of all terms."""
        taken, self._metrics = self._metrics, []
        names = dict.fromkeys(name for metrics in taken for name in metrics)
        means = {name: statistics.mean(metrics.get(name, math.nan) for metrics in taken) for name in names}
        total = sum(value for name, value in means.items() if name.startswith("loss_"))
        return {**means, "loss": total, "ess": means["ESS"], "skipped_steps": float(self.skipped)} if means else {}

    @property
    def lr(self) -> float:
        """The learning rate of the next step."""
        return float(self.optimizer.param_groups[0]["lr"])

    def accumulate(self, batch: TensorDictBase) -> dict[str, Tensor]:
        """Accumulate a minibatch's gradient; return its metrics over all ranks, each ``[]``."""
        batch = in_rows(batch)  # a hook may have made it dense
        kept = [i for i, sample in enumerate(batch.unbind(0)) if self._has_gradient(sample)] or [0]  # metrics of one
        lengths = lengths_of(batch)
        split = micro_batches_of_ranks([lengths[i] for i in kept], self.max_tokens, self.ranks)
        parts = [batch[[kept[i] for i in part]] for part in split if part]
        shortest = batch[[min(kept, key=lambda i: lengths[i])]]
        idle = len(split) - len(parts)  # extra passes, because other ranks have more parts
        self._set_denominators(batch, parts, [shortest] * idle)
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
        tokens = 0.0
        for rows in parts:
            out = self._backward(rows)
            count = float(sum(len(row.get(("tokens", "response"))) for row in rows.unbind(0)))
            tokens += count
            for name, value in out.items():
                if value.ndim == 0:
                    sums[name] = sums[name] + value.detach().float().cpu() * (1.0 if _adds_up(name) else count)
        for _ in range(idle):
            self._backward(shortest, weight=0.0)
        return self._whole(sums, tokens)

    def _backward(self, rows: TensorDictBase, weight: float = 1.0) -> Any:
        with self.precision():
            out = self.loss(rows)
        total = sum(value for name, value in out.items() if name.startswith("loss_"))
        assert isinstance(total, Tensor)
        (total if weight == 1.0 else total * weight).backward()
        return out

    def _whole(self, sums: dict[str, Tensor], tokens: float) -> dict[str, Tensor]:
        """Return metrics of all ranks; their losses are averaged, as their gradients are: see :meth:`Ranks.sum`."""
        every = self._placement.gather((dict(sums), tokens))
        total = sum(count for _, count in every)
        return {
            name: sum((one[name] for one, _ in every), torch.zeros(()))
            / (len(every) if name.startswith("loss_") else 1.0 if _adds_up(name) else max(total, 1.0))
            for name in sums
        }

    def _set_denominators(
        self, batch: TensorDictBase, parts: Sequence[TensorDictBase], idle: Sequence[TensorDictBase]
    ) -> None:
        """Store in each sample the denominators of the whole minibatch's losses."""
        numbers: dict[Any, Any] = dict(self.loss.denominators(batch))
        router_loss = self.loss.router_loss
        if router_loss is not None and (len(parts) > 1 or self.ranks.size > 1):
            with self.precision():
                numbers.update(router_loss.totals(parts))
                if idle:
                    router_loss.totals(idle)
        for key, number in self.ranks.sum(numbers).items():
            value = torch.as_tensor(number)
            batch.set(key, value.expand(*batch.batch_size, *value.shape))

    def _has_gradient(self, sample: TensorDictBase) -> bool:
        loss = self.loss
        penalties = loss.entropy_bonus or loss.kl_to_ref_coeff or loss.kl_to_inference_coeff
        if penalties or loss.router_loss is not None:
            return True
        return bool(sample.get(loss.tensor_keys.advantage).any())

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state and the number of skipped steps; the optimizer is a separate component."""
        return {"schedule": self.schedule.state_dict(), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the schedule and the number of skipped steps."""
        self.schedule.load_state_dict(state_dict["schedule"])
        self.skipped = state_dict["skipped"]


def _adds_up(name: str) -> bool:
    """Whether a metric is summed over parts; the others are averaged."""
    return name.startswith(("loss_", "num_"))
