"""``make mutants``: how many small faults, put into the pure parts one at a time, their tests notice.

For each room it draws mutants of its syntax tree (a comparison, an operator, a number, a condition, a check, a call for
its effect), and runs the room's tests over each, those that run the line first, until one fails. A mutant is killed if
a test fails or does not end. Survivors are listed, as ``file:line``, with what was changed; some change nothing
that anybody could see. ``make mutants ARGS="--each 40 --seed 1 ops data"`` draws others, of two rooms.
"""

from __future__ import annotations

import argparse
import ast
import random
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from coverage import Coverage, CoverageData

from support.hidden_faults import copied_tree, files_of, replaced, run_tests
from support.sources import PACKAGE, ROOT

ENOUGH = 0.85  # of a room's mutants must be killed
PURE = "not engine and not ray and not needs_vllm and not parity and not soak and not compat"
REPLAY = ("test_[bdfhir]*.py", "test_checkpointing.py", "test_parallelism.py")
ROOMS: dict[str, tuple[str, ...]] = {
    "functional": ("objectives/functional.py", "objectives/test_[fgmlb]*.py", "contract/test_loss*.py"),
    "objectives": ("objectives/[!f_]*.py", "objectives/", "contract/test_loss*.py"),
    "ops": ("ops/[!_]*.py", "ops/"),
    "replay": ("modules/replay/[!_]*.py", *(f"modules/replay/{name}" for name in REPLAY), "contract/test_family*.py"),
    "data": ("data/[!_]*.py", "data/"),
    "store": ("store/[!_]*.py", "store/"),
    "schedule": ("collectors/schedule.py", "collectors/test_schedule*.py"),
    "routing": (
        "modules/serving/strategies.py",
        "modules/serving/test_strategies.py",
        "modules/serving/test_balancer.py",
        "modules/serving/test_requests.py",
    ),
}
"""Files of the package, and the patterns of the tests that stand for them."""

PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
COMPARISONS: dict[type[ast.cmpop], Any] = {one: other for pair in PAIRS for one, other in (pair, pair[::-1])}
OPERATORS: dict[type[ast.operator], Any] = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult}
OPERATORS |= {ast.FloorDiv: ast.Mult, ast.Mod: ast.Mult, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "amin": "amax", "amax": "amin", "sum": "mean"}
NAMES |= {"zeros": "ones", "zeros_like": "ones_like", "ones": "zeros", "ones_like": "zeros_like", "minimum": "maximum"}


def changes(node: Any) -> Iterator[tuple[str, Any, str]]:
    """What a mutant may hold in the place of ``node`` or of a part of it: a word for it, that part, and its code."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield "comparison", node, _with(node, ops=[COMPARISONS[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and, or", node, _with(node, op=ast.Or() if isinstance(op, ast.And) else ast.And())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in OPERATORS:
            yield "operator", node, _with(node, op=OPERATORS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.Invert(), operand=operand):
            yield "sign", node, _with(operand)
        case ast.Constant(value=bool(value)):
            yield "constant", node, repr(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield "constant", node, repr(value + 1)
        case ast.If(test=test) | ast.IfExp(test=test) if not isinstance(test, ast.Compare | ast.BoolOp | ast.UnaryOp):
            yield "condition", test, f"(not ({ast.unparse(test)}))"
        case ast.Raise():
            yield "no check", node, "pass"
        case ast.Expr(value=ast.Call()):
            yield "no call", node, "pass"
        case ast.Call(func=ast.Name(id=name)) if name in NAMES:
            yield "function", node.func, NAMES[name]
        case ast.Call(func=ast.Attribute(attr=name)) if name in NAMES:
            yield "function", node.func, _with(node.func, attr=NAMES[name])


def _with(node: Any, **fields: Any) -> str:
    """The code of a node with other fields."""
    code = ast.unparse(type(node)(**{**vars(node), **fields}))
    return f"({code})" if isinstance(node, ast.expr) else code


def parts(node: ast.AST) -> Iterator[ast.AST]:
    """A tree's nodes, without those that no test is to notice: types, decorators, texts, and what an error says."""
    match node:
        case ast.If(test=ast.Name(id="TYPE_CHECKING")) | ast.JoinedStr() | ast.FunctionDef(name="__repr__" | "__str__"):
            return
        case ast.Assign(targets=[ast.Name(id=name)]) if name.startswith("__"):
            return
    yield node
    for field, value in ast.iter_fields(node) if not isinstance(node, ast.Raise) else ():
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and field not in ("annotation", "returns", "decorator_list"):
                yield from parts(child)


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    file: str
    """Relative to the checkout."""
    line: int
    kind: str
    text: str
    """The file's, with the change."""

    @property
    def name(self) -> str:
        """As survivors are listed."""
        line = (ROOT / self.file).read_text(encoding="utf-8").splitlines()[self.line - 1].strip()
        return f"{self.file}:{self.line} {self.kind}: {line}"


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    """Every change that a file's code allows."""
    data = text.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for node in parts(ast.parse(text)):
        for kind, old, code in changes(node):
            first, last = starts[old.lineno - 1] + old.col_offset, starts[old.end_lineno - 1] + old.end_col_offset
            yield Mutant(file, old.lineno, kind, (data[:first] + code.encode() + data[last:]).decode())


