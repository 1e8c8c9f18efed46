"""What our source uses of vLLM, and whether a release, which is read and not run, has it.

Looked up are imports, dotted names and environment variables in texts, keywords of what is called by an imported name,
members of values whose annotation names a class of vLLM, methods that replace vLLM's, and parameters of kernels that
ours replace. What an annotation does not say is not looked up: `make install-check` runs each release.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import os
import re
import tarfile
import tempfile
import tomllib
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

INDEX = "https://pypi.org/simple/vllm/"
DOTTED = re.compile(r"vllm(\.\w+)+")
OURS = re.compile(r"_?torchrl_moe\w*")
"""Attributes that we put on objects of vLLM."""

FIELDS = {
    "modules/backends/vllm/engine_args.py:DEFAULTS": "vllm.engine.arg_utils.AsyncEngineArgs",
    "modules/backends/vllm/continuation.py:STATEFUL": "vllm.sampling_params.SamplingParams",
    "modules/backends/replica.py:KEEPS_ALL": "vllm.sampling_params.SamplingParams",
}
"""``file:name`` of a tuple or a mapping of fields' names -> their class."""

OPTIONAL = {"vllm.v1.worker.gpu_worker.HAS_TRITON": "0.33 asks there; 0.32 in the configuration, which is set, too"}
"""What not every release has, as it would be reported -> why that is right."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Found:
    """Where a name leads: a module, or the statement in it that binds the name."""

    module: str
    node: ast.AST | None = None

    def __str__(self) -> str:
        return f"{self.module}.{getattr(self.node, 'name', '')}".rstrip(".")


class Sources:
    """The Python files of packages, by the folders that hold them."""

    def __init__(self, roots: Mapping[str, Path]) -> None:
        self.roots = dict(roots)
        self.tree = functools.cache(self._tree)
        self.bindings = functools.cache(self._bindings)
        self.find = functools.cache(self._find)
        self.member = functools.cache(self._member)

    def file(self, module: str) -> Path | None:
        parts = module.split(".")
        path = self.roots.get(parts[0], Path("/nowhere")).joinpath(*parts)
        return next((file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()), None)

    def _tree(self, module: str) -> ast.Module:
        file = self.file(module)
        return ast.parse("" if file is None else file.read_text(encoding="utf-8"))

    def _bindings(self, module: str) -> dict[str, list[ast.AST]]:
        found: dict[str, list[ast.AST]] = {}
        imports = (one for one in ast.walk(self.tree(module)) if isinstance(one, ast.Import | ast.ImportFrom))
        for statement in {*statements(self.tree(module)), *imports}:  # imports in functions too
            for name in names_bound(statement):
                found.setdefault(name, []).append(statement)
        return found

    def _find(self, module: str, name: str, seen: frozenset[str] = frozenset()) -> list[Found]:
        """What a name of a module is, through imports; nothing if it is not there, a module for one of others."""
        if module.split(".")[0] not in self.roots:
            return [Found(f"{module}.{name}")]
        found: list[Found] = []
        for statement in self.bindings(module).get(name, ()):
            if isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    if (alias.asname or alias.name) == name:
                        found += self.find(self.home(module, statement), alias.name, seen)
            elif isinstance(statement, ast.Import):
                found += [Found(one.name if one.asname else name) for one in statement.names
                          if (one.asname or one.name.split(".")[0]) == name]  # fmt: skip
            else:
                found.append(Found(module, statement))
        if not found and self.file(f"{module}.{name}"):
            found.append(Found(f"{module}.{name}"))
        if not found and module not in seen:  # modules may star each other; lazy packages list names as texts
            for statement in statements(self.tree(module)):
                if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                    found += self.find(self.home(module, statement), name, seen | {module})
            if "__getattr__" in self.bindings(module) and name in texts(self.tree(module)):
                found.append(Found(f"{module}.{name}"))
        return found

    def home(self, module: str, statement: ast.ImportFrom) -> str:
        """The module that a statement imports from."""
        file = self.file(module)
        up = statement.level - (file is not None and file.name == "__init__.py")
        parts = module.split(".")[: len(module.split(".")) - up] if statement.level else []
        return ".".join([*parts, *filter(None, [statement.module])])

    def resolve(self, module: str, expression: ast.expr | None) -> list[Found]:
        """The classes that an annotation or a dotted name in a module names, ``X | None`` and texts taken apart."""
        match expression:
            case ast.Name():
                return self.find(module, expression.id)
            case ast.Attribute():
                return [two for one in self.resolve(module, expression.value) if one.node is None
                        for two in self.find(one.module, expression.attr)]  # fmt: skip
            case ast.BinOp():
                return self.resolve(module, expression.left) + self.resolve(module, expression.right)
            case ast.Constant(value=str() as text) if re.fullmatch(r"[^\W\d]\w*(\.\w+)*", text):
                return self.resolve(module, ast.parse(text, mode="eval").body)
        return []

    def lineage(self, owner: Found) -> Iterator[Found]:
        """A class and its bases; one of another package has no statement."""
        yield owner
        for base in getattr(owner.node, "bases", ()):
            for one in self.resolve(owner.module, base.value if isinstance(base, ast.Subscript) else base):
                if one.node is not owner.node:
                    yield from self.lineage(one)

    def _member(self, owner: Found, name: str) -> tuple[Found, ast.AST, Function | None] | None:
        """Where a class has a member: the class, the statement, and the method that sets it."""
        for one in self.lineage(owner):
            for statement in statements(one.node) if one.node is not None else ():
                if name in names_bound(statement):
                    return one, statement, None
                for part in ast.walk(statement) if isinstance(statement, Function) else ():
                    if any(isinstance(t, ast.Attribute) and ast.unparse(t) == f"self.{name}" for t in targets(part)):
                        return one, part, statement  # type: ignore[return-value]
        return None


@dataclass
class Report:
    """What was looked up and is there, what is not, with its place, and which entries of the tables were met."""

    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    named: set[str] = field(default_factory=set)


class Search:
    """Looks up all that a package uses; ``ours`` and ``release`` are the folders that hold it and vLLM."""

    def __init__(self, ours: Path, package: str, release: Path) -> None:
        self.sources, self.report = Sources({package: ours, "vllm": release}), Report()
        self.module = self.path = ""
        files = sorted(ours.joinpath(package).rglob("*.py"))
        self.called = {name for file in files for name in re.findall(r"\.(\w+)", file.read_text(encoding="utf-8"))}
        for file in files:
            self.module = ".".join(file.relative_to(ours).with_suffix("").parts).removesuffix(".__init__")
            self.path = str(file.relative_to(ours / package))
            self.walk(self.sources.tree(self.module), {})

    def note(self, there: bool, what: str, node: ast.AST) -> None:
        if what in OPTIONAL:
            self.report.named.add(what)
        elif there:
            self.report.used.add(what)
        else:
            self.report.missing.append(f"{self.path}:{getattr(node, 'lineno', 0)}: {what}")

    def walk(self, node: ast.AST, typed: dict[str, list[Found]]) -> None:
        """``typed``: names whose annotation names a class of vLLM."""
        for part in ast.iter_child_nodes(node):
            inner = typed
            if isinstance(part, Function):
                arguments = [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]
                given = {one.arg: self.sources.resolve(self.module, one.annotation) for one in arguments}
                inner = {**{name: found for name, found in typed.items() if name not in given}, **given}
                for name in {t.id for one in ast.walk(part) for t in targets(one) if isinstance(t, ast.Name)}:
                    inner[name] = []  # it may be another value
            elif isinstance(part, ast.ClassDef):
                self.check_class(Found(self.module, part))
            self.check(part, inner)
            self.walk(part, inner)

    def check(self, node: ast.AST, typed: dict[str, list[Found]]) -> None:
        match node:
            case ast.ImportFrom(module=str() as home, level=0) if home.split(".")[0] == "vllm":
                for alias in node.names:
                    self.note(bool(self.sources.find(home, alias.name)), f"{home}.{alias.name}", node)
            case ast.Import():
                for alias in node.names:
                    if alias.name.split(".")[0] == "vllm":
                        self.note(self.sources.file(alias.name) is not None, alias.name, node)
            case ast.Constant(value=str() as text):
                self.check_text(text, node)
            case ast.JoinedStr() if (text := self.folded(node)) is not None:
                self.check_text(text, node)
            case ast.Attribute():
                for one in self.types(node.value, typed):
                    if not OURS.fullmatch(node.attr) and not node.attr.startswith("__"):
                        self.note(self.may_have(one, node.attr), f"{one}.{node.attr}", node)
            case ast.Call():
                self.check_call(node)
            case ast.Dict():
                self.check_replacements(node)
            case ast.Assign() | ast.AnnAssign():
                self.check_fields(node)

    def types(self, value: ast.expr, typed: dict[str, list[Found]]) -> list[Found]:
        """The classes of vLLM that a value is of, as annotations say, and the modules."""
        if isinstance(value, ast.Name):
            imported = self.sources.find(self.module, value.id) if value.id not in typed else []
            modules = [one for one in imported if one.node is None and self.sources.file(one.module)]
            found = typed.get(value.id, modules)
        elif isinstance(value, ast.Attribute):
            found = [two for one in self.types(value.value, typed) for two in self.type_of_member(one, value.attr)]
        else:
            found = []
        known = [one for one in found if isinstance(one.node, ast.ClassDef) or one.node is None]
        return known if all(one.module.split(".")[0] == "vllm" for one in known) else []

    def type_of_member(self, owner: Found, name: str) -> list[Found]:
        if owner.node is None:
            return self.sources.find(owner.module, name)
        home, node, method = self.sources.member(owner, name) or (owner, None, None)
        if isinstance(node, Function) and any("property" in ast.unparse(one) for one in node.decorator_list):
            return self.sources.resolve(home.module, node.returns)
        if isinstance(node, ast.AnnAssign):
            return self.sources.resolve(home.module, node.annotation)
        if isinstance(node, ast.Assign) and method is not None and isinstance(node.value, ast.Name):
            stated = {one.arg: one.annotation for one in method.args.args}
            return self.sources.resolve(home.module, stated.get(node.value.id))
        return []

    def may_have(self, owner: Found, name: str) -> bool:
        if owner.node is None:
            return bool(self.sources.find(owner.module, name))
        others = [one for one in self.sources.lineage(owner) if one.node is None]
        return self.sources.member(owner, name) is not None or any(one.module != "abc.ABC" for one in others)

    def check_text(self, text: str, node: ast.AST) -> None:
        if DOTTED.fullmatch(text):
            home, _, name = text.rpartition(".")
            self.note(self.sources.file(text) is not None or bool(self.sources.find(home, name)), text, node)
        elif re.fullmatch(r"VLLM_[A-Z0-9_]+", text):
            there = text in {*texts(self.sources.tree("vllm.envs")), *self.sources.bindings("vllm.envs")}
            self.note(there, f"the environment variable {text}", node)

    def folded(self, node: ast.AST | None) -> str | None:
        """A text that is put together from constants of its module; ``None`` if it is not."""
        match node:
            case ast.Constant(value=str() as text):
                return text
            case ast.FormattedValue(value=ast.Name(id=name)):
                (statement, *_) = self.sources.bindings(self.module).get(name, [None])
                return self.folded(statement.value) if isinstance(statement, ast.Assign) else None
            case ast.JoinedStr():
                parts = [self.folded(part) for part in node.values]
                return None if None in parts else "".join(map(str, parts))
        return None

    def check_call(self, node: ast.Call) -> None:
        """Keywords, and what is required, where vLLM's own name is called."""
        for called in self.sources.resolve(self.module, node.func):
            if called.module.split(".")[0] != "vllm" or (found := self.parameters(called)) is None:
                continue
            names, required, is_open = found
            given = {word.arg for word in node.keywords if word.arg}
            wrong = set() if is_open else {f"no {name}=" for name in given - {*names}}
            if all(word.arg for word in node.keywords) and not any(isinstance(a, ast.Starred) for a in node.args):
                wrong |= {f"{name}= is required" for name in required - given - {*names[: len(node.args)]}}
            self.note(not wrong, f"{called}({', '.join(sorted(wrong) or sorted(given))})", node)

    def parameters(self, called: Found) -> tuple[list[str], set[str], bool] | None:
        """Names in order, those without a default, and whether any others are taken; ``None`` if nobody can say."""
        node, skip = called.node, 0
        if isinstance(node, ast.ClassDef):
            made = self.sources.member(called, "__init__")
            if made is None:
                stated: dict[str, bool] = {}
                for one in reversed([*self.sources.lineage(called)]):
                    for line in getattr(one.node, "body", ()):
                        if isinstance(line, ast.AnnAssign) and "ClassVar" not in ast.unparse(line.annotation):
                            stated[ast.unparse(line.target)] = line.value is None
                return ([*stated], {name for name, needed in stated.items() if needed}, False) if stated else None
            node, skip = made[1], 1
        if not isinstance(node, Function):
            return None
        a = node.args
        ordered = [one.arg for one in [*a.posonlyargs, *a.args]]
        needed = {*ordered[skip : len(ordered) - len(a.defaults)]}
        needed |= {one.arg for one, default in zip(a.kwonlyargs, a.kw_defaults, strict=True) if default is None}
        return [*ordered[skip:], *(one.arg for one in a.kwonlyargs)], needed, a.kwarg is not None

    def check_replacements(self, node: ast.Dict) -> None:
        """Functions of ours for functions of vLLM, by dotted names: parameters go by name, ``x`` for ``x_ptr``."""
        for key, value in zip(node.keys, node.values, strict=True):
            path = self.folded(key) or ""
            home, _, name = path.rpartition(".")
            for theirs in self.sources.find(home, name) if DOTTED.fullmatch(path) else ():
                for own in self.sources.resolve(self.module, value):
                    if isinstance(own.node, Function) and isinstance(theirs.node, Function):
                        given = {one.removesuffix("_ptr") for one in self.parameters(theirs)[0]}  # type: ignore[index]
                        for name in sorted(self.parameters(own)[1] - given):  # type: ignore[index]
                            self.note(False, f"{path}({name}), which {own} needs", value)

    def check_class(self, owner: Found) -> None:
        """Methods that replace vLLM's: each is there, and takes what vLLM gives it."""
        bases = [one for one in self.sources.lineage(owner) if one.module.split(".")[0] == "vllm" and one.node]
        for method in getattr(owner.node, "body", ()) if bases else ():
            if not isinstance(method, Function) or method.name.startswith("__") or OURS.fullmatch(method.name):
                continue
            found = next(filter(None, (self.sources.member(one, method.name) for one in bases)), None)
            what = f"{owner}.{method.name}, which replaces vLLM's"
            if found is None or not isinstance(found[1], Function):
                self.note(found is not None or method.name in self.called, what, method)
                continue
            names, _, is_open = self.parameters(Found("", method))  # type: ignore[misc]
            theirs = [one.arg for one in [*found[1].args.posonlyargs, *found[1].args.args, *found[1].args.kwonlyargs]]
            wrong = set() if is_open else {*theirs[1:]} - {*names}
            self.note(not wrong, f"{what}{''.join(f': no {name}' for name in sorted(wrong))}", method)

    def check_fields(self, node: ast.Assign | ast.AnnAssign) -> None:
        for target in targets(node):
            if (path := FIELDS.get(key := f"{self.path}:{getattr(target, 'id', '')}")) is not None:
                self.report.named.add(key)
                (owner,) = self.sources.find(*path.rsplit(".", 1))
                for part in node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", []):
                    self.note(self.sources.member(owner, part.value) is not None, f"{path}.{part.value}", part)


