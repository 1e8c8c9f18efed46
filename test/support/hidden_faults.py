"""``make faults``: faults that this project had, each put back into a copy of the tree, to see which test notices it.

The tests of a row run in its order until the first that fails; that one is run once more on the mended tree, where it
must pass. The copy is on disk, so that engine processes read the fault too; heavy packages are imported once.

    make faults ARGS="--list"
    make faults ARGS="--only store"            # those whose name or file has this text
    make faults ARGS="--results faults.json"   # goes on where it was interrupted
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from support.fault_table import FAULTS, Fault
from support.mutants import forked
from support.sources import ROOT

HEAVY = ("numpy", "torch", "torch._dynamo", "tensordict.nn", "torchrl.collectors", "torchrl.envs.llm", "hypothesis")
HEAVY += ("torchrl.modules.llm", "torchrl.objectives.llm", "transformers.models.qwen3_moe.modeling_qwen3_moe", "pytest")
NEEDED = ("torchrl_moe", "test", "benchmarks", "docs", "tutorials", "requirements")
LIMIT = 1800.0
"""Seconds for the tests of one fault."""
NO_TESTS = 5
"""pytest's status where all tests of the files are left out."""
MOST_BYTES = 8 << 30
"""Of memory, for each process of the tests: some faults ask for all there is."""
WORDS = {
    "caught": "caught by",
    "survived": "SURVIVED",
    "unsteady": "UNSTEADY: the test fails without the fault too:",
    "broken": "BROKEN: the tests cannot be collected:",
    "hung": "caught: the tests did not end; the last was",
    "killed": "NOT KNOWN: a signal ended the tests in",
}


@dataclass(frozen=True, slots=True)
class Run:
    """What the tests said of one tree."""

    status: int | None
    """pytest's own; below 0 a signal's; ``None``: they had not ended in time."""
    test: str = ""
    """The first that failed, or the one that did not end."""
    said: str = ""
    """The last line of its error."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one fault."""

    end: str
    """A key of :data:`WORDS`."""
    test: str = ""
    said: str = ""
    seconds: float = 0.0

    @property
    def is_caught(self) -> bool:
        """Whether the tests have noticed it."""
        return self.end in ("caught", "hung")


def copy_tree(into: Path) -> Path:
    """Copy what tests need of the checkout; the environment and git's history are linked."""
    skipped = shutil.ignore_patterns("__pycache__", "_build", "*.egg-info", ".hypothesis")
    for name in NEEDED:
        shutil.copytree(ROOT / name, into / name, ignore=skipped, symlinks=True)
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            shutil.copy2(path, into / path.name)
    (into / ".venv").symlink_to((ROOT / ".venv").resolve())
    return into


@contextmanager
def introduced(fault: Fault, tree: Path) -> Iterator[None]:
    """Put a fault into a tree, and take it out again."""
    path = tree / "torchrl_moe" / fault.file
    before = path.read_text(encoding="utf-8")
    try:
        _write(path, fault.introduced(before))
        yield
    finally:
        _write(path, before)


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    # byte code goes by size and full seconds: a fault of the same length would not be seen
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def files_of(patterns: Sequence[str], tree: Path) -> list[list[str]]:
    """Return the test files of each pattern below ``test/`` that no earlier pattern has; patterns without any go."""
    found: list[list[str]] = []
    seen: set[str] = set()
    for pattern in patterns:
        pattern = f"{pattern}**/test_*.py" if pattern.endswith("/") else pattern
        paths = [str(path.relative_to(tree)) for path in sorted((tree / "test").glob(pattern))]
        found.append([path for path in paths if path not in seen])
        seen.update(paths)
    return [paths for paths in found if paths]