@contextmanager
def covering(file: Path, tree: Path) -> Iterator[None]:
    """Write which test runs which line."""
    coverage = Coverage(str(file), include=[str(tree / PACKAGE / "*")], config_file=False)
    coverage.set_option("run:dynamic_context", "test_function")
    coverage.start()
    yield
    coverage.stop()
    coverage.save()


def tests_of(mutant: Mutant, tree: Path, data: CoverageData, files: Sequence[str]) -> list[str]:
    """The tests that run the changed line; none where that runs at import, or in fixtures only."""
    lines = data.contexts_by_lineno(str(tree / mutant.file))
    # an expression of several lines may be noted at its first
    line = max((line for line in lines if mutant.line - 4 <= line <= mutant.line), default=0)
    modules = {file: file.removeprefix("test/").removesuffix(".py").replace("/", ".") + "." for file in files}
    found = [(file, context.partition(module)) for context in lines.get(line, []) for file, module in modules.items()]
    return sorted({f"{file}::{name.split('.')[0]}" for file, (_, is_in, name) in found if is_in})


def measure(room: str, each: int, seed: int, tree: Path) -> Iterator[tuple[Mutant, int | None]]:
    """Yield ``each`` of a room's mutants, drawn without repetition, and pytest's status over it: 0, it survived."""
    sources, *patterns = ROOMS[room]
    files = [file for found in files_of(patterns, tree) for file in found]
    files.sort(key=lambda file: (tree / file).stat().st_size)  # a mutant dies at the first that fails
    cover, began = tree / f"coverage-{room}", time.monotonic()
    status, test = run_tests(tree, files, 3600, "-m", PURE, around=covering(cover, tree))
    if status != 0:
        raise SystemExit(f"{room}: its tests do not pass as they are: {test}")
    limit = 60 + 3 * (time.monotonic() - began)
    data = CoverageData(str(cover))
    data.read()
    paths = sorted((tree / PACKAGE).glob(sources))
    found = [one for path in paths for one in mutants_of(str(path.relative_to(tree)), path.read_text(encoding="utf-8"))]
    for mutant in random.Random(seed).sample(found, min(each, len(found))):
        with replaced(tree / mutant.file, mutant.text):
            few = tests_of(mutant, tree, data, files)  # first those that run the line, then all
            end = run_tests(tree, few, limit, "-m", PURE)[0] if few else 0
            yield mutant, run_tests(tree, files, limit, "-m", PURE)[0] if end == 0 else end


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a row for each room, and the survivors; 1 if a room has too many."""
    parser = argparse.ArgumentParser(prog="make mutants", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rooms", nargs="*", choices=[*ROOMS, []], help="all of them by default")
    parser.add_argument("--each", type=int, default=40, metavar="N", help="mutants for each room (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="which are drawn (default: 0)")
    options = parser.parse_args(arguments)
    weak = []
    with copied_tree() as tree:
        for name in options.rooms or ROOMS:
            ends = list(measure(name, options.each, options.seed, tree))
            survivors = [mutant for mutant, end in ends if end == 0]
            killed, late = len(ends) - len(survivors), sum(end is None for _, end in ends)
            print(f"{name}: {killed} of {len(ends)} killed ({killed / len(ends):.0%}; {late} by time)", flush=True)
            for mutant in survivors:
                print(f"    {mutant.name}", flush=True)
            weak += [name] if killed < ENOUGH * len(ends) else []
    if weak:
        print(f"fewer than {ENOUGH:.0%} killed: {', '.join(weak)}")
    return int(bool(weak))


if __name__ == "__main__":
    sys.exit(main())
