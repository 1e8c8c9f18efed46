"""The plain form of what is sent between processes: data that msgpack knows, and that runs no code when it is read.

Numbers, text, bytes and arrays of numbers stand for themselves, and so do mappings whose keys are numbers or text. A
sequence begins with a tag that says what it is: ``["list", ...]``, ``["tuple", ...]``, ``["ReplicaInfo", fields]`` for
one of our data classes, found by name in a closed registry. What users pass loses its class: an object with fields
(vLLM's ``SamplingParams``, ``LoRARequest``) becomes the mapping of them, an enum its value, a path its text.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any

import msgspec
import numpy as np

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.reports import ProbeReport, ReplicaInfo, ReplicaStats, SwapReport
from torchrl_moe.modules.backends.weight_claim import WeightClaim
from torchrl_moe.weight_update.transports.base import StageReport

__all__ = ["NUMBERS", "Packed", "from_plain", "to_plain"]

NUMBERS = "biuf"
"""Kinds of numpy dtypes that may be sent: booleans, integers, floats."""

CARRIERS = {
    kind.__name__: kind
    for kind in (ProbeReport, ReplicaInfo, ReplicaStats, RoutingLayout, StageReport, SwapReport, WeightClaim)
}
BITS = 64  # of a number in msgpack
KEYS = (bool, int, float, str)


class Packed(dict[str, Any]):
    """A dictionary that is plain already, to any depth: it is sent without a look at its content."""


def to_plain(value: Any) -> Any:
    """Return the plain form of a value.

    Raises:
        ValueError: it has none; the message names its class.
    """
    try:
        return _to_plain(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply, or contains itself") from error


def _to_plain(value: Any) -> Any:
    kind = type(value)
    if (convert := _BY_TYPE.get(kind)) is not None:
        return convert(value)
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "Size"):
        return _of_torch(value)
    for kinds, convert in _BY_BASE:
        if isinstance(value, kinds):
            return convert(value)
    if (fields := _fields_of(value)) is not None:
        return _mapping(fields)
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} has no plain form: {_shown(value)}. What can be sent to an engine "
        "process and back: numbers, text, bytes, lists, tuples, mappings and numpy arrays"
    )


def _shown(value: Any) -> str:
    return repr(value)[:80]


def _itself(value: Any) -> Any:
    return value


def _integer(value: int) -> int:
    if value.bit_length() >= BITS:
        raise ValueError(f"{value} has no plain form: integers have at most {BITS - 1} bits")
    return int(value)


def _sequence(word: str) -> Callable[[Any], list[Any]]:
    return lambda value: [word, *map(_to_plain, value)]


def _mapping(value: Mapping[Any, Any]) -> dict[Any, Any]:
    for key in value:
        if isinstance(key, int):
            _integer(key)
        if not isinstance(key, KEYS):
            raise ValueError(f"a mapping with the key {_shown(key)} has no plain form: keys are numbers or text")
    return {(key.value if isinstance(key, Enum) else key): _to_plain(item) for key, item in value.items()}


def _array(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    if value.dtype.kind not in NUMBERS:
        raise ValueError(f"an array of dtype {value.dtype} has no plain form: arrays hold numbers")
    return value


def _carrier(value: Any) -> list[Any]:
    return [type(value).__name__, _mapping(_fields_of(value) or {})]


def _fields_of(value: Any) -> dict[str, Any] | None:
    """Return the public fields that an object can be made with; ``None`` if its class has none."""
    if isinstance(value, type):
        return None
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif dataclasses.is_dataclass(value):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
    else:
        return None
    return {name: getattr(value, name) for name in names if not name.startswith("_")}


def _of_torch(value: Any) -> list[Any]:
    if type(value).__name__ == "Size":
        return ["torch.Size", *value]
    return ["torch.dtype", str(value).removeprefix("torch.")]


_BY_TYPE: dict[type, Callable[[Any], Any]] = {
    type(None): _itself,
    bool: _itself,
    int: _integer,
    float: _itself,
    str: _itself,
    bytes: _itself,
    dict: _mapping,
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    np.ndarray: _array,
    Packed: lambda value: ["packed", dict(value)],
    **dict.fromkeys(CARRIERS.values(), _carrier),
}
_BY_BASE: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (Enum, lambda value: _to_plain(value.value)),
    (np.generic, lambda value: _to_plain(value.item())),
    (int, _integer),
    (float, float),
    (str, str),
    ((bytes, bytearray, memoryview), bytes),
    (PurePath, str),
    (Mapping, _mapping),
    (list, _sequence("list")),
    (tuple, _sequence("tuple")),
)


def from_plain(value: Any) -> Any:
    """Undo :func:`to_plain`, except for what has lost its class.

    Raises:
        ValueError: it is not the plain form of anything.
    """
    if type(value) is dict:
        return {key: from_plain(item) for key, item in value.items()}
    if type(value) is not list:
        return value
    word, *rest = value or [None]
    if word == "list":
        return [from_plain(item) for item in rest]
    if word == "tuple":
        return tuple([from_plain(item) for item in rest])
    if word == "packed" and len(rest) == 1 and type(rest[0]) is dict:
        return Packed(rest[0])
    if isinstance(word, str) and word in CARRIERS and len(rest) == 1 and type(rest[0]) is dict:
        return _carrier_from(CARRIERS[word], rest[0])
    if word in ("torch.dtype", "torch.Size"):
        return _to_torch(word, rest)
    raise ValueError(f"not the plain form of anything: a sequence that begins with {_shown(word)}")


def _carrier_from(kind: type, fields: dict[str, Any]) -> Any:
    try:
        return kind(**{name: from_plain(item) for name, item in fields.items()})
    except TypeError as error:  # from another release of this package
        raise ValueError(f"not a {kind.__name__} of this version: {error}") from error


def _to_torch(word: str, rest: list[Any]) -> Any:
    import torch  # here, since an actor reads no such thing and does without torch

    if word == "torch.Size":
        return torch.Size(rest)
    dtype = getattr(torch, str(rest[0]), None) if len(rest) == 1 else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {rest}")
    return dtype
