"""Methods with ``.remote``."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.serving.remote_calls import also_remote


def twice(instance: Any, number: int) -> int:
    return 2 * (number + instance.offset)


class Adder:
    offset = 10

    @also_remote()
    def add(self, number: int, *, sign: int = 1) -> int:
        """Add."""
        return self.offset + sign * number

    @also_remote(twice)
    def once(self, number: int) -> int:
        return number + self.offset


class Heir(Adder):
    offset = 20

    @also_remote()
    def add(self, number: int, *, sign: int = 1) -> int:
        return 100 + super().add(number, sign=sign)


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of Ray's: a reference is the value in a list."""
    monkeypatch.setattr(cluster, "reference", lambda value: [value])


def test_the_method_is_called_as_ever_and_by_remote_for_a_reference() -> None:
    assert Adder().add(1, sign=-1) == 9
    assert Adder.add(Adder(), 1) == 11
    assert Heir().add(1) == 121
    assert Adder().add.remote(2) == [12]  # type: ignore[attr-defined]
    assert Heir().add.remote(2, sign=-1) == [118]  # type: ignore[attr-defined]


def test_an_answer_of_its_own_is_remotes_alone() -> None:
    assert Adder().once(1) == 11
    assert Adder().once.remote(1) == [22]  # type: ignore[attr-defined]


def test_an_error_is_raised_at_once() -> None:
    with pytest.raises(TypeError, match="add"):
        Adder().add.remote()  # type: ignore[attr-defined]


def test_it_looks_like_the_method() -> None:
    adder = Adder()
    assert list(inspect.signature(adder.add).parameters) == ["number", "sign"]
    assert list(inspect.signature(Adder.add).parameters) == ["self", "number", "sign"]
    assert (adder.add.__name__, Adder.add.__name__, adder.add.__doc__) == ("add", "add", "Add.")
    assert repr(adder.add).startswith("<bound method Adder.add of")