def statements(tree: ast.AST) -> Iterator[ast.stmt]:
    """The statements of a module or a body, those under ``if``, ``try``, ``with`` and loops too, but not a script's."""
    for statement in ast.iter_child_nodes(tree):
        if isinstance(statement, ast.If) and "__main__" in ast.unparse(statement.test):
            continue
        if isinstance(statement, ast.stmt):
            yield statement
        if isinstance(statement, ast.If | ast.Try | ast.ExceptHandler | ast.With | ast.For | ast.While):
            yield from statements(statement)


def targets(statement: ast.AST) -> list[ast.expr]:
    """What a statement assigns to, tuples taken apart."""
    whole = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
    kinds = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.For | ast.AsyncFor | ast.NamedExpr | ast.comprehension
    return [part for one in whole for part in getattr(one, "elts", [one])] if isinstance(statement, kinds) else []


def names_bound(statement: ast.AST) -> set[str]:
    """The names that a statement binds."""
    if isinstance(statement, Function | ast.ClassDef):
        return {statement.name}
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(alias.asname or alias.name).split(".")[0] for alias in statement.names}
    return {part.id for part in targets(statement) if isinstance(part, ast.Name)}


def texts(tree: ast.AST) -> set[str]:
    return {one.value for one in ast.walk(tree) if isinstance(one, ast.Constant) and isinstance(one.value, str)}


