"""``Settings``: dataclasses whose values are read by type and range, once, and whose names cannot be misspelt."""

from __future__ import annotations

import os
import sys
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import cache, partial
from typing import Any, ClassVar, cast

from torchrl_moe._checks import is_number, shown

__all__ = ["ConfigError", "Number", "Settings", "UnknownSettingError", "nearest", "setting"]

SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Texts that YAML, and so Hydra, reads as a switch."""
MOST_BITS = 1000  # Python writes no integer of some thousand digits
PLAIN = (bool, int, float, str, types.NoneType)


@dataclass(frozen=True, slots=True)
class Number:
    """Which numbers are allowed: finite ones of a kind, within bounds. A bool is none, and neither is text.

    >>> str(Number(int, least=1)), str(Number(above=0, most=1))
    ('a whole number, at least 1', 'a number above 0 and at most 1')
    >>> Number(int, least=1).holds(2.0), Number(int, least=1).holds(2), Number().holds(float("nan"))
    (False, True, False)
    """

    kind: type[int] | type[float] = float
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None

    def holds(self, value: object) -> bool:
        """Whether a value is such a number."""
        bounds: dict[str, Any] = {"above": self.above, "below": self.below, "whole": self.kind is int}
        # an integer may be larger than any float, such as 2**2000
        return is_number(value, self.least, self.most, **bounds) and abs(cast(float, value)) <= sys.float_info.max

    def __str__(self) -> str:
        words = {"at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        bounds = " and ".join(f"{word} {bound}" for word, bound in words.items() if bound is not None)
        comma = ", " if bounds.startswith("at") else " "
        return f"{'a whole number' if self.kind is int else 'a number'}{comma if bounds else ''}{bounds}"


class ConfigError(ValueError):
    """An invalid setting."""

    @classmethod
    def of(cls, name: str, error: Exception) -> ConfigError:
        """Return another error about a setting, as one line.

        >>> ConfigError.of("data", KeyError("answer")), ConfigError.of("data", ValueError("no rows\\nat all"))
        (ConfigError("data: KeyError: 'answer'"), ConfigError('data: no rows'))
        """
        if isinstance(error, cls):
            return error
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        speaks_for_itself = first and isinstance(error, OSError | TypeError | ValueError | ImportError)
        return cls(f"{name}: " + (first if speaks_for_itself else f"{type(error).__name__}: {first}".rstrip(": ")))


class UnknownSettingError(ConfigError, AttributeError):
    """There is no setting of that name."""


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Return a hint at the most similar name, or else all names.

    >>> nearest("stepps", ["steps", "seed"]), nearest("nonsense", ["steps", "seed"])
    ('did you mean steps?', 'there are steps, seed')
    """
    names = list(known)
    similar = get_close_matches(name, names, 1)
    return f"did you mean {similar[0]}?" if similar else f"there are {', '.join(names)}"


def setting(default: Any, of: tuple[str, ...] = (), **bounds: Any) -> Any:
    """Return a dataclass field with what it allows.

    Args:
        default: its default; a tuple is that of a list, and a dict is copied for each instance.
        of: the texts that are allowed; in a list, each item's.
        **bounds: of :class:`Number`: ``least``, ``above``, ``most``, ``below``.
    """
    made: dict[str, Any] = {"default": default}
    if isinstance(default, tuple | dict):
        made = {"default_factory": partial(list if isinstance(default, tuple) else dict, default)}
    return field(**made, metadata={"of": of, "bounds": bounds})


