"""Checks that routes are correct: for plain answers, cached prompts, chunked prompts and several samples."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

import numpy as np

from torchrl_moe.testing.conformance.adapter import NotOffered, Sampling
from torchrl_moe.testing.conformance.findings import Finding, RouteFaults

if TYPE_CHECKING:
    from torchrl_moe.testing.conformance.sampled import Sampled
    from torchrl_moe.testing.conformance.trial import Trial

__all__ = ["chunked_prefill", "native_routes", "prefix_cache", "replay_parity", "samples"]


def native_routes(trial: Trial) -> Finding:
    """Each row holds the experts that the model's router chooses, or the alternative at a tie."""
    judge = trial.judge
    judge.check_reference()  # without it no row can be called wrong
    found = [judge.faults(sampled) for sampled in trial.plain]
    rows, faulty = sum(one.rows for one in found), sum(one.count for one in found)
    missing = sum(one.missing for one in found)
    ties, largest = sum(one.ties for one in found), max((one.largest for one in found), default=0.0)
    first = next((one.first for one in found if one.count), "")
    return Finding(
        faulty / max(rows, 1),
        0,
        f"share of {rows} rows, {missing} of them missing; {ties} ties, largest gap of router scores "
        f"{largest:.1e}{first}",
    )


def replay_parity(trial: Trial) -> Finding:
    """The model that follows the routes gives the engine's log-probs."""
    judge = trial.judge
    off = shifted = 0.0
    for sampled in trial.plain:
        off = max(off, judge.parity(sampled))
        rows = judge.routes(sampled)[: len(sampled.ids) - 1]
        if len(rows) > 1:
            shifted = max(shifted, judge.parity(sampled.with_routes(np.roll(rows, 1, 0))))
    if off <= judge.settings.tolerance and shifted <= 10 * judge.settings.tolerance:
        raise NotOffered(f"routes hardly change this model: rows shifted by a token move log-probs by {shifted:.1e}")
    return Finding(
        off, judge.settings.tolerance, f"largest difference of log-probs; rows shifted by a token: {shifted:.1e}"
    )


def prefix_cache(trial: Trial) -> Finding:
    """A cached prompt has all of its rows, and they are correct."""
    cold, warm = trial.repeated
    cached = warm.answer.num_cached_tokens
    if not cached:
        raise NotOffered(f"no prefix was cached: num_cached_tokens is {cached} when a prompt comes again")
    faults = trial.judge.faults(warm)
    off, others = faults.count, ""
    if faults.wrong is None:
        differing = _differing(trial, cold, warm, len(warm.prompt))
        off, others = off + differing, f"; {differing} differ from those of the first time"
    return Finding(off, 0, f"faults with {cached} of {len(warm.prompt)} tokens cached, {faults.text}{others}")


def chunked_prefill(trial: Trial) -> Finding:
    """A prompt that is prefilled in several chunks has the rows of all of them."""
    cold, _ = trial.repeated
    faults = trial.judge.faults(cold)
    cached = cold.answer.num_cached_tokens or 0
    return Finding(
        faults.count,
        0,
        f"faults with a prompt of {len(cold.prompt)} tokens, {cached} of them cached (several chunks, if the engine "
        f"takes fewer at a time), {faults.text}",
    )


def samples(trial: Trial) -> Finding:
    """Each of several answers to one prompt has its own rows."""
    asked = Sampling(max_tokens=trial.settings.answer, n=trial.settings.samples)
    answers = trial.ask([trial.prompt(23, seed=2)], asked)
    found: Sequence[RouteFaults] = [trial.judge.faults(sampled) for sampled in answers]
    shared = 0
    for one, two in combinations(answers, 2):
        left, right = (trial.judge.routes(sampled)[len(sampled.prompt) :] for sampled in (one, two))
        shared += one.tokens != two.tokens and np.array_equal(left, right)
    missing, wrong = sum(one.missing for one in found), sum(one.wrong or 0 for one in found)
    return Finding(
        missing + wrong + shared,
        0,
        f"faults in {len(answers)} answers: {missing} rows missing, {wrong} wrong; {shared} pairs of different answers "
        "with the same rows",
    )


def _differing(trial: Trial, one: Sampled, two: Sampled, tokens: int) -> int:
    """Count the rows (token, layer) of the leading tokens in which two answers have different experts."""
    layers = list(trial.judge.layout.moe_layers)
    left, right = (np.sort(trial.judge.routes(sampled)[:tokens, layers]) for sampled in (one, two))
    rows = min(len(left), len(right))
    return int((left[:rows] != right[:rows]).any(-1).sum())
