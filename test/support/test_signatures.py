"""What a caller of one signature meets in another, on made-up ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from support.signatures import compare, has_member, parameters, public_members, shared_methods


def theirs(model: Any, size: int = 1, *, mode: str = "a", late: bool = False) -> None: ...


def found(ours: Callable[..., Any]) -> dict[str, set[str]]:
    return {row.name: set(row.differences) for row in compare(parameters(theirs), parameters(ours)) if row.differences}


def same(model: Any, size: int = 1, extra: int = 3, *, late: bool = False, mode: str = "a") -> None: ...
def moved(model: Any, extra: int = 3, size: int = 1, *, mode: str = "a", late: bool = False) -> None: ...
def named(model: Any, *, size: int = 1, mode: str = "a", late: bool = False) -> None: ...
def renamed(path: Any, size: int = 1, *, mode: str = "a", late: bool = False) -> None: ...
def other(model: Any, size: int = 2, *, mode: str, late: bool = False) -> None: ...
def fewer(model: Any, size: int = 1) -> None: ...
def catching(model: Any, size: int = 1, **rest: Any) -> None: ...
def both(model: Any = None, *, size: int = 2, mode: str = "a", late: bool = False) -> None: ...


@pytest.mark.parametrize(
    ("ours", "differences"),
    [
        (same, {}),
        (moved, {"size": {"position"}}),
        (named, {"size": {"keyword"}}),
        (renamed, {"model": {"position", "absent"}}),
        (other, {"size": {"default"}, "mode": {"default"}}),
        (fewer, {"mode": {"absent"}, "late": {"absent"}}),
        (catching, {"mode": {"caught"}, "late": {"caught"}}),
        (both, {"model": {"default"}, "size": {"keyword", "default"}}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_differences(ours: Callable[..., Any], differences: dict[str, set[str]]) -> None:
    assert found(ours) == differences


class Base:
    def __init__(self, a: int, b: int = 2) -> None:
        self.a = a

    def kept(self) -> None: ...
    def changed(self, x: int) -> None: ...
    @classmethod
    def made(cls, path: str) -> None: ...

    value = 3


class Child(Base):
    def __init__(self, a: int, *, b: int = 3, **arguments: Any) -> None: ...
    def changed(self, x: int, y: int) -> None: ...
    def _private(self) -> None: ...


def test_members() -> None:
    package = Base.__module__.split(".")[0]
    assert public_members(Child, package) == ["changed", "kept", "made", "value"]
    assert public_members(Child, "torchrl") == []
    assert shared_methods(Base, Child, package) == ["changed"]
    assert [name for name in ("a", "kept", "value", "x") if has_member(Child, name)] == ["a", "kept", "value"]
    assert has_member(Base, "value", like=Child)
    assert not has_member(type("Other", (), {"kept": 3}), "kept", like=Base)  # a method there
    assert list(parameters(Base, "changed")) == ["x"]
    assert list(parameters(Base, "made")) == ["path"]


def test_a_class_that_was_an_actor_has_the_parameters_that_it_was_written_with() -> None:
    def start(self: object, size: int, *, _ray_trace_ctx: object = None) -> None: ...

    written = type("Written", (), {"__init__": start, "start": start})
    assert list(parameters(written)) == list(parameters(written, "start")) == ["size"]
