"""Maps, agreements, loads and kept tokens: numbers by hand, and what the figures hold."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from torchrl_moe.render.routes import (
    agreement_figure,
    expert_agreement,
    expert_figure,
    expert_load,
    kept_counts,
    kept_figure,
    kept_label,
    kept_rows,
    layer_agreement,
    load_figure,
    routes_figure,
)

NAN = np.nan
# three tokens, three layers (the first is dense), two of four experts
THEIRS = np.array([[[-1, -1], [0, 1], [2, 3]], [[-1, -1], [1, 0], [3, 2]], [[-1, -1], [1, 2], [-1, -1]]], dtype=np.int8)
OURS = np.array([[[-1, -1], [1, 0], [2, 3]], [[-1, -1], [1, 3], [0, 1]], [[-1, -1], [-1, -1], [0, 1]]], dtype=np.int16)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: layer_agreement(THEIRS, OURS[1:]), "must have the same shape"),
        (lambda: layer_agreement(THEIRS.astype(float), OURS), "recorded must have a signed integer dtype"),
        (lambda: agreement_figure({"live": [[0.5]]}), "live must have 1 dimension, got 2"),
        (lambda: agreement_figure({"live": [80.0]}), r"live: shares must be in 0\.\.1, got 80\.\.80"),
        (lambda: expert_load(THEIRS, 3), r"routes must be in -1\.\.2, got -1\.\.3: check num_experts"),
        (lambda: expert_load(THEIRS - 1, 4), r"routes must be in -1\.\.3, got -2"),
        (lambda: expert_load(THEIRS.astype(float), 4), "routes must have a signed integer dtype, got float64"),
        (lambda: expert_load(THEIRS[0, 0], 4), r"routes must have shape \[\.\.\., L, K\], got \[2\]"),
        (lambda: expert_agreement(THEIRS, OURS[1:], 4), "recorded and live must have the same shape"),
        (lambda: expert_figure(np.ones(3)), "load, 1 = even must have 2 dimensions, got 1"),
        (lambda: expert_figure(np.ones((2, 3)), np.ones((3, 2))), "must have the same shape"),
        (lambda: kept_counts(np.array([1, 2]), np.array([True]), 9), "must have the same shape"),
        (lambda: kept_counts(np.array([-12]), np.array([True]), 9), "from 12 token ids, and there are 9"),
        (lambda: kept_figure({"a": [0]}, 9), r"a: counts must be in 1\.\.9, got 0\.\.0"),
        (lambda: kept_figure({"a": [10]}, 9), r"a: counts must be in 1\.\.9, got 10\.\.10"),
        (lambda: load_figure({"replica 0": [(1.0, 0), (0.5, 0)]}), "the seconds of replica 0 go back"),
        (lambda: routes_figure(ROUTES[None]), "routes must have 3 dimensions, got 4"),
        (lambda: routes_figure(ROUTES.astype(float)), "routes must have a signed integer dtype"),
        (lambda: routes_figure(ROUTES, [3]), r"layers must be in 0\.\.2, got 3"),
    ],
)
def test_bad_input_is_refused(call: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        call()


# -- agreements and heatmaps ------------------------------------------------------------------------------------------
def test_shares_by_hand() -> None:
    """Rows unknown to either side do not count: of layers 1 and 2, two are known, and one has the same set."""
    np.testing.assert_array_equal(layer_agreement(THEIRS, OURS), [NAN, 0.5, 0.5])
    np.testing.assert_array_equal(layer_agreement(THEIRS[None], THEIRS[None, ..., ::-1]), [NAN, 1.0, 1.0])
    expected = [[NAN] * 4, [1 / 2, 2 / 2, NAN, NAN], [NAN, NAN, 1 / 2, 1 / 2]]
    np.testing.assert_allclose(expert_agreement(THEIRS, OURS, 4), expected)
    same = expert_agreement(THEIRS, THEIRS[..., ::-1], 4)  # in another order
    assert np.nanmin(same) == np.nanmax(same) == 1
    assert expert_agreement(THEIRS[:0], THEIRS[:0], 4).shape == (3, 4)


def test_load_by_hand() -> None:
    expected = [[NAN] * 4, [4 * 2 / 6, 4 * 3 / 6, 4 * 1 / 6, 0], [0, 0, 2, 2]]
    batch = torch.from_numpy(np.stack([THEIRS, THEIRS[..., ::-1].copy()]))  # [B, T, L, K], a tensor
    for routes in (THEIRS, batch):
        np.testing.assert_allclose(expert_load(routes, 4), expected)
    assert np.isnan(expert_load(THEIRS[:0], 4)).all()


def test_panels_hold_the_arrays() -> None:
    load, agreement = expert_load(THEIRS, 4), expert_agreement(THEIRS, OURS, 4)
    figure = expert_figure(load, agreement, "a batch")
    left, right = figure.axes[:2]
    assert [axes.get_title() for axes in (left, right)] == ["load, 1 = even", "agreement of trainer and engine"]
    assert {(axes.get_xlabel(), axes.get_ylabel()) for axes in (left, right)} == {("expert", "layer")}
    for axes, values in ((left, load), (right, agreement)):
        shown = axes.get_images()[0].get_array()
        np.testing.assert_allclose(shown.filled(NAN), values)
        assert (shown.mask == np.isnan(values)).all()
    assert right.get_images()[0].get_clim() == (0, 1) and left.get_images()[0].get_clim() == (0, 2)
    assert figure.get_suptitle() == "a batch"
    assert len(expert_figure(load).axes) == 2  # a panel and its bar
    panel = expert_figure(np.ones((3, 4))).axes[0]
    assert all(float(tick).is_integer() for tick in [*panel.get_xticks(), *panel.get_yticks()])


# -- kept numbers -----------------------------------------------------------------------------------------------------
def test_counts_by_hand() -> None:
    sizes, sampled = torch.tensor([[0, 3, -2], [0, 0, 1]], dtype=torch.int32), torch.tensor([[False, True, True]] * 2)
    np.testing.assert_array_equal(kept_counts(sizes, sampled, 10), [3, 8, 10, 1])


def test_every_count_lies_in_a_bin() -> None:
    for vocabulary in (1, 2, 3, 4, 5, 255, 256, 257):
        counts = np.arange(1, vocabulary + 1)
        (axes,) = kept_figure({"each once": counts}, vocabulary).axes
        values, edges = axes.patches[0].get_data()[:2]
        assert values.sum() == pytest.approx(1)
        assert np.histogram(counts, edges)[0].sum() == vocabulary and (np.diff(edges) > 0).all()


def test_rows_of_a_table_by_hand() -> None:
    assert kept_rows(torch.tensor([[0, 0, 3], [1, -2, 4]])) == [
        ("1 entry", "1"), ("2 to 4 entries", "2"), ("all but some", "1"), ("all", "2"),
    ]  # fmt: skip
    assert kept_rows([]) == []
    few, more = "5 to 16 entries", "17 to 64 entries"
    assert [kept_label(size) for size in (16, 17, 64, 65)] == [few, more, more, "more"]


# -- loads ------------------------------------------------------------------------------------------------------------
NEAR = [(3.0, "SIGKILL"), (3.15, "replica 1 DEAD"), (3.7, "replica 1 STARTING"), (5.9, "replica 1 SERVING")]


@pytest.mark.parametrize(
    ("events", "rows"),
    [
        (NEAR, 3),
        ([(0.0, "a"), (5.0, "b"), (10.0, "c")], 1),  # far apart: one line of text holds all
        ([(3.0, "replica 1 DEAD")] * 5, 5),
    ],
)
def test_labels_of_events_lie_above_the_lines_and_not_over_each_other(
    events: list[tuple[float, str]], rows: int
) -> None:
    figure = load_figure({"replica 0": [(0.0, 12), (9.0, 13)]}, events)
    figure.draw_without_rendering()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len({text.xy[1] for text in axes.texts}) == rows
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    highest = axes.transData.transform((0, 13))[1]
    assert all(box.y0 > highest for box in boxes)


def test_more_events_than_there_is_room_for_are_drawn_all_the_same() -> None:
    (axes,) = load_figure({"replica 0": [(0.0, 1)]}, [(1.0, "replica 1 DEAD")] * 100).axes
    assert len(axes.texts) == 100 and axes.get_ylim()[1] < 3


# -- route maps -------------------------------------------------------------------------------------------------------
# two experts for each of three tokens; the last has no route
ROUTES = np.array([[[-1, -1], [0, 1], [2, 3]], [[-1, -1], [1, 0], [3, -1]], [[-1, -1]] * 3], dtype=np.int8)


def test_maps_by_hand() -> None:
    figure = routes_figure(torch.from_numpy(ROUTES), prompt=1, title="a rollout")
    first, second = (axes.get_images()[0].get_array().filled(NAN) for axes in figure.axes)
    np.testing.assert_array_equal(first, [[1, 1, NAN], [1, 1, NAN], [0, 0, NAN], [0, 0, NAN]])
    np.testing.assert_array_equal(second, [[0, 0, NAN], [0, 0, NAN], [1, 0, NAN], [1, 1, NAN]])
    assert [axes.get_ylabel() for axes in figure.axes] == ["layer 1\nexpert", "layer 2\nexpert"]
    assert [axes.get_lines()[0].get_xdata()[0] for axes in figure.axes] == [0.5, 0.5]
    assert figure.get_suptitle() == "a rollout"
    assert "response after the dashed line" in figure.axes[-1].get_xlabel()


def test_layers_are_chosen_or_spread() -> None:
    deep = np.zeros((2, 10, 1), np.int16)
    deep[:, 0] = -1
    drawn = [axes.get_ylabel().split()[1] for axes in routes_figure(deep).axes]
    assert drawn == ["1", "4", "6", "9"]  # of 1 to 9: places 0, 2.67, 5.33 and 8
    assert [axes.get_ylabel() for axes in routes_figure(deep, [7]).axes] == ["layer 7\nexpert"]


@pytest.mark.parametrize("routes", [ROUTES[:, :1], ROUTES[:0], ROUTES[2:]])
def test_without_routes_it_says_so(routes: Any) -> None:
    (panel,) = routes_figure(routes).axes
    assert panel.texts[0].get_text() == "no route is known"
