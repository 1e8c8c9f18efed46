"""``make mutants``: how many small faults, put into the pure parts one at a time, their tests notice.

For each room it draws mutants of its syntax tree (a comparison, an operator, a number, a condition, a check, a call for
its effect), and runs the room's tests over each, those that run the line first, until one fails. A mutant is killed if
a test fails or does not end. Survivors are listed, as ``file:line``, with what was changed; some change nothing
that anybody could see. The heavy packages are imported once: each mutant lives in a process that is forked from that.

    make mutants ARGS="--each 40 --seed 1 ops data"
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import importlib.abc
import importlib.machinery
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from coverage import Coverage, CoverageData

from support.sources import ROOT

ENOUGH = 0.85  # of a room's mutants must be killed
HEAVY = ("torch", "transformers", "tensordict", "torchrl", "hypothesis", "pytest")
PURE = "not engine and not ray and not needs_vllm and not parity and not soak and not compat"


@dataclass(frozen=True, slots=True)
class Room:
    """Sources of torchrl_moe/, and the tests that stand for them."""

    sources: str
    tests: tuple[str, ...]

    def test_files(self) -> list[str]:
        """Of all patterns, the files that are there, the shortest first: a mutant dies at the first that fails."""
        files = {file for pattern in self.tests for file in ROOT.glob(f"test/{pattern}")}
        return [str(file) for file in sorted(files, key=lambda file: file.stat().st_size)]


REPLAY = ("test_[bdfhir]*.py", "test_checkpointing.py", "test_parallelism.py")
ROOMS = {
    "functional": Room("objectives/functional.py", ("objectives/test_[fgmlb]*.py", "contract/test_loss*.py")),
    "objectives": Room("objectives/[!f_]*.py", ("objectives/*.py", "contract/test_loss*.py")),
    "ops": Room("ops/[!_]*.py", ("ops/*.py",)),
    "replay": Room(
        "modules/replay/[!_]*.py", (*(f"modules/replay/{name}" for name in REPLAY), "contract/test_family*.py")
    ),
    "data": Room("data/[!_]*.py", ("data/*.py",)),
    "store": Room("store/[!_]*.py", ("store/*.py",)),
    "schedule": Room("collectors/schedule.py", ("collectors/test_schedule*.py",)),
    "routing": Room(
        "modules/serving/strategies.py", ("modules/serving/test_strategies.py", "modules/serving/test_balancer.py")
    ),
}

PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
COMPARISONS: dict[type[ast.cmpop], Any] = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
OPERATORS: dict[type[ast.operator], Any] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin", "sum": "mean"}
NAMES |= {"zeros": "ones", "zeros_like": "ones_like", "ones": "zeros", "ones_like": "zeros_like", "minimum": "maximum"}

Change = Callable[[], ast.AST]


def changes(node: ast.AST) -> Iterator[tuple[str, Change]]:
    """What a mutant may hold in the place of ``node``: a word for it, and what makes it."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", lambda: _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and, or", lambda: _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield "operator", lambda: _with(node, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "sign", lambda: operand
        case ast.Constant(value=bool(value)):
            yield "constant", lambda: _with(node, value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", lambda: _with(node, value=value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield "condition", lambda: _with(node, test=ast.UnaryOp(ast.Not(), test))
        case ast.Raise():
            yield "no check", ast.Pass
        case ast.Expr(value=ast.Call()):
            yield "no call", ast.Pass
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield "function", lambda: _with(node, func=ast.Name(NAMES[name], ast.Load()))
        case ast.Call(func=ast.Attribute(attr=name)) if name in NAMES:
            yield "function", lambda: _with(node, func=_with(node.func, attr=NAMES[name]))


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    file: Path
    index: int
    """Which of the file's possible changes, in the order of :func:`places`."""
    line: int
    kind: str

    @property
    def name(self) -> str:
        """As survivors are listed."""
        text = self.file.read_text().splitlines()[self.line - 1].strip()
        return f"{self.file.relative_to(ROOT)}:{self.line} {self.kind}: {text}"

    def code(self) -> ast.Module:
        """The file's tree with the change."""
        tree = ast.parse(self.file.read_text())
        parent, field, position, change = places(tree)[self.index][:4]
        held = getattr(parent, field)
        if position is None:
            setattr(parent, field, change())
        else:
            held[position] = change()
        return ast.fix_missing_locations(tree)


def places(tree: ast.Module) -> list[tuple[ast.AST, str, int | None, Change, str, int]]:
    """Each change that the code allows, in its order; type checkers' code and ``__repr__`` are left out."""
    found: list[tuple[ast.AST, str, int | None, Change, str, int]] = []

    def walk(parent: ast.AST) -> None:
        for field, value in ast.iter_fields(parent):
            if field in ("annotation", "returns", "decorator_list"):
                continue
            for position, node in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if not isinstance(node, ast.AST) or _is_silent(node):
                    continue
                line = getattr(node, "lineno", 0)
                found.extend((parent, field, position, change, kind, line) for kind, change in changes(node))
                if not isinstance(node, ast.Raise):  # what an error says is no promise of these tests
                    walk(node)

    walk(tree)
    return found


def mutants(room: Room, each: int, seed: int) -> list[Mutant]:
    """``each`` of a room's mutants, drawn without repetition."""
    found = [
        Mutant(file, index, place[5], place[4])
        for file in sorted((ROOT / "torchrl_moe").glob(room.sources))
        for index, place in enumerate(places(ast.parse(file.read_text())))
    ]
    return random.Random(seed).sample(found, min(each, len(found)))


def _is_silent(node: ast.AST) -> bool:
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr():
            return True
        case ast.FunctionDef(name=name):
            return name in ("__repr__", "__str__")
        case ast.Assign(targets=[ast.Name(id=name)]):
            return name.startswith("__")
    return False


def _with(node: ast.AST, **fields: object) -> ast.AST:
    changed = copy.copy(node)
    for name, value in fields.items():
        setattr(changed, name, value)
    return changed


class _Changed(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from its mutant."""

    def __init__(self, mutant: Mutant) -> None:
        self.mutant = mutant
        self.module = ".".join(mutant.file.relative_to(ROOT).with_suffix("").parts)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.module:
            return None
        return importlib.util.spec_from_file_location(fullname, self.mutant.file, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.mutant.code(), str(self.mutant.file), "exec"), vars(module))


def forked(work: Callable[[], int], limit: float, log: Path | str = os.devnull) -> int | None:
    """Run a function in a fork with a group of its own; return its status, below 0 a signal's; None: it did not end.

    What it leaves behind is killed; what it prints is in ``log``.
    """
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(BaseException):  # the parent asks for the status alone
            os.setpgid(0, 0)
            output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            status = work()
        os._exit(status)
    deadline, done, end = time.monotonic() + limit, 0, 0
    while not done and time.monotonic() < deadline:
        done, end = os.waitpid(child, os.WNOHANG)
        time.sleep(0.0 if done else 0.05)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    if not done:
        os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(end) if done else None


def passes(tests: Sequence[str], limit: float, mutant: Mutant | None = None, cover: Path | None = None) -> bool | None:
    """Whether the tests pass in a process of their own; None: they had not ended after ``limit`` seconds.

    ``cover``: where it is written which test runs which line.
    """

    def run() -> int:
        import pytest

        if mutant is not None:
            sys.meta_path.insert(0, _Changed(mutant))
        with contextlib.ExitStack() as stack:
            if cover is not None:
                coverage = Coverage(str(cover), include=[str(ROOT / "torchrl_moe" / "*")], config_file=False)
                coverage.set_option("run:dynamic_context", "test_function")
                coverage.start()
                stack.callback(coverage.save)
                stack.callback(coverage.stop)
            return int(pytest.main(["-x", "-q", "-p", "no:cacheprovider", "-m", PURE, *tests]))

    status = forked(run, limit)
    return None if status is None else status == 0


def tests_of(mutant: Mutant, data: CoverageData, files: Sequence[str]) -> list[str]:
    """The tests that run the changed line; none where that runs at import, or in fixtures only."""
    lines = data.contexts_by_lineno(str(mutant.file))
    # an expression of several lines may be noted at its first
    line = max((line for line in lines if mutant.line - 4 <= line <= mutant.line), default=0)
    found = set()
    for context in lines.get(line, []):
        for file in files:
            module = ".".join(Path(file).relative_to(ROOT / "test").with_suffix("").parts)
            _, is_in, function = context.partition(module + ".")
            if is_in:
                found.add(f"{file}::{function.split('.')[0]}")
    return sorted(found)


def measure(room: Room, each: int, seed: int) -> Iterator[tuple[Mutant, bool | None]]:
    """Yield each mutant, and whether the room's tests passed over it."""
    files = room.test_files()
    with tempfile.TemporaryDirectory() as folder:
        cover = Path(folder) / "data"
        began = time.monotonic()
        if passes(files, 3600, cover=cover) is not True:
            raise SystemExit(f"{room.sources}: its tests do not pass as they are")
        limit = 60 + 3 * (time.monotonic() - began)
        data = CoverageData(str(cover))
        data.read()
        for mutant in mutants(room, each, seed):
            # first those that run the line, then all
            few = tests_of(mutant, data, files)
            end = passes(few, limit, mutant) if few else True
            yield mutant, passes(files, limit, mutant) if end else end


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each room, and the survivors; 1 if a room has too many."""
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], help="all of them by default")
    parser.add_argument("--each", type=int, default=40, metavar="N", help="mutants for each room (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn (default: 0)")
    options = parser.parse_args(arguments)
    for name in HEAVY:
        importlib.import_module(name)
    weak = []
    for name in options.rooms or ROOMS:
        ends = list(measure(ROOMS[name], options.each, options.seed))
        survivors = [mutant for mutant, end in ends if end]
        killed, late = len(ends) - len(survivors), sum(end is None for _, end in ends)
        print(f"{name}: {killed} of {len(ends)} killed ({killed / len(ends):.0%}; {late} by time)", flush=True)
        for mutant in survivors:
            print(f"    {mutant.name}", flush=True)
        if killed < ENOUGH * len(ends):
            weak.append(name)
    if weak:
        print(f"fewer than {ENOUGH:.0%} killed: {', '.join(weak)}")
    return int(bool(weak))


if __name__ == "__main__":
    sys.exit(main())
