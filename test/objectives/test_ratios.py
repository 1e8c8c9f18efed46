"""Which policy is old, and which tokens are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.rollouts import by_hand, ragged, samples
from torchrl_moe.objectives import GRPOLoss, Thresholds
from torchrl_moe.objectives.batch import LossInputs, LossKeys
from torchrl_moe.objectives.corrections import PolicyRatios, Proximal, policy_ratios

NAN = float("nan")


def ratios(proximal: Proximal | None, trained: Any = None, prox: Any = None) -> PolicyRatios:
    """Of the batch worked out by hand, with log-probs of the second token replaced."""
    td, actor = by_hand()
    log_probs = actor.log_probs
    if trained is not None:
        with torch.no_grad():
            log_probs[0, 1] = trained
    if prox is not None:
        td[0]["prox_log_prob"][1] = prox
    inputs = LossInputs(
        masking="sft",
        reference=False,
        proximal=proximal == "recomputed",
        staleness=proximal == "interpolated",
        ref_side="left",
        ref_fill=NAN,
    )
    return policy_ratios(log_probs, inputs.read(td, LossKeys(), None), proximal)


def of(values: Tensor) -> list[float]:
    """The three tokens that count, not as logarithms."""
    return values.exp()[torch.tensor([[False, True, True], [False, False, True]])].tolist()


def test_coupled() -> None:
    got = ratios(None)
    assert of(got.log_probs) == pytest.approx([0.6, 0.4, 0.2])
    assert of(got.old_log_probs) == pytest.approx([0.4, 0.4, 0.4])
    for log_ratio in (got.log_ratio, got.sample_log_ratio, got.log_rho):
        assert of(log_ratio) == pytest.approx([1.5, 1, 0.5])
    assert got.log_ratio.requires_grad
    assert not got.log_rho.requires_grad


def test_recomputed() -> None:
    got = ratios("recomputed")
    assert of(got.old_log_probs) == pytest.approx([0.8, 0.4, 0.2])
    assert of(got.log_ratio) == pytest.approx([0.75, 1, 1])
    assert of(got.sample_log_ratio) == pytest.approx([1.5, 1, 0.5])
    assert of(got.log_rho) == pytest.approx([2, 1, 0.5])


def test_interpolated() -> None:
    """Sampled 2, 1 and 4 updates ago: r is the d-th root of π/μ, and ρ the rest of it."""
    got = ratios("interpolated")
    assert of(got.log_ratio) == pytest.approx([1.5**0.5, 1, 0.5**0.25])
    assert of(got.log_rho) == pytest.approx([1.5**0.5, 1, 0.5**0.75])
    assert got.log_ratio.requires_grad
    assert not got.log_rho.requires_grad


def test_what_is_not_known() -> None:
    mask = [[False, True, True], [False, False, True]]
    dropped = [[False, False, True], [False, False, True]]
    got = ratios("recomputed", trained=NAN)
    assert got.mask.tolist() == dropped
    assert got.rho_mask.tolist() == mask  # so that the weights of a batch do not depend on π
    got = ratios("recomputed", prox=NAN)
    assert got.mask.tolist() == got.rho_mask.tolist() == dropped
    got = ratios("interpolated", trained=NAN)
    assert got.mask.tolist() == got.rho_mask.tolist() == dropped
    assert all(values.isfinite().all() for values in (got.log_probs, got.old_log_probs, got.log_ratio, got.log_rho))


@pytest.mark.parametrize("replay", ["none", "R3"])
def test_the_actor_scores_its_own_proximal_policy(replay: Any) -> None:
    """The recipe of the docs, on a real MoE and a ragged batch: before a step r is 1, and the weight is prox/μ."""
    from support.routes import random_routes
    from torchrl_moe.modules import TransformersWrapper
    from torchrl_moe.testing import make_tiny_moe

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
