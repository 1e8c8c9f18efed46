"""Measures of the load over experts, and the auxiliary losses that balance it. Pure functions, torch only.

A *row* is a token in a layer. Its logits are the live router's, before any softmax or sigmoid. A layer whose logits are
all 0 has no router, and so no rows; a token with a logit that is NaN or infinite has no row in that layer.

Letters: B sequences, T tokens of the longest, L decoder layers, E experts, K experts per token.
"""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe.ops.divergence import masked_mean

Scoring: TypeAlias = Literal["softmax", "sigmoid"]


def known_rows(router_logits: Tensor, mask: Tensor) -> Tensor:
    """Return which rows count, bool ``[B, T, L]``: those of ``mask``, in layers with a router, with finite logits.

    >>> logits = torch.tensor([[[[0.0, 1.0], [0.0, 0.0]]]])  # one token; its second layer has no router
    >>> known_rows(logits, torch.tensor([[True]]))
    tensor([[[ True, False]]])
    """
    routed = router_layers(router_logits, mask)
    return mask[..., None] & routed & router_logits.isfinite().all(-1)


def router_layers(router_logits: Tensor, mask: Tensor) -> Tensor:
    """Return which layers have a router, bool ``[L]``: those with a logit other than 0 in ``mask``. As known_rows()."""
    _checks.check_rank("mask", mask, 2, hint="It is [B, T].")
    _checks.check_shape("router_logits", router_logits.shape, (*mask.shape, "L", "E"))
    _checks.check_floating("router_logits", router_logits)
    return ((router_logits != 0).any(-1) & mask[..., None]).any(0).any(0)


def choice_counts(router_logits: Tensor, rows: Tensor, top_k: int) -> Tensor:
    """Return how many rows of each sequence choose each expert by logit, ``[B, L, E]``, without a gradient.

    The choice is the live router's, even where the forward pass followed replayed experts: a balancing loss acts on
    what the router would do. A bias that only affects the selection (DeepSeek-V3) is ignored.

    >>> logits = torch.tensor([[[[3.0, 1.0, 2.0]], [[0.0, 5.0, 4.0]]]])
    >>> choice_counts(logits, torch.ones(1, 2, 1, dtype=torch.bool), top_k=2)
    tensor([[[1., 1., 2.]]])
    """
    logits = _finite(router_logits.detach(), rows)
    experts = router_logits.shape[-1]
    if not 1 <= top_k <= experts:
        raise ValueError(f"top_k must be in 1..{experts}, the number of experts, got {top_k}.")
    chosen = logits.topk(top_k, -1).indices
    hits = torch.zeros_like(router_logits, dtype=torch.float32).scatter_(-1, chosen, 1.0)
    return (hits * rows[..., None]).sum(1)


def recorded_counts(routes: Tensor, mask: Tensor, num_experts: int) -> Tensor:
    """Return how many rows of ``mask`` chose each expert by ``routes``, float32 ``[L, E]``.

    >>> recorded_counts(torch.tensor([[[[2, 0]], [[-1, -1]]]]), torch.ones(1, 2, dtype=torch.bool), num_experts=3)
    tensor([[1., 0., 1.]])
    """
    _checks.check_rank("mask", mask, 2, hint="It is [B, T].")
    _checks.check_shape("routes", routes.shape, (*mask.shape, "L", "K"))
    chosen = routes.long().masked_fill(~mask[..., None, None], -1)
    wrong = chosen[(chosen >= num_experts) | (chosen < -1)]
    if len(wrong):
        raise ValueError(f"routes hold expert {int(wrong[0])}, allowed are 0..{num_experts - 1}, or -1 for none.")
    layers = chosen.shape[2]
    slots = chosen + num_experts * torch.arange(layers, device=chosen.device)[:, None]
    counts = torch.bincount(slots[chosen >= 0], minlength=layers * num_experts)
    return counts.view(layers, num_experts).float()


def load_share(counts: Tensor) -> Tensor:
    """Return each expert's share of all choices, ``[..., E]`` like ``counts``: ``1 / E`` if even, 0 without a choice.

    >>> load_share(torch.tensor([[1.0, 1.0, 2.0], [0.0, 0.0, 0.0]]))
    tensor([[0.2500, 0.2500, 0.5000],
            [0.0000, 0.0000, 0.0000]])
    """
    return counts / _or_one(counts.sum(-1, keepdim=True))


def load_entropy(share: Tensor) -> Tensor:
    """Return the entropy of the load over ``log E``, ``[...]``: 1 if even, 0 if all on one expert, NaN for no load.

    >>> load_entropy(torch.tensor([[0.5, 0.5], [1.0, 0.0], [0.0, 0.0]]))
    tensor([1., 0., nan])
    """
    entropy = torch.special.entr(share).sum(-1)
    return _or_nan(entropy / torch.tensor(share.shape[-1]).log().clamp(min=1e-12), share)


