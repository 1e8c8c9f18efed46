"""A report as text, HTML and JSON."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from torchrl_moe.testing.conformance import CheckResult, ConformanceReport


def row(name: str, verdict: Any, **given: Any) -> CheckResult:
    return CheckResult(name=name, meaning=f"meaning of {name}", verdict=verdict, **given)


REPORT = ConformanceReport(
    "an <engine>",
    (
        row("a", "holds", off=0.0, allowed=0.0, seen="nothing"),
        row("b", "does not hold", off=0.25, allowed=1e-4, seen="much", advice="mend it"),
        row("c", "not offered", seen="no such thing"),
        row("d", "does not hold", off=math.inf, allowed=1e-4, seen="no number", advice="mend that"),
        row("e", "does not hold", seen="an error", advice="look"),
    ),
)


def test_failures_are_those_that_do_not_hold() -> None:
    assert [one.name for one in REPORT.failures] == ["b", "d", "e"]
    assert [one.holds for one in REPORT.results] == [True, False, False, False, False]


def test_rows_are_found_by_name() -> None:
    assert REPORT["c"].seen == "no such thing"
    with pytest.raises(KeyError, match="no check 'z' in this report"):
        REPORT["z"]


def test_the_table() -> None:
    assert str(REPORT) == REPORT.table()
    assert REPORT.table().splitlines() == [
        "an <engine>: 1 holds, 3 do not hold, 1 not offered",
        "check  verdict         off by  allowed  seen",
        "a      holds                0        0  nothing",
        "b      does not hold  2.5e-01  1.0e-04  much",
        "c      not offered                      no such thing",
        "d      does not hold      inf  1.0e-04  no number",
        "e      does not hold                    an error",
        "b: meaning of b. What to do: mend it.",
        "d: meaning of d. What to do: mend that.",
        "e: meaning of e. What to do: look.",
    ]


def test_failures_that_share_their_advice_share_its_line() -> None:
    same = {"meaning": "m", "verdict": "does not hold", "advice": "do"}
    report = ConformanceReport("x", (CheckResult(name="a", **same), CheckResult(name="b", **same)))
    assert report.table().splitlines()[-1] == "a, b: m. What to do: do."


def test_the_html_is_escaped() -> None:
    html = REPORT._repr_html_()
    assert "an &lt;engine&gt;: 1 holds" in html
    assert "What to do: mend it." in html


def test_the_json_is_plain_and_has_no_infinities() -> None:
    found = json.loads(REPORT.to_json())
    assert found["engine"] == "an <engine>"
    assert found["holds"] is False
    assert [one["off"] for one in found["checks"]] == [0, 0.25, None, None, None]
    assert found["checks"][1] == {
        "name": "b",
        "meaning": "meaning of b",
        "verdict": "does not hold",
        "off": 0.25,
        "allowed": 1e-4,
        "seen": "much",
        "advice": "mend it",
    }
    assert json.loads(ConformanceReport("x", REPORT.results[:1]).to_json(indent=None))["holds"] is True


def test_a_row_in_words() -> None:
    assert REPORT["b"].text == (
        "b does not hold, off by 2.5e-01 (allowed: 1.0e-04): much. What must hold: meaning of b. What to do: mend it."
    )
    assert REPORT["c"].text == "c not offered: no such thing. What must hold: meaning of c."
