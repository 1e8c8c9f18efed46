"""Two signatures, parameter by parameter: what a caller of the one meets in the other. Nothing is called."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from inspect import Parameter
from typing import Any, Literal

from support.sources import PACKAGE

Difference = Literal["position", "keyword", "default", "absent", "caught"]
"""How a parameter of the one is not that of the other.

- ``position``: another parameter stands at its place, so that a value given by position means something else;
- ``keyword``: it is taken by its name only;
- ``default``: another default, or none;
- ``absent``: there is none of that name;
- ``caught``: there is none, and ``**keywords`` take it, which says nothing about what becomes of it.
"""

POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One parameter of the first signature."""

    name: str
    theirs: str
    """Its default there, as Python writes it."""
    ours: str
    """Its default here; empty if there is no such parameter."""
    differences: frozenset[Difference]


ADDED_BY_RAY = "_ray_trace_ctx"
"""Ray gives it to the methods of a class in place, once an actor was made of the class in this process."""


def parameters(owner: Any, method: str = "") -> dict[str, Parameter]:
    """Return the parameters of a function, of a class's constructor or of its ``method``, without ``self``.

    ``**arguments`` of a constructor of ours stand for what the base of ours takes: they are replaced by that.
    """
    if method:
        function = getattr(owner, method)
        bound = isinstance(inspect.getattr_static(owner, method), classmethod | staticmethod)
        return _listed(function, skip=0 if bound else 1)
    return _constructor(owner.__mro__) if inspect.isclass(owner) else _listed(owner, skip=0)


def _listed(function: Callable[..., Any], skip: int) -> dict[str, Parameter]:
    listed = list(inspect.signature(function).parameters.items())[skip:]
    return {name: parameter for name, parameter in listed if name != ADDED_BY_RAY}


def _constructor(mro: tuple[type, ...]) -> dict[str, Parameter]:
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
        return "required" if parameter.kind not in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD) else ""
    if inspect.isclass(parameter.default) or inspect.isroutine(parameter.default):
        return str(parameter.default.__name__)
    return "unset" if " at 0x" in repr(parameter.default) else repr(parameter.default)


def compare(theirs: Mapping[str, Parameter], ours: Mapping[str, Parameter]) -> list[Comparison]:
    """Return every parameter of ``theirs``, and what has become of it in ``ours``."""
    kinds = {parameter.kind for parameter in ours.values()}
    places = [name for name, parameter in ours.items() if parameter.kind in POSITIONAL]
    found = []
    for place, (name, parameter) in enumerate(theirs.items()):
        if parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD):
            stars = "**" if parameter.kind is Parameter.VAR_KEYWORD else "*"
            missing: set[Difference] = set() if parameter.kind in kinds else {"absent"}
            found.append(Comparison(stars + name, "", "", frozenset(missing)))
            continue
        mine = ours.get(name)
        differences: set[Difference] = set()
        if parameter.kind in POSITIONAL and place < len(places) and places[place] != name:
            differences.add("position")
        if mine is None:
            differences.add("caught" if Parameter.VAR_KEYWORD in kinds else "absent")
            found.append(Comparison(name, shown(parameter), "", frozenset(differences)))
            continue
        if parameter.kind in POSITIONAL and mine.kind not in POSITIONAL:
            differences.add("keyword")
        if shown(parameter) != shown(mine):
            differences.add("default")
        found.append(Comparison(name, shown(parameter), shown(mine), frozenset(differences)))
    return found


def alone(theirs: Mapping[str, Parameter], ours: Mapping[str, Parameter]) -> list[str]:
    """Return the parameters that only ``ours`` has."""
    stars = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
    kinds = {parameter.kind for parameter in theirs.values()}
    return [
        stars.get(parameter.kind, "") + name
        for name, parameter in ours.items()
        if name not in theirs and not (parameter.kind in stars and parameter.kind in kinds)
    ]


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
