"""Versions and staleness of batches, by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_moe.render.curves import staleness_figure


def test_versions_and_ages_by_hand() -> None:
    batches = [torch.tensor([[-1, 0, 0]]), torch.tensor([[-1, 0, 1], [-1, 1, 2]]), torch.tensor([-1])]
    figure = staleness_figure(batches, [0, 3, 4], "a run")
    above, below = figure.axes
    trained, mean = above.get_lines()
    np.testing.assert_array_equal(trained.get_ydata(), [0, 3, 4])
    np.testing.assert_array_equal(mean.get_xydata(), [[0, 0], [1, 1]])  # the third batch has no sampled token
    assert [bar.get_height() for bar in below.patches] == [0, 3]
    np.testing.assert_array_equal(below.get_lines()[0].get_ydata(), [0, 2])
    assert above.get_title() == "a run"
    assert (below.get_xlabel(), below.get_ylabel()) == ("batch", "staleness, versions")


def test_no_batch_is_an_empty_figure() -> None:
    assert len(staleness_figure([], []).axes) == 2


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 1 batches, and 2 versions"):
        staleness_figure([[0]], [0, 1])
    with pytest.raises(ValueError, match="batch 0 was trained on version 1, and has tokens of version 2"):
        staleness_figure([[0, 2]], [1])
