"""The source of a vLLM release, and ours: read, never imported. What a module, a class or a function of it has.

A release that cannot be installed here, such as one for CUDA, can be read all the same.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import os
import re
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

INDEX = "https://pypi.org/simple/vllm/"

Function = ast.FunctionDef | ast.AsyncFunctionDef
Defined = Function | ast.ClassDef


@dataclass(frozen=True, slots=True)
class Found:
    """Where a name leads: a module of the sources, or the statement that binds it; ``None`` for a name of others."""

    module: str
    node: ast.AST | None = None

    def __str__(self) -> str:
        name = getattr(self.node, "name", "")
        return f"{self.module}.{name}" if name else self.module


@dataclass(frozen=True, slots=True)
class Member:
    """One binding of a member of a class: the statement, the class that has it, and the method that assigns it."""

    owner: Found
    node: ast.AST
    method: Function | None = None


class Sources:
    """The Python files of packages.

    Args:
        roots: package -> the folder that holds it.
    """

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self._roots = dict(roots)
        self._searched: set[str] = set()
        self.tree = functools.lru_cache(maxsize=None)(self._parse)
        self._bindings = functools.lru_cache(maxsize=None)(self._bound_by_module)
        self._members = functools.lru_cache(maxsize=None)(self._members_of)

    def has(self, module: str) -> bool:
        """Whether a module is there."""
        return self.file(module) is not None

    def ours(self, module: str) -> bool:
        """Whether a module belongs to the packages that are read."""
        return module.split(".")[0] in self._roots

    def file(self, module: str) -> Path | None:
        """Return a module's file."""
        parts = module.split(".")
        if parts[0] not in self._roots:
            return None
        path = self._roots[parts[0]].joinpath(*parts)
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)

    def find(self, module: str, name: str) -> list[Found]:
        """Return what a name of a module is, through imports; more than one where it is bound under conditions.

        A name that comes from a package that is not read is found as that package's module, without a statement.
        """
        found: list[Found] = []
        for statement in self._bindings(module).get(name, ()):
            if isinstance(statement, ast.ImportFrom):
                home = self.absolute(module, statement)
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        found += self.imported(home, alias.name)
            elif isinstance(statement, ast.Import):
                found += [
                    Found(alias.name if alias.asname else name)
                    for alias in statement.names
                    if (alias.asname or alias.name.split(".")[0]) == name
                ]
            else:
                found.append(Found(module, statement))
        if not found and self.has(f"{module}.{name}"):
            found.append(Found(f"{module}.{name}"))
        if not found and module not in self._searched:  # modules may star each other
            self._searched.add(module)
            for home in self._starred(module):
                found += self.find(home, name)
            self._searched.discard(module)
        return found

    def imported(self, home: str, name: str) -> list[Found]:
        """Return what ``from home import name`` gives; nothing if it fails."""
        if not self.ours(home):
            return [Found(f"{home}.{name}")]
        return self.find(home, name)

    def members(self, owner: Found, name: str) -> list[Member]:
        """Return the bindings of a class's member, from its own body and methods, else from the first base with it."""
        own = self._members(owner).get(name, [])
        if own:
            return own
        for base in self.bases(owner):
            if base.node is not None and (found := self.members(base, name)):
                return found
        return []

    def bases(self, owner: Found) -> list[Found]:
        """Return the classes that a class names as its bases; those of other packages without a statement."""
        found = []
        for base in getattr(owner.node, "bases", []):
            expression = base.value if isinstance(base, ast.Subscript) else base
            for one in self.resolve(owner.module, expression):
                if one.node is None or (isinstance(one.node, ast.ClassDef) and one.node is not owner.node):
                    found.append(one)
        return found

    def resolve(self, module: str, expression: ast.expr) -> list[Found]:
        """Return what a dotted name in a module is."""
        if isinstance(expression, ast.Name):
            return self.find(module, expression.id)
        if isinstance(expression, ast.Attribute):
            found = []
            for one in self.resolve(module, expression.value):
                if one.node is None:
                    found += self.imported(one.module, expression.attr)
            return found
        return []

    def lineage(self, owner: Found) -> Iterator[Found]:
        """Yield a class and its bases, those of other packages too."""
        yield owner
        for base in self.bases(owner):
            yield from self.lineage(base) if base.node is not None else (base,)

    def inherits(self, owner: Found, name: str) -> bool:
        """Whether a base in another package, which is imported for this, has a member."""
        others = [one for one in self.lineage(owner) if one.node is None and not self.ours(one.module)]
        return any(name in vars(kind) for one in others for kind in _import(one.module).__mro__)

    def names(self, module: str) -> set[str]:
        """Return the names that a module binds, and those that its texts name, as lazy packages list them."""
        names = {*self._bindings(module)}
        if "__getattr__" in names:
            texts = (part.value for part in ast.walk(self.tree(module)) if isinstance(part, ast.Constant))
            names |= {text for text in texts if isinstance(text, str) and text.isidentifier()}
        return names

    def texts(self, module: str) -> set[str]:
        """Return the strings in a module."""
        parts = (part.value for part in ast.walk(self.tree(module)) if isinstance(part, ast.Constant))
        return {text for text in parts if isinstance(text, str)}

    def _parse(self, module: str) -> ast.Module:
        file = self.file(module)
        return ast.parse("" if file is None else file.read_text(encoding="utf-8"))

    def _bound_by_module(self, module: str) -> dict[str, list[ast.AST]]:
        bound: dict[str, list[ast.AST]] = {}
        for statement in statements(self.tree(module)):
            for name in names_bound(statement):
                bound.setdefault(name, []).append(statement)
        return bound

    def _starred(self, module: str) -> list[str]:
        return [
            self.absolute(module, statement)
            for statement in statements(self.tree(module))
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*"
        ]

    def _members_of(self, owner: Found) -> dict[str, list[Member]]:
        found: dict[str, list[Member]] = {}
        assert isinstance(owner.node, ast.ClassDef)
        for statement in statements(owner.node):
            for name in names_bound(statement):
                found.setdefault(name, []).append(Member(owner, statement))
            if isinstance(statement, Function) and (arguments := [*statement.args.posonlyargs, *statement.args.args]):
                for part in ast.walk(statement):
                    for target in targets(part):
                        if isinstance(target, ast.Attribute) and _is_name(target.value, arguments[0].arg):
                            found.setdefault(target.attr, []).append(Member(owner, part, statement))
        return found

    def absolute(self, module: str, statement: ast.ImportFrom) -> str:
        """Return the module that a statement imports from."""
        if not statement.level:
            return statement.module or ""
        file = self.file(module)
        up = statement.level - (file is not None and file.name == "__init__.py")
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *filter(None, [statement.module])])


