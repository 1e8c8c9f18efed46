"""``make faults``: faults that this project had, each put back into a copy of the tree, to see which test notices it.

The tests of a row run in its order until the first that fails; that one is run once more on the mended tree, where it
must pass. The copy is on disk, so that engine processes read the fault too; heavy packages are imported once.
``make faults ARGS="--only store"`` picks those whose name or file has a text.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import multiprocessing
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from support.fault_table import FAULTS, Fault
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
ENDED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)
BEGUN = re.compile(r"^(test/\S+?::.+?)(?: [A-Z]+ +\[ *\d+%\])?\s*$", re.MULTILINE)
"""What pytest's log says of a test."""


@contextmanager
def copied_tree() -> Iterator[Path]:
    """Copy what tests need of the checkout; this process and its children import from there from now on."""
    for name in HEAVY:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="torchrl_moe-faults-") as folder:
        tree = Path(folder).resolve()
        skipped = shutil.ignore_patterns("__pycache__", "_build", "*.egg-info", ".hypothesis")
        for name in NEEDED:
            shutil.copytree(ROOT / name, tree / name, ignore=skipped, symlinks=True)
        for path in ROOT.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy2(path, tree / path.name)
        (tree / ".venv").symlink_to((ROOT / ".venv").resolve())
        ours = [str(tree), str(tree / "test")]
        os.environ["PYTHONPATH"] = os.pathsep.join(ours)
        sys.path[:] = [*ours, *(path for path in sys.path if path not in (str(ROOT), str(ROOT / "test"), ""))]
        for name in [name for name in sys.modules if name.split(".")[0] in ("support", "torchrl_moe")]:
            del sys.modules[name]
        yield tree


@contextmanager
def replaced(path: Path, text: str) -> Iterator[None]:
    """Give a file of the package another text for as long as the context lasts."""
    before = path.read_text(encoding="utf-8")
    try:
        _write(path, text)
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


def forked(work: Callable[[], int], limit: float, log: Path) -> int | None:
    """Run a function in a fork with a group of its own; return its status, below 0 a signal's; None: it did not end.

    What it leaves behind is killed; what it prints is in ``log``.
    """

    def run() -> None:
        os.setpgid(0, 0)
        sys.stdout = sys.stderr = log.open("w", buffering=1)
        os.dup2(sys.stdout.fileno(), 1)
        os.dup2(sys.stdout.fileno(), 2)
        os._exit(work())

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    assert child.pid is not None
    child.join(max(0.0, limit))
    status = child.exitcode
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)
    child.join()
    return status


def run_tests(
    tree: Path,
    tests: Sequence[str],
    limit: float,
    *options: str,
    around: AbstractContextManager[object] | None = None,
) -> tuple[int | None, str]:
    """Run tests of a tree in a fork of this until one fails; return pytest's status, and the test that ended it."""
    log = tree / "faults.log"

    def run() -> int:
        os.chdir(tree)
        resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
        import pytest

        how = ["-x", "-v", "--tb=no", "-rfE", "-p", "no:cacheprovider", "-p", "no:randomly", "--rootdir", str(tree)]
        with around or contextlib.nullcontext():
            return int(pytest.main([*how, *options, *tests]))

    status = forked(run, limit, log)
    said = log.read_text(encoding="utf-8", errors="replace")
    return status, (ENDED.findall(said) or BEGUN.findall(said) or [""])[-1]


def judge(fault: Fault, tree: Path, limit: float = LIMIT) -> tuple[bool, str]:
    """Put a fault into a tree, and run its tests; return whether one noticed it, and what became of it."""
    deadline, patience = time.monotonic() + limit, f"--timeout={fault.patience}"
    path, status, test = tree / "torchrl_moe" / fault.file, None, ""
    with replaced(path, fault.introduced(path.read_text(encoding="utf-8"))):
        for files in files_of(fault.tests, tree):  # most are noticed by the first, and the others need not be imported
            status, test = run_tests(tree, files, deadline - time.monotonic(), patience)
            if status not in (0, NO_TESTS):
                break
    if status in (0, NO_TESTS):
        return False, "SURVIVED"
    if status is None:
        return True, f"caught: the tests did not end; the last was {test}"
    if status != 1 or "::" not in test:  # a signal ended them, or a file could not be imported
        return False, f"NOT KNOWN: pytest ended with {status} in {test}"
    if run_tests(tree, [test], limit, patience)[0] != 0:
        return False, f"UNSTEADY: without the fault fails too: {test}"
    return True, f"caught by {test}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a line for each fault; 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="make faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--list", action="store_true", help="list the faults and end")
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="faults whose name or file has one")
    options = parser.parse_args(arguments)
    chosen = [fault for fault in FAULTS if any(text in f"{fault.name} {fault.file}" for text in options.only)]
    if options.list:
        print("\n".join(f"{fault.name:28} {fault.file:44} {fault.title}" for fault in chosen))
        return 0
    caught = 0
    with copied_tree() as tree:
        for number, fault in enumerate(chosen, 1):
            began = time.monotonic()
            is_caught, end = judge(fault, tree)
            caught += is_caught
            print(f"{number:2} {fault.name:28} {end} ({time.monotonic() - began:.0f} s)", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
