"""Settings that are refused, and what is found: faults counted, and a report as text, HTML and JSON."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from typing import Any

import pytest

from torchrl_moe.testing.conformance import CheckResult, ConformanceReport, Settings


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


def test_failures_are_those_that_do_not_hold_and_a_row_has_words() -> None:
    assert [one.name for one in REPORT.failures] == ["b", "d", "e"]
    assert [one.holds for one in REPORT.results] == [True, False, False, False, False]
    with pytest.raises(KeyError, match="no check 'z' in this report"):
        REPORT["z"]
    assert REPORT["b"].text == (
        "b does not hold, off by 2.5e-01 (allowed: 1.0e-04): much. What must hold: meaning of b. What to do: mend it."
    )
    assert REPORT["c"].text == "c not offered: no such thing. What must hold: meaning of c."


def test_the_table_and_the_json() -> None:
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
    same = {"meaning": "m", "verdict": "does not hold", "advice": "do"}
    shared = ConformanceReport("x", (CheckResult(name="a", **same), CheckResult(name="b", **same)))
    assert shared.table().splitlines()[-1] == "a, b: m. What to do: do."
    html = REPORT._repr_html_()
    assert "an &lt;engine&gt;: 1 holds" in html  # escaped
    assert "What to do: mend it." in html
    found = json.loads(REPORT.to_json())
    assert found["engine"] == "an <engine>"
    assert found["holds"] is False
    assert [one["off"] for one in found["checks"]] == [0, 0.25, None, None, None]
    assert found["checks"][1] == asdict(REPORT["b"])
    assert json.loads(ConformanceReport("x", REPORT.results[:1]).to_json(indent=None))["holds"] is True


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"tolerance": 0.0}, "tolerance must be positive, got 0"),
        ({"tie": -1.0}, "tie must not be negative, got -1"),
        ({"patience": 0.0}, "patience must be positive, got 0"),
        ({"prompts": ()}, r"prompts must be lengths of at least 1, got \(\)"),
        ({"prompts": (3, 0)}, r"prompts must be lengths of at least 1, got \(3, 0\)"),
        ({"answer": 1}, "answer must be at least 2, got 1"),
        ({"long_answer": 3}, "long_answer must be at least 4, got 3"),
        ({"long_prompt": 1}, "long_prompt must be at least 2, got 1"),
        ({"samples": 1}, "samples must be at least 2, got 1"),
        ({"vocabulary": 1}, "vocabulary must be at least 2, got 1"),
    ],
)
def test_what_cannot_be_asked_is_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Settings(**given)
