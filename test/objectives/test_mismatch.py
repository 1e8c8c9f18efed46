"""The metrics by hand, whatever the layout and the split; ages, routes, one warning; and what is refused."""

from __future__ import annotations

import logging
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDictBase
from torch import Tensor

from support.html_table import TableReader
from support.rollouts import BigramActor, dense, ragged, sample, samples
from support.routes import random_routes
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.objectives import CollapseThresholds, MismatchKeys, MismatchMetrics
from torchrl_moe.objectives.mismatch import UniformSample
from torchrl_moe.render.tables import number_text
from torchrl_moe.testing import make_tiny_moe

NAN, L, LN4 = float("nan"), math.log(1.5), math.log(4)
LOG_PROBS = ("log_probs", "full")
VERSIONS = ("policy_versions", "full")
SHAPES = [(2, 3), (1, 4), (3, 1)]


def by_hand() -> tuple[TensorDictBase, Tensor]:
    """Ratios π/μ of 3/2, 1 and 2/3 in one sequence, 4 in another; prompts of one token, padded on the left."""
    td = ragged([sample(1, 3), sample(1, 1)])
    sampled = td.get(LOG_PROBS, as_padded_tensor=True, padding_side="left").nan_to_num()
    ratios = torch.tensor([[9, 1.5, 1, 2 / 3], [9, 9, 9, 4]], dtype=torch.float64)
    return td, sampled + ratios.log()


def measured(td: TensorDictBase, log_probs: Tensor, **more: Any) -> dict[str, float]:
    metrics = MismatchMetrics()
    metrics.update(td, log_probs, **more)
    return metrics.compute()


def test_golden_numbers() -> None:
    td, log_probs = by_hand()
    assert measured(td, log_probs) == pytest.approx(
        {
            "mismatch/tokens": 4,
            "mismatch/dropped_fraction": 0,
            "mismatch/dlogp_mean": (L + 0 + L + LN4) / 4,
            "mismatch/dlogp_max": LN4,
            "mismatch/dlogp_p99": L + 0.97 * (LN4 - L),  # between the third and the fourth: 0.99 * 3 = 2.97
            "mismatch/p99_tokens": 4,
            "mismatch/k1": (-L + 0 + L - LN4) / 4,
            "mismatch/k3": ((0.5 - L) + 0 + (L - 1 / 3) + (3 - LN4)) / 4,
            "mismatch/ppl_ratio": (math.exp((-L + L) / 3) + math.exp(-LN4)) / 2,
            "mismatch/chi2": (9 / 4 + 1 + 4 / 9 + 16) / 4 - 1,
            "mismatch/ess": (3 / 2 + 1 + 2 / 3 + 4) ** 2 / (4 * (9 / 4 + 1 + 4 / 9 + 16)),
            "mismatch/extreme_fraction": 1 / 4,
        },
        abs=1e-7,
    )


def test_no_difference_is_no_mismatch_and_a_small_one_is_not_lost_in_rounding() -> None:
    td, _ = by_hand()
    sampled = td.get(LOG_PROBS, as_padded_tensor=True, padding_side="left").nan_to_num()
    found = measured(td, sampled)
    assert (found["mismatch/k3"], found["mismatch/chi2"], found["mismatch/dlogp_max"]) == (0, 0, 0)
    assert found["mismatch/ess"] == found["mismatch/ppl_ratio"] == 1
    assert measured(td, sampled + 1e-6)["mismatch/k3"] == pytest.approx(5e-13, rel=1e-3)


# -- which tokens -----------------------------------------------------------------------------------------------------


def test_broken_log_probs_are_dropped_and_counted_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    td, log_probs = by_hand()
    whole = measured(td, log_probs)
    log_probs[0, 0] = NAN  # of the prompt
    assert measured(td, log_probs) == whole
    log_probs[1, 3] = NAN
    found = measured(td, log_probs)
    assert found["mismatch/dropped_fraction"] == 0.25
    assert found["mismatch/tokens"] == 3
    assert found["mismatch/dlogp_max"] == pytest.approx(L)
    for broken in (-float("inf"), NAN):
        log_probs[:] = broken
        assert measured(td, log_probs) == {"mismatch/tokens": 0, "mismatch/dropped_fraction": 1}
    assert "dropped_fraction 1 (most 0)" in caplog.text