class Settings:
    """Base of a group of settings, a dataclass.

    An attribute that is no setting raises, with the nearest name; a dict given for a group becomes the group.
    """

    _group: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "") -> None:
        cls._group = group

    def __new__(cls, **given: Any) -> Any:
        """Refuse unknown names before ``__init__`` does, which names no other."""
        for name in given:
            cls.type_of(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: Any) -> None:
        kind = self.type_of(name)
        is_group = isinstance(kind, type) and issubclass(kind, Settings)
        super().__setattr__(name, kind(**value) if is_group and isinstance(value, Mapping) else value)

    @classmethod
    def type_of(cls, name: str) -> Any:
        """Return a setting's type.

        Raises:
            UnknownSettingError: there is no such setting; the nearest name.
        """
        known = _types(cast(Any, cls))
        if name not in known:
            raise UnknownSettingError(f"there is no setting {cls._dotted(name)}: {nearest(str(name), known)}")
        return known[name]

    @classmethod
    def _dotted(cls, name: str) -> str:
        return f"{cls._group}.{name}" if cls._group else str(name)

    def read(self) -> None:
        """Read each value by its type and range, as Hydra would: numbers in texts become numbers.

        Raises:
            ConfigError: names the first that is refused, as ``group.name=value``.
        """
        for item in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            name, kind, value = self._dotted(item.name), self.type_of(item.name), getattr(self, item.name)
            if isinstance(kind, type) and issubclass(kind, Settings):
                if not isinstance(value, kind):
                    problem = f"must be {kind.__name__}(...), or a dict of its settings; leave it out for the defaults"
                    raise ConfigError(f"{name}={_shown(value)} {problem}")
                value.read()
                continue
            found, allowed = _read(value, kind, item)
            if found is MISSING:
                raise ConfigError(f"{name}={_shown(value)} must be {allowed}")
            super().__setattr__(item.name, found)


@cache
def _types(cls: Any) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in fields(cls)}


def _shown(value: Any) -> str:
    try:
        return f"{value:.80}" if isinstance(value, str) else shown(value)
    except ValueError:  # of repr: an integer in it has more digits than Python writes
        return f"a {type(value).__name__} with a huge integer"


def _read(value: Any, kind: Any, item: Field[Any]) -> tuple[Any, str]:
    """Return the value, ``MISSING`` if it is refused, and what is allowed."""
    if isinstance(kind, types.UnionType):
        found, allowed = _read(value, typing.get_args(kind)[0], item)
        return (None if value is None else found), f"{allowed}, or null"
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return _read_list(value, parts[0], item)
    if origin is dict:
        return _read_dict(value, parts[1], item)
    return READERS[kind](value, item)


def _read_list(value: Any, kind: Any, item: Field[Any]) -> tuple[Any, str]:
    read = [_read(one, kind, item) for one in value] if isinstance(value, list | tuple) else [(MISSING, "")]
    found = [one for one, _ in read]
    each = _read(None, kind, item)[1]
    return (MISSING if MISSING in found else found), f"a list, each {each}"


def _read_dict(value: Any, kind: Any, item: Field[Any]) -> tuple[Any, str]:
    is_mapping = isinstance(value, Mapping) and all(isinstance(key, str) for key in value)
    if kind is Any:
        return (
            dict(value) if is_mapping and _is_plain(value) else MISSING
        ), "a dict of plain numbers, texts, lists and dicts"
    values = {key: _read(one, kind, item)[0] for key, one in value.items()} if is_mapping else {"": MISSING}
    return (MISSING if MISSING in values.values() else values), f"a dict, each {_read(None, kind, item)[1]}"


def _is_plain(value: Any) -> bool:
    """Whether YAML can hold a value; a subclass, such as numpy's floats, it cannot."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if type(value) is int and value.bit_length() > MOST_BITS:
        return False
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else type(value) in PLAIN


def _read_flag(value: Any, item: Field[Any]) -> tuple[Any, str]:
    del item
    read = SWITCHES.get(value.lower(), MISSING) if isinstance(value, str) else value
    return (read if isinstance(read, bool) else MISSING), "true or false"


def _read_text(value: Any, item: Field[Any]) -> tuple[Any, str]:
    allowed: tuple[str, ...] = item.metadata.get("of", ())
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    text = str(text) if Number().holds(text) else text  # out=20261126, say, which a command line reads as a number
    text = os.path.expanduser(text) if isinstance(text, str) else text  # out=~/runs, say
    fits = isinstance(text, str) and (text in allowed if allowed else text.strip() != "" and "\0" not in text)
    return (text if fits else MISSING), f"one of {', '.join(allowed)}" if allowed else "a text that is not empty"


def _read_number(kind: type[int] | type[float], value: Any, item: Field[Any]) -> tuple[Any, str]:
    allowed = Number(kind, **item.metadata.get("bounds", {}))
    if isinstance(value, str):
        try:
            value = kind(value)
        except ValueError:
            return MISSING, str(allowed)
    return (kind(value) if allowed.holds(value) else MISSING), str(allowed)


READERS: dict[Any, Callable[[Any, Field[Any]], tuple[Any, str]]] = {
    bool: _read_flag,
    str: _read_text,
    int: lambda value, item: _read_number(int, value, item),
    float: lambda value, item: _read_number(float, value, item),
}
