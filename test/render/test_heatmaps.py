"""Counts by hand, and what the panels hold."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.render.routes import expert_agreement, expert_figure, expert_load

NAN = np.nan
# three tokens, three layers (the first is dense), two of four experts
ENGINE = np.array(
    [
        [[-1, -1], [0, 1], [2, 3]],
        [[-1, -1], [1, 0], [3, 2]],
        [[-1, -1], [1, 2], [-1, -1]],
    ],
    dtype=np.int8,
)
TRAINER = np.array(
    [
        [[-1, -1], [1, 0], [2, 3]],
        [[-1, -1], [1, 3], [0, 1]],
        [[-1, -1], [-1, -1], [0, 1]],
    ],
    dtype=np.int16,
)


def test_load_by_hand() -> None:
    expected = [[NAN] * 4, [4 * 2 / 6, 4 * 3 / 6, 4 * 1 / 6, 0], [0, 0, 2, 2]]
    np.testing.assert_allclose(expert_load(ENGINE, 4), expected)
    batch = torch.from_numpy(np.stack([ENGINE, ENGINE]))  # [B, T, L, K], a tensor
    np.testing.assert_allclose(expert_load(batch, 4), expected)


def test_the_load_of_many_experts_is_counted_like_a_naive_loop() -> None:
    routes = np.random.default_rng(0).permuted(np.tile(np.arange(200), (50, 3, 1)), axis=-1)[..., :6]
    counts = np.zeros((3, 200))
    for row in routes:
        for layer, experts in enumerate(row):
            counts[layer, experts] += 1
    np.testing.assert_allclose(expert_load(routes.astype(np.int16), 200), counts * 200 / 300)


def test_agreement_by_hand() -> None:
    """Rows unknown to either side do not count: the third token is in no layer."""
    expected = [[NAN] * 4, [1 / 2, 2 / 2, NAN, NAN], [NAN, NAN, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(expert_agreement(ENGINE, TRAINER, 4), expected)


def test_the_order_of_experts_does_not_matter() -> None:
    same = expert_agreement(ENGINE, ENGINE[..., ::-1], 4)
    assert np.nanmin(same) == np.nanmax(same) == 1
    np.testing.assert_allclose(expert_load(ENGINE, 4), expert_load(ENGINE[..., ::-1], 4))


def test_no_rows() -> None:
    assert np.isnan(expert_load(ENGINE[:0], 4)).all()
    assert expert_agreement(ENGINE[:0], ENGINE[:0], 4).shape == (3, 4)


def test_panels_hold_the_arrays() -> None:
    load, agreement = expert_load(ENGINE, 4), expert_agreement(ENGINE, TRAINER, 4)
    figure = expert_figure(load, agreement, "a batch")
    left, right = figure.axes[:2]
    assert [axes.get_title() for axes in (left, right)] == ["load, 1 = even", "agreement of trainer and engine"]
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in (left, right)} == {("expert", "layer")}
    for axes, values in ((left, load), (right, agreement)):
        shown = axes.get_images()[0].get_array()
        np.testing.assert_allclose(shown.filled(NAN), values)
        assert (shown.mask == np.isnan(values)).all()
    assert right.get_images()[0].get_clim() == (0, 1)
    assert left.get_images()[0].get_clim() == (0, 2)
    assert figure.get_suptitle() == "a batch"
    assert len(expert_figure(load).axes) == 2  # a panel and its bar


def test_a_figure_is_drawn_without_the_state_of_pyplot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    expert_figure([[1.0, NAN]], [[NAN, 0.5]]).savefig(tmp_path / "f.png")
    assert "matplotlib.pyplot" not in sys.modules
    assert (tmp_path / "f.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: expert_load(ENGINE, 3), r"routes must be in -1\.\.2, got -1\.\.3: check num_experts"),
        (lambda: expert_load(ENGINE - 1, 4), r"routes must be in -1\.\.3, got -2"),
        (lambda: expert_load(ENGINE.astype(float), 4), "routes must have a signed integer dtype, got float64"),
        (lambda: expert_load(ENGINE[0, 0], 4), r"routes must have shape \[\.\.\., L, K\], got \[2\]"),
        (lambda: expert_agreement(ENGINE, TRAINER[1:], 4), "recorded and live must have the same shape"),
        (lambda: expert_figure(np.ones(3)), "load, 1 = even must have 2 dimensions, got 1"),
        (lambda: expert_figure(np.ones((2, 3)), np.ones((3, 2))), "must have the same shape"),
    ],
)
def test_bad_input_is_refused(call: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()