@pytest.mark.parametrize(("strategy", "share"), [("sft", 0.25), ("rlhf", 0.25), ("generic", 0)])
def test_responses_without_a_sample_log_prob_are_dropped_and_counted(strategy: Any, share: float) -> None:
    td, log_probs = by_hand()
    td[0][LOG_PROBS][3] = -float("inf")
    metrics = MismatchMetrics(masking_strategy=strategy)
    metrics.update(td, log_probs)
    assert metrics.compute()["mismatch/dropped_fraction"] == share
    assert metrics.compute()["mismatch/tokens"] == 3
    td[0]["masks", "all_assistant_mask"] = torch.tensor([False, True, False, False])  # only rlhf reads it
    metrics.reset()
    metrics.update(td, log_probs)
    assert metrics.compute()["mismatch/tokens"] == (2 if strategy == "rlhf" else 3)


def test_what_corrections_mask_is_counted_and_still_measured() -> None:
    td, log_probs = by_hand()
    kept = torch.tensor([[False, True, True, False], [True, True, True, False]])
    found = measured(td, log_probs, kept=kept)
    assert found.pop("mismatch/masked_fraction") == 2 / 4
    assert found.pop("mismatch/masked_sequence_fraction") == 1 / 2
    assert found == measured(td, log_probs)


def scored(rollouts: list[Any], layout: Any) -> tuple[TensorDictBase, Tensor]:
    td = layout(rollouts)
    return td, BigramActor(seed=1).score(td)[0]


@settings(max_examples=30)
@given(st.permutations(range(4)), st.integers(1, 3), st.integers(0, 2), st.integers(0, 2))
def test_pads_order_and_split_change_nothing(order: list[int], cut: int, left: int, right: int) -> None:
    rollouts = samples([*SHAPES, (2, 2)])
    expected = measured(*scored(rollouts, ragged))
    shuffled = [rollouts[i] for i in order]
    assert measured(*scored(shuffled, lambda x: dense(x, left, right))) == pytest.approx(expected)
    one, other_rank = MismatchMetrics(), MismatchMetrics()
    one.update(*scored(shuffled[:cut], ragged))
    other_rank.update(*scored(shuffled[cut:], ragged))
    one.merge(pickle.loads(pickle.dumps(other_rank)))
    assert one.compute() == pytest.approx(expected)
    other_rank.update(*scored(shuffled[:cut], ragged))
    assert other_rank.compute() == pytest.approx(expected)
    one.reset()  # it forgets
    assert one.compute() == MismatchMetrics().compute() == {"mismatch/tokens": 0}
    one.update(*scored(rollouts, ragged))
    assert one.compute() == expected


def test_the_percentile_is_of_a_sample_once_there_are_many() -> None:
    metrics = MismatchMetrics(sample_size=200)
    td = ragged([sample(1, 100)])
    sampled = td.get(LOG_PROBS, as_padded_tensor=True, padding_side="left").nan_to_num()
    for part in range(10):
        metrics.update(td, sampled - torch.arange(101) / 100 - part)  # 0.01 ... 1, 1.01 ... 2, up to 10
    found = metrics.compute()
    assert found["mismatch/p99_tokens"] == len(metrics.log_ratios) == 200
    # of 200 numbers, at least 3 are above 9 but for one try in two million, and their mean has an error of 0.2
    assert found["mismatch/dlogp_p99"] == pytest.approx(9.9, abs=0.9)
    assert -metrics.log_ratios.mean() == pytest.approx(5.005, abs=1.2)
    assert found["mismatch/dlogp_max"] == pytest.approx(10.0)  # of all
    assert found["mismatch/dlogp_mean"] == pytest.approx(5.005)
    assert (metrics.log_ratios < 0).all()  # signed


# -- versions and routes ----------------------------------------------------------------------------------------------


def test_by_age_of_the_version() -> None:
    td, log_probs = by_hand()
    for one, versions in zip(td, ([-1, 7, 6, 0], [-1, 7]), strict=True):
        one[VERSIONS] = torch.tensor(versions, dtype=torch.int32)
    metrics = MismatchMetrics(max_age=3)
    metrics.update(td, log_probs, version=7)
    expected = {"age_mean": (0 + 1 + 7 + 0) / 4}
    groups = {0: (2, (0.5 - L + 3 - LN4) / 2, (L + LN4) / 2), 1: (1, 0, 0), 3: (1, L - 1 / 3, L)}
    for age, values in groups.items():
        expected |= dict(zip([f"age_{age}/{name}" for name in ("tokens", "k3", "dlogp_mean")], values, strict=True))
    found = {name.partition("/")[2]: value for name, value in metrics.compute().items() if "age" in name}
    assert found == pytest.approx(expected)
    assert not [name for name in measured(td, log_probs) if "age" in name]
    with pytest.raises(ValueError, match="version=6, but tokens were sampled by version 7"):
        measured(td, log_probs, version=6)
    with pytest.raises(ValueError, match=r"no \('policy_versions', 'full'\)"):
        measured(by_hand()[0].exclude(VERSIONS), log_probs, version=7)


