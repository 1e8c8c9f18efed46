"""A figure shows itself in a notebook, and without matplotlib it says which extra has it."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import numpy as np
import pytest

from torchrl_moe import render
from torchrl_moe.render.figures import NotebookFigure, whole_ticks

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


def test_every_figure_is_here() -> None:
    assert sorted(FIGURES) == [name for name in render.__all__ if name.endswith("_figure")]


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_can_be_shown_and_sent(name: str) -> None:
    figure = getattr(render, name)(*FIGURES[name])
    assert isinstance(pickle.loads(pickle.dumps(figure)), NotebookFigure)
    for axes in figure.axes:
        if axes.get_label() != "<colorbar>" and axes.axison:
            assert axes.get_xlabel() or axes.get_ylabel()


def test_a_notebook_gets_a_picture() -> None:
    assert NotebookFigure(figsize=(1, 1))._repr_png_().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", FIGURES)
def test_without_matplotlib_the_extra_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchrl_moe.render.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install 'torchrl_moe\[render\]'"):
        getattr(render, name)(*FIGURES[name])


def test_ticks_stand_at_whole_numbers() -> None:
    axes = NotebookFigure().subplots()
    axes.set_xlim(0, 3)
    whole_ticks(axes.xaxis)
    assert {at % 1 for at in axes.get_xticks()} == {0.0}
