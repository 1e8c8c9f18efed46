"""House rules that ruff and mypy do not hold, file by file."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

import pytest

from support.sources import Source, package_sources, snippet

ENGINE_PROCESS = {"torchrl_moe/_compat.py", "torchrl_moe/modules/backends/process/fork_server.py"}
"""Files that write the environment, in an engine process only: what vLLM reads from there has no other switch.

A driver only puts back what vLLM has changed in it.
"""

Checker = Callable[[Source], Iterator[str]]


def module_docstring(source: Source) -> Iterator[str]:
    """Each file says what it is."""
    if not ast.get_docstring(source.tree):
        yield f"{source.path}: no module docstring"


def unfinished(source: Source) -> Iterator[str]:
    """No marker of work to come, and no name that only pretends to exist."""
    for number, line in enumerate(source.text.splitlines(), 1):
        if re.search(r"\b(TODO|FIXME|XXX)\b", line):
            yield f"{source.path}:{number}: {line.strip()}"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Raise) and node.exc and "NotImplementedError" in ast.unparse(node.exc):
            yield f"{source.at(node)}: a stub"


def swallowed(source: Source) -> Iterator[str]:
    """``except Exception`` re-raises, or hands the error on by name."""
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.ExceptHandler):
            continue
        broad = node.type is None or {"Exception", "BaseException"} & names_read(node.type)
        handled = node.name in {name for part in node.body for name in names_read(part)}
        if broad and not handled and not any(isinstance(inner, ast.Raise) for inner in ast.walk(node)):
            yield f"{source.at(node)}: an error of any type ends here"


def environment(source: Source) -> Iterator[str]:
    """``os.environ`` is read-only after import."""
    if str(source.path) in ENGINE_PROCESS or not re.search("environ|putenv|unsetenv", source.text):
        return
    writes = r"environ(\[.*\])?|environ\.(update|setdefault|pop|popitem|clear)|putenv|unsetenv"
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.Delete):
            targets = [node.target] if isinstance(node, ast.AugAssign) else node.targets
        else:
            targets = [node.func] if isinstance(node, ast.Call) else []
        if any(re.fullmatch(rf"(os\.)?({writes})", ast.unparse(target), re.DOTALL) for target in targets):
            yield f"{source.at(node)}: writes the environment"


def names_read(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


CHECKERS: list[Checker] = [module_docstring, unfinished, swallowed, environment]


@pytest.mark.parametrize("checker", CHECKERS, ids=lambda checker: checker.__name__)
def test_the_package_keeps_the_rule(checker: Checker) -> None:
    assert [line for source in package_sources() for line in checker(source)] == []


@pytest.mark.parametrize(
    ("checker", "text"),
    [
        (module_docstring, "x = 1"),
        (unfinished, "x = 1  # TODO: more"),
        (unfinished, "def f():\n    raise NotImplementedError('later')"),
        (swallowed, "try: f()\nexcept (ValueError, BaseException) as e: x = 1"),
        (environment, "os.environ.setdefault('A', '1')"),
        (environment, "os.environ['A'] += 'b'"),
        (environment, "os.putenv('A', '1')"),
    ],
)
def test_a_breach_is_found(checker: Checker, text: str) -> None:
    assert len(list(checker(snippet(text)))) == 1
