"""The checks as pytest tests: one for each check, in your own project.

In the topmost ``conftest.py``, or with ``-p torchrl_moe.testing.conformance.plugin``::

    pytest_plugins = ["torchrl_moe.testing.conformance.plugin"]

    @pytest.fixture(scope="session")
    def conformance_adapter():
        return MyAdapter(...)

    @pytest.fixture(scope="session")
    def conformance_model():
        return "path/or/name/of/the/model"

and in a test file::

    def test_my_engine(conformance_check):
        conformance_check()

Checks that are not offered are skipped, with the reason. The table is shown at the end; ``--conformance-json FILE``
writes the report. The checks share one engine: run them in one process, without ``-n`` of pytest-xdist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from torchrl_moe.data import RoutingLayout
from torchrl_moe.testing.conformance.adapter import EngineAdapter
from torchrl_moe.testing.conformance.checks import CHECKS, open_trial, run_check
from torchrl_moe.testing.conformance.report import CheckResult, ConformanceReport, Settings
from torchrl_moe.testing.conformance.trial import Trial

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# what the summary at the end shows; only the configuration outlives the fixtures
RESULTS = pytest.StashKey[dict[str, CheckResult]]()
ENGINE = pytest.StashKey[str]()


@pytest.fixture(scope="session")
def conformance_adapter() -> EngineAdapter:
    """The engine's adapter; to be overridden."""
    raise pytest.UsageError("override the fixture conformance_adapter: it returns the adapter of your engine")


@pytest.fixture(scope="session")
def conformance_model() -> PreTrainedModel | str | Path | None:
    """The served transformers model, or where to load it from; unless overridden, nothing is compared."""
    return None


@pytest.fixture(scope="session")
def conformance_layout() -> RoutingLayout | None:
    """The layout of the model's routers, if there is no model."""
    return None


@pytest.fixture(scope="session")
def conformance_settings() -> Settings:
    """Settings of the requests, and tolerances."""
    return Settings()


@pytest.fixture(scope="session")
def conformance_trial(
    conformance_adapter: EngineAdapter,
    conformance_model: PreTrainedModel | str | Path | None,
    conformance_layout: RoutingLayout | None,
    conformance_settings: Settings,
    pytestconfig: pytest.Config,
) -> Iterator[Trial]:
    """The run that all checks share."""
    pytestconfig.stash[ENGINE] = str(getattr(conformance_adapter, "name", type(conformance_adapter).__name__))
    trial = open_trial(conformance_adapter, conformance_model, conformance_layout, conformance_settings)
    yield trial
    trial.close()


@pytest.fixture
def conformance_check(
    request: pytest.FixtureRequest, conformance_trial: Trial, pytestconfig: pytest.Config
) -> Callable[[], None]:
    """A function that runs one check, and fails or skips the test."""

    def run() -> None:
        # noted before the test is skipped or failed, which both leave this function
        result = run_check(request.param, conformance_trial)
        pytestconfig.stash.setdefault(RESULTS, {})[result.name] = result
        if result.verdict == "not offered":
            pytest.skip(result.text)
        if not result.holds:
            pytest.fail(result.text, pytrace=False)

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds ``--conformance-json``."""
    group = parser.getgroup("conformance", "conformance of an engine's routes")
    group.addoption("--conformance-json", metavar="FILE", help="write the report of the conformance checks as JSON")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Runs tests that use ``conformance_check`` once for each check."""
    if "conformance_check" in metafunc.fixturenames:
        metafunc.parametrize("conformance_check", CHECKS, ids=[one.name for one in CHECKS], indirect=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Shows the table, and writes the JSON."""
    results = config.stash.get(RESULTS, {})
    if not results:
        return  # the session ran other tests only
    report = ConformanceReport(config.stash.get(ENGINE, "engine"), tuple(results.values()))
    terminalreporter.section("conformance")
    terminalreporter.write_line(report.table())
    path = config.getoption("--conformance-json")
    if path:
        Path(path).write_text(report.to_json() + "\n", encoding="utf-8")
