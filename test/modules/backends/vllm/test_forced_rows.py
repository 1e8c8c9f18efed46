"""Rows on their way to the workers, inside vLLM's own ``SamplingParams``."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.backends.request_routes import RequestRoutes
from torchrl_moe.modules.backends.vllm.engine_requests import Forced, attach, attached, forced_in, forced_of

LAYOUT = RoutingLayout(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=300)
ROWS = np.full((4, 3, 2), -1, np.int16)
ROWS[:3, 1:] = [[[0, 299], [7, 8]]] * 3

ABLE, UNABLE = RequestRoutes(LAYOUT), RequestRoutes(LAYOUT, "FancyRouter routes inside its kernel")


def request(**fields: Any) -> Request:
    return Request(request_id="a", sampling_params=None, prompt_token_ids=np.arange(4, dtype=np.int32), **fields)


def params(extra_args: Any = None) -> Any:
    made = SimpleNamespace(extra_args=extra_args)
    made.clone = lambda: copy.copy(made)
    return made


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


def test_what_vllm_hands_on_is_what_the_request_follows() -> None:
    asked = params({"mine": 1})
    made = attached(asked, request(routed_experts=ROWS), ABLE)
    forced = forced_in(made)
    assert forced.rows is not None
    assert forced.rows.dtype == np.int16
    assert (forced.rows == ROWS).all()
    assert not forced.is_live
    assert made.extra_args["mine"] == 1
    assert asked.extra_args == {"mine": 1}  # others share them


def test_a_request_without_rows_costs_nothing() -> None:
    asked = params()
    assert attached(asked, request(), ABLE) is asked
    assert attached(asked, request(on_resume="live"), UNABLE) is asked
    assert forced_in(asked).rows is None
    assert forced_in(None).rows is None


def test_a_request_that_is_to_route_live_says_so_to_the_scheduler() -> None:
    forced = forced_in(attached(params(), request(on_resume="live"), ABLE))
    assert forced.is_live
    assert forced.rows is None