def installed() -> Path:
    """The folder that holds the installed vLLM."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parents[1]


def download(version: str, cache: Path) -> Path:
    """The folder that holds a release, from ``cache`` or from PyPI, whose digest it is checked against."""
    folder = cache / f"vllm-{version}"
    if not folder.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        page = urllib.request.urlopen(INDEX, timeout=60).read().decode()
        pattern = rf'href="([^"#]*/vllm-{re.escape(version)}\.tar\.gz)#sha256=([0-9a-f]{{64}})'
        link = re.search(pattern, page)
        assert link is not None, f"{INDEX} has no source of vLLM {version}"
        archive = urllib.request.urlopen(urllib.parse.urljoin(INDEX, link[1]), timeout=600).read()
        assert hashlib.sha256(archive).hexdigest() == link[2], f"what came for vLLM {version} is not what PyPI lists"
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            packed = Path(scratch, "source.tar.gz")
            packed.write_bytes(archive)
            with tarfile.open(packed) as tar:
                wanted = [item for item in tar if re.fullmatch(r"[^/]+/vllm/.*\.py", item.name)]
                tar.extractall(scratch, wanted, filter="data")
            os.rename(Path(scratch, folder.name), folder)
    return folder


PROJECT = Path(__file__).parents[2] / "pyproject.toml"


def releases() -> tuple[str, ...]:
    """Return them, the oldest first."""
    project = tomllib.loads(PROJECT.read_text(encoding="utf-8"))["project"]
    (wanted,) = project["optional-dependencies"]["vllm"]
    limits = re.fullmatch(r"vllm>=0\.(\d+),<0\.(\d+)", wanted)
    assert limits is not None, f"{wanted!r} names no range of minor versions"
    return tuple(f"0.{minor}.0" for minor in range(int(limits[1]), int(limits[2])))
