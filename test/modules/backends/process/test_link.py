"""Messages come out as they went in, over a real socket, and a broken link or a stuck reader is never silent."""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from enum import Enum, IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.waiting import HOUR, until
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.link import SocketStream
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionMetrics,
    CompletionOutput,
    KeptIds,
    Request,
    Scoring,
)


def decoded(value: Any) -> Any:
    """As the other side reads it, from memory of its own."""
    return link.decode([bytearray(frame) for frame in link.encode(value)])


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
)
KEYS = st.text(st.characters(exclude_categories=["Cs"])) | st.integers(-(2**63), 2**63 - 1)
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner), max_leaves=12)


@settings(max_examples=50)
@given(value=VALUES)
def test_plain_data_comes_out_as_it_went_in(value: Any) -> None:
    again = decoded(value)
    assert again == value
    assert repr(again) == repr(value)  # 1 is not True, nor 1.0


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
    params: Params = dataclasses.field(default_factory=Params)
    count: int = dataclasses.field(default=0, init=False)


def test_what_users_pass_crosses_as_what_it_stands_for() -> None:
    made_with = {"temperature": 0.5, "stop": []}  # all that it can be made with, defaults too
    options = {"regex": None, "mode": "keep", "params": {"temperature": 1.0, "stop": []}}
    pairs = [
        (Params(temperature=0.5), made_with),
        (Options(regex="a+"), {**options, "regex": "a+"}),
        ([Mode.KEEP, Level.HIGH], ["keep", 2]),
        (Path("/some/where"), "/some/where"),
        ((np.int64(3), np.float32(0.5), np.bool_(True)), [3, 0.5, True]),
        ({Level.HIGH: None}, {2: None}),
    ]
    given, expected = ({str(i): pair[side] for i, pair in enumerate(pairs)} for side in (0, 1))
    assert link.plain(given) == expected
    assert decoded({"weight": (torch.bfloat16, torch.Size([2, 3]))}) == {"weight": [torch.bfloat16, [2, 3]]}
    (request,) = decoded([Request(request_id="r", sampling_params=given, lora_request=Options(), prompt="x")])
    assert (request.sampling_params, request.lora_request) == (expected, options)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (lambda: None, "builtins.function has no plain form: <function"),
        ({"a": [threading.Lock()]}, "_thread.lock has no plain form"),
        (Params, "has no plain form"),
        (torch.zeros(2), "torch.Tensor has no plain form"),
        (1 << 64, "can't serialize ints"),
        (np.array([None]), "dtype object has no plain form"),
        (ENDLESS, "recursion"),
        (Request(request_id="r", prompt="x", sampling_params={"stop": ENDLESS}), "recursion"),
        (RuntimeError("x"), "builtins.RuntimeError has no plain form"),
        ("\ud800", "surrogates not allowed"),
    ],
)
def test_what_has_no_plain_form_is_refused_by_its_class(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        link.encode({"value": value})


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
        lora_request=draw(st.sampled_from([None, {"lora_int_id": 1}])),
        guided_options=draw(st.sampled_from([None, {"regex": "a+"}])),
        return_routed_experts=draw(st.booleans()),
        resume=draw(st.none() | completions(np.uint8)),
        scoring=draw(st.none() | words(2).map(lambda kept: Scoring(temperature=0.5, kept=kept))),
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
def completions(draw: st.DrawFn, dtype: Any) -> Completion:
    prompt = draw(TOKENS)
    return Completion(
        request_id=draw(TEXTS),
        prompt=draw(st.none() | TEXTS),
        prompt_token_ids=np.array(prompt, np.int64),
        num_cached_tokens=draw(st.integers(0, 5)),
        outputs=[draw(outputs(i, len(prompt), dtype)) for i in range(draw(st.integers(0, 3)))],
        metrics=CompletionMetrics(
            queue_seconds=draw(SECONDS), first_token_seconds=draw(SECONDS), total_seconds=draw(SECONDS), replica=7
        ),
        prompt_logprobs=draw(st.none() | st.just(np.linspace(-1, 0, len(prompt), dtype=np.float32))),
        finished=draw(st.booleans()),
    )


def same(one: Any, two: Any) -> None:
    """Equal field by field, arrays by dtype, shape and values."""
    assert type(one) is type(two)
    if isinstance(one, np.ndarray):
        assert one.dtype == two.dtype
        np.testing.assert_array_equal(one, two)
    elif isinstance(one, list):
        for left, right in zip(one, two, strict=True):
            same(left, right)
    elif isinstance(one, Request | Completion | CompletionOutput | CompletionMetrics | KeptIds | Scoring):
        for name in type(one).__slots__:
            same(getattr(one, name), getattr(two, name))
    else:
        assert one == two


MESSAGES = st.lists(requests(), max_size=6) | st.sampled_from([np.uint8, np.uint16]).flatmap(
    lambda dtype: st.lists(completions(dtype), max_size=5)
)


@settings(max_examples=50)
@given(batch=MESSAGES)
def test_any_mix_of_requests_or_of_completions_comes_out_as_it_went_in(batch: list[Any]) -> None:
    same(decoded(batch), batch)


# -- frames ------------------------------------------------------------------------------------------------------------

Ends = tuple[SocketStream, SocketStream]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """The two ends of one socket, with a small buffer: a large message is written while it is read."""
    pair = socket.socketpair()
    for end in pair:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 12)
    streams = SocketStream(pair[0]), SocketStream(pair[1])
    yield streams
    for stream in streams:
        stream.close()


def through(ends: Ends, body: Any) -> Any:
    """One message through the socket, written in a thread."""
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(ends[0].send, link.message("kind", body, "driver"))
        kind, driver, received = link.read(ends[1])
        written.result()
    assert (kind, driver) == ("kind", "driver")
    return received


