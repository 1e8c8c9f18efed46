"""Figures show themselves in a notebook, name the extra that they need, and have legends that cover nothing."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from torchrl_moe import render
from torchrl_moe.render.curves import PHASES, log_ratio_figure, staleness_figure, timeline_figure, training_figure
from torchrl_moe.render.figures import NotebookFigure, legend_above, whole_ticks
from torchrl_moe.render.routes import agreement_figure, kept_figure, load_figure

# -- figures ----------------------------------------------------------------------------------------------------------
FIGURES: dict[str, tuple[Any, ...]] = {
    "agreement_figure": ({"live": [0.5, 1.0]},),
    "expert_figure": ([[1.0, 1.0]],),
    "kept_figure": ({"all": [1, 2]}, 4),
    "load_figure": ({"replica 0": [(0.0, 1)]},),
    "log_ratio_figure": ({"live": [0.0, 0.1]},),
    "routes_figure": (np.zeros((3, 2, 1), np.int8),),
    "staleness_figure": ([[0, 1]], [1]),
    "timeline_figure": ([{"replica": 0, "phase": "a", "start": 0.0, "seconds": 1.0}],),
    "training_figure": ([{"step": 0, "reward": 0.5}],),
}
"""Each figure of the room, and the least that it draws."""


@pytest.mark.parametrize("name", [name for name in render.__all__ if name.endswith("_figure")])
def test_every_figure_can_be_shown_and_sent_and_without_matplotlib_names_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    figure = getattr(render, name)(*FIGURES[name])
    assert isinstance(pickle.loads(pickle.dumps(figure)), NotebookFigure)
    for axes in figure.axes:
        if axes.get_label() != "<colorbar>" and axes.axison:
            assert axes.get_xlabel() or axes.get_ylabel()
    monkeypatch.delitem(sys.modules, "torchrl_moe.render.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl_moe\[render\]'"):
        getattr(render, name)(*FIGURES[name])


def test_a_notebook_gets_a_picture_with_ticks_at_whole_numbers() -> None:
    figure = NotebookFigure(figsize=(1, 1))
    assert figure._repr_png_().startswith(b"\x89PNG")
    axes = figure.subplots()
    axes.set_xlim(0, 3)
    whole_ticks(axes.xaxis)
    assert {at % 1 for at in axes.get_xticks()} == {0.0}


# -- legends ----------------------------------------------------------------------------------------------------------
def curves() -> Any:
    numbers = {"reward": 0.5, "dlogp_mean": 1e-3, "dlogp_max": 1e-1, "dlogp_live": 1e-2, "length": 6.0}
    rows = [{"step": step, "held_out_reward": 0.5, **numbers} for step in range(3)]
    return training_figure([{**row, **{f"seconds_{phase}": 1.0 for phase in PHASES}} for row in rows], "a run")


def histogram() -> Any:
    return log_ratio_figure({"replayed": np.arange(5.0), "live router": np.arange(9.0)}, title="log-ratios")


def timeline() -> Any:
    phases = ("pack", "stage", "pause", "swap", "canary")
    rows = [{"replica": 0, "phase": phase, "start": i, "seconds": 1.0} for i, phase in enumerate(phases)]
    return timeline_figure(rows, "a swap")


def agreement() -> Any:
    return agreement_figure({"live router": [0.5, 0.75], "replayed": [1.0, 1.0]}, "a rollout")


def kept() -> Any:
    return kept_figure({"top_p=0.9": [1, 5, 9], "top_k=4": [4, 4]}, 64, "kept tokens")


def staleness() -> Any:
    return staleness_figure([[0, 0], [0, 1], [1, 2]], [0, 2, 3], "a run")


def load() -> Any:
    return load_figure({f"replica {i}": [(0.0, i), (1.0, 3)] for i in range(4)}, [(0.5, "replica 1 died")], "a call")


def long_labels() -> Any:
    return kept_figure({f"temperature 0.6, top_p 0.{part}": np.arange(1, 99) for part in (90, 95, 99)}, 259)


def many_labels() -> Any:
    return load_figure({f"replica {index}": [(0.0, index), (1.0, 9)] for index in range(12)})


WITH_LEGENDS = [curves, histogram, timeline, agreement, kept, staleness, load, long_labels, many_labels]


@pytest.mark.parametrize("background", ["default", pytest.param("dark_background", marks=pytest.mark.parity)])
@pytest.mark.parametrize("draw", WITH_LEGENDS)
def test_no_legend_covers_what_is_drawn(draw: Callable[[], Any], background: str) -> None:
    with style.context(background):
        figure = draw()
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.canvas.draw()
    legends = [(axes, axes.get_legend()) for axes in figure.axes if axes.get_legend()]
    assert legends
    for axes, legend in legends:
        box, panel, title = (part.get_window_extent(renderer) for part in (legend, axes.patch, axes.title))
        assert panel.y1 <= box.y0 and box.y1 <= title.y0 + 1
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
        assert panel.width >= 0.3 * figure.bbox.width and title.y1 <= figure.bbox.y1


def test_a_panel_without_labels_has_a_title_only() -> None:
    axes = Figure().subplots()
    axes.plot([1, 2])
    legend_above(axes, "a title")
    assert axes.get_legend() is None and axes.get_title() == "a title"
