"""How messages travel between a driver and an engine process: frames of plain data and flat arrays over one socket.

A message is a head, its plain form in msgpack (``plain.py``), and its large arrays as they lie in memory. One message
holds many requests or completions, packed by ``packing.py``, so no Python object exists per token on either side.
Nothing that is read here runs code. This file knows neither vLLM nor processes; it only frames, reads and writes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionMetrics,
    CompletionOutput,
    KeptIds,
    ProbeReport,
    ReplicaInfo,
    ReplicaStats,
    Request,
    Scoring,
    SwapReport,
    WeightClaim,
)
from torchrl_moe.weight_update.transports.base import StageReport

if TYPE_CHECKING:
    import torch

__all__ = [
    "MOST_FRAME_BYTES",
    "NOWHERE",
    "NUMBERS",
    "Frames",
    "Outbox",
    "Packed",
    "Payload",
    "Stream",
    "completion_bytes",
    "encode",
    "from_plain",
    "hang_up",
    "open_payload",
    "pack_completions",
    "pack_requests",
    "packed_ids",
    "payload",
    "receive",
    "rename",
    "to_plain",
    "unpack_completions",
    "unpack_requests",
]


# The plain form of what is sent between processes: data that msgpack knows, and that runs no code when it is read.
#
# Numbers, text, bytes and arrays of numbers stand for themselves, and so do mappings whose keys are numbers or text.
# A sequence begins with a tag that says what it is: ``["list", ...]``, ``["tuple", ...]``, ``["ReplicaInfo",
# fields]`` for one of our data classes, found by name in a closed registry. What users pass loses its class: an
# object with fields (vLLM's ``SamplingParams``, ``LoRARequest``) becomes the mapping of them, an enum its value, a
# path its text.


NUMBERS = "biuf"
"""Kinds of numpy dtypes that may be sent: booleans, integers, floats."""

DATA_CLASSES = {
    kind.__name__: kind
    for kind in (ProbeReport, ReplicaInfo, ReplicaStats, RoutingLayout, StageReport, SwapReport, WeightClaim)
}
BITS = 64  # of a number in msgpack
KEYS = (bool, int, float, str)


class Packed(dict[str, Any]):
    """A dictionary that is plain already, to any depth: it is sent without a look at its content."""


def to_plain(value: object) -> object:
    """Return the plain form of a value."""
    try:
        return _to_plain(value)
    except RecursionError as error:
        raise ValueError("it is nested too deeply, or contains itself") from error


def _to_plain(value: object) -> object:
    kind = type(value)
    if (convert := _BY_TYPE.get(kind)) is not None:
        return convert(value)
    # torch is recognised by name, since an actor does without importing it
    if kind.__module__ == "torch" and kind.__name__ in ("dtype", "Size"):
        return _of_torch(value)
    # subclasses: what users pass
    for kinds, convert in _BY_BASE:
        if isinstance(value, kinds):
            return convert(value)
    if (fields := _fields_of(value)) is not None:
        return _mapping(fields)
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} has no plain form: {_shown(value)}. What can be sent to an engine "
        "process and back: numbers, text, bytes, lists, tuples, mappings and numpy arrays"
    )


def _shown(value: object) -> str:
    return repr(value)[:80]


def _itself(value: object) -> object:
    return value


def _integer(value: int) -> int:
    if value.bit_length() >= BITS:
        raise ValueError(f"{value} has no plain form: integers have at most {BITS - 1} bits")
    return int(value)


def _sequence(tag: str) -> Callable[[Iterable[object]], list[object]]:
    return lambda value: [tag, *map(_to_plain, value)]


def _mapping(value: Mapping[Any, object]) -> dict[object, object]:
    for key in value:
        if isinstance(key, int):
            _integer(key)
        if not isinstance(key, KEYS):
            raise ValueError(f"a mapping with the key {_shown(key)} has no plain form: keys are numbers or text")
    return {(key.value if isinstance(key, Enum) else key): _to_plain(item) for key, item in value.items()}


def _array(value: NDArray[np.generic]) -> NDArray[np.generic]:
    if value.dtype.kind not in NUMBERS:
        raise ValueError(f"an array of dtype {value.dtype} has no plain form: arrays hold numbers")
    return value


def _data_class(value: object) -> list[object]:
    return [type(value).__name__, _mapping(_fields_of(value) or {})]


def _fields_of(value: object) -> dict[str, object] | None:
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


def _of_torch(value: object) -> list[object]:
    if isinstance(value, tuple):
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
    **dict.fromkeys(DATA_CLASSES.values(), _data_class),
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


def from_plain(value: object) -> Any:
    """Undo :func:`to_plain`, except for what has lost its class."""
    if type(value) is dict:
        return {key: from_plain(item) for key, item in value.items()}
    if type(value) is not list:
        return value
    tag, *rest = value or [None]
    if tag == "list":
        return [from_plain(item) for item in rest]
    if tag == "tuple":
        return tuple([from_plain(item) for item in rest])
    if tag == "packed" and len(rest) == 1 and type(rest[0]) is dict:
        return Packed(rest[0])
    if isinstance(tag, str) and tag in DATA_CLASSES and len(rest) == 1 and type(rest[0]) is dict:
        return _data_class_from(DATA_CLASSES[tag], rest[0])
    if tag in ("torch.dtype", "torch.Size"):
        return _to_torch(tag, rest)
    raise ValueError(f"not the plain form of anything: a sequence that begins with {_shown(tag)}")


def _data_class_from(kind: type, fields: dict[str, object]) -> object:
    try:
        return kind(**{name: from_plain(item) for name, item in fields.items()})
    except TypeError as error:  # from another release of this package
        raise ValueError(f"not a {kind.__name__} of this version: {error}") from error


def _to_torch(tag: str, rest: list[Any]) -> torch.dtype | torch.Size:
    import torch  # here, since an actor reads no such thing and does without torch

    if tag == "torch.Size":
        return torch.Size(rest)
    dtype = getattr(torch, str(rest[0]), None) if len(rest) == 1 else None
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {rest}")
    return dtype


LOG = logging.getLogger(__name__)
Scalar = TypeVar("Scalar", bound=np.generic)
Buffer: TypeAlias = "bytes | bytearray | memoryview"
Frames: TypeAlias = "list[bytes | memoryview]"
"""One message as it is written: a count of its large buffers and its head, then the buffers."""
Payload: TypeAlias = "list[NDArray[np.uint8]]"
"""A message inside another; a process that passes it on does not decode it."""

MOST_FRAME_BYTES = 1 << 32
MOST_WAITING_BYTES = 1 << 30
STUCK_SECONDS = 30.0
FAR_TOO_MUCH = 8  # times what may wait
ARRAY = 1  # the extension code of our arrays in msgpack
COUNT_BYTES = 4
INLINE_BYTES = 1 << 10  # an array that is smaller lies in the head: a frame of its own costs more


def encode(message: object) -> Frames:
    """Return the frames of one message; its arrays are not copied, so leave them as they are until it is written."""
    buffers: list[memoryview] = []

    def put_aside(array: NDArray[np.generic] | np.generic) -> Any:
        if isinstance(array, np.generic):
            return array.item()
        flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if len(flat) > MOST_FRAME_BYTES:
            raise ValueError(f"an array of {len(flat)} bytes cannot be sent: {MOST_FRAME_BYTES} at most")
        place: int | bytes
        if len(flat) < INLINE_BYTES:
            place = bytes(flat)
        else:
            place = len(buffers)
            buffers.append(flat)
        return msgspec.msgpack.Ext(ARRAY, msgspec.msgpack.encode((array.dtype.str, array.shape, place)))

    head = msgspec.msgpack.Encoder(enc_hook=put_aside).encode(to_plain(message))
    return [len(buffers).to_bytes(COUNT_BYTES, "little") + head, *buffers]


def decode(head: Buffer, buffers: Sequence[Buffer]) -> Any:
    """Undo :func:`encode`; the arrays share the buffers and are read-only."""

    def take(code: int, data: memoryview) -> NDArray[np.generic]:
        name, shape, place = msgspec.msgpack.decode(data, type=tuple[str, tuple[int, ...], int | bytes])
        dtype = np.dtype(name)
        if code != ARRAY or dtype.kind not in NUMBERS:
            raise ValueError(f"no array of numbers: {name}")
        array = np.frombuffer(buffers[place] if isinstance(place, int) else place, dtype).reshape(shape)
        array.flags.writeable = False
        return array

    try:
        return from_plain(msgspec.msgpack.Decoder(ext_hook=take).decode(memoryview(head)[COUNT_BYTES:]))
    except (msgspec.MsgspecError, IndexError, TypeError) as error:
        raise ValueError(str(error)) from error


def payload(message: object) -> Payload:
    """Encode a message that goes into another one; see :func:`encode`."""
    return [np.frombuffer(frame, np.uint8) for frame in encode(message)]


def open_payload(payload: Payload) -> Any:
    """Undo :func:`payload`."""
    return decode(payload[0].data, [buffer.data for buffer in payload[1:]])


class Stream(Protocol):
    """Where messages are written and read: a ``multiprocessing.connection.Connection``, or one with its methods."""

    def send_bytes(self, buf: bytes | memoryview) -> None:
        """Write one frame."""

    def recv_bytes(self, maxlength: int | None = None) -> bytes | memoryview:
        """Read one frame; ``OSError`` if it is longer than it may be."""

    def fileno(self) -> int:
        """Return the descriptor of its socket."""

    def close(self) -> None:
        """Close it."""


def receive(connection: Stream) -> Any:
    """Receive one message. Its arrays share the received buffers and are read-only."""
    head = connection.recv_bytes(MOST_FRAME_BYTES)
    count = int.from_bytes(head[:COUNT_BYTES], "little")
    buffers = [connection.recv_bytes(MOST_FRAME_BYTES) for _ in range(count)]
    try:
        return decode(head, buffers)
    except ValueError as error:
        LOG.warning("a connection is closed: what arrived is no message: %s", error)
        raise OSError(str(error)) from error


class Outbox:
    """Writes messages in its own thread, so that no sender waits for a stuck reader.

    When the thread ends, for whatever reason, it hangs up: the other side would wait for a message that was lost in
    silence. It also hangs up when the reader falls too far behind: what waits is dropped, with a line in the log, and
    this side reads end of file, as if the other side had gone.
    """

    def __init__(
        self,
        connection: Stream,
        frame: Callable[[list[Any]], list[Frames]] = list,
        size: Callable[[Any], int] | None = None,
        limit: int = MOST_WAITING_BYTES,
        stuck_seconds: float = STUCK_SECONDS,
        reader: str = "the other side",
    ) -> None:
        self._connection = connection
        self._frame = frame
        self._size = size or _frames_size
        self._limit = limit
        self._reader = reader
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a finalizer may put a message while this thread puts another
        self._waiting = 0  # bytes
        self._stuck_seconds = stuck_seconds
        self._read_at = time.monotonic()  # when the reader last took something
        self._over = False
        self.overflowed = False
        """Whether the reader fell too far behind."""
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue an item to be written; never waits. After an overflow, or the end, it is dropped."""
        size = self._size(item)
        with self._lock:
            if self._over:
                return
            if not self._waiting:
                self._read_at = time.monotonic()
            if not self._waiting or self._waiting + size <= self._allowed():
                self._waiting += size
                self._queue.put((item, size))
                return
            self._over = self.overflowed = True
        LOG.warning(
            "%s does not keep up: %d bytes wait for it, and the connection is ended", self._reader, self._waiting
        )
        self._queue.put(None)
        hang_up(self._connection)  # the thread may be writing

    def _allowed(self) -> int:
        is_stuck = time.monotonic() - self._read_at >= self._stuck_seconds
        return self._limit if is_stuck else FAR_TOO_MUCH * self._limit

    def finish(self) -> None:
        """Hang up once everything put so far is written; never waits."""
        self._queue.put(None)

    def close(self, timeout: float = 5.0) -> None:
        """Write everything put so far, hang up and end the thread."""
        self.finish()
        if threading.current_thread() is not self._thread:  # which may itself collect, and so end, its owner
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except OSError:  # the other side is gone, as the reader on this side finds too
            return
        finally:
            self._over = True
            hang_up(self._connection)

    def _write_until_closed(self) -> None:
        closing = False
        while not closing:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            closing = any(entry is None for entry in batch)
            entries = [entry for entry in batch if entry is not None]
            # what waits is dropped: the reader is not coming back
            if self.overflowed:
                return
            for frames in self._frame([item for item, _ in entries]) if entries else ():
                for part in frames:
                    self._connection.send_bytes(part)
                    self._read_at = time.monotonic()
            with self._lock:
                self._waiting -= sum(size for _, size in entries)


