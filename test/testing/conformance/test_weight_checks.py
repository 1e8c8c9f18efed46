"""Each check sees each engine with its fault. That it holds for one without: ``test_checks.py``."""

from __future__ import annotations

from dataclasses import replace

from support.conformance import faults_of, result, shared_moe
from support.conforming_engine import QUICK
from support.faulty_engines import FAULTS
from torchrl_moe.testing.conformance import check

NAMES = ("versions", "update", "versions_over_update", "rows_over_update")


@faults_of(NAMES)
def test_it_sees_the_fault(name: str, fault: str) -> None:
    found = result(name, FAULTS[name][fault](shared_moe()))
    assert found.verdict == "does not hold", found.text
    assert found.off is None or found.off > found.allowed  # type: ignore[operator]
    assert found.advice


def test_an_update_that_tolerances_cannot_see_proves_nothing() -> None:
    """An engine that keeps its weights would hold."""
    settings = replace(QUICK, tolerance=10.0)
    found = check(
        FAULTS["update"]["none of the weights"](shared_moe()), shared_moe(), only=["update"], settings=settings
    )
    assert found["update"].verdict == "not offered"
    assert "other weights hardly change this model's log-probs" in found["update"].seen
