"""What of TorchRL's is different here: both signatures, parameter by parameter, and the reasons in docs/torchrl.toml.

Every parameter, method and name is compared: what differs needs a reason, and a reason needs a difference. Run as a
module, this writes the tables of docs/reference/torchrl.md.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from importlib import import_module
from inspect import Parameter
from pathlib import Path
from typing import Any, Literal

import torchrl

from support.sources import PACKAGE, ROOT

REASONS = ROOT / "docs" / "torchrl.toml"
THEIR_PACKAGE = "torchrl"

LABELS = {"default": "other default", "keyword": "by name only", "wider": "wider", "otherwise": "computes otherwise"}
LABELS |= {"refused": "refused", "same": "same"}
"""What a reason is for -> how the table says it."""
KINDS = {"fault": "pins a fault of TorchRL", "internal": "tests TorchRL's internals", "open": "open"}
"""Why a test of TorchRL's does not pass with our classes -> how the table says it."""

Reasons = Mapping[str, Any]
"""Keys of ``LABELS``, each with its why; ``example`` is a value that is refused."""


# -- signatures -------------------------------------------------------------------------------------------------------

Difference = Literal["position", "keyword", "default", "absent", "caught"]
"""How a parameter of TorchRL's is not ours: another stands at its place; by its name only; another default, or none;
there is none of that name; there is none, and ``**keywords`` take it, which says nothing about what becomes of it."""

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
STARS = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True, slots=True)
class Comparison:
    """One parameter of the first signature."""

    name: str
    theirs: str  # its default there, as Python writes it
    ours: str  # its default here; empty if there is no such parameter
    differences: frozenset[Difference]


ADDED_BY_RAY = "_ray_trace_ctx"
"""Ray gives it to the methods of a class in place, once an actor was made of the class in this process."""


def parameters(owner: Any, method: str = "") -> dict[str, Parameter]:
    """Return the parameters of a function, of a class's constructor or of its ``method``, without ``self``."""
    if method:
        function = getattr(owner, method)
        bound = isinstance(inspect.getattr_static(owner, method), classmethod | staticmethod)
        return _listed(function, skip=0 if bound else 1)
    return _constructor(owner.__mro__) if inspect.isclass(owner) else _listed(owner, skip=0)


def _listed(function: Callable[..., Any], skip: int) -> dict[str, Parameter]:
    listed = list(inspect.signature(function).parameters.items())[skip:]
    return {name: parameter for name, parameter in listed if name != ADDED_BY_RAY}


def _constructor(mro: tuple[type, ...]) -> dict[str, Parameter]:
    """``**arguments`` of ours stand for what the base of ours takes: they are replaced by that."""
    at = next(i for i, cls in enumerate(mro) if "__init__" in vars(cls))
    found = _listed(mro[at].__init__, skip=1)  # type: ignore[misc]
    base = next((cls for cls in mro[at + 1 :] if "__init__" in vars(cls)), object)
    caught = [name for name, parameter in found.items() if parameter.kind is Parameter.VAR_KEYWORD]
    if caught and mro[at].__module__.startswith(f"{PACKAGE}.") and base.__module__.startswith(f"{PACKAGE}."):
        del found[caught[0]]
        found = {**found, **{k: v for k, v in _constructor(mro[at + 1 :]).items() if k not in found}}
    return found


def shown(parameter: Parameter) -> str:
    """A parameter's default as Python writes it, without addresses."""
    if parameter.default is Parameter.empty:
        return "" if parameter.kind in STARS else "required"
    if inspect.isclass(parameter.default) or inspect.isroutine(parameter.default):
        return str(parameter.default.__name__)
    return "unset" if " at 0x" in repr(parameter.default) else repr(parameter.default)


def compare(theirs: Mapping[str, Parameter], ours: Mapping[str, Parameter]) -> list[Comparison]:
    """Return every parameter of ``theirs``, and what has become of it in ``ours``."""
    kinds = {parameter.kind for parameter in ours.values()}
    places = [name for name, parameter in ours.items() if parameter.kind in POSITIONAL]
    found = []
    for place, (name, parameter) in enumerate(theirs.items()):
        mine = ours.get(name)
        differences: set[Difference] = set()
        if parameter.kind in STARS:
            name = STARS[parameter.kind] + name
            differences |= {"absent"} if parameter.kind not in kinds else set()
        else:
            if parameter.kind in POSITIONAL and place < len(places) and places[place] != name:
                differences.add("position")
            if mine is None:
                differences.add("caught" if Parameter.VAR_KEYWORD in kinds else "absent")
            else:
                differences |= {"keyword"} if parameter.kind in POSITIONAL and mine.kind not in POSITIONAL else set()
                differences |= {"default"} if shown(parameter) != shown(mine) else set()
        here = "" if mine is None or parameter.kind in STARS else shown(mine)
        found.append(Comparison(name, shown(parameter), here, frozenset(differences)))
    return found


