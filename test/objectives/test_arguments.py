"""Each argument is refused with what was got and what is allowed."""

from __future__ import annotations

from inspect import signature
from itertools import product
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


NAN = float("nan")
WRONG: dict[type, dict[str, list[Any]]] = {
    GRPOLoss: {
        "kl_clamp": [0],
        "kl_mask_threshold": [0],
        "kl_to_ref_coeff": [-1],
        "kl_to_inference_coeff": [NAN],
        "kl_estimator": ["k4", "k1"],  # k1 as a plain loss has an expected gradient of 0 on policy
        "dual_clip": [1.0],
        "router_loss": [3, MoERouterLoss(SimpleNamespace(score=None), top_k=2)],  # of another actor
        "aggregation": ["mean"],
        "reduction": ["sum", "max"],
        "masking_strategy": ["all"],
        "ref_log_prob_padding_side": ["both"],
        "proximal_policy": ["old"],
        "reference": ["model"],
        "correction": ["tis"],  # an importance weight, without a proximal policy
        "fixed_length": [3],
        "gamma": [0.99],
        "clip_value": [True, 0.2],
        "samples_mc_entropy": [0],
        "device": ["nowhere"],
        "clip_epsilon": [1.1, -0.1, (1.1, 0.2), (0.2, -0.1), (0.2,), (0.1, 0.2, 0.3), NAN],
    },
    DAPO: {"gamma": [1]},
    GSPOLoss: {"level": ["word"]},
    CISPOLoss: {"dual_clip": [3.0]},  # those without a clipped surrogate
    DPPOLoss: {"divergence": ["js"], "max_ratio": [0.5], "dual_clip": [3.0]},
    SAPOLoss: {"temperatures": [(1.0, 0.0), (1.0,), (-1.0, 1.0), (NAN, 1.0)], "dual_clip": [3.0]},
    MoERouterLoss: {"top_k": [0], "z_coeff": [-1.0], "load_balancing_coeff": [NAN], "scoring": ["linear"]},
    MismatchMetrics: {"masking_strategy": ["all"], "tau": [1.0], "max_age": [0], "sample_size": [0]},
    Thresholds: {"tis": [-1.0], "k3": [NAN], "mis": [(0.5, 2.0)], "icepop": [5.0], "geo": [(1.1, 0.9)]},
    RLOOAdvantage: {"group_size": [1]},
    DrGRPOAdvantage: {"group_size": [0]},
    ReinforcePlusPlusAdvantage: {"batch_size": [1], "group_size": [3]},
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in WRONG.items() for name in names])
def test_a_wrong_argument_is_refused_by_its_name(kind: type, name: str) -> None:
    for value in WRONG[kind][name]:
        with pytest.raises(ValueError, match=f"^{name}" if kind is GRPOLoss else name):
            kind(**{**BUILT[kind], name: value})
    for length in (None, 0):
        with pytest.raises(ValueError, match=r"^fixed_length"):
            GRPOLoss(ACTOR, aggregation="fixed_length", fixed_length=length)


@pytest.mark.parametrize(
    ("arguments", "aggregation"),
    [
        ({"aggregation": None}, "token_mean"),
        ({"aggregation": "prompt_mean", "reduction": "mean"}, "prompt_mean"),
        ({"aggregation": "prompt_mean", "reduction": "none"}, "none"),
        ({"kl_to_ref_coeff": 0.0, "kl_estimator": "k1", "kl_off_policy": True}, "token_mean"),
    ],
)
def test_a_right_argument_is_taken(arguments: dict[str, Any], aggregation: str) -> None:
    assert GRPOLoss(ACTOR, **arguments).aggregation == aggregation
    # Hydra gives a pair as a list
    for clip, expected in ((0.2, (0.2, 0.2)), ((1.0, 4.0), (1.0, 4.0)), ([0, 0], (0.0, 0.0))):
        loss = GRPOLoss(ACTOR, clip_epsilon=clip)
        assert (loss.clip_epsilon_low.item(), loss.clip_epsilon_high.item()) == pytest.approx(expected)


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


@pytest.mark.parametrize("kind", BUILT)
def test_each_argument_takes_a_value_or_refuses_it_by_its_name(kind: type) -> None:
    for name, value in product(arguments_of(kind), VALUES):
        try:
            kind(**{**BUILT[kind], name: value})
        except (TypeError, ValueError) as error:
            assert name in str(error), (name, value, str(error))