@functools.cache
def _import(path: str) -> type:
    """Return the class of another package."""
    if path == "typing.NamedTuple":
        return NamedTuple("Any", [])  # which is what a class gets from it
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return found if isinstance(found, type) else object  # ``typing.Generic`` and the like


def installed() -> Path:
    """Return the folder that holds the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def download(version: str, cache: Path) -> Path:
    """Return the folder that holds a release, from ``cache`` or from PyPI, whose digest it is checked against."""
    folder = cache / f"vllm-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        page = urllib.request.urlopen(INDEX, timeout=60).read().decode()
        pattern = rf'href="([^"#]*/vllm-{re.escape(version)}\.tar\.gz)#sha256=([0-9a-f]{{64}})'
        link = re.search(pattern, page)
        assert link is not None, f"{INDEX} has no source of vLLM {version}"
        archive = urllib.request.urlopen(urllib.parse.urljoin(INDEX, link[1]), timeout=600).read()
        assert hashlib.sha256(archive).hexdigest() == link[2], f"what came for vLLM {version} is not what PyPI lists"
        _unpack(archive, folder)
    return folder


def _unpack(archive: bytes, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packed = Path(scratch, "source.tar.gz")
        packed.write_bytes(archive)
        with tarfile.open(packed) as tar:
            wanted = [item for item in tar if re.fullmatch(r"[^/]+/vllm/.*\.py", item.name)]
            tar.extractall(scratch, wanted, filter="data")
        os.rename(Path(scratch, folder.name), folder)


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements of a module or a body, those under ``if``, ``try``, ``with`` and loops too."""
    for statement in ast.iter_child_nodes(tree):
        if isinstance(statement, ast.stmt):
            yield statement
        if isinstance(statement, ast.If | ast.Try | ast.ExceptHandler | ast.With | ast.For | ast.While | ast.AsyncWith):
            yield from statements(statement)


def targets(statement: ast.AST) -> list[ast.expr]:
    """Return what a statement assigns to, tuples taken apart."""
    if isinstance(statement, ast.Assign):
        whole = statement.targets
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr):
        whole = [statement.target]
    elif isinstance(statement, ast.With | ast.AsyncWith):
        whole = [item.optional_vars for item in statement.items if item.optional_vars is not None]
    else:
        return []
    return [part for one in whole for part in _apart(one)]


def _apart(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for part in target.elts:
            yield from _apart(part)
    else:
        yield target.value if isinstance(target, ast.Starred) else target


def names_bound(statement: ast.AST) -> set[str]:
    """Return the names that a statement binds."""
    if isinstance(statement, Defined):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    return {part.id for part in targets(statement) if isinstance(part, ast.Name)}


def _is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name
