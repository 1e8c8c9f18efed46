"""Routes keep their values through every container they pass, and a wrong one is found and named."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack

from torchrl_moe.data import UNSET_EXPERT, KeptTokens, RoutedExperts, RoutingLayout
from torchrl_moe.data.routed_experts import routes_from_vllm
from torchrl_moe.errors import RouteShapeError, RouteValueError

U = UNSET_EXPERT
LAYOUT = RoutingLayout(num_layers=3, moe_layers=(1, 2), top_k=2, num_experts=8)
ROWS = np.array([[[0, 0], [5, 3], [0, 1]], [[0, 0], [7, 0], [2, 6]]], dtype=np.uint8)
FULL = [[[U, U], [5, 3], [0, 1]], [[U, U], [7, 0], [2, 6]], [[U, U], [U, U], [U, U]]]


def engine_rows(num_rows: int, layout: RoutingLayout, seed: int = 0) -> np.ndarray[Any, Any]:
    """What vLLM would return: distinct experts per row, zeros on dense layers."""
    shape = (num_rows, layout.num_layers, layout.num_experts)
    rows = np.argsort(np.random.default_rng(seed).random(shape), axis=-1)[..., : layout.top_k]
    rows[:, layout.dense_layers] = 0
    return rows.astype(np.uint8 if layout.num_experts <= 256 else np.uint16)


def sample(num_tokens: int = 3, layout: RoutingLayout = LAYOUT, seed: int = 0) -> RoutedExperts:
    return RoutedExperts.from_vllm(engine_rows(num_tokens - 1, layout, seed), num_tokens=num_tokens, layout=layout)


def split(routes: RoutedExperts) -> list[torch.Tensor]:
    return [routes.full] if not routes.batch_size else [full for part in routes.unbind(0) for full in split(part)]


def assert_same(got: RoutedExperts, wanted: RoutedExperts) -> None:
    assert type(got) is RoutedExperts
    assert got.batch_size == wanted.batch_size
    for one, other in zip(split(got), split(wanted), strict=True):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()


@st.composite
def layouts(draw: st.DrawFn, max_experts: int = 40) -> RoutingLayout:
    num_layers = draw(st.integers(1, 5))
    moe_layers = draw(st.sets(st.integers(0, num_layers - 1), min_size=1))
    num_experts = draw(st.integers(2, max_experts))
    top_k = draw(st.integers(1, min(4, num_experts)))
    return RoutingLayout(
        num_layers=num_layers, moe_layers=tuple(sorted(moe_layers)), top_k=top_k, num_experts=num_experts
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[RoutingLayout, list[RoutedExperts]]:
    layout = draw(layouts())
    lengths = draw(st.lists(st.integers(1, 7), min_size=1, max_size=4))
    return layout, [sample(length, layout, seed) for seed, length in enumerate(lengths)]


CASTS: dict[str, tuple[Any, ...]] = {
    "to": (torch.bfloat16, torch.int8, torch.uint8),
    "type": (torch.float16,),
    **dict.fromkeys(("half", "bfloat16", "float", "double"), (None,)),
    "apply": (lambda x: x.half(),),
}


@pytest.mark.parametrize(("name", "given"), [(name, given) for name, values in CASTS.items() for given in values])
def test_a_cast_of_what_holds_ids_never_changes_them(name: str, given: Any) -> None:
    """As floats of 16 bits, ids above 256 would be others."""

    def cast(whole: TensorDictBase) -> Any:
        return getattr(whole, name)(*[given] * (given is not None))

    routes = RoutedExperts(full=torch.tensor([[[257, 301]]], dtype=torch.int16))
    kept = KeptTokens(ids=torch.tensor([257], dtype=torch.int32), sizes=torch.tensor([1], dtype=torch.int32))
    td = TensorDict(routed_experts=routes, log_probs=TensorDict(full=torch.zeros(1)))
    for whole in (td, lazy_stack([td, td.clone()]), torch.stack([td, td.clone()])):
        with pytest.raises(RouteValueError, match=r"routed_experts\.full holds ids"):
            cast(whole)
    with pytest.raises(RouteValueError, match=r"routed_experts\.full holds ids"):
        td.to(dtype=torch.float64)
    with pytest.raises(ValueError, match=r"kept\.(ids|sizes) holds ids"):
        cast(TensorDict(sampling=TensorDict(kept=kept)))


def test_what_is_no_cast_of_ids_is_left_alone() -> None:
    td = TensorDict(routed_experts=sample(), log_probs=TensorDict(full=torch.zeros(1, dtype=torch.float64)))
    for whole in (td, lazy_stack([td, TensorDict(routed_experts=sample(5), log_probs=td["log_probs"])])):
        cast = whole.apply(lambda x: x.half() if x.is_floating_point() else x)
        one, other = (td, cast) if whole is td else (td, cast[0])
        assert other["log_probs", "full"].dtype == torch.float16
        assert_same(other["routed_experts"], one["routed_experts"])
        assert_same(whole.to("cpu")[0 if whole is not td else ()]["routed_experts"], sample())
    assert td.to(torch.int64)["routed_experts"].full.tolist() == sample().full.tolist()
    assert bool((td == td.clone()).all()) and td.isfinite()["routed_experts"].full.dtype == torch.bool
    assert td.apply(lambda x: x.float().mean())["routed_experts"].full.ndim == 0


# from_vllm


@pytest.mark.parametrize(
    ("num_experts", "expert"), [(128, 127), (129, 127), (129, 128), (256, 255), (257, 256), (32768, 32767)]
)
def test_ids_survive_the_dtype_borders(num_experts: int, expert: int) -> None:
    layout = RoutingLayout(num_layers=1, moe_layers=(0,), top_k=2, num_experts=num_experts)
    rows = np.array([[[expert, 0]]], dtype=np.uint8 if num_experts <= 256 else np.uint16)
    routes = RoutedExperts.from_vllm(rows, num_tokens=2, layout=layout).validate(layout)
    assert routes.full.dtype == layout.dtype and routes.full.tolist() == [[[expert, 0]], [[U, U]]]


def test_signed_rows_and_lists_are_taken_and_a_read_only_array_is_copied() -> None:
    rows = ROWS.copy()
    rows.flags.writeable = False
    for taken in (rows, ROWS.astype(np.int64), ROWS.astype(np.int16), ROWS.tolist()):
        assert routes_from_vllm(taken, 3, LAYOUT).tolist() == FULL
    RoutedExperts.from_vllm(rows, num_tokens=3, layout=LAYOUT).full[:] = 4
    assert rows.tolist() == ROWS.tolist()


@pytest.mark.parametrize(
    ("rows", "num_tokens", "error", "text"),
    [
        (ROWS, 4, RouteShapeError, " must have 3 rows, got 2. Each of the 4 tokens has a row except the last"),
        (ROWS, 2, RouteShapeError, " must have 1 row, got 2."),
        (ROWS[:, :2], 3, RouteShapeError, " must have shape [rows, 3, 2], got [2, 2, 2]."),
        (ROWS[..., :1], 3, RouteShapeError, " must have shape [rows, 3, 2], got [2, 3, 1]."),
        (ROWS * 1.0, 3, RouteValueError, " must have an integer dtype, got float64."),
        (ROWS + np.uint8(1), 3, RouteValueError, ": token 1, layer 1 holds expert 8 in [8, 1]; allowed are 0..7"),
        (ROWS - np.int8(1), 3, RouteValueError, ": token 0, layer 0 holds expert -1 in [-1, -1]; allowed are"),
        (ROWS[:, ::-1], 3, RouteValueError, ": token 0, layer 0 holds expert 1 in [0, 1]; the layer has no"),
    ],
)
def test_rows_that_do_not_fit(rows: Any, num_tokens: int, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'engine rows{text}')}"):
        RoutedExperts.from_vllm(rows, num_tokens=num_tokens, layout=LAYOUT)


@settings(max_examples=50)
@given(layouts(max_experts=300), st.integers(1, 9), st.integers(0, 99))
def test_engine_rows_come_back_in_order_and_are_valid(layout: RoutingLayout, num_tokens: int, seed: int) -> None:
    rows = engine_rows(num_tokens - 1, layout, seed)
    routes = RoutedExperts.from_vllm(rows, num_tokens=num_tokens, layout=layout)
    assert routes.validate(layout, num_tokens=num_tokens) is routes and routes.full.dtype == layout.dtype
    assert routes.full[:-1, layout.moe_layers].tolist() == rows[:, layout.moe_layers].tolist()
    assert routes.batch_size == torch.Size([])
    assert (routes.full[-1] == U).all() and (routes.full[:, layout.dense_layers] == U).all()
    unknown = RoutedExperts.from_vllm(None, num_tokens=num_tokens, layout=layout).validate(layout)
    assert (unknown.full == U).all() and unknown.full.shape == routes.full.shape and unknown.coverage(layout) == 0


# validate


@settings(max_examples=30)
@given(batches())
def test_valid_routes_pass_in_every_form(batch: tuple[RoutingLayout, list[RoutedExperts]]) -> None:
    layout, samples = batch
    ragged = lazy_stack(samples)
    lengths = [len(one.full) for one in samples]
    masks = [torch.ones(length, dtype=torch.bool) for length in lengths]
    ragged.validate(layout, num_tokens=lengths, attention_mask=masks)
    lazy_stack([ragged, ragged]).validate(layout, num_tokens=lengths * 2, attention_mask=[masks, masks])
    padded = ragged.pad(side="left")
    mask = torch.nn.utils.rnn.pad_sequence(masks, batch_first=True, padding_side="left")
    padded.validate(layout, num_tokens=lengths, attention_mask=mask)
    padded.validate(layout, num_tokens=max(lengths))
    padded.unsqueeze(0).validate(layout, attention_mask=mask.unsqueeze(0).long())
    padded[:0].validate(layout, num_tokens=4, attention_mask=mask[:0])


@pytest.mark.parametrize(
    ("layer", "row", "text"),
    [
        (2, [0, 0], "holds [0, 0]: all zeros is what an engine returns for a row it did not capture."),
        (2, [4, 4], "holds expert 4 twice in [4, 4]."),
        (2, [4, U], "holds [4, -1], which is partly -1."),
        (2, [4, 8], "holds expert 8 in [4, 8]; allowed are 0..7"),
        (1, [-2, 3], "holds expert -2 in [-2, 3]; allowed are 0..7"),
        (0, [0, U], "holds [0, -1], but that layer has no router; the layers with one are [1, 2]."),
    ],
)
def test_rows_that_no_router_makes(layer: int, row: list[int], text: str) -> None:
    samples = [sample(2), sample(3), sample(4), sample(5)]
    samples[2].full[1, layer] = torch.tensor(row)
    nested = lazy_stack([lazy_stack(samples[:2]), lazy_stack(samples[2:])])
    dense = lazy_stack(samples).pad(side="right")
    for routes, place in ((samples[2], ""), (nested, "sample (1, 0), "), (dense, "sample 2, ")):
        wanted = f"routed_experts: {place}token 1, layer {layer} {text}"
        with pytest.raises(RouteValueError, match=f"^{re.escape(wanted)}"):
            routes.validate(LAYOUT)


def test_pads_do_not_count_as_tokens_and_have_no_route() -> None:
    routes, mask = lazy_stack([sample(2), sample(4)]).pad(side="left"), torch.tensor([[0, 0, 1, 1], [1] * 4])
    routes.validate(LAYOUT, num_tokens=[2, 4], attention_mask=mask)
    with pytest.raises(RouteShapeError, match="routed_experts of sample 0 must have 4 rows, got 2"):
        routes.validate(LAYOUT, num_tokens=4, attention_mask=mask)
    text = r"^routed_experts: sample 0, token 2, layer 1 holds .* but the attention mask says it is a pad"
    with pytest.raises(RouteValueError, match=text):
        routes.validate(LAYOUT, attention_mask=mask.flip(1))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_tokens": 3}, "routed_experts of sample 1 must have 3 rows, got 4."),
        ({"num_tokens": [3, 5]}, "routed_experts of sample 1 must have 5 rows, got 4."),
        ({"num_tokens": [3]}, "num_tokens must have 2 rows, got 1."),
        ({"attention_mask": [torch.ones(3)]}, "attention_mask must have 2 rows, got 1."),
        ({"attention_mask": torch.ones(2, 4)}, "attention_mask of sample 0 must have shape [3], got [4]."),
    ],
)
def test_counts_and_masks_that_do_not_fit(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(RouteShapeError, match=f"^{re.escape(text)}"):
        lazy_stack([sample(3), sample(4)]).validate(LAYOUT, **arguments)


OTHER_WIDTH = RoutedExperts(full=torch.full((5, 3, 4), U, dtype=torch.int8))


@pytest.mark.parametrize(
    ("routes", "error", "text"),
    [
        (RoutedExperts(full=torch.zeros(3, 2)), RouteShapeError, " must have shape [..., T, L, K], got [3, 2]"),
        (OTHER_WIDTH, RouteShapeError, " must have shape [T, 3, 2], got [5, 3, 4]. Check that the RoutingLayout"),
        (lazy_stack([sample(), OTHER_WIDTH]), RouteShapeError, " of sample 1 must have shape [T, 3, 2], got"),
        (sample().to(torch.int16), RouteValueError, " must have dtype torch.int8 for 8 experts, got torch.int16"),
        (RoutedExperts(full=sample().full.to(torch.uint8)), RouteValueError, " must have dtype torch.int8 for 8 exp"),
    ],
)
def test_shapes_and_dtypes_that_are_no_routes(routes: RoutedExperts, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"^{re.escape(f'routed_experts{text}')}"):
        routes.validate(LAYOUT)


# truncate and pad


def test_padded_and_cut_by_hand() -> None:
    routes = RoutedExperts.from_vllm(ROWS, num_tokens=3, layout=LAYOUT)
    empty = [[U, U]] * 3
    assert routes.pad(5).full.tolist() == [empty, empty, *FULL]
    assert routes.pad(4, "right").full.tolist() == [*FULL, empty]
    batch = lazy_stack([routes, routes.truncate(1)])
    assert batch.pad(side="right").full.tolist() == [FULL, [FULL[0], empty, empty]]
    assert batch.pad().batch_size == torch.Size([2])
    assert batch.pad().pad(4).full.tolist() == [[empty, *FULL], [empty, empty, empty, FULL[0]]]
    nested = lazy_stack([lazy_stack([sample(2), sample(3)]), lazy_stack([sample(4), sample(5)])])
    padded = nested.pad(side="right")
    assert padded.full.shape == (2, 2, 5, 3, 2) and padded.batch_size == nested.batch_size == (2, 2)
    assert padded[1, 0].full[:4].tolist() == sample(4).full.tolist()
    other_dim = lazy_stack([torch.stack([sample(2)] * 3), torch.stack([sample(4)] * 3)], 1)
    assert other_dim.pad().full.shape == (3, 2, 4, 3, 2)
    ragged = lazy_stack([routes, routes.truncate(1)]).truncate(2)
    assert [full.tolist() for full in split(ragged)] == [FULL[:2], FULL[:1]]
    assert torch.stack([routes, routes]).truncate(1).full.tolist() == [FULL[:1]] * 2


@settings(max_examples=50)
@given(batches(), st.integers(0, 3), st.sampled_from(["left", "right"]))
def test_padding_can_be_taken_off_again(batch: tuple[RoutingLayout, list[RoutedExperts]], more: int, side: Any) -> None:
    layout, samples = batch
    length = max(len(one.full) for one in samples) + more
    padded = lazy_stack(samples).pad(length, side)
    assert padded.full.shape == (len(samples), length, layout.num_layers, layout.top_k)
    assert padded.validate(layout).full.dtype == layout.dtype
    for one, row in zip(samples, padded.unbind(0), strict=True):
        count = len(one.full)
        assert_same(row.truncate(count) if side == "right" else RoutedExperts(full=row.full[-count:]), one)
        rest = row.full[count:] if side == "right" else row.full[:-count]
        assert (rest == UNSET_EXPERT).all()


def test_what_cannot_be_padded_or_cut() -> None:
    batch = lazy_stack([sample(3), sample(5)])
    with pytest.raises(RouteShapeError, match=r"cannot pad to 4 rows, the longest sample has 5: truncate\(\) first"):
        batch.pad(4)
    with pytest.raises(ValueError, match="side must be 'left' or 'right', got 'middle'"):
        batch.pad(6, "middle")  # type: ignore[arg-type]
    for call in (batch.truncate, lambda count: RoutedExperts.from_vllm(None, num_tokens=count, layout=LAYOUT)):
        with pytest.raises(RouteShapeError, match="num_tokens must be at least 1, got 0"):
            call(0)


# What is known, and how it looks


def test_is_set_coverage_and_bytes() -> None:
    routes = RoutedExperts.from_vllm(ROWS, num_tokens=3, layout=LAYOUT)
    assert routes.is_set.tolist() == [[False, True, True], [False, True, True], [False, False, False]]
    assert routes.coverage() == routes.coverage(LAYOUT) == pytest.approx(4 / 6) and routes.nbytes == 3 * 3 * 2
    batch = lazy_stack([routes, routes.truncate(1)])
    assert batch.coverage() == pytest.approx(6 / 8) and batch.nbytes == 4 * 3 * 2
    assert batch.pad().is_set.shape == (2, 3, 3) and batch.pad()[:0].coverage() == batch.pad()[:0].nbytes == 0
    known = torch.compile(lambda routes: routes.is_set.sum(), backend="eager")
    assert known(routes) == 4
    routes.full[:, 1] = UNSET_EXPERT
    assert (routes.coverage(), routes.coverage(LAYOUT)) == (pytest.approx(2 / 3), pytest.approx(2 / 6))
    assert RoutedExperts.from_vllm(None, num_tokens=2, layout=LAYOUT).coverage() == 0
    with pytest.raises(RouteShapeError, match=r"is_set needs samples of one length, got .*T=1\.\.3.*: pad"):
        _ = batch.is_set


def test_how_it_looks() -> None:
    routes = RoutedExperts.from_vllm(ROWS, num_tokens=3, layout=LAYOUT)
    ragged = lazy_stack([routes, routes.truncate(1)])
    line = "RoutedExperts(shape=[2, T=1..3, L=3, K=2], dtype=int8, coverage=75.0%, nbytes=24)"
    assert repr(routes) == "RoutedExperts(shape=[T=3, L=3, K=2], dtype=int8, coverage=66.7%, nbytes=18)"
    assert f"routed_experts: {line}}}" in repr(lazy_stack([TensorDict(routed_experts=one) for one in ragged.unbind(0)]))
    # what holds no routes is shown too
    assert repr(sample().empty()) == "RoutedExperts(shape=[])"
    assert repr(RoutedExperts(full=torch.zeros(3, 2, 0, dtype=torch.int8))) == "RoutedExperts(shape=[3, 2, 0])"
    assert repr(sample().to("meta")) == "RoutedExperts(shape=[T=3, L=3, K=2], dtype=int8, nbytes=18)"
    assert repr(sample().pad().unsqueeze(0)[:0]).startswith("RoutedExperts(shape=[0, T=3, L=3, K=2], dtype=int8")


def test_a_lazy_stack_without_samples() -> None:
    nothing = lazy_stack([sample(), sample(2)])[:0]
    assert (nothing.coverage(), nothing.nbytes, nothing.pad().full.shape) == (0.0, 0, (0, 0, 0, 0))
    assert nothing.validate(LAYOUT) is nothing
    assert repr(nothing) == "RoutedExperts(shape=[])"


def test_route_table() -> None:
    routes = RoutedExperts.from_vllm(ROWS, num_tokens=3, layout=LAYOUT)
    assert routes.route_table(["What", " is\n", "?"]).splitlines() == [
        "token           layer 1  layer 2",
        "    0  'What'       5,3      0,1",
        "    1  ' is\\n'      7,0      2,6",
        "    2  '?'            ·        ·",
    ]
    assert routes.route_table().splitlines()[:2] == ["token  layer 1  layer 2", "    0      5,3      0,1"]
    assert RoutedExperts.from_vllm(None, num_tokens=2, layout=LAYOUT).route_table() == "no route known in 2 rows"
    lines = sample(100).route_table(max_rows=5).splitlines()  # both ends
    assert [line.split()[0] for line in lines] == ["token", "0", "1", "2", "…", "98", "99"]
    for most, shown in {1: 2, 2: 2, 4: 4}.items():  # at least both ends
        assert len(sample(100).route_table(max_rows=most).splitlines()) == 2 + shown
    assert lines[4] == "… 95 more tokens" and len(sample(5).route_table(max_rows=5).splitlines()) == 6
    with pytest.raises(RouteShapeError, match=r"route_table shows one sample, got RoutedExperts\(shape=\[2, T=3"):
        torch.stack([sample(), sample()]).route_table()
    with pytest.raises(RouteShapeError, match="tokens must have 3 rows, got 1"):
        sample().route_table(["a"])


def test_a_count_is_an_integer_of_any_kind() -> None:
    made = sample()
    assert made.validate(LAYOUT, num_tokens=np.int64(3)) is made
    assert made.pad(np.int32(4)).full.shape == (4, 3, 2)
    for value in (1.5, True, "3", float("nan"), -1):
        for name, call in (
            ("length", made.pad),
            ("num_tokens", lambda value: made.validate(LAYOUT, num_tokens=value)),
            ("num_tokens must be", made.truncate),
            ("num_tokens must be", lambda value: RoutedExperts.from_vllm(None, num_tokens=value, layout=LAYOUT)),
        ):
            with pytest.raises(ValueError, match=name):
                call(value)
