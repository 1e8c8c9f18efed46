"""Judging answers made up by hand: rows known, wrong and tied, log-probs, ties, and the distribution sampled from."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.conformance import shared_moe
from support.conforming_engine import QUICK, ConformingEngine, distribution
from torchrl_moe.testing.conformance import Answer, NotOffered, Sampling, Settings
from torchrl_moe.testing.conformance.checks import SAMPLINGS
from torchrl_moe.testing.conformance.judge import Judge, Reference, Sampled, sampled_log_probs
from torchrl_moe.testing.conformance.report import DoesNotHold

PROMPT = (9, 30, 201)


def judge(settings: Settings = QUICK) -> Judge:
    reference = Reference(shared_moe())
    return Judge(settings, reference.layout, reference)


@pytest.fixture(scope="module")
def sampled() -> Sampled:
    sampling = Sampling(max_tokens=5)
    ((answer,),) = ConformingEngine(shared_moe()).generate([PROMPT], sampling)
    return Sampled(PROMPT, sampling, answer)


@pytest.fixture(scope="module")
def flip(sampled: Sampled) -> tuple[Sampled, str, float]:
    """The answer with another expert in one row, where that is, and the gap of their scores."""
    found = []
    for layer, place, other in itertools.product((1, 2), (0, 1), range(8)):
        rows = sampled.answer.routed_experts.copy()
        if other not in rows[4, layer]:
            rows[4, layer, place] = other
            flipped = sampled.with_routes(rows)
            found.append((judge(replace(QUICK, tie=0.0)).faults(flipped).largest, layer, flipped))
    gap, layer, flipped = min(found, key=lambda row: row[0])
    return flipped, f"; the first at token 4, layer {layer}", gap


def test_unknown_rows_are_missing_and_no_others(sampled: Sampled) -> None:
    rows = sampled.answer.routed_experts.copy()
    rows[2] = rows[4, 2] = -1
    found = judge().faults(sampled.with_routes(rows))
    assert (found.missing, found.wrong) == (3, 0)
    assert found.first == "; the first at token 2, layer 1"
    assert judge().known(sampled.with_routes(rows[:5])).sum() == 7
    found = Judge(QUICK, judge().layout, None).faults(sampled.with_routes(sampled.answer.routed_experts[1:]))
    assert (found.missing, found.wrong) == (2, None)


def test_a_tie_is_no_fault_and_a_fault_no_tie(flip: tuple[Sampled, str, float]) -> None:
    flipped, where, gap = flip
    tied = judge(replace(QUICK, tie=1.01 * gap)).faults(flipped)
    assert (tied.wrong, tied.ties) == (0, 1)
    assert tied.largest == pytest.approx(gap)
    wrong = judge(replace(QUICK, tie=0.99 * gap)).faults(flipped)
    assert (wrong.wrong, wrong.ties) == (1, 0)
    assert wrong.first == where


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        (np.zeros((7, 3), np.int8), r"routes are int8 \[7, 3\], not integers \[tokens - 1, 3, 2\]"),
        (np.zeros((7, 3, 2), np.float32), r"routes are float32 \[7, 3, 2\]"),
        (np.full((7, 3, 2), [[-1], [3], [3]], np.int8), "sample 0, token 0, layer 1"),
    ],
)
def test_another_shape_or_type_and_what_no_router_chooses_do_not_hold(sampled: Sampled, routes: Any, text: str) -> None:
    with pytest.raises(DoesNotHold, match=text):
        judge().follow(sampled.with_routes(routes))


def test_what_lacks_a_model_a_layout_or_routes_is_not_offered(sampled: Sampled) -> None:
    alone = Judge(QUICK, None, None)
    with pytest.raises(NotOffered, match="pass model= or layout="):
        alone.routes(sampled)
    with pytest.raises(NotOffered, match="pass model="):
        alone.gap(sampled)
    with pytest.raises(NotOffered, match="answers have no routed_experts"):
        judge().routes(sampled.with_routes(None))
    with pytest.raises(NotOffered, match="answers have no log-probs"):
        judge().gap(Sampled(PROMPT, Sampling(), Answer(token_ids=[1])))


def test_log_probs_of_the_other_side_are_right_where_it_ties(flip: tuple[Sampled, str, float]) -> None:
    flipped, _, gap = flip
    logits = judge().follow(flipped).logits
    own = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, flipped.ids[len(PROMPT) :, None])[:, 0]
    flipped = replace(flipped, answer=replace(flipped.answer, log_probs=own))
    strict, lenient = (judge(replace(QUICK, tie=share * gap)) for share in (0.99, 1.01))
    assert strict.gap(flipped)[0] > QUICK.tolerance
    assert lenient.gap(flipped)[0] < 1e-5
    assert (strict.fitting(flipped) < 5, lenient.fitting(flipped)) == (True, 5)
    own[3] += 1
    assert lenient.fitting(flipped) == 3


@pytest.mark.parametrize("name", ["log_probs", "versions"])
def test_what_is_not_there_is_not_offered_and_another_number_is_a_fault(name: str) -> None:
    with pytest.raises(NotOffered, match=r"answers have no (log-probs|versions)"):
        getattr(Sampled((5, 6), Sampling(), Answer(token_ids=np.array([7, 8]))), name)
    with pytest.raises(DoesNotHold, match=r"3 (log-probs|versions) for 2 tokens"):
        getattr(Sampled((5, 6), Sampling(), Answer(token_ids=np.array([7, 8]), **{name: [1, 2, 3]})), name)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_each_sampling_is_that_of_numpy(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 40, (20,), generator=generator)
    logits = 3 * torch.randn(20, 40, generator=generator)
    found = sampled_log_probs(logits, ids, 12, SAMPLINGS[name])
    expected = [
        distribution(logits[t - 1].double().numpy(), ids[:t].tolist(), ids[12:t].tolist(), SAMPLINGS[name])[ids[t]]
        for t in range(12, 20)
    ]
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-5, atol=1e-5)
