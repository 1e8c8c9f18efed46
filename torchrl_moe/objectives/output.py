"""The outputs of the losses. Each loss names its class as ``output_type``, as TorchRL's losses do."""

from __future__ import annotations

from tensordict import TensorClass
from torch import Tensor

__all__ = ["CISPOLossOutput", "DAPOLossOutput", "GRPOLossOutput", "LLMLossOutput"]


class LLMLossOutput(TensorClass["nocast"]):  # type: ignore[name-defined] # mypy takes "nocast" for a type
    """What a loss returns: ``loss_*`` are to be summed, the others are detached and describe the valid tokens."""

    loss_objective: Tensor
    clip_fraction: Tensor
    """Share of tokens whose ratio lies outside the clip range, or that the loss's own trust region blocks."""
    kl_approx: Tensor
    """Mean of ``log μ - log π``."""
    ESS: Tensor
    """Effective sample size of the ratios π/μ, as a share of the tokens."""
    num_dropped_tokens: Tensor
    """Number of tokens with a value that is NaN or infinite, 0 if all is well: a log-prob of the actor or the proximal
    policy, a sample log-prob where the masking strategy names responses, or an entropy (left out of the entropy terms
    only)."""
    masked_fraction: Tensor | None = None
    """Share of tokens that the corrections leave out."""
    mean_weight: Tensor | None = None
    """Mean weight of the tokens; masked tokens count as 0."""
    entropy: Tensor | None = None
    loss_entropy: Tensor | None = None
    loss_kl_to_ref: Tensor | None = None
    kl_to_ref: Tensor | None = None
    loss_kl_to_inference: Tensor | None = None
    kl_to_inference: Tensor | None = None
    loss_load_balancing: Tensor | None = None
    """This field and the next ones need a ``router_loss``, see :class:`~torchrl_moe.objectives.MoERouterLossOutput`."""
    loss_z: Tensor | None = None
    expert_load: Tensor | None = None
    load_entropy: Tensor | None = None
    max_load: Tensor | None = None
    num_dropped_rows: Tensor | None = None


class GRPOLossOutput(LLMLossOutput):
    """Output of :class:`~torchrl_moe.objectives.GRPOLoss`, and of derived losses without their own class."""


class DAPOLossOutput(LLMLossOutput):
    """Of :class:`~torchrl_moe.objectives.DAPO`."""


class CISPOLossOutput(LLMLossOutput):
    """Of :class:`~torchrl_moe.objectives.CISPOLoss`."""
