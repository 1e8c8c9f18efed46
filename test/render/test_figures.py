"""Figures show themselves in a notebook, name the extra that they need, and have legends that cover nothing."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest
from matplotlib import style
from matplotlib.backends.backend_agg import FigureCanvasAgg

from torchrl_moe import render
from torchrl_moe.render.curves import PHASES
from torchrl_moe.render.figures import NotebookFigure

NUMBERS = {"reward": 0.5, "held_out_reward": 0.5, "dlogp_mean": 1e-3, "dlogp_max": 1e-1, "dlogp_live": 1e-2}
RUN = [{"step": step, "length": 6.0, **NUMBERS, **{f"seconds_{phase}": 1.0 for phase in PHASES}} for step in range(3)]
SWAP = [{"replica": 0, "phase": phase, "start": 0, "seconds": 1.0} for phase in ("pack", "stage", "pause", "swap")]
LOADS = {f"replica {i}": [(0.0, i), (1.0, 3)] for i in range(4)}
FIGURES: dict[str, tuple[Any, ...]] = {
    "agreement_figure": ({"live router": [0.5, 0.75], "replayed": [1.0, 1.0]}, "a rollout"),
    "expert_figure": ([[1.0, 1.0]],),
    "kept_figure": ({"top_p=0.9": [1, 5, 9], "top_k=4": [4, 4]}, 64, "kept tokens"),
    "load_figure": (LOADS, [(0.5, "replica 1 died")], "a call"),
    "log_ratio_figure": ({"replayed": np.arange(5.0), "live router": np.arange(9.0)}, 2.0, 81, "log-ratios"),
    "routes_figure": (np.zeros((3, 2, 1), np.int8),),
    "staleness_figure": ([[0, 0], [0, 1], [1, 2]], [0, 2, 3], "a run"),
    "timeline_figure": (SWAP, "a swap"),
    "training_figure": (RUN, "a run"),
}
"""Each figure of the room, and something to draw."""


@pytest.mark.parametrize("name", [name for name in render.__all__ if name.endswith("_figure")])
def test_every_figure_can_be_shown_and_sent_and_without_matplotlib_names_the_extra(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "matplotlib.pyplot", raising=False)
    figure = getattr(render, name)(*FIGURES[name])
    assert isinstance(pickle.loads(pickle.dumps(figure)), NotebookFigure)
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert "matplotlib.pyplot" not in sys.modules  # it needs none of its state
    for axes in figure.axes:
        if axes.get_label() != "<colorbar>" and axes.axison:
            assert axes.get_xlabel() or axes.get_ylabel()
    monkeypatch.delitem(sys.modules, "torchrl_moe.render.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl_moe\[render\]'"):
        getattr(render, name)(*FIGURES[name])


LONG = {f"temperature 0.6, top_p 0.{part}": np.arange(1, 99) for part in (90, 95, 99)}
MANY = {f"replica {index}": [(0.0, index), (1.0, 9)] for index in range(12)}


@pytest.mark.parametrize("background", ["default", pytest.param("dark_background", marks=pytest.mark.parity)])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        *((name, arguments) for name, arguments in FIGURES.items() if name not in ("expert_figure", "routes_figure")),
        ("kept_figure", (LONG, 259)),
        ("load_figure", (MANY,)),
    ],
)
def test_no_legend_covers_what_is_drawn(name: str, arguments: tuple[Any, ...], background: str) -> None:
    with style.context(background):
        figure = getattr(render, name)(*arguments)
        renderer = FigureCanvasAgg(figure).get_renderer()
        figure.canvas.draw()
    legends = [(axes, axes.get_legend()) for axes in figure.axes if axes.get_legend()]
    assert legends
    for axes, legend in legends:
        box, panel, title = (part.get_window_extent(renderer) for part in (legend, axes.patch, axes.title))
        assert panel.y1 <= box.y0 and box.y1 <= title.y0 + 1
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
        assert panel.width >= 0.3 * figure.bbox.width and title.y1 <= figure.bbox.y1
