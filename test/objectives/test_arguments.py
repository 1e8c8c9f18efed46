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

ACTOR = SimpleNamespace(score=None)
OFF = "None switches it off"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kl_clamp": 0}, f"kl_clamp must be a number above 0, or None, got 0. {OFF}.$"),
        ({"kl_mask_threshold": 0}, f"kl_mask_threshold must be a number above 0, or None, got 0. {OFF}.$"),
        ({"kl_to_ref_coeff": -1}, f"kl_to_ref_coeff must be a finite number of at least 0, or None, got -1. {OFF}.$"),
        ({"kl_to_inference_coeff": float("nan")}, "kl_to_inference_coeff must be a finite number of .*, got nan"),
        ({"kl_estimator": "k4"}, r"kl_estimator must be one of \['k1', 'k2', 'k3'\], got 'k4'.$"),
        ({"kl_estimator": "k1"}, "kl_estimator='k1' as a plain loss has an expected gradient of 0 on policy"),
        ({"dual_clip": 1.0}, "dual_clip must be a number above 1, or None, got 1.0. 3 is usual"),
        ({"router_loss": 3}, "router_loss must be a MoERouterLoss of this loss's actor, got int of another"),
        (
            {"router_loss": MoERouterLoss(SimpleNamespace(score=None), top_k=2)},
            "router_loss .* MoERouterLoss of another",
        ),
        ({"aggregation": "mean"}, r"aggregation must be one of \['token_mean', .*\], got 'mean'.$"),
        ({"reduction": "sum"}, "reduction must be one of .*, got 'sum': TorchRL's loss is a mean then too. For a sum"),
        ({"masking_strategy": "all"}, r"masking_strategy must be one of \['sft', 'rlhf', 'generic'\], got 'all'"),
        ({"ref_log_prob_padding_side": "both"}, r"ref_log_prob_padding_side must be one of .* got 'both'"),
        ({"proximal_policy": "old"}, r"proximal_policy must be one of \[None, 'recomputed', .*\], got 'old'"),
        ({"reference": "model"}, r"reference must be one of \['key', 'adapter'\], got 'model'"),
        ({"correction": "tis"}, "correction='tis' is an importance weight, and the ratio of the coupled objective"),
        ({"reduction": "max"}, r"reduction must be one of \[None, 'mean', 'none'\], got 'max'.$"),
        ({"fixed_length": 3}, "fixed_length and .* go together, got fixed_length=3 and aggregation='token_mean'"),
        ({"aggregation": "fixed_length"}, "fixed_length and .* go together, got fixed_length=None and aggregation="),
        ({"aggregation": "fixed_length", "fixed_length": 0}, "fixed_length must be an integer of at least 1, or None"),
        ({"gamma": 0.99}, "gamma must be None, got 0.99: .* Discount rewards before the advantage"),
        *(
            ({"clip_value": wrong}, f"clip_value must be None or False, got {wrong}: .* clip_epsilon is")
            for wrong in (True, 0.2)
        ),
        ({"samples_mc_entropy": 0}, "samples_mc_entropy must be an integer of at least 1, got 0.$"),
        *(
            ({"clip_epsilon": wrong}, "clip_epsilon .*must be a .*number.*, got ")
            for wrong in (1.1, -0.1, (1.1, 0.2), (0.2, -0.1), (0.2,), (0.1, 0.2, 0.3), float("nan"))
        ),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        GRPOLoss(ACTOR, **arguments)


@pytest.mark.parametrize("kind", [CISPOLoss, DPPOLoss, SAPOLoss])
def test_a_loss_without_a_clipped_surrogate_has_no_dual_clip(kind: Any) -> None:
    kind(ACTOR, dual_clip=None)
    with pytest.raises(ValueError, match=f"^{kind.__name__} has no dual_clip, got 3.0: it bounds"):
        kind(ACTOR, dual_clip=3.0)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"aggregation": None}, "token_mean"),
        ({"aggregation": "prompt_mean", "reduction": "mean"}, "prompt_mean"),
        ({"aggregation": "prompt_mean", "reduction": "none"}, "none"),
        ({"aggregation": "fixed_length", "fixed_length": 8}, "fixed_length"),
        ({"kl_mask_threshold": 0.1, "kl_to_ref_coeff": 0.0, "kl_estimator": "k1", "kl_off_policy": True}, "token_mean"),
        ({"dual_clip": 3.0, "clip_value": False, "samples_mc_entropy": 8}, "token_mean"),
    ],
)
def test_a_right_argument_is_taken(arguments: dict[str, Any], expected: str) -> None:
    router_loss = MoERouterLoss(ACTOR, top_k=2)
    loss = GRPOLoss(ACTOR, router_loss=router_loss, **arguments)
    assert (loss.aggregation, loss.router_loss) == (expected, router_loss)


def test_what_nobody_would_read_and_what_cannot_score_are_refused() -> None:
    for kind in (GRPOLoss, DAPO):
        with pytest.raises(TypeError, match="unexpected keyword argument 'clip_epsilom'"):
            kind(ACTOR, clip_epsilom=1)
    with pytest.raises(TypeError, match=r"actor_network must have a score method .* got object: wrap the model"):
        GRPOLoss(object())


def test_hooks_of_torchrl() -> None:
    type("Mine", (GRPOLoss,), {"_surrogate": None})
    with pytest.raises(TypeError, match=r"^Mine overrides _compute_policy_objective, _kl_to_ref, .* _surrogate\(rat"):
        type("Mine", (GRPOLoss,), {"_kl_to_ref": None, "_compute_policy_objective": None})


@pytest.mark.parametrize(
    ("clip", "expected"), [(0.2, (0.2, 0.2)), ((0.2, 1.5), (0.2, 1.5)), ((1.0, 4.0), (1.0, 4.0)), ([0, 0], (0.0, 0.0))]
)
def test_clip_range(clip: Any, expected: tuple[float, float]) -> None:
    """Hydra gives a pair as a list."""
    loss = GRPOLoss(ACTOR, clip_epsilon=clip)
    assert (loss.clip_epsilon_low.item(), loss.clip_epsilon_high.item()) == pytest.approx(expected)


BUILT: dict[type, dict[str, Any]] = {
    **{kind: {"actor_network": ACTOR} for kind in (GRPOLoss, DAPO, GSPOLoss, CISPOLoss, SAPOLoss, DPPOLoss)},
    MoERouterLoss: {"actor_network": ACTOR, "top_k": 2},
    **{kind: {} for kind in (GRPOAdvantage, RLOOAdvantage, DrGRPOAdvantage, MismatchMetrics)},
    **{kind: {} for kind in (Thresholds, CollapseThresholds)},
    ReinforcePlusPlusAdvantage: {"batch_size": 8},
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
