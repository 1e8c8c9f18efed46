"""Requests and completions come out as they went in, over a real socket, and a broken link is never silent."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput, Request

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
        resume=draw(st.none() | completions(np.uint8, wire.NOWHERE)),
    )


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
            queue_seconds=draw(SECONDS),
            first_token_seconds=draw(SECONDS),
            total_seconds=draw(SECONDS),
            replica=replica,
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
    elif isinstance(one, Request | Completion | CompletionOutput | CompletionMetrics):
        for name in type(one).__slots__:
            same(getattr(one, name), getattr(two, name))
    else:
        assert one == two


@pytest.fixture
def ends() -> Iterator[tuple[Connection, Connection]]:
    """The two ends of one socket, with a small buffer: a large message is written while it is read."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    connections = [Connection(end.detach()) for end in pair]
    yield connections[0], connections[1]
    for connection in connections:
        connection.close()


def send(connection: Connection, message: Any) -> None:
    for frame in wire.encode(message):
        connection.send_bytes(frame)


def through(ends: tuple[Connection, Connection], message: Any) -> Any:
    """One message through the socket, written in a thread."""
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(send, ends[0], message)
        received = wire.receive(ends[1])
        written.result()
    return received


SHARED = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)


@SHARED
@given(batch=st.lists(requests(), max_size=6))
def test_any_mix_of_requests_comes_out_as_it_went_in(ends: tuple[Connection, Connection], batch: list[Request]) -> None:
    same(wire.unpack_requests(through(ends, wire.pack_requests(batch))), batch)


@SHARED
@given(batch=st.sampled_from([np.uint8, np.uint16]).flatmap(lambda dtype: st.lists(completions(dtype), max_size=5)))
def test_any_mix_of_completions_comes_out_as_it_went_in(
    ends: tuple[Connection, Connection], batch: list[Completion]
) -> None:
    same(wire.unpack_completions(through(ends, wire.pack_completions(batch)), replica=7), batch)


def test_the_replica_is_stamped_on_the_metrics() -> None:
    sent = Completion(request_id="r", prompt=None, prompt_token_ids=np.arange(2), num_cached_tokens=0, outputs=[])
    (received,) = wire.unpack_completions(wire.pack_completions([sent]), replica=3)
    assert (sent.metrics.replica, received.metrics.replica) == (-1, 3)


def test_requests_that_share_parameters_still_share_them() -> None:
    params = {"stop": ["\n"]}
    batch = [Request(request_id=str(i), sampling_params=params, prompt="hi") for i in range(3)]
    first, *others = wire.unpack_requests(pickle.loads(pickle.dumps(wire.pack_requests(batch))))
    assert first.sampling_params == params
    assert all(other.sampling_params is first.sampling_params for other in others)


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
    head, *buffers = wire.encode(wire.pack_completions(batch))
    arrays = 8 * (100 * 4 + 1000 * 12 + 1099 * 48 * 8)
    assert len(head) < 3000
    assert arrays <= sum(len(buffer) for buffer in buffers) <= arrays + 1000


def test_what_is_received_is_read_only_and_not_a_copy(ends: tuple[Connection, Connection]) -> None:
    received = through(ends, {"big": np.arange(100_000)})["big"]
    assert not received.flags.writeable
    assert not received.flags.owndata
    np.testing.assert_array_equal(received, np.arange(100_000))


@pytest.mark.parametrize("frames", [0, 1])
def test_a_side_that_goes_away_ends_the_file(ends: tuple[Connection, Connection], frames: int) -> None:
    ours, theirs = ends
    for frame in wire.encode({"big": np.arange(10)})[:frames]:  # also in the middle of a message
        ours.send_bytes(frame)
    ours.close()
    with pytest.raises(EOFError):
        wire.receive(theirs)


# -- the outbox ------------------------------------------------------------------------------------------------------


def one_each(items: list[Any]) -> list[wire.Frames]:
    return [wire.encode(item) for item in items]


def test_the_outbox_writes_in_order_and_hangs_up_when_closed(ends: tuple[Connection, Connection]) -> None:
    outbox = wire.Outbox(ends[0], one_each)
    for number in range(50):
        outbox.put(("message", number))
    assert [wire.receive(ends[1]) for _ in range(50)] == [("message", number) for number in range(50)]
    outbox.put("last words")
    outbox.close()
    assert wire.receive(ends[1]) == "last words"
    with pytest.raises(EOFError):
        wire.receive(ends[1])


def test_the_outbox_never_waits_for_a_reader_and_frames_what_gathered_together(
    ends: tuple[Connection, Connection],
) -> None:
    batches: list[int] = []

    def together(items: list[Any]) -> list[wire.Frames]:
        batches.append(len(items))
        return [wire.encode(items)]

    outbox = wire.Outbox(ends[0], together)
    big = np.zeros(1 << 20, np.uint8)  # many times the socket's buffer
    for _ in range(20):
        outbox.put(big)  # would hang here if it wrote itself
    received = 0
    while received < 20:
        received += len(wire.receive(ends[1]))
    outbox.close()
    assert sum(batches) == 20
    assert len(batches) < 20


def test_an_outbox_that_fails_to_frame_hangs_up_both_ways(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    errors: list[type[BaseException]] = []
    monkeypatch.setattr(threading, "excepthook", lambda args: errors.append(args.exc_type))
    outbox = wire.Outbox(ends[0], one_each)
    outbox.put(lambda: None)  # does not pickle
    for end in ends:
        with pytest.raises(EOFError):
            wire.receive(end)
    outbox.put("nobody writes this, and nobody waits for it")
    outbox.close()
    assert len(errors) == 1


def test_an_outbox_whose_reader_is_gone_ends_quietly(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: pytest.fail(str(args)))
    outbox = wire.Outbox(ends[0], one_each)
    ends[1].close()
    outbox.put("hello")
    with pytest.raises(EOFError):
        wire.receive(ends[0])
    outbox.close()


def test_one_completion_that_is_kept_does_not_keep_its_message() -> None:
    def one(name: str) -> Completion:
        ids = np.arange(100, dtype=np.int64)
        output = CompletionOutput(
            index=0,
            token_ids=ids,
            text="",
            finish_reason="stop",
            policy_versions=ids.astype(np.int32),
            logprobs=ids.astype(np.float32),
            routed_experts=np.zeros((199, LAYERS, TOP_K), np.uint8),
        )
        return Completion(request_id=name, prompt=None, prompt_token_ids=ids, num_cached_tokens=0, outputs=[output])

    packed = wire.pack_completions([one("a"), one("b")])
    for completion in wire.unpack_completions(packed, 0):
        output = completion.outputs[0]
        kept = (completion.prompt_token_ids, output.token_ids, output.policy_versions, output.logprobs)
        assert all(array.base is None for array in (*kept, output.routed_experts))
