"""A trainer's bar, a panel for each replica, a line for each update: at the seconds that were given."""

from __future__ import annotations

from torchrl_moe.render.collection_timelines import collection_figure

PHASES = [
    {"phase": "waiting", "start": 0.0, "seconds": 2.0},
    {"phase": "training", "start": 2.0, "seconds": 3.0},
    {"phase": "waiting", "start": 5.0, "seconds": 1.0},
]
FLIGHTS = {"replica 0": [(0.0, 4), (3.0, 1)], "others": [(1.0, 9)]}


def test_each_phase_is_a_bar_of_its_color() -> None:
    bar = collection_figure("trainer", PHASES, FLIGHTS).axes[0]
    drawn = {
        part.get_label(): [(path.get_extents().x0, path.get_extents().x1) for path in part.get_paths()]
        for part in bar.collections
    }
    assert drawn == {"training": [(2.0, 5.0)], "waiting": [(0.0, 2.0), (5.0, 6.0)]}
    colors = {tuple(part.get_facecolor()[0]) for part in bar.collections}
    assert len(colors) == 2
    assert bar.get_ylabel() == "trainer"


def test_each_replica_is_a_step_line_until_the_end() -> None:
    _, first, others = collection_figure("trainer", PHASES, FLIGHTS, end=8.0).axes
    ((line,), (other,)) = (axes.get_lines() for axes in (first, others))
    assert line.get_drawstyle() == "steps-post"
    assert (list(line.get_xdata()), list(line.get_ydata())) == ([0.0, 3.0, 8.0], [4, 1, 1])
    assert (list(other.get_xdata()), list(other.get_ydata())) == ([1.0, 8.0], [9, 9])
    assert [axes.get_ylabel() for axes in (first, others)] == ["replica 0", "others"]
    assert first.get_ylim() == others.get_ylim()  # so that they can be compared
    assert first.get_ylim()[1] > 9


def test_a_sum_has_a_scale_of_its_own() -> None:
    _, first, others = collection_figure("trainer", PHASES, FLIGHTS, sums=["others"]).axes
    assert 4 < first.get_ylim()[1] < 5
    assert 9 < others.get_ylim()[1] < 10


def test_an_update_is_a_line_through_every_panel() -> None:
    figure = collection_figure("writer", PHASES, FLIGHTS, [1.5, 4.0], title="a title")
    for axes in figure.axes:
        (lines,) = (part for part in axes.collections if part.get_label() == "weight update")
        assert [segment[:, 0].tolist() for segment in lines.get_segments()] == [[1.5, 1.5], [4.0, 4.0]]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert sorted(legend) == ["answers in flight", "training", "waiting", "weight update"]
    assert figure.axes[0].get_title() == "a title"
    assert figure.axes[-1].get_xlabel() == "seconds"


def test_nothing_gives_an_empty_figure() -> None:
    (bar,) = collection_figure("trainer", [], {}).axes
    assert not bar.collections and bar.get_legend() is None
