"""What our source uses of vLLM, and whether a release has it: imports, attributes, arguments, replaced methods, texts.

Nothing is listed by hand: a line that is written tomorrow is looked up tomorrow. ``vllm_names.py`` says of which class
a value is that is ``Any`` in our code; a value of which nobody says so is reported, too.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass, field
from pathlib import Path

from support import vllm_names
from support.vllm_source import Defined, Found, Function, Sources, targets
from support.vllm_types import Reader, Scope, Type, inside, paths

DOTTED = re.compile(r"vllm(\.\w+)+")
OURS = re.compile(r"_?torchrl_moe\w*")
"""Attributes that we put on objects of vLLM."""


@dataclass(frozen=True, slots=True)
class Names:
    """What ``vllm_names.py`` says.

    Attributes:
        objects: a name, or ``file:name`` -> the class of what it names, as an annotation over dotted paths.
        mixed: a class of ours -> the one of vLLM that it is mixed into.
        fields: ``file:name`` of a tuple or mapping of field names -> their class.
        unresolved: ``file:expression``, or ``file:*`` for all of a file -> why nobody can say what it is.
        optional: what not every release has, as it is reported -> why that is right.
    """

    objects: dict[str, str] = field(default_factory=dict)
    mixed: dict[str, str] = field(default_factory=dict)
    fields: dict[str, str] = field(default_factory=dict)
    unresolved: dict[str, str] = field(default_factory=dict)
    optional: dict[str, str] = field(default_factory=dict)


OWN = Names(vllm_names.OBJECTS, vllm_names.MIXED_INTO, vllm_names.FIELDS, vllm_names.UNRESOLVED, vllm_names.NOT_IN_EACH)


@dataclass
class Report:
    """What was found.

    Attributes:
        used: what was looked up and is there.
        missing: what is not there, with its place.
        optional: what our code asks for before it uses it -> whether it is there.
        unresolved: ``file:expression`` of values of which it is not known what they are, and which the table does not
            name -> their places.
        named: the entries of :class:`Names` that were used.
    """

    used: set[str] = field(default_factory=set)
    missing: list[str] = field(default_factory=list)
    optional: dict[str, bool] = field(default_factory=dict)
    unresolved: dict[str, list[str]] = field(default_factory=dict)
    named: set[str] = field(default_factory=set)


def uses(ours: Path, package: str, release: Path, names: Names = OWN) -> Report:
    """Look up all that a package uses.

    Args:
        ours: the folder that holds our package.
        package: its name.
        release: the folder that holds vLLM.
        names: of values that are ``Any`` in our code.
    """
    return _Search(ours, package, release, names).run()


class _Search:
    def __init__(self, ours: Path, package: str, release: Path, names: Names) -> None:
        self.sources = Sources({package: ours, "vllm": release})
        self.names, self.report = names, Report()
        self.root, self.package = ours, package
        self.reader = Reader(self.sources, self._named, names.mixed)
        self.path, self.faces_vllm = "", False
        self.called: set[str] = set()
        self._asked: dict[int, set[tuple[str, str]]] = {}

    def run(self) -> Report:
        texts = {file: file.read_text(encoding="utf-8") for file in self.root.joinpath(self.package).rglob("*.py")}
        self.called = {name for text in texts.values() for name in re.findall(r"\.(\w+)", text)}
        for file in sorted(texts):
            self.path = str(file.relative_to(self.root / self.package))
            is_facing = _is_facing(self.path)
            has_fields = any(key.startswith(f"{self.path}:") for key in self.names.fields)
            if (
                not (is_facing or has_fields)
                and re.search(r"\b(import|from) vllm\b|\"(vllm\.|VLLM_)", texts[file]) is None
            ):
                continue
            module = self._module(file)
            tree = self.sources.tree(module)
            self.faces_vllm = is_facing or any(_imports_vllm(part) for part in ast.walk(tree))
            self._walk(tree, self.reader.scope(module, None, None))
        return self.report

    def _module(self, file: Path) -> str:
        return ".".join(file.relative_to(self.root).with_suffix("").parts).removesuffix(".__init__")

    def _named(self, name: str, scope: Scope) -> str | None:
        file = self.sources.file(scope.module)
        if scope.module.split(".")[0] != self.package or file is None:
            return None
        path = str(file.relative_to(self.root / self.package))
        if not _is_facing(path) and f"{path}:{name}" not in self.names.objects:
            return None
        for key in (f"{path}:{scope.name}:{name}", f"{path}:{name}", name.lstrip("_")):
            if key in self.names.objects:
                self.report.named.add(key)
                return self.names.objects[key]
        return None

    # -- the walk ---------------------------------------------------------------------------------------------------

    def _walk(self, node: ast.AST, scope: Scope) -> None:
        for part in ast.iter_child_nodes(node):
            inner = scope
            if isinstance(part, ast.ClassDef):
                owner = Found(scope.module, part)
                self._check_class(owner, scope)
                inner = self.reader.scope(scope.module, owner, None, scope if scope.function else None)
            elif isinstance(part, Function):
                inner = self.reader.scope(scope.module, scope.owner, part, scope if scope.function else None)
            if not isinstance(part, Defined):
                self._check(part, scope)
            self._walk(part, inner)

    def _check(self, node: ast.AST, scope: Scope) -> None:
        match node:
            case ast.ImportFrom() if _imports_vllm(node):
                self._check_import(node, scope)
            case ast.Import():
                for alias in node.names:
                    if alias.name.split(".")[0] == "vllm":
                        self._note(self.sources.has(alias.name), alias.name, node, scope)
            case ast.Attribute():
                self._check_attribute(node, node.value, node.attr, scope)
            case ast.Call():
                self._check_call(node, scope)
            case ast.Constant(value=str() as text):
                self._check_text(text, node, scope)
            case ast.JoinedStr() if (text := self._folded(node, scope)) is not None:
                self._check_text(text, node, scope)
            case ast.Dict():
                self._check_replacements(node, scope)
            case ast.Assign() | ast.AnnAssign() if scope.function is None:
                self._check_fields(node, scope)

    def _note(self, there: bool, what: str, node: ast.AST, scope: Scope, optional: bool = False) -> None:
        if what in self.names.optional:
            self.report.named.add(what)
        if optional or what in self.names.optional:
            self.report.optional[what] = there
        elif there:
            self.report.used.add(what)
        else:
            self.report.missing.append(f"{self.path}:{getattr(node, 'lineno', 0)}: {what}")

    def _check_import(self, node: ast.ImportFrom, scope: Scope) -> None:
        home = str(node.module)
        for alias in node.names:
            there = self.sources.has(home) and bool(
                self.sources.imported(home, alias.name) or alias.name in self.sources.names(home)
            )
            self._note(there, f"{home}.{alias.name}", node, scope)

    def _check_text(self, text: str, node: ast.expr, scope: Scope) -> None:
        """Dotted names of vLLM, and its environment variables, in a text of their own."""
        if DOTTED.fullmatch(text):
            self._note(self.sources.has(text) or bool(self._at(text)), text, node, scope)
        elif re.fullmatch(r"VLLM_[A-Z0-9_]+", text):
            there = text in self.sources.texts("vllm.envs") | self.sources.names("vllm.envs")
            self._note(there, f"the environment variable {text}", node, scope)

    def _at(self, path: str) -> list[Found]:
        home, _, name = path.rpartition(".")
        return self.sources.imported(home, name) if self.sources.has(home) else []

    def _folded(self, node: ast.expr | None, scope: Scope) -> str | None:
        """Return a text that is put together from constants of its module; ``None`` if it is not."""
        if isinstance(node, ast.Constant):
            return str(node.value) if isinstance(node.value, str) else None
        if isinstance(node, ast.FormattedValue) and isinstance(node.value, ast.Name):
            found = [one.node for one in self.sources.find(scope.module, node.value.id)]
            return self._folded(found[0].value, scope) if found and isinstance(found[0], ast.Assign) else None
        if isinstance(node, ast.JoinedStr):
            parts = [self._folded(part, scope) for part in node.values]
            return None if None in parts else "".join(part for part in parts if part is not None)
        return None

    def _check_replacements(self, node: ast.Dict, scope: Scope) -> None:
        """Functions of ours for functions of vLLM, by dotted names: parameters go by name, ``x`` for ``x_ptr``."""
        for key, value in zip(node.keys, node.values, strict=True):
            path = self._folded(key, scope)
            if path is None or DOTTED.fullmatch(path) is None:
                continue
            theirs = [one.node for one in self._at(path) if isinstance(one.node, Function)]
            ours = [one.of for one in self.reader.types(value, scope) if one.kind == "function"]
            if theirs and ours and ours[0] is not None:
                signature = self._signature(Type("function", ours[0]))
                assert signature is not None
                parameters = theirs[0].args
                given = {one.arg.removesuffix("_ptr") for one in [*parameters.args, *parameters.kwonlyargs]}
                for name in sorted(signature[2] - given):
                    self._note(False, f"{path}({name}), which {ours[0]} needs", value, scope)

    # -- attributes -------------------------------------------------------------------------------------------------

    def _check_attribute(self, node: ast.AST, value: ast.expr, name: str, scope: Scope, optional: bool = False) -> None:
        found = self.reader.types(value, scope)
        theirs = [one for one in found if self._of_vllm(one)]
        if theirs and not OURS.fullmatch(name):
            there = not all(self.reader.lacks(one, name) for one in theirs)
            if there or len(theirs) == len(found):
                what = f"{' | '.join(sorted(str(one.of) for one in theirs))}.{name}"
                self._note(there, what, node, scope, optional or (not there and self._is_asked(value, name, scope)))
        elif self.faces_vllm and found and all(one.kind == "unknown" for one in found) and not name.startswith("__"):
            self._note_unresolved(self._root(value, scope), f"{scope.name}: {ast.unparse(value)}.{name}")

    def _note_unresolved(self, value: ast.expr, place: str) -> None:
        key = f"{self.path}:{ast.unparse(value)}"
        known = {key, f"{self.path}:*"} & {*self.names.unresolved}
        self.report.named |= known
        if not known:
            self.report.unresolved.setdefault(key, []).append(place)

    def _of_vllm(self, one: Type) -> bool:
        if one.kind == "module":
            return one.of is not None and one.of.module.split(".")[0] == "vllm"
        if one.kind not in ("instance", "class", "super") or one.of is None:
            return False
        if one.of.module.split(".")[0] == "vllm":
            return True
        if str(one.of) in self.names.mixed:
            return True
        return one.of.node is not None and any(
            base.module.split(".")[0] == "vllm" for base in self.sources.lineage(one.of)
        )

    def _root(self, value: ast.expr, scope: Scope) -> ast.expr:
        """Return the first part of an expression of which it is not known what it is."""
        inner = getattr(value, "func", None) or getattr(value, "value", None)
        found = self.reader.types(inner, scope) if isinstance(inner, ast.expr) else ()
        if isinstance(inner, ast.expr) and found and all(one.kind == "unknown" for one in found):
            return self._root(inner, scope)
        return value

    def _is_asked(self, value: ast.expr, name: str, scope: Scope) -> bool:
        """Whether the function asks ``hasattr``, or ``getattr`` with a default, before it uses an attribute."""
        function = scope.function
        if function is None:
            return False
        if id(function) not in self._asked:
            self._asked[id(function)] = {
                (ast.unparse(part.args[0]), str(part.args[1].value))
                for part in inside(function)
                if isinstance(part, ast.Call)
                and isinstance(part.func, ast.Name)
                and (part.func.id == "hasattr" or (part.func.id == "getattr" and len(part.args) == 3))
                and isinstance(part.args[1], ast.Constant)
            }
        return (ast.unparse(value), name) in self._asked[id(function)]

    # -- calls ------------------------------------------------------------------------------------------------------

    def _check_call(self, node: ast.Call, scope: Scope) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr", "setattr") and len(node.args) > 1:
            self._check_named_attribute(node, node.func.id, scope)
            return
        called = [one for one in self.reader.types(node.func, scope) if one.kind in ("class", "function")]
        theirs = [one for one in called if one.of is not None and one.of.module.split(".")[0] == "vllm"]
        wrong = [self._wrong_arguments(one, node) for one in theirs]
        if wrong and all(wrong):
            names = " | ".join(sorted(str(one.of) for one in theirs))
            self._note(False, f"{names}({', '.join(sorted(set().union(*wrong)))})", node, scope)
        for one in theirs:
            self.report.used |= {f"{one.of}({word.arg}=)" for word in node.keywords if word.arg}

    def _check_named_attribute(self, node: ast.Call, how: str, scope: Scope) -> None:
        optional = how == "hasattr" or (how == "getattr" and len(node.args) == 3)
        pairs = self._named_pairs(node.args[0], node.args[1], scope)
        for value, name in pairs:
            self._check_attribute(node, value, name, scope, optional)
        if not pairs and self.faces_vllm and any(self._of_vllm(one) for one in self.reader.types(node.args[0], scope)):
            self._note_unresolved(node, f"{scope.name}: {ast.unparse(node)}")

    def _named_pairs(self, value: ast.expr, name: ast.expr, scope: Scope) -> list[tuple[ast.expr, str]]:
        """Return the attributes that are named: by a text, or by those that a loop goes through, with their objects."""
        if isinstance(name, ast.Constant):
            return [(value, str(name.value))]
        pairs = []
        for loop in inside(scope.function) if scope.function is not None and isinstance(name, ast.Name) else ():
            if not isinstance(loop, ast.For | ast.comprehension):
                continue
            for path in paths(loop.target, ast.unparse(name)):
                rows = self._listed(loop.iter, scope)
                of_row = list(paths(loop.target, ast.unparse(value)))
                for row in rows:
                    one = _at_path(row, path)
                    owner = _at_path(row, of_row[0]) if of_row else value
                    if not isinstance(one, ast.Constant) or owner is None:
                        return []
                    pairs.append((owner, str(one.value)))
        return pairs

    def _listed(self, node: ast.expr, scope: Scope) -> list[ast.expr]:
        """Return what a tuple, a list or the keys of a mapping have in them, if they are written out."""
        if isinstance(node, ast.Name):
            found = [one.node for one in self.sources.find(scope.module, node.id)]
            values = [one.value for one in found if isinstance(one, ast.Assign | ast.AnnAssign)]
            return [part for one in values if one is not None for part in self._listed(one, scope)]
        if isinstance(node, ast.Dict):
            return [key for key in node.keys if key is not None]
        return node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else []

    def _wrong_arguments(self, called: Type, node: ast.Call) -> set[str]:
        """Return what a call gives that a function or class of vLLM does not take, and what it leaves out."""
        given = {word.arg for word in node.keywords if word.arg}
        open_ended = any(word.arg is None for word in node.keywords) or any(
            isinstance(one, ast.Starred) for one in node.args
        )
        for word in node.keywords:
            if word.arg is None and isinstance(word.value, ast.Dict):
                given |= {str(key.value) for key in word.value.keys if isinstance(key, ast.Constant)}
        signature = self._signature(called)
        if signature is None:
            return set()
        positional, keywords, required, any_keyword, any_positional = signature
        wrong = set() if any_keyword else {f"no {name}=" for name in given - {*positional, *keywords}}
        if len(node.args) > len(positional) and not any_positional and not open_ended:
            wrong.add(f"{len(positional)} positional arguments at most")
        if not open_ended:
            left_out = required - given - {*positional[: len(node.args)]}
            wrong |= {f"{name}= is required" for name in left_out}
        return wrong

    def _signature(self, called: Type) -> tuple[list[str], set[str], set[str], bool, bool] | None:
        """Return positional parameters, those by keyword only, the required ones, and whether any others are taken."""
        assert called.of is not None
        node, drop = called.of.node, called.bound
        if isinstance(node, ast.ClassDef):
            made = self.sources.members(called.of, "__init__")
            if not made:
                return self._fields(called.of)
            node, drop = made[-1].node, True
        if not isinstance(node, Function):
            return None
        arguments = node.args
        ordered = [*arguments.posonlyargs, *arguments.args]
        without = len(ordered) - len(arguments.defaults)
        required = {one.arg for one in ordered[:without]} | {
            one.arg for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default is None
        }
        names = [one.arg for one in ordered]
        if drop and names:
            required.discard(names[0])
            names = names[1:]
        only = {one.arg for one in arguments.kwonlyargs}
        return names, only, required, arguments.kwarg is not None, arguments.vararg is not None

    def _fields(self, owner: Found) -> tuple[list[str], set[str], set[str], bool, bool] | None:
        """Return the fields of a dataclass, a pydantic model, a msgspec struct or a named tuple."""
        fields: dict[str, bool] = {}
        for one in reversed(list(self.sources.lineage(owner))):
            if isinstance(one.node, ast.ClassDef):
                stated = [part for part in one.node.body if isinstance(part, ast.AnnAssign)]
                for part in stated:
                    if isinstance(part.target, ast.Name) and "ClassVar" not in ast.unparse(part.annotation):
                        fields[part.target.id] = part.value is None
        if not fields:
            return None
        return list(fields), set(), {name for name, needed in fields.items() if needed}, False, False

    # -- classes and tables -----------------------------------------------------------------------------------------

    def _check_class(self, owner: Found, scope: Scope) -> None:
        """Methods that replace vLLM's: each is there, and takes what vLLM gives it."""
        assert isinstance(owner.node, ast.ClassDef)
        if not any(base.node is not None and base.module.startswith("vllm") for base in self.sources.lineage(owner)):
            return
        for method in owner.node.body:
            if not isinstance(method, Function) or method.name.startswith("__") or OURS.fullmatch(method.name):
                continue
            what = f"{owner}.{method.name}, which replaces vLLM's"
            theirs = [
                member
                for base in self.sources.lineage(owner)
                if base.node is not None and base.module.startswith("vllm")
                for member in self.sources.members(base, method.name)
            ]
            if not theirs:
                inherited = self.sources.inherits(owner, method.name)
                self._note(inherited or method.name in self.called, what, method, scope)
                continue
            node = theirs[0].node
            wrong = _not_taken(method, node) if isinstance(node, Function) else set()
            self._note(not wrong, f"{what}{''.join(f': no {name}' for name in sorted(wrong))}", method, scope)

    def _check_fields(self, node: ast.Assign | ast.AnnAssign, scope: Scope) -> None:
        """A tuple or mapping of field names."""
        for target in targets(node):
            key = f"{self.path}:{getattr(target, 'id', '')}"
            if (path := self.names.fields.get(key)) is None:
                continue
            self.report.named.add(key)
            assert node.value is not None
            parts = node.value.keys if isinstance(node.value, ast.Dict) else getattr(node.value, "elts", [])
            for part in parts:
                assert isinstance(part, ast.Constant), f"{key}: {ast.unparse(node.value)}"
                for one in self.reader.of_path(path):
                    self._note(not self.reader.lacks(one, str(part.value)), f"{path}.{part.value!s}", part, scope)


