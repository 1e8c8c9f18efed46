"""The distribution that a token was sampled from: by hand, and against a sampler in numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from support.conforming_engine import distribution
from torchrl_moe.testing.conformance import Sampling
from torchrl_moe.testing.conformance.checks import SAMPLINGS
from torchrl_moe.testing.conformance.judge import sampled_log_probs

LOGITS = torch.tensor([[math.log(0.5), math.log(0.3), math.log(0.2)]])


def probs(sampling: Sampling, prompt: list[int], answer: list[int]) -> list[float]:
    """Of the answer's tokens, where each position has LOGITS."""
    ids = torch.tensor([*prompt, *answer])
    return sampled_log_probs(LOGITS.expand(len(ids), 3), ids, len(prompt), sampling).exp().tolist()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(), [0.5, 0.3, 0.2]),
        (Sampling(temperature=0.5), [0.25 / 0.38, 0.09 / 0.38, 0.04 / 0.38]),
        (Sampling(top_k=2), [0.625, 0.375, 0]),
        (Sampling(top_p=0.79), [0.625, 0.375, 0]),  # 0.5 is too little, 0.8 is enough
        (Sampling(top_p=0.4), [1, 0, 0]),
        (Sampling(min_p=0.5), [0.625, 0.375, 0]),  # 0.2 is less than half of 0.5
    ],
)
def test_truncation_by_hand(sampling: Sampling, expected: list[float]) -> None:
    assert [probs(sampling, [0], [token])[0] for token in range(3)] == pytest.approx(expected)


def test_penalties_by_hand() -> None:
    """Logits ln 0.5, ln 0.3, ln 0.2: all negative, so that a repetition penalty multiplies."""
    twice = probs(Sampling(repetition_penalty=2.0), [0], [1, 1])
    assert twice == pytest.approx([0.3 / (0.25 + 0.3 + 0.2), 0.09 / (0.25 + 0.09 + 0.2)])
    less = math.exp(-1)
    there = probs(Sampling(presence_penalty=1.0), [0], [1, 1, 1])
    assert there == pytest.approx([0.3] + [0.3 * less / (0.5 + 0.3 * less + 0.2)] * 2)
    often = probs(Sampling(frequency_penalty=1.0), [0], [1, 1, 1])
    assert often[2] == pytest.approx(0.3 * less**2 / (0.5 + 0.3 * less**2 + 0.2))


def test_no_tokens_have_no_log_probs() -> None:
    assert sampled_log_probs(LOGITS, torch.tensor([0]), 1, Sampling()).shape == (0,)


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
