"""What of TorchRL's is different here: both signatures, and the reasons in docs/torchrl.toml.

Every parameter, method and name of TorchRL's is compared. What differs needs a reason, and a reason needs a difference.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any

from support.signatures import Comparison, alone, compare, has_member, parameters, public_members, shared_methods

REASONS = Path(__file__).parents[2] / "docs" / "torchrl.toml"
THEIR_PACKAGE = "torchrl"

LABELS = {
    "default": "other default",
    "keyword": "by name only",
    "wider": "wider",
    "otherwise": "computes otherwise",
    "refused": "refused",
    "same": "same",
}
"""What a reason is for -> how the table says it."""
KINDS = {"fault": "pins a fault of TorchRL", "internal": "tests TorchRL's internals", "open": "open"}
"""Why a test of TorchRL's does not pass with our classes -> how the table says it."""

Reasons = Mapping[str, Any]
"""Keys of ``LABELS``, each with its why; ``example`` is a value that is refused."""


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
    method: str = ""
    """A method that stands for itself: a second constructor."""
    apart: Sequence[str] = ()
    """Methods of a class that are pairs by themselves."""
    like: Sequence[str] = ()
    """The titles of other pairs, whose reasons hold here too."""
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
        found = alone(theirs, ours)
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
        found: dict[str, Reasons] = {}
        for title in pair.like:
            found |= self.reasons(self.named(title))
        return found

    def members(self, pair: Pair) -> dict[str, str]:
        """Return why methods and attributes are not here, by the pair and by those it is like."""
        found: dict[str, str] = {}
        for title in pair.like:
            found |= self.members(self.named(title))
        return {**found, **pair.members}

    def named(self, title: str) -> Pair:
        """Return the pair of that title."""
        return next(pair for pair in self.pairs if pair.title == title)

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