def _is_facing(path: str) -> bool:
    """Whether names in a file of ours mean objects of vLLM."""
    return path.startswith(vllm_names.FACING) and path not in vllm_names.ABOUT_OTHERS


def _imports_vllm(node: ast.AST) -> bool:
    if isinstance(node, ast.ImportFrom):
        return not node.level and (node.module or "").split(".")[0] == "vllm"
    return isinstance(node, ast.Import) and any(alias.name.split(".")[0] == "vllm" for alias in node.names)


def _at_path(row: ast.expr, path: tuple[int, ...]) -> ast.expr | None:
    """Return a part of a tuple."""
    for index in path:
        if not isinstance(row, ast.Tuple) or index >= len(row.elts):
            return None
        row = row.elts[index]
    return row


def _not_taken(own: Function, theirs: Function) -> set[str]:
    """Return the parameters of vLLM's method that ours does not take."""
    if own.args.kwarg is not None and own.args.vararg is not None:
        return set()
    ordered = [one.arg for one in [*own.args.posonlyargs, *own.args.args]]
    taken = {*ordered, *(one.arg for one in own.args.kwonlyargs)}
    wanted = [*theirs.args.posonlyargs, *theirs.args.args, *theirs.args.kwonlyargs]
    return {one.arg for one in wanted[1:] if one.arg not in taken} if own.args.kwarg is None else set()
