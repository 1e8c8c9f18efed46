"""Checks that log-probs are of the sampled distribution, under every setting that changes it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING

from torchrl_moe.testing.conformance.adapter import NotOffered, Sampling
from torchrl_moe.testing.conformance.findings import Finding

if TYPE_CHECKING:
    from torchrl_moe.testing.conformance.trial import Trial

__all__ = ["MEANING", "SAMPLINGS", "log_probs"]

MEANING = "log-probs are those of the distribution that each token was sampled from"

SAMPLINGS: Mapping[str, Sampling] = MappingProxyType(
    {
        "plain": Sampling(),
        "temperature": Sampling(temperature=0.7),
        "top_k": Sampling(top_k=10),
        "top_p": Sampling(top_p=0.8),
        "min_p": Sampling(min_p=0.1),
        "repetition_penalty": Sampling(repetition_penalty=1.3),
        "presence_penalty": Sampling(presence_penalty=0.7),
        "frequency_penalty": Sampling(frequency_penalty=0.7),
        "together": Sampling(temperature=0.7, top_k=20, top_p=0.9),
    }
)
"""The sampling settings of each check. ``together``: top-p is applied to what top-k has left."""


def log_probs(trial: Trial, name: str) -> Finding:
    """Log-probs are those of the distribution that was sampled.

    Args:
        trial: over the engine.
        name: a key of :data:`SAMPLINGS`.
    """
    trial.judge.check_reference()  # without it, no need to generate
    if name == "plain":
        answers = trial.plain
    else:
        prompts = [trial.prompt(length, seed=3) for length in trial.settings.prompts]
        answers = trial.ask(prompts, replace(SAMPLINGS[name], max_tokens=trial.settings.answer))
    found = [trial.judge.gap(sampled) for sampled in answers]
    off, unprocessed = (max(values, default=0.0) for values in zip(*found, strict=True))
    tokens = sum(len(sampled.tokens) for sampled in answers)
    allowed = trial.settings.tolerance
    if name != "plain" and off <= allowed and unprocessed <= 10 * allowed:
        raise NotOffered(f"it hardly changes this model's log-probs: by {unprocessed:.1e} in {tokens} log-probs")
    power = f"; the model's own, unprocessed ones would be off by {unprocessed:.1e}" if name != "plain" else ""
    return Finding(off, allowed, f"largest difference of {tokens} log-probs{power}")
