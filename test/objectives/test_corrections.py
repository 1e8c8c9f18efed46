"""Each correction by hand, what goes with what, and what is refused.

ρ is 3 and 0.5 in the first sequence (1.5 as a whole), 1.25 in the second. π against μ is given apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from support.rollouts import ragged, samples
from support.routes import random_routes
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.objectives.corrections import Correction, Corrections, PolicyRatios, Thresholds
from torchrl_moe.testing import make_tiny_moe

MASK = torch.tensor([[True, True], [False, True]])
LOG_RHO = torch.tensor([[3.0, 0.5], [9.0, 1.25]], dtype=torch.float64).log()
ADVANTAGE = torch.tensor([[-1.0, -1.0], [0.0, 2.0]], dtype=torch.float64)
STALENESS = torch.tensor([[0, 4], [0, 9]])
RATIOS = PolicyRatios(
    log_probs=LOG_RHO,
    old_log_probs=LOG_RHO,
    log_ratio=LOG_RHO,
    sample_log_ratio=torch.tensor([[-0.3, -0.1], [9.0, 0.2]], dtype=torch.float64),  # mean log μ - log π: 0.2, -0.2
    mask=MASK,
    log_rho=LOG_RHO,
    rho_mask=MASK,
)
X, _ = True, False
RAW, ONES, ALL = [3, 0.5, 1.25], [1, 1, 1], [X, X, X]


def apply(names: Any, proximal: Any = "recomputed", mean: float | None = None, **cuts: Any) -> tuple[list[Any], ...]:
    """Weights and kept tokens of the three that count; a weight of a token that is not kept does not matter."""
    corrections = Corrections(names, Thresholds(**cuts), proximal)
    mean_weight = None if mean is None else torch.tensor(mean)
    weight, kept = corrections(RATIOS, ADVANTAGE, STALENESS if corrections.needs_staleness else None, mean_weight)
    weight = torch.where(kept, weight, torch.nan)
    return weight[MASK].tolist(), kept[MASK].tolist()


GOLDEN: list[tuple[Any, dict[str, Any], Sequence[float], Sequence[bool]]] = [
    ("tis", {}, [2, 0.5, 1.25], ALL),
    ("tis", {"tis": 1.0}, [1, 0.5, 1], ALL),
    ("seq_tis", {}, [1.5, 1.5, 1.25], ALL),
    ("seq_tis", {"seq_tis": 1.4}, [1.4, 1.4, 1.25], ALL),
    ("mis", {}, RAW, [_, X, X]),
    ("icepop", {"icepop": (0.6, 2.0)}, RAW, [_, _, X]),
    ("seq_mis", {"seq_mis": 1.4}, [1.5, 1.5, 1.25], [_, _, X]),
    ("geo", {}, ONES, [_, _, _]),
    ("geo", {"geo": (0.9, 1.23)}, ONES, [X, X, _]),  # √1.5 = 1.225
    ("k3", {}, ONES, [_, _, _]),
    ("k3", {"k3": 0.1}, ONES, [_, _, X]),  # 0.547 and 0.027
    ("opsm", {}, ONES, [_, _, X]),
    ("opsm", {"opsm": 0.25}, ONES, ALL),
    ("staleness_mask", {}, ONES, [X, X, _]),
    ("staleness_mask", {"staleness_mask": 3}, ONES, [X, _, _]),
    ("staleness_mask", {"staleness_mask": 9}, ONES, ALL),
    ("staleness_weight", {}, [1, 1 / 4, 1 / 9], ALL),
    (["geo", "tis"], {"geo": (0.9, 1.23)}, [2, 0.5, 1.25], [X, X, _]),
    (["seq_tis", "seq_mis"], {"seq_tis": 1.2, "seq_mis": 1.4}, [1.2, 1.2, 1.2], [_, _, X]),
    (["tis", "staleness_weight", "opsm"], {"opsm": 0.25}, [2, 0.5 / 4, 1.25 / 9], ALL),
]


@pytest.mark.parametrize(("names", "cuts", "weights", "kept"), GOLDEN)
def test_golden_numbers(names: Any, cuts: dict[str, Any], weights: Sequence[float], kept: Sequence[bool]) -> None:
    got_weights, got_kept = apply(names, **cuts)
    assert got_kept == list(kept)
    expected = [weight if keep else math.nan for weight, keep in zip(weights, kept, strict=True)]
    assert got_weights == pytest.approx(expected, nan_ok=True)
    named = {name for names, *rest in GOLDEN for name in ([names] if isinstance(names, str) else names)}
    assert named == set(get_args(Correction)) - {"snis"}  # below


@pytest.mark.parametrize("name", ["mis", "icepop", "seq_mis"])
def test_the_coupled_ratio_is_the_weight_already(name: Any) -> None:
    cuts = {"icepop": (0.6, 2.0), "seq_mis": 1.4}
    weights, kept = apply(name, proximal=None, **cuts)
    assert kept == apply(name, **cuts)[1]
    assert {weight for weight in weights if not math.isnan(weight)} == {1.0}
    assert apply(["mis", "seq_mis"], proximal=None)[1] == [_, X, X]


@pytest.mark.parametrize(
    ("names", "of_tokens", "expected"),
    [  # a token left out by its weight counts as zero in the mean
        (["tis", "snis"], [2, 0.5, 1.25], [2 / 1.25, 0.5 / 1.25, 1]),
        (["mis", "snis"], [0, 0.5, 1.25], [math.nan, 3 * 0.5 / 1.75, 3 * 1.25 / 1.75]),
    ],
)
def test_normalised_weights_have_a_mean_of_one(names: Any, of_tokens: list[float], expected: list[float]) -> None:
    found = Corrections(names, proximal="recomputed").importance_weight(LOG_RHO, MASK)
    assert found[MASK].tolist() == pytest.approx(of_tokens)
    assert found[~MASK].tolist() == [0]
    assert apply(names, mean=sum(of_tokens) / 3)[0] == pytest.approx(expected, nan_ok=True)
    corrections = Corrections(["mis", "snis"], Thresholds(mis=0.1), "recomputed")
    weight, kept = corrections(RATIOS, ADVANTAGE, None, torch.tensor(0.0))
    assert not weight.any() and not kept[MASK].any()  # a batch without weight is not divided by 0


def test_weights_are_constants() -> None:
    log_rho: Tensor = LOG_RHO.clone().requires_grad_()
    ratios = replace(RATIOS, log_rho=log_rho, sample_log_ratio=log_rho)
    names: Any = ["tis", "mis", "geo", "k3", "opsm", "staleness_weight"]
    weight, _ = Corrections(names, proximal="recomputed")(ratios, ADVANTAGE, STALENESS, None)
    assert not weight.requires_grad


@pytest.mark.parametrize(
    ("names", "proximal", "told"),
    [
        ("trunc", None, r"correction must be of \['tis', .*\], one name or a list of them, got 'trunc'"),
        (["geo", "geo"], None, r"correction lists a name twice, got \['geo', 'geo'\]"),
        *((name, None, "an importance weight, .* Set proximal_policy") for name in ("tis", "snis", ["geo", "seq_tis"])),
        *(
            (names, "recomputed", r"two importance weights, of tokens .* and of sequences .* count twice. geo")
            for names in (["tis", "seq_mis"], ["seq_tis", "icepop"])
        ),
        (["snis", "geo"], "recomputed", r"'snis' normalises an importance weight, got \['snis', 'geo'\]: add tis"),
        (["snis", "tis"], "interpolated", "'snis' needs the mean weight .* use 'recomputed', or leave 'snis' out"),
    ],
)
def test_combinations_without_a_meaning_are_refused(names: Any, proximal: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Corrections(names, proximal=proximal)


@pytest.mark.parametrize("replay", ["none", "R3"])
def test_the_actor_scores_its_own_proximal_policy(replay: Any) -> None:
    """The recipe of the docs, on a real MoE and a ragged batch: before a step r is 1, and the weight is prox/μ."""
    actor = TransformersWrapper(make_tiny_moe("qwen3_moe"), replay=replay)
    rollouts = [one.apply(lambda x: x.float() if x.is_floating_point() else x) for one in samples([(2, 3), (1, 4)])]
    for i, rollout in enumerate(rollouts if replay == "R3" else []):
        routes = random_routes(actor.router_replay, 1, len(rollout["tokens", "full"]), seed=i)[0]
        rollout["routed_experts", "full"] = routes
    td = ragged([rollout.exclude("prox_log_prob") for rollout in rollouts])
    with torch.no_grad():
        actor.get_new_version(log_probs_key="prox")(td)
    loss = GRPOLoss(actor, proximal_policy="recomputed", correction="mis", thresholds=Thresholds(mis=1e9))
    loss.set_keys(prox_log_prob=("prox", "full"))
    out = loss(td)
    weighted = [(row["prox", "full"] - row["log_probs", "full"]).exp() * row["advantage"][0] for row in td.unbind(0)]
    torch.testing.assert_close(out.loss_objective.detach(), -torch.cat(weighted).nansum() / 7, rtol=1e-4, atol=1e-6)
    assert out.clip_fraction.item() == out.num_dropped_tokens.item() == 0
    out.loss_objective.backward()
    gate = actor.model.get_submodule("model.layers.1.mlp.gate").weight
    assert gate.grad.abs().max() > 0
