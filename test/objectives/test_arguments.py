"""Each argument is refused with what was got and what is allowed."""

from __future__ import annotations

from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest

from support.values import VALUES
from torchrl_moe.objectives import (
    DAPO,
    CISPOLoss,
    CollapseThresholds,
    DPPOLoss,
    DrGRPOAdvantage,
    GroupAdvantage,
    GRPOAdvantage,
    GRPOLoss,
    GSPOLoss,
    MismatchMetrics,
    MoERouterLoss,
    ReinforcePlusPlusAdvantage,
    RLOOAdvantage,
    SAPOLoss,
    Thresholds,
)
from torchrl_moe.objectives.arguments import (
    aggregation_of,
    check_choice,
    check_dual_clip,
    check_fixed_length,
    check_hooks,
    check_no_dual_clip,
    check_penalties,
    check_router_loss,
    check_unused,
    clip_range,
)


def test_choice() -> None:
    check_choice("reduction", None, (None, "mean"))
    with pytest.raises(ValueError, match=r"^reduction must be one of \[None, 'mean'\], got 'sum'.$"):
        check_choice("reduction", "sum", (None, "mean"))


def test_penalties() -> None:
    check_penalties(None, None, None, "k3", False)
    check_penalties(0.1, 0.0, 0.0, "k1", True, 10.0)
    with pytest.raises(ValueError, match=r"^kl_clamp must be a number above 0, or None, got 0. None switches it off.$"):
        check_penalties(None, None, None, "k3", False, 0)
    with pytest.raises(
        ValueError, match=r"^kl_mask_threshold must be a number above 0, or None, got 0. None switches it off.$"
    ):
        check_penalties(0, None, None, "k3", False)
    with pytest.raises(
        ValueError,
        match=r"^kl_to_ref_coeff must be a finite number of at least 0, or None, got -1. None switches it off.$",
    ):
        check_penalties(None, -1, None, "k3", False)
    with pytest.raises(
        ValueError, match=r"^kl_to_inference_coeff must be a finite number of at least 0, or None, got nan"
    ):
        check_penalties(None, None, float("nan"), "k3", False)
    with pytest.raises(ValueError, match=r"^kl_estimator must be one of \['k1', 'k2', 'k3'\], got 'k4'.$"):
        check_penalties(None, None, None, "k4", False)
    with pytest.raises(ValueError, match=r"^kl_estimator='k1' as a plain loss has an expected gradient of 0 on policy"):
        check_penalties(None, None, None, "k1", False)


def test_dual_clip() -> None:
    check_dual_clip(None)
    check_dual_clip(3.0)
    with pytest.raises(ValueError, match=r"^dual_clip must be a number above 1, or None, got 1.0. 3 is usual"):
        check_dual_clip(1.0)
    check_no_dual_clip(int, {"dual_clip": None})
    with pytest.raises(ValueError, match=r"^int has no dual_clip, got 3.0: it bounds the clipped surrogate"):
        check_no_dual_clip(int, {"dual_clip": 3.0})


def test_router_loss() -> None:
    actor, other = object(), object()
    check_router_loss(None, actor)
    check_router_loss(SimpleNamespace(actor_network=actor), actor)
    for wrong in (SimpleNamespace(actor_network=other), 3):
        with pytest.raises(ValueError, match=r"^router_loss must be a MoERouterLoss of this loss's actor, got "):
            check_router_loss(wrong, actor)