def alone(theirs: Mapping[str, Parameter], ours: Mapping[str, Parameter]) -> list[str]:
    """Return the parameters that only ``ours`` has."""
    kinds = {*STARS} & {parameter.kind for parameter in theirs.values()}
    mine = {name: parameter for name, parameter in ours.items() if name not in theirs and parameter.kind not in kinds}
    return [STARS.get(parameter.kind, "") + name for name, parameter in mine.items()]


def public_members(owner: type, package: str) -> list[str]:
    """Return the public names that a class has from itself and from its bases in ``package``."""
    classes = [cls for cls in owner.__mro__ if cls.__module__.split(".")[0] == package]
    return sorted({name for cls in classes for name in vars(cls) if not name.startswith("_")})


def has_member(owner: type, name: str, like: type | None = None) -> bool:
    """Whether a class has a name, or one of its methods sets it on ``self``; a method if it is one of ``like``."""
    if hasattr(owner, name):
        return like is None or _is_method(owner, name) or not _is_method(like, name)
    return name in _set_on_self(owner)


def _is_method(owner: type, name: str) -> bool:
    value = getattr(owner, name, None)
    return callable(value) and not inspect.isclass(value)


@cache
def _set_on_self(owner: type) -> set[str]:
    own = (PACKAGE, owner.__module__.split(".")[0])
    classes = [cls for cls in owner.__mro__ if cls.__module__.split(".")[0] in own]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(cls))) for cls in classes]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    stored = [node for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {node.attr for node in stored if isinstance(node.value, ast.Name) and node.value.id == "self"}


def shared_methods(theirs: type, ours: type, package: str) -> list[str]:
    """Return the methods of ``theirs`` that ``ours`` has too, and has not taken over as they are."""
    found = []
    for name in public_members(theirs, package):
        one, other = (inspect.getattr_static(owner, name, None) for owner in (theirs, ours))
        if one is not other and all(_is_method(owner, name) for owner in (theirs, ours)):
            found.append(name)
    return found


# -- what the page says of them ---------------------------------------------------------------------------------------


def load(path: str) -> Any:
    """Return what a full name stands for."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(module), name)


@dataclass(frozen=True)
class Pair:
    """A class or function of TorchRL's, and ours of the same name."""

    title: str
    theirs: str
    ours: str
    method: str = ""  # one that stands for itself: a second constructor
    apart: Sequence[str] = ()  # methods of a class that are pairs by themselves
    like: Sequence[str] = ()  # the titles of other pairs, whose reasons hold here too
    without: Sequence[str] = ()  # parameters of ours that the class inherits and refuses
    parameters: Mapping[str, Reasons] = field(default_factory=dict)
    """By name; ``method.name`` for those of a method. Names with one reason may share a key, with commas."""
    members: Mapping[str, str] = field(default_factory=dict)
    """Methods and attributes that are not here -> why."""

    @cached_property
    def both(self) -> tuple[Any, Any]:
        """TorchRL's, and ours."""
        return load(self.theirs), load(self.ours)

    @cached_property
    def compared(self) -> dict[str, Comparison]:
        """Every parameter of TorchRL's, those of methods as ``method.name``."""
        rows = {row.name: row for row in compare(*(parameters(owner, self.method) for owner in self.both))}
        for method in self._methods:
            of_method = compare(*(parameters(owner, method) for owner in self.both))
            rows |= {f"{method}.{row.name}": row for row in of_method}
        return rows

    @property
    def _methods(self) -> list[str]:
        whole = isinstance(self.both[0], type) and not self.method
        return [name for name in shared_methods(*self.both, THEIR_PACKAGE) if name not in self.apart] if whole else []

    @property
    def alone(self) -> list[str]:
        """The parameters of ours that TorchRL's has not."""
        theirs, ours = (parameters(owner, self.method) for owner in self.both)
        found = [name for name in alone(theirs, ours) if name not in self.without]
        for method in self._methods:
            names = alone(*(parameters(owner, method) for owner in self.both))
            found += [f"{method}({', '.join(names)})"] if names else []
        return found

    @property
    def missing(self) -> list[str]:
        """The public methods and attributes of TorchRL's class that ours has not."""
        theirs, ours = self.both
        if not isinstance(theirs, type) or self.method:
            return []
        return [name for name in public_members(theirs, THEIR_PACKAGE) if not has_member(ours, name, like=theirs)]


@dataclass(frozen=True)
class Namespace:
    """A package of TorchRL's, and the room that stands for it."""

    theirs: str
    ours: str
    absent: Mapping[str, str] = field(default_factory=dict)
    """Names that are not here -> why."""

    @cached_property
    def names(self) -> tuple[list[str], list[str]]:
        """TorchRL's public names, and those of them that are here."""
        theirs, ours = (import_module(name) for name in (self.theirs, self.ours))
        return sorted(theirs.__all__), sorted(set(theirs.__all__) & set(ours.__all__))

    @property
    def taken_over(self) -> list[str]:
        """The names that stand for TorchRL's own object."""
        theirs, ours = (import_module(name) for name in (self.theirs, self.ours))
        return [name for name in self.names[1] if getattr(ours, name) is getattr(theirs, name)]


@dataclass(frozen=True)
class Book:
    """All that the page shows."""

    pairs: list[Pair]
    namespaces: list[Namespace]
    tests: list[dict[str, str]]

    @classmethod
    def read(cls, path: Path = REASONS) -> Book:
        """Return what the file of reasons says."""
        data = tomllib.loads(path.read_text(encoding="utf-8"))
        return cls(
            [Pair(**{**entry, **_split(entry)}) for entry in data["pair"]],
            [Namespace(**{**entry, "absent": _apart(entry.get("absent", {}))}) for entry in data["namespace"]],
            data.get("test", []),
        )

    def reasons(self, pair: Pair) -> dict[str, Reasons]:
        """Return the reasons of a pair, with those of the pairs it is like."""
        return {**self.inherited(pair), **pair.parameters}

    def inherited(self, pair: Pair) -> dict[str, Reasons]:
        """Return the reasons of the pairs that a pair is like."""
        return {name: why for other in self._like(pair) for name, why in self.reasons(other).items()}

    def members(self, pair: Pair) -> dict[str, str]:
        """Return why methods and attributes are not here, by the pair and by those it is like."""
        return {name: why for other in self._like(pair) for name, why in self.members(other).items()} | {**pair.members}

    def _like(self, pair: Pair) -> list[Pair]:
        return [next(other for other in self.pairs if other.title == title) for title in pair.like]

    def problems(self) -> Iterator[str]:
        """Return what the file of reasons lacks or has too much, each with the name and what to do."""
        for pair in self.pairs:
            reasons, members = self.reasons(pair), self.members(pair)
            for name, row in pair.compared.items():
                yield from (f"{pair.title}: {problem}" for problem in _problems(name, row, reasons.get(name, {})))
            for name in sorted(pair.parameters.keys() - pair.compared.keys()):
                yield f"{pair.title}: TorchRL's has no parameter {name!r}: take its reason out"
            for name in sorted(set(pair.missing) - members.keys()):
                yield f"{pair.title}: TorchRL's has {name!r}, and ours has not: add it, or a reason under members"
            for name in sorted(pair.members.keys() - set(pair.missing)):
                yield f"{pair.title}: {name!r} is no longer missing: take its reason out"
        for space in self.namespaces:
            theirs, here = space.names
            for name in sorted(set(theirs) - set(here) - space.absent.keys()):
                yield f"{space.theirs} has {name!r}, and {space.ours} has not: export it, or add a reason under absent"
            for name in sorted(space.absent.keys() - (set(theirs) - set(here))):
                yield f"{space.theirs}: {name!r} is no longer missing: take its reason out"
        for test in self.tests:
            if test["kind"] not in KINDS:
                yield f"{test['name']}: kind must be one of {list(KINDS)}, got {test['kind']!r}"


def _apart(grouped: Mapping[str, Any]) -> dict[str, Any]:
    """Names that share a key, with commas -> each by itself."""
    return {name.strip(): value for key, value in grouped.items() for name in key.split(",")}


def _split(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _apart(entry.get(key, {})) for key in ("parameters", "members")}


def _problems(name: str, row: Comparison, reasons: Reasons) -> Iterator[str]:
    given = reasons.keys() - {"example"}
    if unknown := sorted(given - LABELS.keys()):
        yield f"{name!r} has {', '.join(unknown)}: a reason is one of {', '.join(LABELS)}"
    if "position" in row.differences:
        yield f"{name!r} stands at another place than in TorchRL's: a value given by position would mean something else"
    for kind in ("default", "keyword"):
        if kind in row.differences and kind not in given:
            yield f"{name!r} differs ({kind}: {row.theirs} there, {row.ours} here) and has no reason {kind!r}"
        if kind in given and kind not in row.differences:
            yield f"{name!r} has a stale reason {kind!r}: both are {row.ours or 'absent'}"
    if "absent" in row.differences and "refused" not in given:
        yield f"{name!r} is TorchRL's, and ours lacks it: take it, or refuse it and add a reason 'refused'"
    if "caught" in row.differences and not given & {"refused", "wider", "otherwise", "same"}:
        yield f"{name!r} is caught by ours with **keywords: add 'same', 'wider', 'otherwise' or 'refused', and why"
    if "same" in given and "caught" not in row.differences:
        yield f"{name!r} has a stale reason 'same': it is named here"
    if "refused" in given and "absent" not in row.differences and "example" not in reasons:
        yield f"{name!r} is refused, which its signature does not show: add an example = <a value that is refused>"


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = ROOT / "docs" / "reference" / "torchrl.md"
HOW = "torchrl.md is not what the signatures say: PYTHONPATH=.:test python -m support.torchrl_page writes it"
SHOWN = re.compile(r"(?<=<!-- )(\w+) -->\n\n.*?\n\n(?=<!-- end of \1 -->)", re.DOTALL)


def classes(book: Book) -> str:
    """Every pair, parameter by parameter."""
    return "\n\n".join(_section(book, pair) for pair in book.pairs)


def _section(book: Book, pair: Pair) -> str:
    reasons, like = book.reasons(pair), book.inherited(pair)
    rows, same, alike = [], [], []
    for name, row in pair.compared.items():
        why = {kind: text for kind, text in reasons.get(name, {}).items() if kind != "example"}
        if not why:
            same += [] if "." in name else [name]
        elif name not in pair.parameters and name in like:
            alike.append(name)
        else:
            labels = ", ".join(LABELS[kind] for kind in LABELS if kind in why)
            text = " ".join(why[kind] for kind in LABELS if kind in why)
            rows.append(f"| `{_call(name)}` | {_code(row.theirs)} | {_code(row.ours)} | {labels} | {text} |")
    missing = {name: book.members(pair)[name] for name in pair.missing}
    rows += [f"| `.{name}` | | | not here | {why} |" for name, why in missing.items() if name in pair.members]
    alike += [f".{name}" for name in missing if name not in pair.members]
    parts = [f"### {pair.title}", f"`{pair.theirs}` and `{pair.ours}`."]
    parts += ["\n".join(["| parameter | TorchRL | here | | |", "|---|---|---|---|---|", *rows])] if rows else []
    parts += [f"As {' and '.join(pair.like)}: {_list(alike)}."] if alike else []
    parts += [f"Same name, place and default: {_list(same)}."] if same else []
    parts += [f"Here alone: {_list(pair.alone)}."] if pair.alone else []
    return "\n\n".join(parts)


def _call(name: str) -> str:
    method, _, parameter = name.rpartition(".")
    return f"{method}({parameter})" if method else parameter


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _list(names: list[str]) -> str:
    return ", ".join(f"`{_call(name) if not name.startswith('.') else name}`" for name in names)


def names(book: Book) -> str:
    """What is imported from where."""
    lines = ["| TorchRL | here | the same names |", "|---|---|---|"]
    for space in book.namespaces:
        star = {name: r"\*" for name in space.taken_over}
        here = ", ".join(f"`{name}`{star.get(name, '')}" for name in space.names[1])
        lines.append(f"| `{space.theirs}` | `{space.ours}` | {here} |")
    lines += ["", "\\* TorchRL's own.", "", "| not here | why |", "|---|---|"]
    for space in book.namespaces:
        together: dict[str, list[str]] = {}
        for name, why in space.absent.items():
            together.setdefault(why, []).append(f"`{name}`")
        lines += [f"| {', '.join(same)} | {why} |" for why, same in together.items()]
    return "\n".join(lines)


def tests(book: Book) -> str:
    """TorchRL's own tests that do not pass with our classes."""
    lines = ["| test | | why |", "|---|---|---|"]
    return "\n".join(
        [*lines, *(f"| `{test['name']}` | {KINDS[test['kind']]} | {test['why']} |" for test in book.tests)]
    )


def version() -> str:
    """TorchRL's release."""
    return f"TorchRL {torchrl.__version__.partition('+')[0]}."


def written(text: str, book: Book) -> str:
    """Return a page with its generated parts as they should be."""
    parts = {"version": version, "names": lambda: names(book), "classes": lambda: classes(book)}
    parts["tests"] = lambda: tests(book)
    return SHOWN.sub(lambda match: f"{match[1]} -->\n\n{parts[match[1]]()}\n\n", text)


if __name__ == "__main__":
    book = Book.read()
    if found := list(book.problems()):
        raise SystemExit("\n".join([f"{REASONS.name} and the signatures do not agree:", *found]))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), book), encoding="utf-8")
