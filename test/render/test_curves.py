"""The figure of a run: four panels, the numbers of its rows, and rows with holes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrl_moe.render.curves import PHASES, training_figure


def row(step: int, **changes: Any) -> dict[str, Any]:
    values = {
        "step": step,
        "reward": 0.1 * step,
        "held_out_reward": "" if step % 2 else 0.5,
        "dlogp_mean": 1e-6,
        "dlogp_max": 1e-5,
        "length": 3.0 + step,
        **{f"seconds_{phase}": 0.1 * (i + 1) for i, phase in enumerate(PHASES)},
    }
    return {**values, **changes}


ROWS = [row(step) for step in range(4)]


def lines(axes: Any) -> dict[str, tuple[list[float], list[float]]]:
    return {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}


def test_four_panels_show_the_columns() -> None:
    figure = training_figure(ROWS, "a run")
    reward, mismatch, length, seconds = figure.axes
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["reward", "|log-prob, trainer - engine|", "answer length, tokens", "seconds per step"]
    assert figure.get_suptitle() == "a run"
    assert {axes.get_xlabel() for axes in figure.axes} == {"step"}
    shown = lines(reward)
    assert shown["rollouts"] == ([0, 1, 2, 3], pytest.approx([0.0, 0.1, 0.2, 0.3]))
    assert shown["held-out problems, greedy"] == ([0, 2], [0.5, 0.5])
    assert lines(mismatch) == {"mean": ([0, 1, 2, 3], [1e-6] * 4), "max": ([0, 1, 2, 3], [1e-5] * 4)}
    assert mismatch.get_yscale() == "log"
    assert [values for _, values in lines(length).values()] == [[3, 4, 5, 6]]
    assert [area.get_label() for area in seconds.collections] == list(PHASES)
    tops = [area.get_paths()[0].vertices[:, 1].max() for area in seconds.collections]
    assert np.allclose(tops, [0.1, 0.3, 0.6, 1.0])  # stacked


def test_a_short_run_can_be_seen() -> None:
    rows = [row(step, held_out_reward="", dlogp_mean="" if step else 1e-6, dlogp_max="") for step in range(3)]
    reward, mismatch, length, _ = training_figure(rows).axes
    assert set(lines(reward)) == {"rollouts"} and set(lines(mismatch)) == {"mean"}  # no series without a point
    assert [line.get_marker() for axes in (reward, mismatch, length) for line in axes.get_lines()] == ["o"] * 3
    assert all(float(tick).is_integer() for axes in (reward, mismatch, length) for tick in axes.get_xticks())
    assert mismatch.get_xlim() == (-0.5, 2.5)
    assert training_figure([row(step) for step in range(10)]).axes[0].get_lines()[0].get_marker() == "None"


def test_what_was_not_measured_says_so_and_one_step_has_bars() -> None:
    figure = training_figure([row(0, dlogp_mean="", dlogp_max="", seconds_sync=0.0)])
    _, mismatch, _, seconds = figure.axes
    assert [text.get_text() for text in mismatch.texts] == ["not measured"] and not mismatch.get_lines()
    assert [bar.get_height() for bar in seconds.patches] == pytest.approx([0.1, 0.2, 0.3])
    assert [text.get_text() for text in seconds.get_legend().get_texts()] == ["generate", "score", "train"]


def test_rewards_beyond_1_are_not_cut_off() -> None:
    low, high = training_figure([row(step, reward=10.0 * step) for step in range(3)]).axes[0].get_ylim()
    assert low <= 0 and high >= 20


def test_the_live_router_is_shown_where_it_was_measured() -> None:
    mismatch = training_figure([row(0, dlogp_live=0.25), row(1, dlogp_live="")]).axes[1]
    assert lines(mismatch)["mean, live router"] == ([0], [0.25])
    assert lines(mismatch)["mean, replayed"] == ([0, 1], [1e-6] * 2)
    assert set(lines(mismatch)) == {"mean, live router", "mean, replayed", "max, replayed"}


@pytest.mark.parametrize("empty", ["", None])
def test_empty_cells_are_left_out(empty: Any) -> None:
    rows = [row(step, held_out_reward=empty, dlogp_mean=empty) for step in range(3)]
    figure = training_figure(rows)
    assert set(lines(figure.axes[0])) == {"rollouts"} and set(lines(figure.axes[1])) == {"max"}
    assert len(lines(figure.axes[1])["max"][0]) == 3


def test_rows_read_back_from_a_file_are_text(tmp_path: Path) -> None:
    text = [{key: str(value) for key, value in one.items()} for one in ROWS]
    figure = training_figure(text)
    assert lines(figure.axes[0])["rollouts"][0] == [0, 1, 2, 3]
    figure.savefig(tmp_path / "run.png")
    assert (tmp_path / "run.png").stat().st_size > 10_000


@pytest.mark.parametrize(
    "rows",
    [
        [row(0)],
        [row(0), row(1, seconds_sync="", seconds_score=None)],  # a phase that did not run took no time
        [row(0, dlogp_mean=0.0, dlogp_max=0.0)],  # agreement to the bit, on a log scale
        [{"step": 0, "reward": 1.0}],
        [],
    ],
)
def test_short_and_incomplete_runs_are_drawn(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    training_figure(rows).savefig(tmp_path / "run.png")


def test_no_display_is_needed_and_no_global_state_is_touched(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom torchrl_moe.render.curves import training_figure\n"
        "assert 'matplotlib' not in sys.modules\n"
        "training_figure([{'step': 0, 'reward': 1.0}]).savefig(sys.argv[1])\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
    )
    bare = {"PATH": "", "HOME": str(tmp_path), "MPLCONFIGDIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run.png")], env=bare, check=True, timeout=60)
    assert (tmp_path / "run.png").exists()
