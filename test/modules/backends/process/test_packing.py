"""Requests and completions come out as they went in, and what they share crosses once."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process import wire as packing
from torchrl_moe.modules.backends.process.wire import pack_completions, pack_requests, unpack_completions
from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput, KeptIds, Request

LAYERS, TOP_K = 3, 2
TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=5)
TEXTS = st.text(max_size=6)
SECONDS = st.floats(0, 1e3, width=32)
GREEDY = {"temperature": 0.0}


@st.composite
def requests(draw: st.DrawFn) -> Request:
    by_ids = draw(st.booleans())
    return Request(
        request_id=draw(TEXTS),
        sampling_params=draw(st.sampled_from([None, GREEDY, {"max_tokens": 3}])),
        prompt_token_ids=np.array(draw(TOKENS), np.int32) if by_ids else None,
        prompt=None if by_ids else draw(TEXTS),
        priority=draw(st.integers(-3, 3)),
        lora_request=draw(st.sampled_from([None, ("adapter", 1)])),
        guided_options=draw(st.sampled_from([None, {"regex": "a+"}])),
        return_routed_experts=draw(st.booleans()),
        resume=draw(st.none() | completions(np.uint8, packing.NOWHERE)),
        routed_experts=draw(st.none() | followed()),
        on_resume=draw(st.sampled_from([None, "forced", "live"])),
    )


@st.composite
def followed(draw: st.DrawFn) -> Any:
    """Rows of any shape and dtype: one request may come from a user, the next one from an engine."""
    shape = (draw(st.integers(0, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 3)))
    dtype = draw(st.sampled_from([np.int8, np.int16, np.int64]))
    return np.resize(np.arange(-1, 9).astype(dtype), shape)


@st.composite
def words(draw: st.DrawFn, tokens: int) -> KeptIds:
    sizes = np.array(draw(st.lists(st.integers(-3, 3), min_size=tokens, max_size=tokens)), np.int32)
    count = int(np.abs(sizes).sum())
    return KeptIds(np.array(draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), np.int32), sizes)


@st.composite
def outputs(draw: st.DrawFn, index: int, prompt_tokens: int, dtype: Any) -> CompletionOutput:
    ids = draw(TOKENS)
    rows = max(prompt_tokens + len(ids) - 1, 0)
    routes = np.array(draw(st.lists(st.integers(0, np.iinfo(dtype).max), min_size=1)), dtype)
    return CompletionOutput(
        index=index,
        token_ids=np.array(ids, np.int64),
        text=draw(TEXTS),
        finish_reason=draw(st.sampled_from(["stop", "length", "abort"])),
        stop_reason=draw(st.sampled_from([None, 258, "\n"])),
        policy_versions=np.array(draw(st.lists(st.integers(-1, 9), min_size=len(ids), max_size=len(ids))), np.int32),
        logprobs=np.linspace(-9, 0, len(ids), dtype=np.float32) if draw(st.booleans()) else None,
        routed_experts=np.resize(routes, (rows, LAYERS, TOP_K)) if draw(st.booleans()) else None,
        kept=draw(st.none() | words(len(ids))),
        resume=draw(st.sampled_from(["none", "forced", "live"])),
    )


@st.composite
def completions(draw: st.DrawFn, dtype: Any, replica: int = 7) -> Completion:
    prompt = draw(TOKENS)
    return Completion(
        request_id=draw(TEXTS),
        prompt=draw(st.none() | TEXTS),
        prompt_token_ids=np.array(prompt, np.int64),
        num_cached_tokens=draw(st.integers(0, 5)),
        outputs=[draw(outputs(i, len(prompt), dtype)) for i in range(draw(st.integers(0, 3)))],
        metrics=CompletionMetrics(
            queue_seconds=draw(SECONDS), first_token_seconds=draw(SECONDS), total_seconds=draw(SECONDS), replica=replica
        ),
    )


def same(one: Any, two: Any) -> None:
    """Equal field by field, arrays by dtype, shape and values."""
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    elif isinstance(one, list):
        assert len(one) == len(two)
        for left, right in zip(one, two, strict=True):
            same(left, right)
    elif isinstance(one, Request | Completion | CompletionOutput | CompletionMetrics | KeptIds):
        for name in type(one).__slots__:
            same(getattr(one, name), getattr(two, name))
    else:
        assert one == two


SHARED = settings(max_examples=60)


def through(message: Any) -> Any:
    """As the other side reads it."""
    head, *buffers = wire.encode(message)
    return wire.decode(head, buffers)


@SHARED
@given(batch=st.lists(requests(), max_size=6))
def test_any_mix_of_requests_comes_out_as_it_went_in(batch: list[Request]) -> None:
    same(packing.unpack_requests(through(pack_requests(batch))), batch)


@SHARED
@given(batch=st.sampled_from([np.uint8, np.uint16]).flatmap(lambda dtype: st.lists(completions(dtype), max_size=5)))
def test_any_mix_of_completions_comes_out_as_it_went_in(batch: list[Completion]) -> None:
    same(unpack_completions(through(pack_completions(batch)), replica=7), batch)


def test_the_replica_is_stamped_on_the_metrics() -> None:
    sent = Completion(request_id="r", prompt=None, prompt_token_ids=np.arange(2), num_cached_tokens=0, outputs=[])
    (received,) = unpack_completions(pack_completions([sent]), replica=3)
    assert (sent.metrics.replica, received.metrics.replica) == (-1, 3)


def test_requests_that_share_parameters_still_share_them() -> None:
    params = {"stop": ["\n"]}
    batch = [Request(request_id=str(i), sampling_params=params, prompt="hi") for i in range(3)]
    first, *others = packing.unpack_requests(through(pack_requests(batch)))
    assert first.sampling_params == params
    assert all(other.sampling_params is first.sampling_params for other in others)


def test_each_request_keeps_the_rows_that_it_follows() -> None:
    rows: list[Any] = [
        None,
        np.full((3, 2, 4), 127, np.int8),
        np.full((1, 5, 1), -1, np.int64),
        np.zeros((0, 3, 2), np.int16),
        np.arange(24, dtype=np.int16).reshape(4, 3, 2)[::2, :, ::-1],  # a view, as a user may pass
    ]
    batch = [
        Request(request_id=str(i), sampling_params=None, prompt_token_ids=np.arange(4, dtype=np.int32), **asked)
        for i, asked in enumerate(
            {"routed_experts": one, "on_resume": "live"} if one is not None else {} for one in rows
        )
    ]
    received = packing.unpack_requests(through(pack_requests(batch)))
    for request, one in zip(received, rows, strict=True):
        same(request.routed_experts, one)
    assert [request.on_resume for request in received] == [None, *["live"] * 4]


def test_bytes_do_not_grow_with_python_objects_per_token() -> None:
    batch = [
        Completion(
            request_id=str(i),
            prompt=None,
            prompt_token_ids=np.arange(100),
            num_cached_tokens=0,
            outputs=[
                CompletionOutput(
                    index=0,
                    token_ids=np.arange(1000),
                    text="",
                    finish_reason="stop",
                    policy_versions=np.zeros(1000, np.int32),
                    logprobs=np.zeros(1000, np.float32),
                    routed_experts=np.zeros((1099, 48, 8), np.uint8),
                )
            ],
        )
        for i in range(8)
    ]
    head, *buffers = wire.encode(pack_completions(batch))
    arrays = 8 * (100 * 4 + 1000 * 12 + 1099 * 48 * 8)
    assert len(head) < 3000
    assert arrays <= sum(len(buffer) for buffer in buffers) <= arrays + 1000


def output_of(count: int, **fields: Any) -> CompletionOutput:
    """An answer of so many tokens, after a prompt of as many."""
    ids = np.arange(count, dtype=np.int64)
    return CompletionOutput(
        index=0,
        token_ids=ids,
        text="",
        finish_reason="stop",
        policy_versions=ids.astype(np.int32),
        routed_experts=np.zeros((2 * count - 1, LAYERS, TOP_K), np.uint8),
        **fields,
    )


def completion_of(name: str, *outputs: CompletionOutput) -> Completion:
    ids = outputs[0].token_ids
    return Completion(request_id=name, prompt=None, prompt_token_ids=ids, num_cached_tokens=0, outputs=list(outputs))


def test_one_completion_that_is_kept_does_not_keep_its_message() -> None:
    words = KeptIds(np.arange(300, dtype=np.int32), np.full(100, 3, np.int32))
    answer = output_of(100, logprobs=np.zeros(100, np.float32), kept=words)
    packed = pack_completions([completion_of("a", answer), completion_of("b", answer)])
    for completion in unpack_completions(packed, 0):
        output = completion.outputs[0]
        assert output.kept is not None
        mine = (completion.prompt_token_ids, output.token_ids, output.policy_versions, output.logprobs)
        assert all(array.base is None for array in (*mine, output.routed_experts, output.kept.ids, output.kept.sizes))


def test_the_bytes_of_a_completion_are_those_of_its_arrays() -> None:
    one = completion_of("r", output_of(10), output_of(10))
    assert packing.completion_bytes(one) == 80 + 2 * (80 + 40 + 19 * 6)
    one.outputs[0].kept = KeptIds(np.zeros(7, np.int32), np.zeros(10, np.int32))
    assert packing.completion_bytes(one) == 80 + 2 * (80 + 40 + 19 * 6) + 28 + 40


def test_names_are_changed_and_the_arrays_shared() -> None:
    packed = pack_requests([Request(request_id="a", sampling_params=None, prompt="hi")])
    renamed = packing.rename(packed, lambda name: f"d/{name}")
    assert (packing.packed_ids(packed), packing.packed_ids(renamed)) == (["a"], ["d/a"])
    assert renamed["ids"] is packed["ids"]
