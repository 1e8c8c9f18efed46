"""Faults of routes, counted and in words."""

from __future__ import annotations

from torchrl_moe.testing.conformance.report import RouteFaults


def test_missing_and_wrong_rows_count() -> None:
    found = RouteFaults(rows=10, missing=2, wrong=3, ties=1, first="; the first at token 4, layer 1")
    assert found.count == 5
    assert found.text == ("10 rows of tokens and layers: 2 missing, 3 wrong, 1 ties; the first at token 4, layer 1")


def test_without_a_model_no_row_is_wrong() -> None:
    found = RouteFaults(rows=10, missing=2, wrong=None)
    assert found.count == 2
    assert found.text == "10 rows of tokens and layers: 2 missing, no model to judge them"
