"""Routes are laid out and checked before they are bound: what is wrong is named, or its sample runs live.

Malformed routes are made by hypothesis, and judged row by row in plain Python.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.routes import tokens
from support.toy_moe import ROUTES, SCORES, SITES, ToyMoE, ToyRouter, U, bound, changed, own
from torchrl_moe.data import RoutedExperts
from torchrl_moe.errors import RouteShapeError, RouteValueError, RoutingError
from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.modules.replay.router_replay import Packing, RouterReplay


def jagged(*samples: Tensor) -> Tensor:
    return torch.nested.nested_tensor(list(samples), layout=torch.jagged)


TWO = jagged(ROUTES[0, :2], ROUTES[1])
"""Samples of two and three tokens."""


@pytest.mark.parametrize(
    ("routes", "mask", "message"),
    [
        (ROUTES[0], None, r"routes must have shape \[B, T, 3, 2\], got \[3, 3, 2\]"),
        (ROUTES[:, :, 1:], None, r"got \[2, 3, 2, 2\].*L counts all decoder layers"),
        (jagged(ROUTES[0, :2, :, 0]), None, r"routes of sample 0 must have shape \[T, 3, 2\], got \[2, 3\]"),
        (TWO, [[1, 1, 0]] * 2, r"routes of sample 1 must have 2 rows, got 3.*attention_mask keeps"),
        (TWO, [[1, 1, 1]] * 3, r"attention_mask must have shape \[2, T\], got \[3, 3\]"),
        (ROUTES, [[1] * 4] * 2, r"attention_mask must have shape \[2, 3\], got \[2, 4\]"),
    ],
)
def test_routes_and_masks_of_another_shape_are_refused(routes: Tensor, mask: Any, message: str) -> None:
    with pytest.raises(RouteShapeError, match=message):
        bound(routes, mask)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (["a"], "a tensor of integers, got list"),
        (None, "a tensor of integers, got NoneType"),
        (ROUTES.to_sparse(), "dense or nested jagged, got layout torch.sparse_coo"),
        (ROUTES.float(), "signed integer dtype, got torch.float32"),
        (ROUTES.clamp(min=0).to(torch.uint8), "signed integer dtype, got torch.uint8.*from_vllm"),
        (changed((0, 2, 1), [0, 0]), r"sample 0, token 2, layer 1 holds \[0, 0\]: all zeros .* did not capture"),
        (changed((0, 0, 0), [4, 5]), r"layer 0 holds \[4, 5\], but that layer has no router"),
    ],
)
def test_routes_of_wrong_values_are_refused_by_token_and_layer(routes: Any, message: str) -> None:
    with pytest.raises(RouteValueError, match=message):
        bound(routes)


@pytest.mark.parametrize("mask", [[[0.0, -torch.inf, 0.0]] * 2, [[0.5, 1, 1]] * 2, "x"])
def test_what_is_no_mask_and_no_policy_is_refused(mask: Any) -> None:
    with pytest.raises(ValueError, match=r"on_bad_routes must be one of \('raise', 'live'\), got 'skip'"):
        bound(on_bad_routes="skip")
    with pytest.raises(RouteValueError, match=r"attention_mask must be .*0 .*1"):
        bound(mask=mask)
    assert bound(mask=[[1, 1, 0]] * 2).replayed == bound(mask=np.array([[1, 1, 0]] * 2)).replayed


def test_tokens_are_counted_without_pads_in_every_layout() -> None:
    """The third token of the second sample, of two and four tokens."""
    short, long = ROUTES[0, :2], torch.cat([ROUTES[0], ROUTES[0, :1]])
    long[2, 1] = torch.tensor([5, 9])
    pads, mask = ROUTES.new_full((2, 3, 2), U), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    left, right = torch.stack([torch.cat([pads, short]), long]), torch.stack([torch.cat([short, pads]), long])
    for routes, keep in ((left, mask), (right, mask.flip(1)), (jagged(short, long), None), (jagged(short, long), mask)):
        with pytest.raises(RouteValueError, match=r"sample 1, token 2, layer 1 holds expert 9 in \[5, 9\]"):
            bound(routes, keep)
        assert bound(routes, keep, on_bad_routes="live").refused == (1,)


def test_a_layer_of_fewer_experts_per_token_has_trailing_unset_columns() -> None:
    sites = [SITES[0], RouterSite(2, "layers.2.gate", 4, 1, 2)]
    routes = ROUTES.clone()
    routes[:, :, 2] = torch.tensor([3, U])
    binding = bound(routes, sites=sites)
    assert binding.replayed == (0, 6, 6)
    assert binding.choose(sites[1], SCORES[:, :4], own, False).tolist() == [[3]] * 6
    routes[1, 0, 2] = torch.tensor([0, U])  # of one expert per token, expert 0 is as good as any
    assert bound(routes, sites=sites).replayed == (0, 6, 6)
    with pytest.raises(RouteValueError, match=r"sample 0, token 0, layer 2 holds \[0, 1\]; its router chooses 1"):
        bound(ROUTES, sites=sites)
    assert bound(ROUTES, sites=sites, on_bad_routes="live").refused == (0, 1)
    routes[0, 0, 2, 0] = 4
    with pytest.raises(RouteValueError, match=r"layer 2 holds expert 4 .* allowed are 0\.\.3"):
        bound(routes, sites=sites)


@pytest.mark.filterwarnings("error")
def test_arrays_and_routed_experts_are_taken_without_a_warning_and_copied() -> None:
    given, read_only = ROUTES.to(torch.int8, copy=True), np.asarray(ROUTES, dtype=np.int16)
    read_only.flags.writeable = False  # as arrays from a buffer or a file are
    for routes in (RoutedExperts(full=given, batch_size=[2]), np.array(read_only), read_only):
        assert bound(routes).replayed == (0, 6, 6)
    binding = bound(given)
    given.fill_(7)
    assert binding.choose(SITES[0], SCORES, own, False).tolist() == [[5, 3]] * 6


def test_a_packed_input_gets_the_rows_where_its_tokens_stand() -> None:
    # sequences of 2, 1 and 2 tokens, padded to [3, 2], in rows of 3: [b0 b1 a0], [c0 c1 .]
    mask = torch.tensor([[0, 1], [1, 1], [1, 1]])
    packing = Packing(torch.tensor([[0, 2], [0, 1], [3, 4]]), (2, 3))
    routes = torch.full((3, 2, 3, 2), U)
    routes[:, :, 1:] = torch.arange(6).view(3, 2, 1, 1) + torch.tensor([0, 1])
    routes[0, 0] = 4  # nonsense, on a pad
    binding = bound(routes, mask, packing=packing)
    assert (binding.shape, binding.replayed) == ((2, 3), (0, 5, 5))
    assert binding.routes[:, 1, 0].tolist() == [2, 3, 1, 4, 5, U]
    assert bound(routes, mask).replayed == (0, 5, 5)
    routes[2, 0, 2] = torch.tensor([4, 4])
    with pytest.raises(RouteValueError, match="sample 2, token 0, layer 2"):
        bound(routes, mask, packing=packing)
    spared = bound(routes, mask, packing=packing, on_bad_routes="live")
    assert spared.refused == (2,)
    assert spared.routes[:, 1, 0].tolist() == [2, 3, 1, U, U, U]


@pytest.mark.parametrize(
    ("index", "error", "message"),
    [
        ([[0, 1, 2], [3, 4, 4]], RouteValueError, "holds 4, which is out of range or there twice"),
        ([[0, 1, 2], [3, 4, -1]], RouteValueError, "holds -1, which"),
        ([[0, 1, 2], [3, 4, 6]], RouteValueError, r"holds 6, .* from 0 to 5 for an input of \[1, 6\]"),
        (torch.arange(6).view(2, 3).to(torch.uint8), RouteValueError, "must have dtype torch.int64, got torch.uint8"),
        ([[0, 1, 2, 3, 4, 5]], RouteShapeError, r"packing.index must have shape \[2, 3\], got \[1, 6\]"),
    ],
)
def test_places_that_no_packed_input_has_are_refused(index: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        bound(packing=Packing(torch.as_tensor(index), (1, 6)))


def test_places_of_pads_do_not_count() -> None:
    index, mask = torch.tensor([[3, 1, 0], [2, 0, 0]]), torch.tensor([[1, 1, 0], [1, 1, 0]])
    assert bound(mask=mask, packing=Packing(index, (1, 4))).replayed == (0, 4, 4)
    with pytest.raises(RouteValueError, match=r"holds 0, .*Give the attention_mask"):
        bound(packing=Packing(index, (1, 4)))


DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
IDS = (-(2**63), -32769, -129, -128, -2, -1, 0, 1, 7, 8, 9, 127, 128, 255, 256, 32767, 65535, 2**31, 2**63 - 1)


def is_good(row: list[int], layer: int) -> bool:
    if set(row) == {U}:
        return True
    return layer > 0 and all(0 <= expert < 8 for expert in row) and len(set(row)) == len(row)


@st.composite
def mutated(draw: st.DrawFn) -> Tensor:
    """Good routes of some dtype in which up to five ids are others, wrapped as that dtype wraps them."""
    routes = ROUTES.to(draw(st.sampled_from(DTYPES)), copy=True)
    bits = torch.iinfo(routes.dtype).bits
    place = st.tuples(*(st.integers(0, size - 1) for size in routes.shape))
    for at in draw(st.lists(place, max_size=5)):
        expert = draw(st.sampled_from(IDS))
        routes[at] = (expert + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)
    return routes


@settings(max_examples=200)
@given(mutated())
def test_a_row_is_refused_if_and_only_if_it_is_bad(routes: Tensor) -> None:
    rows = [(b, t, i, row) for b, s in enumerate(routes.tolist()) for t, x in enumerate(s) for i, row in enumerate(x)]
    bad = [(b, t, i, row) for b, t, i, row in rows if not is_good(row, i)]
    tolerant = bound(routes, on_bad_routes="live")
    assert tolerant.refused == tuple(sorted({b for b, *_ in bad}))
    for site in SITES:
        chosen = tolerant.choose(site, SCORES, own, False).view(2, 3, 2)
        for b, t, i, row in rows:
            if i == site.layer:
                live = b in tolerant.refused or U in row
                assert chosen[b, t].tolist() == (own().indices.view(2, 3, 2)[b, t].tolist() if live else row)
    if bad:
        with pytest.raises(RouteValueError) as error:
            bound(routes)
        b, t, i, row = bad[0]
        assert f"sample {b}, token {t}, layer {i} " in str(error.value)
        assert str(row) in str(error.value)
    else:
        assert torch.equal(bound(routes).routes, routes.flatten(0, 1))


@pytest.fixture(scope="module")
def toy() -> RouterReplay:
    return RouterReplay(ToyMoE(ToyRouter))


SIZES = st.lists(st.integers(0, 4), max_size=5)
ANYTHING = st.one_of(
    st.none(),
    st.text(max_size=3),
    st.floats(),
    st.recursive(st.integers(-(2**70), 2**70), lambda inner: st.lists(inner, max_size=3), max_leaves=8),
    st.tuples(SIZES, st.sampled_from(["i1", "u1", "u2", "i8", "f4", "c8", "?", "O", "U1", "M8[s]"])).map(
        lambda drawn: np.ones(drawn[0], dtype=drawn[1])
    ),
    st.tuples(SIZES, st.sampled_from([*DTYPES, torch.bool, torch.bfloat16, torch.complex64])).map(
        lambda drawn: torch.zeros(drawn[0], dtype=drawn[1])
    ),
    st.lists(st.integers(0, 4), min_size=1, max_size=3).map(
        lambda lengths: jagged(*(torch.full((length, 2, 2), U) for length in lengths))
    ),
)


@settings(max_examples=300)
@given(ANYTHING, st.sampled_from(["raise", "live"]), st.sampled_from([None, (2, 6), (2, 4), (1,)]))
def test_whatever_comes_in_is_refused_by_name_or_fits(toy: RouterReplay, routes: Any, policy: Any, mask: Any) -> None:
    before = toy.model(tokens() % 32)[0]
    attention_mask = None if mask is None else torch.ones(mask)
    try:
        with toy.replay(routes, attention_mask, on_bad_routes=policy):
            assert torch.equal(toy.model(tokens() % 32)[0], before)  # all that may pass here are rows of -1
    except RoutingError as error:
        assert str(error)
    assert torch.equal(toy.model(tokens() % 32)[0], before)
