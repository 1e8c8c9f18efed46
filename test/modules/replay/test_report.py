"""A replay's report is a mapping, and a table where it is shown."""

from __future__ import annotations

from support.html_table import TableReader
from torchrl_moe.modules.replay.router_replay import ReplayReport

DONE = {"replayed": 1400, "live": 4, "refused": 0, "agreement": 0.875}


def test_it_is_printed_and_shown_as_a_table() -> None:
    report = ReplayReport({1: DONE, 3: {**DONE, "agreement": None}})
    title, header, first, second = repr(report).splitlines()
    assert title == "replay of 2 layers, mean agreement 87.5%"
    assert header.split() == ["layer", *("replayed", "rows"), *("live", "rows"), *("refused", "rows"), "agreement"]
    assert first.split() == ["1", "1,400", "4", "0", "87.5%"]
    assert second.split() == ["3", "1,400", "4", "0", "–"]
    read = TableReader(report._repr_html_())
    assert read.rows["tbody"] == [["1", "1,400", "4", "0", "87.5%"], ["3", "1,400", "4", "0", "–"]]
    assert read.other[0] == title


def test_before_a_context_it_says_so() -> None:
    assert repr(ReplayReport()) == "replay: no context has come to its end yet"
    assert "no context" in ReplayReport()._repr_html_()


def test_deep_models_are_cut() -> None:
    report = ReplayReport(dict.fromkeys(range(200), DONE))
    assert len(repr(report).splitlines()) == 2 + 64 + 1
    assert TableReader(report._repr_html_()).rows["tbody"][-1][0] == "… 136 more"
