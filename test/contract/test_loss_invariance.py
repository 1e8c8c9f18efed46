"""Pads, order, micro-batches and ranks change no loss of any kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase, lazy_stack

from support.rollouts import BigramActor, dense, numbers, ragged, samples, total
from torchrl_moe.objectives import CISPOLoss, DPPOLoss, GRPOLoss, GSPOLoss, SAPOLoss, Thresholds

WIDE = Thresholds(icepop=(0.7, 1.4), seq_mis=1.5, geo=(0.8, 1.3), k3=0.2, opsm=0.05, staleness_mask=3)
"""Such that some tokens of the samples are left out and some are not."""
KL: dict[str, Any] = {"kl_to_ref_coeff": 0.3, "kl_to_inference_coeff": 0.2}
PENALTIES: dict[str, Any] = {**KL, "kl_mask_threshold": 0.4}
LOSSES: dict[str, tuple[type[GRPOLoss], dict[str, Any]]] = {
    "grpo": (GRPOLoss, {**PENALTIES, "clip_epsilon": (0.2, 0.28), "dual_clip": 3.0}),
    "grpo, masks": (GRPOLoss, {"correction": ["icepop", "opsm", "staleness_mask"], "aggregation": "sequence_mean"}),
    "grpo, decoupled": (GRPOLoss, {"correction": ["tis", "geo", "snis"], "proximal_policy": "recomputed"}),
    "grpo, sequences": (
        GRPOLoss,
        {"correction": ["seq_tis", "seq_mis", "snis"], "proximal_policy": "recomputed", "aggregation": "prompt_mean"},
    ),
    "grpo, interpolated": (
        GRPOLoss,
        {"correction": ["tis", "k3", "staleness_weight"], "proximal_policy": "interpolated", "kl_off_policy": True},
    ),
    "dr_grpo": (GRPOLoss, {"aggregation": "fixed_length", "fixed_length": 5}),
    "gspo": (GSPOLoss, {**KL, "clip_epsilon": 0.3, "correction": "geo"}),
    "gspo-token": (GSPOLoss, {"level": "token", "clip_epsilon": 0.3, "correction": "seq_mis"}),
    "cispo": (CISPOLoss, {**PENALTIES, "kl_estimator": "k2"}),
    "dppo-tv": (DPPOLoss, {"clip_epsilon": 0.05, "correction": "k3"}),
    "dppo-kl": (DPPOLoss, {**PENALTIES, "divergence": "kl", "clip_epsilon": 0.02}),
    "sapo": (SAPOLoss, {"correction": "tis", "proximal_policy": "recomputed", "aggregation": "token_mean"}),
}

shapes = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 4)), min_size=1, max_size=5)
light = settings(max_examples=8)
every_loss = pytest.mark.parametrize("name", LOSSES)
masking = st.sampled_from(["sft", "rlhf", "generic"])


def build(name: str, seed: int, masking: Any = "sft") -> tuple[GRPOLoss, BigramActor]:
    kind, arguments = LOSSES[name]
    actor = BigramActor(seed)
    return kind(actor, thresholds=WIDE, masking_strategy=masking, **arguments), actor


def with_denominators(loss: GRPOLoss, td: TensorDictBase) -> TensorDictBase:
    for key, number in loss.denominators(td).items():
        td[key] = torch.full(td.batch_size, number, dtype=torch.float64)
    return td


def per_token_advantages(td: TensorDictBase, seed: int) -> TensorDictBase:
    torch.manual_seed(seed)
    rows = list(td.unbind(0))
    for row in rows:
        row["advantage"] = torch.randn(len(row["tokens", "full"]), 1, dtype=torch.float64)
    return lazy_stack(rows)


def check_same(whole: Any, parts: Any, actor: BigramActor) -> None:
    for key in (key for key in whole.keys() if key.startswith("loss_")):  # noqa: SIM118
        torch.testing.assert_close(sum(part.get(key) for part in parts), whole.get(key), rtol=1e-6, atol=1e-6)
    losses = (sum(map(total, parts)), total(whole))
    gradients = [torch.autograd.grad(loss, actor.logits, retain_graph=True)[0] for loss in losses]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)


@every_loss
@light
@given(shapes, st.integers(0, 10_000), masking, st.integers(0, 4), st.integers(0, 4))
def test_pads(name: str, lengths: list[tuple[int, int]], seed: int, strategy: Any, left: int, right: int) -> None:
    loss, actor = build(name, seed, strategy)
    plain, padded = loss(ragged(samples(lengths, seed))), loss(dense(samples(lengths, seed), left, right))
    check_same(plain, [padded], actor)
    assert numbers(padded) == pytest.approx(numbers(plain), abs=1e-6, rel=1e-6)


@every_loss
@light
@given(lengths=shapes, seed=st.integers(0, 10_000), part_size=st.integers(1, 5))
def test_order_and_micro_batches(name: str, lengths: list[tuple[int, int]], seed: int, part_size: int) -> None:
    td = per_token_advantages(ragged(samples(lengths, seed)), seed)
    loss, actor = build(name, seed)
    whole = loss(td)
    td = with_denominators(loss, td)
    order = torch.randperm(len(td), generator=torch.Generator().manual_seed(seed)).tolist()
    cuts = range(0, len(td), part_size)
    check_same(whole, [loss(lazy_stack([td[i] for i in order[at : at + part_size]])) for at in cuts], actor)


@every_loss
@light
@given(lengths=shapes.filter(lambda lengths: len(lengths) > 1), seed=st.integers(0, 10_000))
def test_ranks(name: str, lengths: list[tuple[int, int]], seed: int) -> None:
    """As data parallel training does: each rank its part, its denominators summed, gradients averaged."""
    td = ragged(samples(lengths, seed))
    loss, actor = build(name, seed)
    whole = loss(td)
    cut = 1 + seed % (len(td) - 1)
    ranks = [lazy_stack([td[i] for i in places]) for places in (range(cut), range(cut, len(td)))]
    first, second = (loss.denominators(rank) for rank in ranks)
    for rank in ranks:
        for key, number in first.items():
            rank[key] = torch.full(rank.batch_size, (number + second[key]) / 2, dtype=torch.float64)
    check_same(whole.apply(lambda value: 2 * value), [loss(rank) for rank in ranks], actor)


@every_loss
def test_nan_advantages_where_no_token_counts(name: str) -> None:
    td = per_token_advantages(ragged(samples([(2, 3), (1, 4)])), 0)
    loss, actor = build(name, 0)
    plain = loss(td)
    for row in td.unbind(0):
        row["advantage"][: len(row["tokens", "prompt"])] = float("nan")
    check_same(plain, [loss(td)], actor)


@every_loss
def test_log_probs_that_are_not_finite_drop_their_tokens_with_a_count(name: str) -> None:
    """And the rest is as if the token had weighed nothing: no NaN, and the same split as whole."""
    td = ragged(samples([(2, 3), (1, 4), (3, 1)]))
    loss, actor = build(name, 0)
    with torch.no_grad():
        token = td[0]["tokens", "full"][3]
        actor.logits[td[0]["tokens", "full"][2], token] = float("-inf")
    td[1]["prox_log_prob"][3] = float("nan")
    td[2]["log_probs", "full"][3] = float("inf")
    assert loss.denominators(td)["num_valid_tokens"] == 7
    whole = loss(td)
    assert whole.num_dropped_tokens.item() == 2 + (loss.proximal_policy == "recomputed")
    assert all(torch.isfinite(value).all() for value in whole.values())
    parts = [loss(part) for part in with_denominators(loss, td).split(1)]
    for key in (key for key in whole.keys() if key.startswith("loss_")):  # noqa: SIM118
        torch.testing.assert_close(sum(part.get(key) for part in parts), whole.get(key))