def routed(td: TensorDictBase, agreement: list[float], fallback: list[int]) -> TensorDictBase:
    """As TransformersWrapper writes: the metric of the batch in each sample."""
    td.set(("routing", "agreement"), torch.tensor([agreement] * len(td)))
    td.set(("routing", "fallback"), torch.tensor(fallback))
    return td


def test_agreement_and_fallback_weigh_their_rows() -> None:
    """Two micro-batches: 4 + 2 rows of which 1 + 1 are not known, and 5 of which 1 is not."""
    td, log_probs = by_hand()
    metrics = MismatchMetrics()
    metrics.update(routed(td, [NAN, 0.5, 1.0], [1, 1]), log_probs)
    other = ragged([sample(2, 3)])
    metrics.update(routed(other, [NAN, 1.0, 0.75], [1]), BigramActor().score(other)[0])
    found = {name: value for name, value in metrics.compute().items() if name.startswith("routing/")}
    layers = {"layer_1": (4 * 0.5 + 4 * 1) / 8, "layer_2": (4 * 1 + 4 * 0.75) / 8}
    expected = {"routing/fallback_fraction": 3 / 11, "routing/agreement": (0.75 + 0.875) / 2}
    assert found == pytest.approx(expected | {f"routing/agreement/{name}": share for name, share in layers.items()})
    found = measured(routed(td, [NAN, NAN], [4, 2]), log_probs)  # agreement that was not measured is absent
    assert {name: found[name] for name in found if name.startswith("routing/")} == {"routing/fallback_fraction": 1}


def test_it_reads_what_the_scoring_wrapper_writes() -> None:
    actor = TransformersWrapper(make_tiny_moe("qwen3_moe"), measure_agreement=True)
    rollouts = samples(SHAPES)
    for i, rollout in enumerate(rollouts):
        routes = random_routes(actor.router_replay, 1, len(rollout["tokens", "full"]), seed=i)[0]
        routes[-1] = -1
        rollout["routed_experts", "full"] = routes
    td = ragged(rollouts)
    found = measured(td, actor.score(td)[0])
    assert found["mismatch/tokens"] == 8
    assert found["routing/fallback_fraction"] == pytest.approx(3 / 14)
    assert {name for name in found if "layer" in name} == {f"routing/agreement/layer_{i}" for i in (1, 2, 3)}
    assert found["routing/agreement"] == pytest.approx(td["routing", "agreement"][0, 1:].mean().item())


# -- the warning ------------------------------------------------------------------------------------------------------


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("torchrl_moe.objectives")]


def test_a_collapse_is_one_line_and_the_next_one_another(caplog: pytest.LogCaptureFixture) -> None:
    td, far = by_hand()
    near = td.get(LOG_PROBS, as_padded_tensor=True, padding_side="left").nan_to_num()
    metrics = MismatchMetrics()
    for log_probs, lines in ((near, 0), (far, 1), (far, 1), (near, 1), (far, 2)):
        metrics.reset()
        metrics.update(td, log_probs)
        metrics.compute()
        assert len(warnings(caplog)) == lines
    (line, _), (record, *_) = warnings(caplog), caplog.records
    assert record.levelno == logging.WARNING
    assert "\n" not in line
    assert line.endswith("may collapse: k3 0.445 (most 0.01), extreme_fraction 0.25 (most 0.1)")


def test_thresholds_can_be_moved(caplog: pytest.LogCaptureFixture) -> None:
    low = CollapseThresholds(k3=None, extreme_fraction=None, ess=0.9)
    for thresholds in (None, CollapseThresholds(k3=1.0, extreme_fraction=0.25), low):
        assert warnings(caplog) == []
        metrics = MismatchMetrics(thresholds=thresholds)
        metrics.update(*by_hand())
        metrics.compute()
    assert [line.partition("collapse: ")[2] for line in warnings(caplog)] == ["ess 0.652 (least 0.9)"]


