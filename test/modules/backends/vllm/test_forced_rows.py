"""Rows on their way to the workers, inside vLLM's own ``SamplingParams``."""

from __future__ import annotations

import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.vllm.forced_rows import (
    Forced,
    attach,
    check_rows,
    forced_in,
    forced_of,
    rows_of_answer,
)

LAYOUT = RoutingLayout(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=300)
ROWS = np.full((4, 3, 2), -1, np.int16)
ROWS[:3, 1:] = [[[0, 299], [7, 8]]] * 3


def sampling_params(**fields: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**fields)


def test_rows_cross_to_the_core_and_from_there_to_the_workers() -> None:
    """As msgpack, which the core reads into the class again, and pickled."""
    asked = sampling_params(max_tokens=3, extra_args={"mine": [1]})
    made = attach(asked, Forced(rows=ROWS))
    core = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=type(made))
    for one in (made, core, pickle.loads(pickle.dumps(core))):
        forced = forced_in(one)
        assert forced.rows is not None
        assert forced.rows.dtype == np.int16
        assert (forced.rows == ROWS).all()
        assert not forced.is_live
        assert one.extra_args["mine"] == [1]
        assert one.max_tokens == 3
    assert asked.extra_args == {"mine": [1]}


def test_a_request_that_follows_nothing_shares_its_parameters() -> None:
    asked = sampling_params()
    assert attach(asked, Forced()) is asked
    assert asked.extra_args is None
    assert forced_in(attach(asked, Forced(is_live=True))).is_live


def test_a_schedulers_request_is_looked_into_once() -> None:
    request = SimpleNamespace(sampling_params=attach(sampling_params(), Forced(rows=ROWS)))
    forced = forced_of(request)
    assert (forced.rows == ROWS).all()
    assert forced_of(request) is forced
    pooling = SimpleNamespace(sampling_params=None)
    assert forced_of(pooling).rows is None


def test_what_an_engine_recorded_is_followed_where_there_is_a_router() -> None:
    recorded = np.zeros((2, 3, 2), np.uint16)
    recorded[:, 1:] = [[0, 299], [7, 8]]
    rows = rows_of_answer(recorded, LAYOUT)
    assert rows.dtype == np.int16
    assert (rows == ROWS[:2]).all()
    assert not recorded[:, 0].any()


def test_rows_are_checked_and_copied() -> None:
    given = ROWS.astype(np.int64)
    given.flags.writeable = False
    rows = check_rows(given, 4, LAYOUT)
    assert rows.dtype == np.int16
    assert (rows == ROWS).all()
    assert check_rows(ROWS[:0], 4, LAYOUT).shape == (0, 3, 2)
    with pytest.raises(ValueError, match="at most a row per prompt token, 3, got 4"):
        check_rows(ROWS, 3, LAYOUT)
    with pytest.raises(ValueError, match="token 2, layer 1 holds expert 300"):
        check_rows(np.where((ROWS == 299) & (np.arange(4) == 2)[:, None, None], 300, ROWS), 4, LAYOUT)
