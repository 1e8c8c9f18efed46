"""What crosses between processes comes out as it went in, or as the mapping, number or text that it stands for."""

from __future__ import annotations

import dataclasses
import threading
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.process.wire import Packed, from_plain, to_plain
from torchrl_moe.modules.backends.replica import ProbeReport, ReplicaInfo, ReplicaStats, SwapReport
from torchrl_moe.weight_update.transports.base import StageReport


def through(value: Any) -> Any:
    """By msgpack, as the other side reads it; arrays do not go through it."""
    return from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(value))))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
KEYS = st.text() | st.integers(-(2**63) + 1, 2**63 - 1)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(KEYS, inner),
    max_leaves=12,
)


@given(value=VALUES)
def test_plain_data_comes_out_as_it_went_in(value: Any) -> None:
    again = through(value)
    assert again == value
    assert repr(again) == repr(value)  # 1 is not True, nor 1.0, and a tuple is no list


LAYOUT = RoutingLayout(num_layers=4, moe_layers=(1, 2, 3), top_k=2, num_experts=8)


@pytest.mark.parametrize(
    "carrier",
    [
        ReplicaInfo(model="m", layout=LAYOUT, max_model_len=8, dtype="bfloat16"),
        ReplicaStats(running=3, cache_usage=0.5, step_at=1.5),
        StageReport(seconds=1.0, nbytes=7, digest="d", loaded=0.5),
        SwapReport(started=False, error="no"),
        ProbeReport(core_answered=True, cpu_seconds=2.0),
    ],
)
def test_a_carrier_of_ours_comes_out_as_itself(carrier: Any) -> None:
    assert through({"found": [carrier]}) == {"found": [carrier]}


def test_dtypes_and_sizes_of_torch_cross_by_name() -> None:
    metadata = {"weight": (torch.bfloat16, torch.Size([2, 3]))}
    again = through(metadata)
    assert again == metadata
    assert type(again["weight"][1]) is torch.Size


class Mode(Enum):
    KEEP = "keep"


class Level(IntEnum):
    HIGH = 2


class Params(msgspec.Struct):
    temperature: float = 1.0
    stop: list[str] = []
    _derived: int = 5


@dataclasses.dataclass
class Options:
    regex: str | None = None
    mode: Mode = Mode.KEEP
    count: int = dataclasses.field(default=0, init=False)


class Pair(NamedTuple):
    one: int
    two: int


def test_what_users_pass_crosses_as_what_it_stands_for() -> None:
    given = {
        "struct": Params(temperature=0.5),
        "dataclass": Options(regex="a+"),
        "enum": [Mode.KEEP, Level.HIGH],
        "path": Path("/some/where"),
        "numpy": (np.int64(3), np.float32(0.5), np.bool_(True)),
        "pair": Pair(1, 2),
        "view": memoryview(b"xy"),
        Level.HIGH: None,
    }
    assert through(given) == {
        "struct": {"temperature": 0.5, "stop": []},  # all that it can be made with, defaults too
        "dataclass": {"regex": "a+", "mode": "keep"},
        "enum": ["keep", 2],
        "path": "/some/where",
        "numpy": (3, 0.5, True),
        "pair": (1, 2),
        "view": b"xy",
        2: None,
    }


def test_what_is_packed_is_not_looked_at() -> None:
    rows = [["a", 1], ["b", 2]]
    again = through({"packed": Packed(rest=rows)})["packed"]
    assert type(again) is Packed
    assert again == {"rest": rows}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (lambda: None, "builtins.function has no plain form: <function"),
        ({"a": [threading.Lock()]}, "_thread.lock has no plain form"),
        (Params, "has no plain form"),
        (torch.zeros(2), "torch.Tensor has no plain form"),
        ({1, 2}, "builtins.set has no plain form"),
        (1 << 63, "integers have at most 63 bits"),
        ({(1, 2): 3}, r"the key \(1, 2\) has no plain form"),
        (np.array([None]), "dtype object has no plain form"),
        (RuntimeError("x"), "builtins.RuntimeError has no plain form"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_its_class(value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        to_plain(value)


def test_what_contains_itself_is_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ValueError, match="nested too deeply"):
        to_plain(endless)


@pytest.mark.parametrize(
    "value",
    [
        [],
        ["os.system", "true"],
        [3, 4],
        ["ReplicaStats", {"no_such_field": 1}],
        ["ReplicaStats"],
        ["packed", 1],
        ["torch.dtype", "nn"],
        ["torch.dtype", "float32", "extra"],
        {"a": ["Path", "/"]},
    ],
)
def test_what_is_the_plain_form_of_nothing_is_not_read(value: Any) -> None:
    with pytest.raises(ValueError):
        from_plain(value)