def test_what_does_not_fit_is_refused() -> None:
    td, log_probs = by_hand()
    for version in (True, 4.0, "4", -1, NAN):
        with pytest.raises(ValueError, match="version must be an integer of at least 0, or None, got "):
            measured(td, log_probs, version=version)
    with pytest.raises(ValueError, match=r"log_probs and .* same shape, got log_probs \[2, 3\]"):
        measured(td, log_probs[:, 1:])
    with pytest.raises(ValueError, match=r"kept and .* same shape, got kept \[2\]"):
        measured(td, log_probs, kept=torch.ones(2, dtype=torch.bool))
    td.set(("routing", "fallback"), torch.zeros(2))
    td.set(("routing", "agreement"), torch.zeros(2))
    with pytest.raises(ValueError, match=r"\('routing', 'agreement'\) must have shape \[2, L\], got \[2\]"):
        measured(td, log_probs)
    for fallback in (-1, 99):
        routed(td, [NAN], [fallback] * 2)
        with pytest.raises(ValueError, match=r"\('routing', 'fallback'\) must be from 0 to the sample's tokens"):
            measured(td, log_probs)
    metrics = MismatchMetrics(keys=MismatchKeys(sample_log_prob="mine"))
    with pytest.raises(ValueError, match="the tensordict has no 'mine'"):
        metrics.update(td, log_probs)


def test_what_is_refused_leaves_nothing() -> None:
    td, log_probs = by_hand()
    for one in td:
        one[VERSIONS] = torch.full((len(one["tokens", "full"]),), 7, dtype=torch.int32)
    metrics = MismatchMetrics()
    metrics.update(td, log_probs, version=8)
    before = metrics.compute()
    flat = torch.ones(2, dtype=torch.bool)
    for more in ({"kept": flat}, {"version": 6}, {"version": 8, "kept": flat}):
        with pytest.raises(ValueError, match=r"version=6|kept and "):
            metrics.update(td, log_probs, **more)
    with pytest.raises(ValueError, match="from 0 to the sample's tokens"):
        metrics.update(routed(td.clone(), [NAN], [99, 0]), log_probs, version=8)
    assert metrics.compute() == before


def test_only_metrics_of_the_same_arguments_are_merged() -> None:
    for other in ({"tau": 3.0}, {"masking_strategy": "rlhf"}, {"max_age": 2}):
        with pytest.raises(ValueError, match=f"with the same arguments can be merged, got {next(iter(other))}="):
            MismatchMetrics().merge(MismatchMetrics(**other))
    with pytest.raises(ValueError, match="other must be of class MismatchMetrics"):
        MismatchMetrics().merge(None)  # type: ignore[arg-type]


def test_it_is_printed_and_shown_without_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    metrics = MismatchMetrics()
    assert repr(metrics) == "MismatchMetrics(0 tokens)"
    assert TableReader(metrics._repr_html_()).rows["tbody"] == [["mismatch/tokens", "0", ""]]
    td, log_probs = by_hand()
    metrics.update(td, log_probs)
    found = metrics._metrics()
    assert repr(metrics).startswith(f"MismatchMetrics({found['mismatch/tokens']:.0f} tokens, k3=")
    rows = {name: rest for name, *rest in TableReader(metrics._repr_html_()).rows["tbody"]}
    assert set(rows) == set(found)
    assert rows["mismatch/k3"] == [number_text(found["mismatch/k3"]), "most 0.01"]
    assert rows["mismatch/k1"][1] == ""
    assert warnings(caplog) == []
    metrics.compute()
    assert len(warnings(caplog)) == 1


# -- a sample of numbers: all until there are too many, then each as likely as any other ------------------------------


def test_every_number_is_as_likely_as_any_other_also_across_a_merge() -> None:
    """50 of 200, in pieces and merged, 400 times: each is kept 100 times, give or take 4.5 standard deviations."""
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    seen = np.zeros(200)
    for seed in range(400):
        first, second = UniformSample(50, seed=2 * seed), UniformSample(50, seed=2 * seed + 1)
        for piece in np.split(np.arange(120), 8):
            first.add(piece)
        second.add(np.arange(120, 200))
        first.merge(second)
        assert len(set(first.values)) == 50
        seen[first.values.astype(int)] += 1
    assert abs(seen - 100).max() < 4.5 * np.sqrt(400 * 0.25 * 0.75)
    assert abs(seen[:120].mean() - 100) < 2  # neither stream is preferred
    assert (np.random.get_state()[1] == before).all()  # its randomness is its own
    few = UniformSample(capacity=6)
    few.add(np.array([[3.0, 1.0], [2.0, 5.0]]))
    few.add(np.array([4, 6], dtype=np.int64))
    assert sorted(few.values) == [1, 2, 3, 4, 5, 6]
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1, got 0"):
        UniformSample(0)


def test_samples_that_merge_have_priorities_of_their_own() -> None:
    """With shared ones, number i of one stream would be kept if and only if number i of the other is."""
    first, second = UniformSample(50), UniformSample(50)
    first.add(np.arange(1000))
    second.add(np.arange(1000, 2000))
    first.merge(second)
    kept = set(first.values.astype(int))
    assert sum(i + 1000 in kept for i in kept) < 15  # 1.25 are expected; 25 of 25 if they were shared
