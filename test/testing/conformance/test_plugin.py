"""The checks as tests of pytest: a session within this one, of a project with an engine of its own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.conformance import shared_moe
from torchrl_moe.testing.conformance import plugin

ENGINE = """
import pytest
from support.conforming_engine import QUICK
from support.conformance import shared_moe
from support.faulty_engines import FAULTS

@pytest.fixture(scope="session")
def conformance_adapter():
    return FAULTS["dtype"]["int32"](shared_moe())

@pytest.fixture(scope="session")
def conformance_settings():
    return QUICK
"""
MODEL = """
@pytest.fixture(scope="session")
def conformance_model():
    return shared_moe()
"""
TEST = """
def test_my_engine(conformance_check):
    conformance_check()
"""
ALONE = [f"-pno:{name}" for name in ("cacheprovider", "faulthandler", "timeout", "xdist")]
"""What a session within another leaves to that one."""


class Outcomes:
    """Collects what became of the tests: check -> outcome."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.outcome != "passed" or report.when == "call":
            name = report.nodeid.partition("[")[2].removesuffix("]")
            self.found[name] = report.outcome if report.when == "call" else f"{report.outcome} in {report.when}"


def run(folder: Path, *arguments: str, **files: str) -> tuple[dict[str, str], int]:
    """The outcomes, and the exit code."""
    shared_moe()
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    outcomes = Outcomes()
    config = [f"--rootdir={folder}", "--import-mode=importlib", "-c", str(folder / "none.ini"), "-s"]
    (folder / "none.ini").write_text("[pytest]\n")
    try:
        code = pytest.main([*config, *ALONE, *arguments, str(folder)], plugins=[plugin, outcomes])
    finally:
        for name in [name for name, module in sys.modules.items() if _lies_in(module, folder)]:
            del sys.modules[name]  # or the next session would take it for its own
    return outcomes.found, int(code)


def _lies_in(module: Any, folder: Path) -> bool:
    return str(getattr(module, "__file__", "")).startswith(str(folder))


def test_each_check_is_a_test_and_the_report_is_written(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wanted = "rows and not over or dtype or native_routes"
    path = tmp_path / "report.json"
    found, code = run(tmp_path, "-k", wanted, f"--conformance-json={path}", conftest=ENGINE + MODEL, test_it=TEST)
    assert found == {"rows": "passed", "dtype": "failed", "native_routes": "passed"}
    assert code == 1
    text = capfd.readouterr().out
    assert "dtype does not hold, off by 1 (allowed: 0): wrong types: routes are int32, wanted int8" in text
    assert "conforming: 2 hold, 1 do not hold, 0 not offered" in text
    report = json.loads(path.read_text())
    assert (report["engine"], report["holds"]) == ("conforming", False)
    assert [(one["name"], one["verdict"]) for one in report["checks"]] == [
        ("rows", "holds"),
        ("dtype", "does not hold"),
        ("native_routes", "holds"),
    ]


def test_what_is_not_offered_is_skipped_with_the_reason(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, code = run(tmp_path, "-rs", "-k", "replay_parity", conftest=ENGINE, test_it=TEST)
    assert (found, code) == ({"replay_parity": "skipped"}, 0)
    assert "replay_parity not offered: nothing says which layers have routers" in capfd.readouterr().out


def test_an_engine_must_be_given(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    found, code = run(tmp_path, "-k", "rows and not over", test_it=TEST + "def test_other_rows(): pass")
    assert found == {"rows": "failed in setup", "": "passed"}
    assert code == 1
    assert "override the fixture conformance_adapter" in capfd.readouterr().out
