"""All numbers until there are too many, then each as likely as any other, also across a merge."""

from __future__ import annotations

import numpy as np
import pytest

from torchrl_moe.objectives.mismatch import UniformSample


def test_it_holds_everything_until_it_is_full() -> None:
    sample = UniformSample(capacity=6)
    sample.add(np.array([[3.0, 1.0], [2.0, 5.0]]))
    sample.add(np.array([4, 6], dtype=np.int64))
    assert sorted(sample.values) == [1, 2, 3, 4, 5, 6]
    sample.add(np.arange(100.0))
    assert len(sample) == 6


def test_every_number_is_as_likely_as_any_other() -> None:
    """50 of 200, in pieces and merged, 400 times: each is kept 100 times, give or take 4.5 standard deviations."""
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


def test_samples_that_merge_have_priorities_of_their_own() -> None:
    """With shared ones, number i of one stream would be kept if and only if number i of the other is."""
    first, second = UniformSample(50), UniformSample(50)
    first.add(np.arange(1000))
    second.add(np.arange(1000, 2000))
    first.merge(second)
    kept = set(first.values.astype(int))
    assert sum(i + 1000 in kept for i in kept) < 15  # 1.25 are expected; 25 of 25 if they were shared


def test_its_randomness_is_its_own() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    UniformSample(2).add(np.arange(10))
    assert (np.random.get_state()[1] == before).all()


def test_an_empty_capacity_is_refused() -> None:
    with pytest.raises(ValueError, match="capacity must be an integer of at least 1, got 0"):
        UniformSample(0)