class _Watch:
    """Writes which test runs, and which one failed."""

    def __init__(self, into: Path) -> None:
        self._into = into
        self._failed = False

    def _note(self, **values: str) -> None:
        if not self._failed:
            self._into.write_text(json.dumps(values), encoding="utf-8")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._note(test=nodeid)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            lines = [line[1:].strip() for line in str(report.longrepr).splitlines() if line.startswith("E ")]
            self._note(test=report.nodeid, said=lines[0][:200] if lines else "")
            self._failed = True

    pytest_collectreport = pytest_runtest_logreport


def run_tests(tree: Path, tests: Sequence[str], limit: float, patience: int = 300) -> Run:
    """Run tests of a tree until one fails, ``limit`` seconds for all and ``patience`` for each, in a fork of this."""
    notes = tree / "faults-watch.json"
    notes.unlink(missing_ok=True)

    def run() -> int:
        os.chdir(tree)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        import pytest

        options = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(tree)]
        return int(pytest.main([*options, "--timeout", str(patience), *tests], plugins=[_Watch(notes)]))

    status = forked(run, limit, tree / "faults.log")
    found = json.loads(notes.read_text(encoding="utf-8")) if notes.exists() else {}
    return Run(status, **found)


def judge(fault: Fault, tree: Path, limit: float = LIMIT) -> Result:
    """Put a fault into a tree, and run its tests."""
    began = time.monotonic()
    with introduced(fault, tree):
        run = Run(0)
        for files in files_of(fault.tests, tree):  # most are noticed by the first, and the others need not be imported
            run = run_tests(tree, files, limit - (time.monotonic() - began), fault.patience)
            if run.status not in (0, NO_TESTS):
                break
    end = {0: "survived", NO_TESTS: "survived", 1: "caught", None: "hung"}.get(run.status)
    end = end or ("killed" if (run.status or 0) < 0 else "broken")
    if end == "caught" and "::" not in run.test:  # a file that could not be imported
        end = "broken"
    if end == "caught" and run_tests(tree, [run.test], limit, fault.patience).status != 0:
        end = "unsteady"
    return Result(end, run.test, run.said, round(time.monotonic() - began, 1))


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each fault; 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="make faults", description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="faults whose name or file has one")
    parser.add_argument("--results", type=Path, metavar="FILE", help="keep results, and go on from those it has")
    parser.add_argument("--limit", type=float, default=LIMIT, metavar="SECONDS", help="for the tests of one fault")
    options = parser.parse_args(arguments)
    only = options.only or [""]
    chosen = [fault for fault in FAULTS if any(text in f"{fault.name} {fault.file}" for text in only)]
    if options.list:
        for fault in chosen:
            print(f"{fault.name:28} {fault.file:44} {fault.title}")
        return 0
    results: dict[str, Result] = {}
    if options.results is not None and options.results.exists():
        kept = json.loads(options.results.read_text(encoding="utf-8"))
        results = {name: Result(**values) for name, values in kept.items()}
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="torchrl_moe-faults-") as folder:
        tree = copy_tree(Path(folder).resolve())
        os.environ["PYTHONPATH"] = os.pathsep.join([str(tree), str(tree / "test")])
        # imports of what runs here from now on, and of its children, come from the copy
        here = {str(ROOT), str(ROOT / "test"), ""}
        sys.path[:] = [str(tree), str(tree / "test"), *(path for path in sys.path if path not in here)]
        for name in [name for name in sys.modules if name.split(".")[0] in ("support", "torchrl_moe")]:
            del sys.modules[name]
        for number, fault in enumerate(chosen, 1):
            found = results.get(fault.name)
            if found is None or not found.is_caught:
                found = results[fault.name] = judge(fault, tree, options.limit)
                if options.results is not None:
                    kept = {name: asdict(result) for name, result in results.items()}
                    options.results.write_text(json.dumps(kept, indent=1), encoding="utf-8")
            print(f"{number:2} {fault.name:28} {WORDS[found.end]} {found.test} ({found.seconds:.0f} s)", flush=True)
    caught = sum(results[fault.name].is_caught for fault in chosen)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
