"""How far apart two policies are, from the log-probs that both give to the same sampled tokens; and their one mean.

Estimators are per token, the mean over tokens is :func:`masked_mean`. With tokens sampled from p, ``E[k1] = E[k3] =
KL(p || q)`` (J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchrl_moe import _checks

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are cut to this range: beyond it, ``exp`` is useless to a loss, and soon infinite."""


def bounded_log_ratio(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``log p - log q``, cut to ``±LOG_RATIO_LIMIT``, in float32 at least.

    Where it is cut its gradient is 0. NaN stays NaN.

    >>> bounded_log_ratio(torch.tensor([-1.0, -50.0]), torch.tensor([-1.5, -0.1]))
    tensor([  0.5000, -20.0000])
    """
    _checks.check_same_shape({"log_p": log_p, "log_q": log_q})
    _checks.check_floating("log_p", log_p)
    _checks.check_floating("log_q", log_q)
    dtype = torch.promote_types(torch.promote_types(log_p.dtype, log_q.dtype), torch.float32)
    return (log_p.to(dtype) - log_q.to(dtype)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def k1(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``log p - log q``: unbiased, of high variance, of either sign.

    >>> k1(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.5000])
    """
    return bounded_log_ratio(log_p, log_q)


def k2(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``(log p - log q)^2 / 2``: biased, of low variance, never negative.

    >>> k2(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1250])
    """
    return 0.5 * bounded_log_ratio(log_p, log_q).square()


def k3(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return ``q/p - 1 - log(q/p)``: unbiased, of low variance, never negative.

    >>> k3(torch.tensor([-1.0]), torch.tensor([-1.5]))
    tensor([0.1065])
    """
    log_ratio = bounded_log_ratio(log_q, log_p)
    return log_ratio.expm1() - log_ratio


def extreme_fraction(log_ratio: Tensor, mask: Tensor, tau: float = 2.0) -> Tensor:
    """Return F(tau): the share of tokens with ``max(p/q, q/p) > tau`` (arXiv 2510.11370).

    Args:
        log_ratio: ``log p - log q``, any shape.
        mask: bool, same shape: the tokens that count.
        tau: greater than 1.

    >>> extreme_fraction(torch.tensor([0.1, -1.0, 3.0]), torch.tensor([True, True, False]))
    tensor(0.5000)
    """
    if not tau > 1:
        raise ValueError(f"tau must be greater than 1, got {tau}: it bounds a ratio that is 1 where policies agree.")
    _checks.check_same_shape({"log_ratio": log_ratio, "mask": mask})
    _checks.check_floating("log_ratio", log_ratio)
    return masked_mean((log_ratio.abs() > math.log(tau)).float(), mask, mask.sum())


# The one mean of the package. An implicit denominator is the most common fault of LLM losses: a mean over pads, or
# over a micro-batch where the whole batch was meant. So the caller names it.
def masked_mean(value: Tensor, mask: Tensor, denominator: Tensor | float, dim: int | None = None) -> Tensor:
    """Return the sum of ``value`` where ``mask`` is set, divided by ``denominator``.

    Values are selected, not multiplied: what lies under a cleared mask may be NaN. Sums run in float32 at least.

    Args:
        value: floating point, any shape.
        mask: bool, same shape.
        denominator: a number, or a tensor of the result's shape (or ``[]``). Where it is 0 the sum is returned as it
            is: the mean of nothing is 0.
        dim: the dimension to sum over; ``None`` for all.

    >>> value, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[True, True], [True, False]])
    >>> masked_mean(value, mask, mask.sum())
    tensor(2.3333)
    >>> masked_mean(value, mask, mask.sum(-1), dim=-1)
    tensor([1.5000, 4.0000])
    """
    _checks.check_same_shape({"value": value, "mask": mask})
    _checks.check_floating("value", value)
    kept = torch.where(mask, value, value.new_zeros(()))
    dtype = torch.promote_types(value.dtype, torch.float32)
    total = kept.sum(dtype=dtype) if dim is None else kept.sum(dim, dtype=dtype)
    divisor = torch.as_tensor(denominator, dtype=dtype, device=value.device)
    if divisor.ndim:
        _checks.check_same_shape({"denominator": divisor, "sum of value": total})
    return total / torch.where(divisor == 0, divisor.new_ones(()), divisor)