def _frames_size(frames: Frames) -> int:
    return sum(len(frame) for frame in frames)


def hang_up(connection: Stream) -> None:
    """End the traffic both ways without closing the descriptor, which another thread may be reading."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


# How requests and completions are packed: one flat array per field for a whole batch, and the rest as rows.


NOWHERE = -1  # the replica of a completion that none has finished


def _concatenate(arrays: Sequence[NDArray[np.generic]], dtype: type[Scalar]) -> NDArray[Scalar]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _split(flat: NDArray[Scalar], lengths: NDArray[np.int64]) -> list[NDArray[Scalar]]:
    """Split into copies: a piece that is kept must not keep the whole message alive."""
    stops = np.cumsum(lengths)
    return [flat[stop - length : stop].copy() for stop, length in zip(stops.tolist(), lengths.tolist(), strict=True)]


def packed_ids(packed: Packed) -> list[str]:
    """Return the request ids of packed requests or completions, in order."""
    return [row[0] for row in packed["rest"]]


def rename(packed: Packed, name: Callable[[str], str]) -> Packed:
    """Return packed requests or completions under other request ids; the arrays are shared."""
    return Packed({**packed, "rest": [(name(row[0]), *row[1:]) for row in packed["rest"]]})


def pack_requests(requests: Sequence[Request]) -> Packed:
    """Flatten requests; a prompt given as text has length -1 in ``lengths``. What requests share is sent once."""
    ids = [request.prompt_token_ids for request in requests]
    options = [(request.sampling_params, request.lora_request, request.guided_options) for request in requests]
    # requests of one call share these objects, so identity tells equal ones without comparing
    keys = [tuple(map(id, of_one)) for of_one in options]
    distinct = dict(zip(keys, options, strict=True))
    places = {key: place for place, key in enumerate(distinct)}
    resumed = {i: request.resume for i, request in enumerate(requests) if request.resume is not None}
    return Packed(
        ids=_concatenate([row for row in ids if row is not None], np.int32),
        lengths=np.array([-1 if row is None else len(row) for row in ids], np.int64),
        rest=[(r.request_id, r.prompt, r.priority, r.return_routed_experts, r.on_resume) for r in requests],
        scoring={i: _pack_scoring(r.scoring) for i, r in enumerate(requests) if r.scoring is not None},
        forced={i: r.routed_experts for i, r in enumerate(requests) if r.routed_experts is not None},
        options=to_plain(list(distinct.values())),
        places=[places[key] for key in keys],
        resumed=list(resumed),
        resume=dict(pack_completions(list(resumed.values()))) if resumed else None,
    )


def unpack_requests(packed: Packed) -> list[Request]:
    """Undo :func:`pack_requests`; requests that shared their parameters share them again."""
    lengths = packed["lengths"]
    ids = iter(_split(packed["ids"], lengths[lengths >= 0]))
    options = from_plain(packed["options"])
    given = unpack_completions(packed["resume"], NOWHERE) if packed["resumed"] else []
    resumed = dict(zip(packed["resumed"], given, strict=True))
    requests = []
    rows = zip(lengths.tolist(), packed["rest"], packed["places"], strict=True)
    for i, (length, row, place) in enumerate(rows):
        request_id, prompt, priority, routes, on_resume = row
        params, lora, guided = options[place]
        requests.append(
            Request(
                request_id=request_id,
                sampling_params=params,
                prompt_token_ids=next(ids) if length >= 0 else None,
                prompt=prompt,
                priority=priority,
                lora_request=lora,
                guided_options=guided,
                return_routed_experts=routes,
                resume=resumed.get(i),
                routed_experts=packed["forced"].get(i),
                scoring=_unpack_scoring(packed["scoring"].get(i)),
                on_resume=on_resume,
            )
        )
    return requests


def _pack_scoring(scoring: Scoring) -> tuple[object, ...]:
    kept = scoring.kept
    return (scoring.temperature, *(() if kept is None else (kept.ids, kept.sizes)))


def _unpack_scoring(packed: Sequence[Any] | None) -> Scoring | None:
    if packed is None:
        return None
    temperature, *kept = packed
    return Scoring(temperature=temperature, kept=KeptIds(*kept) if kept else None)


def pack_completions(completions: Sequence[Completion]) -> Packed:
    """Flatten completions. All routes of one engine share ``[L, K]`` and dtype, so they concatenate along rows."""
    outputs = [output for completion in completions for output in completion.outputs]
    logprobs = [output.logprobs for output in outputs]
    routes = [output.routed_experts for output in outputs]
    recorded = [rows for rows in routes if rows is not None]
    kept = [output.kept for output in outputs]
    return Packed(
        prompt_ids=_concatenate([c.prompt_token_ids for c in completions], np.int32),
        prompt_lengths=np.array([len(c.prompt_token_ids) for c in completions], np.int64),
        ids=_concatenate([o.token_ids for o in outputs], np.int32),
        lengths=np.array([len(o.token_ids) for o in outputs], np.int64),
        versions=_concatenate([o.policy_versions for o in outputs], np.int32),
        logprobs=_concatenate([row for row in logprobs if row is not None], np.float32),
        kept_ids=_concatenate([k.ids for k in kept if k is not None], np.int32),
        kept_sizes=_concatenate([k.sizes for k in kept if k is not None], np.int32),
        kept_lengths=np.array([-1 if k is None else len(k.ids) for k in kept], np.int64),
        has_logprobs=[row is not None for row in logprobs],
        routes=np.concatenate(recorded) if recorded else None,
        route_lengths=np.array([-1 if rows is None else len(rows) for rows in routes], np.int64),
        outputs=[(o.index, o.text, o.finish_reason, o.stop_reason, o.resume) for o in outputs],
        scores=_concatenate([c.prompt_logprobs for c in completions if c.prompt_logprobs is not None], np.float32),
        has_scores=[c.prompt_logprobs is not None for c in completions],
        rest=[
            (
                c.request_id,
                c.prompt,
                c.num_cached_tokens,
                len(c.outputs),
                c.metrics.queue_seconds,
                c.metrics.first_token_seconds,
                c.metrics.total_seconds,
            )
            for c in completions
        ],
    )


def completion_bytes(completion: Completion) -> int:
    """Return how many bytes the arrays of a completion take."""
    arrays: list[NDArray[np.generic] | None] = [completion.prompt_token_ids, completion.prompt_logprobs]
    for output in completion.outputs:
        arrays += [output.token_ids, output.policy_versions, output.logprobs, output.routed_experts]
        arrays += [] if output.kept is None else [output.kept.ids, output.kept.sizes]
    return sum(array.nbytes for array in arrays if array is not None)


def unpack_completions(packed: Packed, replica: int) -> list[Completion]:
    """Undo :func:`pack_completions`; ``replica`` is stamped on the metrics."""
    # arrays of all answers were flattened in order, so iterators deal them out again
    outputs = iter(_unpack_outputs(packed))
    prompts = _split(packed["prompt_ids"].astype(np.int64), packed["prompt_lengths"])
    scored = np.array(packed["has_scores"], bool)
    scores = iter(_split(packed["scores"], packed["prompt_lengths"][scored]))
    completions = []
    for prompt_ids, has_scores, (request_id, prompt, cached, count, queued, first, total) in zip(
        prompts, packed["has_scores"], packed["rest"], strict=True
    ):
        metrics = CompletionMetrics(
            queue_seconds=queued, first_token_seconds=first, total_seconds=total, replica=replica
        )
        completions.append(
            Completion(
                request_id=request_id,
                prompt=prompt,
                prompt_token_ids=prompt_ids,
                num_cached_tokens=cached,
                outputs=[next(outputs) for _ in range(count)],
                metrics=metrics,
                prompt_logprobs=next(scores) if has_scores else None,
            )
        )
    return completions


def _unpack_outputs(packed: Packed) -> list[CompletionOutput]:
    lengths, route_lengths = packed["lengths"], packed["route_lengths"]
    ids = _split(packed["ids"].astype(np.int64), lengths)
    versions = _split(packed["versions"], lengths)
    logprobs = iter(_split(packed["logprobs"], lengths[np.array(packed["has_logprobs"], bool)]))
    recorded = route_lengths[route_lengths >= 0]
    routes = iter(_split(packed["routes"], recorded) if len(recorded) else ())
    named = packed["kept_lengths"]
    kept = zip(
        _split(packed["kept_ids"], named[named >= 0]), _split(packed["kept_sizes"], lengths[named >= 0]), strict=True
    )
    return [
        CompletionOutput(
            index=index,
            token_ids=ids[i],
            text=text,
            finish_reason=finish_reason,
            policy_versions=versions[i],
            logprobs=next(logprobs) if packed["has_logprobs"][i] else None,
            routed_experts=next(routes) if route_lengths[i] >= 0 else None,
            stop_reason=stop_reason,
            kept=KeptIds(*next(kept)) if named[i] >= 0 else None,
            resume=resume,
        )
        for i, (index, text, finish_reason, stop_reason, resume) in enumerate(packed["outputs"])
    ]
