"""The package and its tests as syntax trees, which the tests of the architecture read; and files, imported by path."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Literal

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "torchrl_moe"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Scope = Literal["module", "function", "typing"]


@dataclass(frozen=True, slots=True)
class Source:
    """One file."""

    path: Path
    """Relative to the checkout."""
    text: str
    tree: ast.Module

    @property
    def name(self) -> str:
        """Dotted module name; a package is named without ``__init__``."""
        parts = self.path.with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def at(self, node: ast.AST) -> str:
        """``path:line`` of a node, as an editor reads it."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"


@dataclass(frozen=True, slots=True)
class Import:
    """One imported name: ``from a.b import c`` has the target ``a.b.c``."""

    target: str
    scope: Scope
    node: ast.AST


def snippet(text: str, path: str = "torchrl_moe/snippet.py") -> Source:
    """A file that does not exist: what a checker must be able to refuse."""
    return Source(Path(path), text, ast.parse(text))


@cache  # parsing all of it takes a second
def python_sources(folder: str, root: Path = ROOT) -> list[Source]:
    """Every file in a folder of the checkout. Nobody changes the trees."""
    paths = sorted((root / folder).rglob("*.py"))
    return [snippet(path.read_text(encoding="utf-8"), str(path.relative_to(root))) for path in paths]


def package_sources() -> list[Source]:
    """Every file of the package."""
    return python_sources(PACKAGE)


def script(path: Path) -> ModuleType:
    """Import a file that is in no package."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    sys.modules[path.stem] = module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def imports(source: Source) -> tuple[Import, ...]:
    """Every import of a file, those in functions and ``import_module("a literal")`` included."""
    return tuple(_imports(source))


def _imports(source: Source) -> Iterator[Import]:
    package = source.name.split(".")
    if source.path.stem != "__init__":
        package = package[:-1]
    for node, scope in _scoped(source.tree, "module"):
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, scope, node) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (Import(f"{module}.{alias.name}", scope, node) for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in {"import_module", "__import__"}:
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from (Import(str(name), scope, node) for name in names)


def _scoped(node: ast.AST, scope: Scope) -> Iterator[tuple[ast.AST, Scope]]:
    yield node, scope
    if isinstance(node, ast.If) and ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}:
        parts: list[tuple[ast.AST, Scope]] = [(child, "typing") for child in node.body]
        parts += [(child, scope) for child in node.orelse]
    else:
        inner: Scope = "function" if scope == "module" and isinstance(node, Function | ast.Lambda) else scope
        parts = [(child, inner) for child in ast.iter_child_nodes(node)]
    for child, inner in parts:
        yield from _scoped(child, inner)
