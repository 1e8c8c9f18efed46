"""Checks of a loss's arguments, run when the loss is built, before any step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast, get_args

from torchrl_moe._checks import check_bool, check_number, shown
from torchrl_moe.objectives import functional as F

__all__ = [
    "aggregation_of",
    "check_choice",
    "check_dual_clip",
    "check_fixed_length",
    "check_hooks",
    "check_no_dual_clip",
    "check_penalties",
    "check_router_loss",
    "check_unused",
    "clip_range",
]


OFF = "None switches it off."


def check_choice(name: str, got: object, allowed: tuple[object, ...]) -> None:
    """Raise ValueError unless ``got`` is one of ``allowed``."""
    if got not in allowed:
        raise ValueError(f"{name} must be one of {list(allowed)}, got {got!r}.")


def check_dual_clip(dual_clip: float | None) -> None:
    """Raise ValueError unless the bound is above 1, or ``None``."""
    check_number("dual_clip", dual_clip, above=1, none=True, infinite=True, hint="3 is usual, None switches it off.")


def check_no_dual_clip(loss: type, arguments: Mapping[str, object]) -> None:
    """Raise ValueError if a loss without a clipped surrogate is given ``dual_clip``."""
    if arguments.get("dual_clip") is not None:
        raise ValueError(
            f"{loss.__name__} has no dual_clip, got {arguments['dual_clip']}: it bounds the clipped surrogate of "
            "GRPOLoss, DAPO and GSPOLoss."
        )


def check_penalties(
    threshold: float | None,
    to_ref: float | None,
    to_inference: float | None,
    estimator: str,
    off_policy: bool,
    clamp: float | None = None,
) -> None:
    """Raise ValueError unless the KL arguments are valid: coefficients, bounds (``None`` passes) and estimator."""
    for name, bound in {"kl_mask_threshold": threshold, "kl_clamp": clamp}.items():
        check_number(name, bound, above=0, none=True, infinite=True, hint=OFF)
    for name, coeff in {"kl_to_ref_coeff": to_ref, "kl_to_inference_coeff": to_inference}.items():
        check_number(name, coeff, 0, none=True, hint=OFF)
    check_bool("kl_off_policy", off_policy)
    check_choice("kl_estimator", estimator, ("k1", "k2", "k3"))
    if estimator == "k1" and not off_policy:
        raise ValueError(
            "kl_estimator='k1' as a plain loss has an expected gradient of 0 on policy: use 'k2', pass "
            "kl_off_policy=True, or put it into the reward (functional.kl_reward)."
        )


def check_fixed_length(aggregation: str, fixed_length: int | None) -> None:
    """Raise ValueError unless ``fixed_length`` is given if and only if the aggregation uses it."""
    if (aggregation == "fixed_length") != (fixed_length is not None):
        raise ValueError(
            f"fixed_length and aggregation='fixed_length' go together, got fixed_length={fixed_length} and "
            f"aggregation={aggregation!r}: give the greatest number of tokens that a response may have."
        )
    check_number("fixed_length", fixed_length, 1, whole=True, none=True)


def aggregation_of(aggregation: str | None, reduction: str | None, fixed_length: int | None) -> F.Aggregation:
    """Return the aggregation, from the three arguments that set it.

    >>> aggregation_of(None, None, None), aggregation_of("prompt_mean", "none", None)
    ('token_mean', 'none')
    """
    chosen = cast(F.Aggregation, "token_mean" if aggregation is None else aggregation)
    check_choice("aggregation", chosen, get_args(F.Aggregation))
    check_fixed_length(chosen, fixed_length)
    if reduction == "sum":
        raise ValueError(
            "reduction must be one of [None, 'mean', 'none'], got 'sum': TorchRL's loss is a mean then too. For a sum "
            "over tokens divided by a number of your choice use aggregation='fixed_length', fixed_length=...."
        )
    check_choice("reduction", reduction, (None, "mean", "none"))
    return "none" if reduction == "none" else chosen


def check_unused(gamma: float | None, clip_value: bool | float | None, samples_mc_entropy: int) -> None:
    """Raise ValueError if an argument is set that TorchRL's losses accept but GRPO cannot use."""
    if gamma is not None:
        raise ValueError(
            f"gamma must be None, got {gamma}: GRPO has no value function, and TorchRL's loss never reads it. Discount "
            "rewards before the advantage is computed."
        )
    if clip_value is not None and clip_value is not False:
        raise ValueError(
            f"clip_value must be None or False, got {clip_value}: GRPO has no value function to clip, and TorchRL's "
            "loss never reads it. clip_epsilon is the range of the ratio."
        )
    check_number("samples_mc_entropy", samples_mc_entropy, 1, whole=True)


def check_hooks(loss: type) -> None:
    """Raise TypeError if a subclass overrides a method that TorchRL's losses call and these losses never do."""
    hooks = {"_compute_policy_objective", "_get_cur_log_prob", "_log_weight"}
    hooks |= {"_aggregate_loss_value", "_get_entropy", "_kl_to_ref"}
    if found := sorted(hooks & set(vars(loss))):
        raise TypeError(
            f"{loss.__name__} overrides {', '.join(found)}, which TorchRL's losses call and these never do: override "
            "_surrogate(ratios, advantage), the loss per token, or let the actor's score() return other log-probs."
        )


def check_router_loss(router_loss: object, actor: object) -> None:
    """Raise ValueError if there is a router loss of another actor, since that actor's forward pass does not run."""
    if router_loss is not None and getattr(router_loss, "actor_network", None) is not actor:
        raise ValueError(
            f"router_loss must be a MoERouterLoss of this loss's actor, got {type(router_loss).__name__} of another: "
            "its terms come from the actor's one forward pass."
        )


def clip_range(clip_epsilon: float | tuple[float, float]) -> tuple[float, float]:
    """Return ``(low, high)`` of a number or a pair.

    >>> clip_range(0.2), clip_range((0.2, 0.28))
    ((0.2, 0.2), (0.2, 0.28))
    """
    pair = tuple(clip_epsilon) if isinstance(clip_epsilon, tuple | list) else (clip_epsilon, clip_epsilon)
    if len(pair) != 2:
        raise ValueError(f"clip_epsilon must be a number, or (low, high), got {shown(clip_epsilon)}.")
    check_number("clip_epsilon (low)", pair[0], 0, 1)
    check_number("clip_epsilon (high)", pair[1], 0, infinite=True)
    return float(pair[0]), float(pair[1])