def max_load(share: Tensor) -> Tensor:
    """Return the load of the busiest expert over the mean load, ``[...]``: 1 if even, E at worst, NaN for no load.

    >>> max_load(torch.tensor([[0.25, 0.75], [0.0, 0.0]]))
    tensor([1.5000,    nan])
    """
    return _or_nan(share.amax(-1) * share.shape[-1], share)


def load_balancing_loss(
    router_logits: Tensor,
    rows: Tensor,
    top_k: int,
    *,
    scoring: Scoring = "softmax",
    per_sequence: bool = False,
    share: Tensor | None = None,
    num_rows: Tensor | None = None,
) -> Tensor:
    """Return the mean over layers of ``E Σ_e f_e P_e``: 1 if load and scores are even, up to ``E / K`` if not.

    ``f_e`` is expert e's share of the choices, ``P_e`` the mean of its normalised score; only ``P_e`` has a gradient.
    Switch Transformer's loss (arXiv 2101.03961, eq. 4-6, there for K = 1) as Mixtral uses it for K experts, each choice
    counted as 1/K. Layers are balanced one by one; transformers pools them first, and multiplies by K. With
    ``per_sequence`` f and P are of one sequence, and the result is the mean over sequences (DeepSeek-V3, arXiv
    2412.19437, eq. 17-20, where ``scoring`` is ``"sigmoid"``).

    A product of two means is not additive: the losses of micro-batches balance each micro-batch separately. They sum to
    the loss of the whole batch, gradients included, if each is given the whole batch's ``share`` and ``num_rows`` (as
    global batch balancing does, arXiv 2501.11873). With ``per_sequence``, the whole batch's ``num_rows`` is enough.

    >>> logits = torch.tensor([[[[0.0, 0.0]], [[0.0, 0.0]]]])
    >>> load_balancing_loss(logits, torch.ones(1, 2, 1, dtype=torch.bool), top_k=2)
    tensor(1.)
    """
    _checks.check_choice("scoring", scoring, get_args(Scoring))
    if per_sequence and share is not None:
        raise ValueError("share is that of the whole batch: leave it out with per_sequence=True.")
    counts = choice_counts(router_logits, rows, top_k)
    live = _finite(router_logits, rows).float()
    scores = live.softmax(-1) if scoring == "softmax" else torch.nn.functional.normalize(live.sigmoid(), p=1, dim=-1)
    scores = (scores * rows[..., None]).sum(1)  # [B, L, E]
    sizes = rows.sum(1)  # [B, L]
    experts = router_logits.shape[-1]
    if per_sequence:
        balance = experts * (load_share(counts) * scores).sum(-1) / sizes.clamp(min=1)
        divisor = (sizes > 0).sum(0) if num_rows is None else num_rows
    else:
        if share is None:
            share = load_share(counts.sum(0))
        _checks.check_shape("share", share.shape, tuple(counts.shape[1:]), hint="It is [L, E].")
        balance = experts * (share.to(scores) * scores).sum(-1)
        divisor = sizes.sum(0) if num_rows is None else num_rows
    return _layer_mean(balance.sum(0), divisor)


def z_loss(router_logits: Tensor, rows: Tensor, num_rows: Tensor | None = None) -> Tensor:
    """Return the mean over rows of ``(log Σ_e exp x_e)^2``: it keeps logits small, where low precision is accurate.

    ST-MoE's router z-loss (arXiv 2202.08906, eq. 5), the mean over layers. With ``num_rows`` of the whole batch
    (``[L]``, as for :func:`load_balancing_loss`), the losses of its parts sum to that of the whole.

    >>> z_loss(torch.tensor([[[[0.0, 0.0]]]]), torch.ones(1, 1, 1, dtype=torch.bool))  # log(2)^2
    tensor(0.4805)
    """
    squares = _finite(router_logits, rows).float().logsumexp(-1).square() * rows
    return _layer_mean(squares.sum((0, 1)), rows.sum((0, 1)) if num_rows is None else num_rows)


def _finite(router_logits: Tensor, rows: Tensor) -> Tensor:
    """The logits of ``rows``, 0 elsewhere: a NaN there would reach the gradient."""
    _checks.check_rank("router_logits", router_logits, 4, hint="They are [B, T, L, E].")
    _checks.check_shape("rows", rows.shape, tuple(router_logits.shape[:-1]), hint="See known_rows().")
    return torch.where(rows[..., None], router_logits, router_logits.new_zeros(()))


def _layer_mean(total: Tensor, divisor: Tensor) -> Tensor:
    """Return the mean of ``total / divisor`` over the layers whose divisor is not 0; all ``[L]``."""
    _checks.check_shape("num_rows", divisor.shape, tuple(total.shape), hint="It is [L], a number per layer.")
    divisor = divisor.to(total)
    return masked_mean(total / _or_one(divisor), divisor > 0, (divisor > 0).sum())


def _or_one(divisor: Tensor) -> Tensor:
    return divisor.masked_fill(divisor == 0, 1)


def _or_nan(value: Tensor, share: Tensor) -> Tensor:
    return value.masked_fill(share.sum(-1) == 0, float("nan"))
