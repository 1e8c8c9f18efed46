"""Messages come out as they went in, over a real socket, and a broken link or a stuck reader is never silent."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, IntEnum
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import HOUR, until
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.process.wire import (
    Packed,
    from_plain,
    pack_completions,
    pack_requests,
    to_plain,
    unpack_completions,
)
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionMetrics,
    CompletionOutput,
    KeptIds,
    ProbeReport,
    ReplicaInfo,
    ReplicaStats,
    Request,
    SwapReport,
)
from torchrl_moe.weight_update.transports.base import StageReport

# -- the plain form ----------------------------------------------------------------------------------------------------


def as_plain(value: Any) -> Any:
    """By msgpack, as the other side reads it; arrays do not go as_plain it."""
    return from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(to_plain(value))))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63) + 1, 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
)
PLAIN_KEYS = st.text() | st.integers(-(2**63) + 1, 2**63 - 1)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(PLAIN_KEYS, inner),
    max_leaves=12,
)


@given(value=VALUES)
def test_plain_data_comes_out_as_it_went_in(value: Any) -> None:
    again = as_plain(value)
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
    assert as_plain({"found": [carrier]}) == {"found": [carrier]}


def test_dtypes_and_sizes_of_torch_cross_by_name() -> None:
    metadata = {"weight": (torch.bfloat16, torch.Size([2, 3]))}
    again = as_plain(metadata)
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
    assert as_plain(given) == {
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
    again = as_plain({"packed": Packed(rest=rows)})["packed"]
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


# -- requests and completions ------------------------------------------------------------------------------------------


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


EXAMPLES = settings(max_examples=60)


def decoded(message: Any) -> Any:
    """As the other side reads it."""
    head, *buffers = wire.encode(message)
    return wire.decode(head, buffers)


@EXAMPLES
@given(batch=st.lists(requests(), max_size=6))
def test_any_mix_of_requests_comes_out_as_it_went_in(batch: list[Request]) -> None:
    same(wire.unpack_requests(decoded(pack_requests(batch))), batch)


@EXAMPLES
@given(batch=st.sampled_from([np.uint8, np.uint16]).flatmap(lambda dtype: st.lists(completions(dtype), max_size=5)))
def test_any_mix_of_completions_comes_out_as_it_went_in(batch: list[Completion]) -> None:
    same(unpack_completions(decoded(pack_completions(batch)), replica=7), batch)


def test_requests_that_share_parameters_still_share_them() -> None:
    params = {"stop": ["\n"]}
    batch = [Request(request_id=str(i), sampling_params=params, prompt="hi") for i in range(3)]
    first, *others = wire.unpack_requests(decoded(pack_requests(batch)))
    assert first.sampling_params == params
    assert all(other.sampling_params is first.sampling_params for other in others)


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


# -- frames ------------------------------------------------------------------------------------------------------------


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


def test_what_is_received_is_read_only_and_not_a_copy(ends: tuple[Connection, Connection]) -> None:
    received = through(ends, {"big": np.arange(100_000)})["big"]
    assert not received.flags.writeable
    assert not received.flags.owndata
    np.testing.assert_array_equal(received, np.arange(100_000))


def test_a_small_array_needs_no_frame_of_its_own_and_views_arrive_as_they_look(
    ends: tuple[Connection, Connection],
) -> None:
    grid = np.arange(40_000, dtype=np.uint16).reshape(200, 200)
    sent = {"small": np.arange(3.0), "none": np.zeros((0, 4), np.uint8), "turned": grid.T[::2], "one": np.array(7)}
    assert len(wire.encode(sent)) == 2  # the head, and the large one
    received = through(ends, sent)
    for name, array in sent.items():
        assert received[name].dtype == array.dtype
        np.testing.assert_array_equal(received[name], array)


EXTENSION = msgspec.msgpack.Ext


@pytest.mark.parametrize(
    "head",
    [
        b"\xc1",  # no msgpack
        b"",
        msgspec.msgpack.encode(["list", EXTENSION(1, msgspec.msgpack.encode(("|O", (1,), b"12345678")))]),
        msgspec.msgpack.encode(["list", EXTENSION(1, msgspec.msgpack.encode(("<f8", (1 << 40,), b"12345678")))]),
        msgspec.msgpack.encode(["list", EXTENSION(1, msgspec.msgpack.encode(("<f8", (1,), 7)))]),  # no such buffer
        msgspec.msgpack.encode(["list", EXTENSION(2, b"")]),
        msgspec.msgpack.encode(["os.system", "true"]),
        msgspec.msgpack.encode(["ReplicaInfo", {"no_such_field": 1}]),
    ],
)
def test_what_is_no_message_ends_the_connection_with_a_line_in_the_log(
    ends: tuple[Connection, Connection], head: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    ends[0].send_bytes(bytes(wire.COUNT_BYTES) + head)
    with pytest.raises(OSError):
        wire.receive(ends[1])
    assert "a connection is closed: what arrived is no message: " in caplog.text


def test_a_frame_that_is_announced_too_large_is_not_read(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire, "MOST_FRAME_BYTES", 1000)
    with pytest.raises(ValueError, match="an array of 1001 bytes cannot be sent: 1000 at most"):
        wire.encode(np.zeros(1001, np.uint8))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(ends[0].send_bytes, bytes(1001))
        with pytest.raises(OSError):
            wire.receive(ends[1])


@pytest.mark.parametrize("frames", [0, 1])
def test_a_side_that_goes_away_ends_the_file(ends: tuple[Connection, Connection], frames: int) -> None:
    ours, theirs = ends
    for frame in wire.encode({"big": np.arange(1000)})[:frames]:  # also in the middle of a message
        ours.send_bytes(frame)
    ours.close()
    with pytest.raises(EOFError):
        wire.receive(theirs)


# -- the outbox ------------------------------------------------------------------------------------------------------


def small(item: Any) -> int:
    return 1


def one_each(items: list[Any]) -> list[wire.Frames]:
    return [wire.encode(item) for item in items]


def test_the_outbox_never_waits_for_a_reader_and_frames_what_gathered_together(
    ends: tuple[Connection, Connection],
) -> None:
    batches: list[int] = []

    def together(items: list[Any]) -> list[wire.Frames]:
        batches.append(len(items))
        return [wire.encode(items)]

    outbox = wire.Outbox(ends[0], together, small)
    big = np.zeros(1 << 20, np.uint8)  # many times the socket's buffer
    for _ in range(20):
        outbox.put(big)  # would hang here if it wrote itself
    received = 0
    while received < 20:
        received += len(wire.receive(ends[1]))
    outbox.close()
    assert sum(batches) == 20
    assert len(batches) < 20


def test_an_outbox_whose_reader_is_gone_ends_quietly(
    ends: tuple[Connection, Connection], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda args: pytest.fail(str(args)))
    outbox = wire.Outbox(ends[0], one_each, small)
    ends[1].close()
    outbox.put("hello")
    with pytest.raises(EOFError):
        wire.receive(ends[0])
    outbox.close()


def test_a_reader_that_has_stopped_is_dropped_at_the_bound_and_both_sides_hear_of_it(
    ends: tuple[Connection, Connection], caplog: pytest.LogCaptureFixture
) -> None:
    outbox = wire.Outbox(ends[0], limit=1000, stuck_seconds=0, reader="driver seven")
    first, second = np.zeros(1 << 20, np.uint8), np.zeros(600, np.uint8)
    outbox.put(wire.encode(first))  # any size will do if nothing waits; the thread now writes it in vain
    assert not outbox.overflowed
    outbox.put(wire.encode(second))
    assert outbox.overflowed
    outbox.put(wire.encode("nobody reads this"))
    with pytest.raises((EOFError, OSError)):  # this side reads the end
        wire.receive(ends[0])
    with pytest.raises(EOFError):  # the other had not read all of the first
        wire.receive(ends[1])
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("driver seven does not keep up: 1048")
    until(lambda: not outbox._thread.is_alive())


def test_a_slow_reader_is_not_dropped_for_what_it_has_read(ends: tuple[Connection, Connection]) -> None:
    outbox = wire.Outbox(ends[0], limit=3000, stuck_seconds=0)
    for number in range(100):  # 100 times 1 KB, of which two may wait
        outbox.put([bytes(wire.COUNT_BYTES) + wire.encode(number)[0][wire.COUNT_BYTES :] + bytes(0), *[]])
        assert wire.receive(ends[1]) == number
    assert not outbox.overflowed
    outbox.close()


def test_a_reader_that_reads_may_be_eight_times_as_late(ends: tuple[Connection, Connection]) -> None:
    outbox = wire.Outbox(ends[0], limit=1 << 20, stuck_seconds=HOUR)
    big = np.zeros(1 << 20, np.uint8)
    for _ in range(7):
        outbox.put(wire.encode(big))
    assert not outbox.overflowed
    outbox.put(wire.encode(big))
    assert outbox.overflowed