def test_fixed_length() -> None:
    check_fixed_length("fixed_length", 128)
    check_fixed_length("token_mean", None)
    for aggregation, length in (("fixed_length", None), ("token_mean", 128)):
        with pytest.raises(ValueError, match=f"go together, got fixed_length={length} and aggregation='{aggregation}'"):
            check_fixed_length(aggregation, length)
    with pytest.raises(ValueError, match=r"^fixed_length must be an integer of at least 1, or None, got 0.$"):
        check_fixed_length("fixed_length", 0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((None, None, None), "token_mean"),
        (("prompt_mean", "mean", None), "prompt_mean"),
        (("prompt_mean", "none", None), "none"),
        (("fixed_length", None, 8), "fixed_length"),
    ],
)
def test_aggregation(arguments: tuple[Any, ...], expected: str) -> None:
    assert aggregation_of(*arguments) == expected


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("mean", None, None), r"^aggregation must be one of \['token_mean', .*\], got 'mean'.$"),
        ((None, "sum", None), r"^reduction must be one of .*, got 'sum': TorchRL's loss is a mean then too. For a sum"),
        ((None, "max", None), r"^reduction must be one of \[None, 'mean', 'none'\], got 'max'.$"),
        ((None, None, 3), r"^fixed_length and aggregation='fixed_length' go together"),
    ],
)
def test_a_wrong_aggregation_is_refused(arguments: tuple[Any, ...], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        aggregation_of(*arguments)


def test_arguments_without_a_use() -> None:
    check_unused(None, None, 1)
    check_unused(None, False, 8)
    with pytest.raises(ValueError, match=r"^gamma must be None, got 0.99: .* Discount rewards before the advantage"):
        check_unused(0.99, None, 1)
    for value in (True, 0.2):
        with pytest.raises(ValueError, match=rf"^clip_value must be None or False, got {value}: .* clip_epsilon is"):
            check_unused(None, value, 1)
    with pytest.raises(ValueError, match=r"^samples_mc_entropy must be an integer of at least 1, got 0.$"):
        check_unused(None, None, 0)


def test_hooks_of_torchrl() -> None:
    check_hooks(type("Mine", (), {"_surrogate": None}))
    with pytest.raises(TypeError, match=r"^Mine overrides _compute_policy_objective, _kl_to_ref, which TorchRL's"):
        check_hooks(type("Mine", (), {"_kl_to_ref": None, "_compute_policy_objective": None}))


def test_clip_range() -> None:
    assert clip_range(0.2) == (0.2, 0.2)
    assert clip_range((0.2, 1.5)) == (0.2, 1.5)
    assert clip_range((1.0, 4.0)) == (1.0, 4.0)
    assert clip_range([0, 0]) == (0.0, 0.0)  # type: ignore[arg-type] # as Hydra gives it


@pytest.mark.parametrize("wrong", [1.1, -0.1, (1.1, 0.2), (0.2, -0.1), (0.2,), (0.1, 0.2, 0.3), float("nan")])
def test_a_wrong_clip_range_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"^clip_epsilon .*must be a .*number.*, got "):
        clip_range(wrong)


# -- every argument, every kind of value ------------------------------------------------------------------------------

BUILT: dict[type, dict[str, Any]] = {
    **{
        kind: {"actor_network": SimpleNamespace(score=None)}
        for kind in (GRPOLoss, DAPO, GSPOLoss, CISPOLoss, SAPOLoss, DPPOLoss)
    },
    MoERouterLoss: {"actor_network": SimpleNamespace(score=None), "top_k": 2},
    **{kind: {} for kind in (GRPOAdvantage, RLOOAdvantage, DrGRPOAdvantage, MismatchMetrics, Thresholds)},
    ReinforcePlusPlusAdvantage: {"batch_size": 8},
    CollapseThresholds: {},
}


def arguments_of(kind: type) -> list[str]:
    """Names of a constructor's arguments, those that it passes to its base included."""
    own = signature(kind).parameters.values()
    bases = [GRPOLoss] if issubclass(kind, GRPOLoss) else [GroupAdvantage] if issubclass(kind, GroupAdvantage) else []
    more = [name for base in bases if base is not kind for name in arguments_of(base)]
    return list(dict.fromkeys([one.name for one in own if one.kind is not one.VAR_KEYWORD] + more))


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in BUILT for name in arguments_of(kind)])
def test_each_argument_takes_a_value_or_refuses_it_by_its_name(kind: type, name: str) -> None:
    for value in VALUES:
        try:
            kind(**{**BUILT[kind], name: value})
        except (TypeError, ValueError) as error:
            assert name in str(error), (value, str(error))
