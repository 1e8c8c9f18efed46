"""Each check sees each engine with its fault. That it holds for one without: ``test_checks.py``."""

from __future__ import annotations

from support.conformance import faults_of, result, shared_moe
from support.faulty_engines import FAULTS

NAMES = ("abort", "resume", "resumed_tail")


@faults_of(NAMES)
def test_it_sees_the_fault(name: str, fault: str) -> None:
    found = result(name, FAULTS[name][fault](shared_moe()))
    assert found.verdict == "does not hold", found.text
    assert found.off is None or found.off > found.allowed  # type: ignore[operator]
    assert found.advice
