"""The source of a released vLLM, read and never imported: which names its modules and classes define."""

from __future__ import annotations

import ast
import functools
import hashlib
import os
import re
import tarfile
import tempfile
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

INDEX = "https://pypi.org/simple/vllm/"


class VLLMSource:
    """The Python files of one vLLM release.

    Args:
        root: the folder that holds the package ``vllm``.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._tree = functools.lru_cache(maxsize=None)(self._parse)

    def has(self, module: str, name: str = "") -> bool:
        """Whether a module is there, and defines, imports or contains ``name``."""
        if self._file(module) is None:
            return False
        return not name or name in self._names(module) or self._file(f"{module}.{name}") is not None

    def members(self, module: str, name: str) -> set[str]:
        """Return what a class, or its bases in vLLM, has: in its body, and set on ``self`` by its methods."""
        home, node = self._find(module, name)
        if node is None:
            return set()
        found = {target for statement in node.body for target in _bound(statement)}
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_self(part.value):
                found.add(part.attr)
        for base in node.bases:
            text = ast.unparse(base).split("[")[0]
            if text.isidentifier() and text != name:
                found |= self.members(home, text)
        return found

    def parameters(self, module: str, name: str) -> set[str]:
        """Return the names of a function's parameters; of a method's for ``Class.method``, here or in a base."""
        owner, _, method = name.rpartition(".")
        home, node = self._find(module, owner or method)
        if owner and isinstance(node, ast.ClassDef):
            methods = [item for item in node.body if getattr(item, "name", None) == method]
            if not methods:
                bases = [ast.unparse(base).split("[")[0] for base in node.bases]
                return set().union(*(self.parameters(home, f"{base}.{method}") for base in bases if base != owner))
            node = methods[0]
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return set()
        return {argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}

    def _file(self, module: str) -> Path | None:
        path = self._root.joinpath(*module.split("."))
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)

    def _parse(self, module: str) -> ast.Module:
        file = self._file(module)
        return ast.parse("" if file is None else file.read_text(encoding="utf-8"))

    def _names(self, module: str) -> set[str]:
        names = {name for statement in _statements(self._tree(module)) for name in _bound(statement)}
        if "__getattr__" in names:  # a lazy package lists its names in a table
            for part in ast.walk(self._tree(module)):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value.isidentifier():
                    names.add(part.value)
        return names

    def _find(self, module: str, name: str) -> tuple[str, ast.AST | None]:
        """Find a definition, through imports inside vLLM; return the module that has it, and ``None`` if none does."""
        for statement in _statements(self._tree(module)):
            if getattr(statement, "name", None) == name:
                return module, statement
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        return self._find(self._absolute(module, statement), alias.name)
        return module, None

    def _absolute(self, module: str, statement: ast.ImportFrom) -> str:
        if not statement.level:
            return statement.module or ""
        file = self._file(module)
        up = statement.level - (file is not None and file.name == "__init__.py")
        parts = module.split(".")
        return ".".join([*parts[: len(parts) - up], *filter(None, [statement.module])])


def download(version: str, cache: Path) -> VLLMSource:
    """Return a release's source, from ``cache`` or from PyPI, whose digest it is checked against."""
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
    return VLLMSource(folder)


def _unpack(archive: bytes, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        packed = Path(scratch, "source.tar.gz")
        packed.write_bytes(archive)
        with tarfile.open(packed) as tar:
            wanted = [item for item in tar if re.fullmatch(r"[^/]+/vllm/.*\.py", item.name)]
            tar.extractall(scratch, wanted, filter="data")
        os.rename(Path(scratch, folder.name), folder)


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The statements of a module, those under ``if`` and ``try`` too."""
    for statement in ast.iter_child_nodes(tree):
        yield statement
        if isinstance(statement, ast.If | ast.Try | ast.ExceptHandler | ast.With):
            yield from _statements(statement)


def _bound(statement: ast.AST) -> set[str]:
    """The names that a statement binds."""
    if isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    return {
        part.id for target in targets if target is not None for part in ast.walk(target) if isinstance(part, ast.Name)
    }
