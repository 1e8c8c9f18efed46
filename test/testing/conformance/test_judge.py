"""Judging answers made up by hand: rows known, wrong and tied, log-probs, and sides taken at ties."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from support.conformance import shared_moe
from support.conforming_engine import QUICK, ConformingEngine
from torchrl_moe.testing.conformance import Answer, NotOffered, Sampling, Settings
from torchrl_moe.testing.conformance.judge import Judge, Sampled
from torchrl_moe.testing.conformance.reference import Reference
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


def test_right_routes_have_no_faults(sampled: Sampled) -> None:
    found = judge().faults(sampled)
    assert (found.rows, found.missing, found.wrong, found.ties) == (14, 0, 0, 0)
    assert judge().parity(sampled) < 1e-5
    assert judge().gap(sampled)[0] < 1e-5


def test_unknown_rows_are_missing_and_no_others(sampled: Sampled) -> None:
    rows = sampled.answer.routed_experts.copy()
    rows[2] = -1
    rows[4, 2] = -1
    found = judge().faults(sampled.with_routes(rows))
    assert (found.missing, found.wrong) == (3, 0)
    assert found.first == "; the first at token 2, layer 1"
    assert judge().known(sampled.with_routes(rows[:5])).sum() == 7


def test_a_tie_is_no_fault_and_a_fault_no_tie(flip: tuple[Sampled, str, float]) -> None:
    flipped, where, gap = flip
    tied = judge(replace(QUICK, tie=1.01 * gap)).faults(flipped)
    assert (tied.wrong, tied.ties) == (0, 1)
    assert tied.largest == pytest.approx(gap)
    wrong = judge(replace(QUICK, tie=0.99 * gap)).faults(flipped)
    assert (wrong.wrong, wrong.ties) == (1, 0)
    assert wrong.first == where


def test_log_probs_of_the_other_side_of_a_tie_are_right_where_it_ties(flip: tuple[Sampled, str, float]) -> None:
    flipped, _, gap = flip
    logits = judge().follow(flipped).logits
    own = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, flipped.ids[len(PROMPT) :, None])[:, 0]
    flipped = replace(flipped, answer=replace(flipped.answer, log_probs=own))
    assert judge(replace(QUICK, tie=0.99 * gap)).gap(flipped)[0] > QUICK.tolerance
    assert judge(replace(QUICK, tie=1.01 * gap)).gap(flipped)[0] < 1e-5


def test_only_some_tokens_may_be_looked_at(sampled: Sampled) -> None:
    rows = sampled.answer.routed_experts.copy()
    rows[5:] = np.roll(rows[5:], 1, -1)  # the same sets
    rows[6] = (rows[6] + 1) % 8
    rows[6, 0] = -1
    log_probs = sampled.answer.log_probs.copy()
    log_probs[3:] += 1
    spoilt = Sampled(PROMPT, sampled.sampling, replace(sampled.answer, routed_experts=rows, log_probs=log_probs))
    assert judge().faults(spoilt, tokens=6).count == 0
    assert judge().faults(spoilt).count > 0
    assert judge().parity(spoilt, tokens=6) < 1e-5
    assert judge().parity(spoilt, since=3) > 0.5


@pytest.mark.parametrize(
    ("routes", "text"),
    [
        (np.zeros((7, 3), np.int8), r"routes are int8 \[7, 3\], not integers \[tokens - 1, 3, 2\]"),
        (np.zeros((7, 2, 2), np.int8), r"routes are int8 \[7, 2, 2\]"),
        (np.zeros((7, 3, 4), np.int8), r"routes are int8 \[7, 3, 4\]"),
        (np.zeros((7, 3, 2), np.float32), r"routes are float32 \[7, 3, 2\]"),
    ],
)
def test_another_shape_or_type_does_not_hold(sampled: Sampled, routes: Any, text: str) -> None:
    with pytest.raises(DoesNotHold, match=text):
        judge().routes(sampled.with_routes(routes))


def test_routes_that_no_router_chooses_do_not_hold(sampled: Sampled) -> None:
    rows = sampled.answer.routed_experts.copy()
    rows[0, 1] = 3
    with pytest.raises(DoesNotHold, match=r"sample 0, token 0, layer 1"):
        judge().follow(sampled.with_routes(rows))


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


def test_without_a_model_rows_are_counted_only(sampled: Sampled) -> None:
    found = Judge(QUICK, judge().layout, None).faults(sampled.with_routes(sampled.answer.routed_experts[1:]))
    assert (found.missing, found.wrong) == (2, None)


def test_it_judges_by_other_weights(sampled: Sampled) -> None:
    other = judge().by(judge().reference.altered(3))
    assert other.gap(sampled)[0] > 1e-2
    assert judge().gap(sampled)[0] < 1e-5
    assert torch.isfinite(torch.tensor(other.parity(sampled)))


def test_tokens_fit_the_weights_also_behind_a_tie(flip: tuple[Sampled, str, float]) -> None:
    flipped, _, gap = flip
    logits = judge().follow(flipped).logits
    own = logits[len(PROMPT) - 1 : -1].log_softmax(-1).gather(1, flipped.ids[len(PROMPT) :, None])[:, 0]
    flipped = replace(flipped, answer=replace(flipped.answer, log_probs=own))
    assert judge(replace(QUICK, tie=0.99 * gap)).fitting(flipped) < 5
    assert judge(replace(QUICK, tie=1.01 * gap)).fitting(flipped) == 5
    own[3] += 1
    assert judge(replace(QUICK, tie=1.01 * gap)).fitting(flipped) == 3