def test_arrays_arrive_as_they_look_the_large_ones_in_memory_of_their_own_and_not_copied(ends: Ends) -> None:
    grid = np.arange(40_000, dtype=np.uint16).reshape(200, 200)
    sent = {"small": np.arange(3.0), "none": np.zeros((0, 4), np.uint8), "turned": grid.T[::2], "one": np.array(7)}
    assert len(link.encode(sent)) == 2  # the body, and the large one
    large = {"big": np.arange(100_000), "more": np.arange(5000)}
    received = through(ends, {**sent, **large})
    for name, array in {**sent, **large}.items():
        assert received[name].dtype == array.dtype
        assert received[name].flags.writeable
        np.testing.assert_array_equal(received[name], array)
    assert not any(received[name].flags.owndata for name in large)
    assert not np.shares_memory(received["big"], received["more"])


PACK = msgspec.msgpack.encode
HEAD = PACK(("kind", ""))


def with_array(*fields: Any) -> list[bytes]:
    return [HEAD, PACK(["", msgspec.msgpack.Ext(link.ARRAY, PACK(fields))])]


@pytest.mark.parametrize(
    "frames",
    [
        [b"\xc1"],  # no msgpack
        [],
        [HEAD],  # no body
        [PACK("kind"), PACK(("", 1))],
        [HEAD, b""],
        with_array("|O", (1,), b"12345678"),
        with_array("<f8", (1 << 40,), b"12345678"),
        with_array("<f8", (-2,), b"12345678"),
        with_array("<f8", (1,), 7),  # no such frame
        *(
            [HEAD, PACK(body)]
            for body in (
                ["", msgspec.msgpack.Ext(9, b"")],
                ["", msgspec.msgpack.Ext(link.DTYPE, b"nn")],
                ["os.system", "true"],
                ["ReplicaStats", {"running": "many"}],
                ["completions", [{"request_id": "r"}]],
                ["requests", [[], [{}]]],
                7,
            )
        ),
    ],
)
def test_what_is_no_message_ends_the_connection_with_a_line_in_the_log(
    ends: Ends, frames: list[bytes], caplog: pytest.LogCaptureFixture
) -> None:
    ends[0].send(frames)
    with pytest.raises(OSError):
        link.read(ends[1])
    assert "a connection is closed: what arrived is no message: " in caplog.text


def test_what_is_announced_too_large_is_not_read(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "MOST_BYTES", 1000)
    with pytest.raises(ValueError, match="an array of 1001 bytes cannot be sent: 1000 at most"):
        link.encode(np.zeros(1001, np.uint8))
    with pytest.raises(ValueError, match=r"a message of \d+ bytes cannot be sent: 1000 at most"):
        link.encode([np.zeros(600, np.uint8)] * 2)
    for frames, what in (([bytes(500), bytes(501)], "1001 bytes"), ([b""] * 4, "4 frames")):
        monkeypatch.setattr(link, "MOST_FRAMES", 3)
        ours, theirs = map(SocketStream, socket.socketpair())
        ours.send(frames)
        with pytest.raises(OSError, match=f"a message of {what} was announced; at most"):
            theirs.receive()
        ours.close()
        theirs.close()


@pytest.mark.parametrize("sent", [0, 3, 30, 4000])
def test_a_side_that_goes_away_ends_the_file(sent: int) -> None:
    (ours, theirs), (one, other) = socket.socketpair(), socket.socketpair()
    with ours, theirs, one, other:
        SocketStream(one).send(link.message("kind", {"big": np.arange(5000)}))
        ours.sendall(other.recv(1 << 20)[:sent])  # also in the middle of a message
        ours.close()
        with pytest.raises(EOFError):
            SocketStream(theirs).receive()


def test_the_outbox_never_waits_for_a_reader_and_frames_what_gathered_together(ends: Ends) -> None:
    batches: list[int] = []

    def together(items: list[Any]) -> list[link.Frames]:
        batches.append(len(items))
        return [link.message("all", items)]

    outbox = link.Outbox(ends[0], together, lambda item: 1)
    for _ in range(20):
        outbox.put(np.zeros(1 << 20, np.uint8))  # many times the socket's buffer: would hang here if it wrote itself
    received = 0
    while received < 20:
        received += len(link.read(ends[1])[2])
    outbox.close()
    assert sum(batches) == 20
    assert len(batches) < 20


def test_a_reader_that_has_stopped_is_dropped_at_the_bound_and_both_sides_hear_of_it(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    outbox = link.Outbox(ends[0], limit=1000, stuck_seconds=0, reader="driver seven")
    first, second = np.zeros(1 << 20, np.uint8), np.zeros(600, np.uint8)
    outbox.put(link.message("one", first))  # any size will do if nothing waits; the thread now writes it in vain
    assert not outbox.overflowed
    outbox.put(link.message("one", second))
    assert outbox.overflowed
    outbox.put(link.message("one", "nobody reads this"))
    with pytest.raises((EOFError, OSError)):  # this side reads the end
        link.read(ends[0])
    with pytest.raises(EOFError):  # the other had not read all of the first
        link.read(ends[1])
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line.startswith("driver seven does not keep up: 1048")
    until(lambda: not outbox._thread.is_alive())


def test_a_reader_that_reads_may_be_eight_times_as_late(ends: Ends) -> None:
    outbox = link.Outbox(ends[0], limit=1 << 20, stuck_seconds=HOUR)
    for number in range(8):
        outbox.put(link.message("one", np.zeros(1 << 20, np.uint8)))
        assert outbox.overflowed is (number == 7)
