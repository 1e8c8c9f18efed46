"""The link between a driver and an engine process: messages of plain data and arrays, over one socket.

A message is a head, ``(kind, driver)``, and a body. Both are msgpack; the body's large arrays travel as frames of their
own, as they lie in memory. Nothing that is read here runs code. What users
pass loses its class: an object with fields (vLLM's ``SamplingParams``) becomes a mapping of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.replica import (
    Completion,
    ProbeReport,
    ReplicaInfo,
    ReplicaStats,
    Request,
    StageReport,
    SwapReport,
    WeightClaim,
)

LOG = logging.getLogger(__name__)
Buffer: TypeAlias = "bytes | bytearray | memoryview"
Frames: TypeAlias = "list[Buffer]"
"""A message as it is written: its head, its body, then the large arrays of that."""
Message: TypeAlias = "tuple[str, str, Any]"
"""A message as it is read: its kind, the driver that it comes from or goes to, and its body."""

NUMBERS = "biuf"
"""Kinds of numpy dtypes that may be sent: booleans, integers, floats."""
MOST_BYTES = 1 << 32  # of a frame
MOST_FRAMES = 1 << 24
MOST_WAITING_BYTES = 1 << 30
STUCK_SECONDS = 30.0
FAR_TOO_MUCH = 8  # times what may wait
INLINE_BYTES = 1 << 12  # an array that is smaller lies in the body: a frame of its own costs more
ARRAY, DTYPE = 1, 2  # the codes of our extensions of msgpack
PLAIN = msgspec.msgpack.Encoder()
PLACES = msgspec.msgpack.Decoder(tuple[str, tuple[int, ...], int | bytes])
DATA_CLASSES = {
    kind.__name__: kind for kind in (ProbeReport, ReplicaInfo, ReplicaStats, StageReport, SwapReport, WeightClaim)
}
COMPLETIONS, REQUESTS = "completions", "requests"
OURS: Mapping[str, Any] = {COMPLETIONS: list[Completion], **DATA_CLASSES}
OPTIONS = ("sampling_params", "lora_request", "guided_options")
OTHERS = tuple(field.name for field in dataclasses.fields(Request) if field.name not in OPTIONS)


# -- plain data -------------------------------------------------------------------------------------------------------


def encode(value: object) -> Frames:
    """Return a body and its large arrays, which are not copied: leave them as they are until they are written.

    Raises:
        ValueError: it holds something else than numbers, text, bytes, arrays of numbers, lists, tuples and mappings of
            them; or one of our data classes, requests or completions below the top.
    """
    buffers: Frames = []

    def hook(item: Any) -> Any:
        if isinstance(item, np.ndarray):
            return _array(item, buffers)
        # torch is recognised by name, since an actor does without importing it
        if type(item).__module__ == "torch" and type(item).__name__ == "dtype":
            return msgspec.msgpack.Ext(DTYPE, str(item).removeprefix("torch.").encode())
        return plain(item)  # what msgspec does not know

    try:
        body = msgspec.msgpack.Encoder(enc_hook=hook).encode(tagged(value))
    except (OverflowError, RecursionError, TypeError, UnicodeError) as error:
        raise ValueError(f"it cannot be sent: {error}") from error
    if (size := len(body) + sum(map(len, buffers))) > MOST_BYTES:  # the other side would hang up
        raise ValueError(f"a message of {size} bytes cannot be sent: {MOST_BYTES} at most")
    return [body, *buffers]


def decode(frames: Sequence[Buffer]) -> Any:
    """Undo :func:`encode`. Sequences come back as lists. The arrays are writable, the large ones share the frames."""

    def hook(code: int, data: memoryview) -> object:
        if code == DTYPE:
            return _torch_dtype(bytes(data).decode())
        name, shape, place = PLACES.decode(data)
        dtype = np.dtype(name)
        if code != ARRAY or dtype.kind not in NUMBERS:
            raise ValueError(f"no array of numbers: {name}")
        buffer = bytearray(place) if isinstance(place, bytes) else frames[place + 1]
        return np.ndarray(shape, dtype, buffer)

    try:
        return untagged(*msgspec.msgpack.Decoder(ext_hook=hook).decode(frames[0]))
    except (msgspec.MsgspecError, LookupError, TypeError, OverflowError) as error:
        raise ValueError(str(error)) from error


def _array(array: NDArray[Any], buffers: Frames) -> msgspec.msgpack.Ext:
    if array.dtype.kind not in NUMBERS:
        raise ValueError(f"an array of dtype {array.dtype} has no plain form: arrays hold numbers")
    if array.nbytes > MOST_BYTES:
        raise ValueError(f"an array of {array.nbytes} bytes cannot be sent: {MOST_BYTES} at most")
    place: int | bytes
    if array.nbytes < INLINE_BYTES:
        place = array.tobytes()
    else:
        place = len(buffers)
        buffers.append(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return msgspec.msgpack.Ext(ARRAY, PLAIN.encode((array.dtype.str, array.shape, place)))


def _torch_dtype(name: str) -> object:
    import torch  # here, since an actor reads no such thing and does without torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype {name!r}")
    return dtype


def plain(value: object) -> Any:
    """Return what users pass as plain data: objects with fields become mappings of their public ones.

    >>> plain({"reasons": ("stop", 3), "top_p": np.float32(0.5)})
    {'reasons': ['stop', 3], 'top_p': 0.5}
    """
    if isinstance(value, Enum):
        return plain(value.value)
    if value is None or isinstance(value, str | bytes | bool | int | float | np.ndarray):
        return value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in value]
    if isinstance(value, msgspec.Struct):
        names = value.__struct_fields__
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = tuple(field.name for field in dataclasses.fields(value) if field.init)
    elif isinstance(value, PurePath):
        return str(value)
    else:
        kind = type(value)
        raise ValueError(
            f"{kind.__module__}.{kind.__qualname__} has no plain form: {repr(value)[:80]}. What can be sent to an "
            "engine process and back: numbers, text, bytes, lists, tuples, mappings and numpy arrays"
        )
    return {name: plain(getattr(value, name)) for name in names if not name.startswith("_")}


# -- our own classes ---------------------------------------------------------------------------------------------------
# A body is a tag and a value: the name of a data class, whose fields the value holds, or what a list holds. msgspec
# writes data classes as mappings of their fields by itself.


def tagged(value: object) -> tuple[str, object]:
    """Return a value's tag, and the value as msgspec takes it."""
    if type(value).__name__ in DATA_CLASSES:
        return type(value).__name__, value
    if isinstance(value, list) and value and isinstance(value[0], Completion):
        return COMPLETIONS, value
    if isinstance(value, list) and value and isinstance(value[0], Request):
        return REQUESTS, _without_options(value)
    return "", value


def untagged(tag: str, value: Any) -> Any:
    """Undo :func:`tagged`, once the value has come as plain data."""
    if tag == REQUESTS:  # those that shared their options share them again
        options, others = value
        return [msgspec.convert({**options[fields.pop("options")], **fields}, Request) for fields in others]
    return msgspec.convert(value, OURS[tag]) if tag else value


def _without_options(requests: Sequence[Request]) -> tuple[list[object], list[dict[str, object]]]:
    """Return the options of requests, and their other fields with the place of their options."""
    # requests of one call share these objects, so identity tells equal ones without comparing; they are sent once
    keys = [tuple(id(getattr(one, name)) for name in OPTIONS) for one in requests]
    first = {key: one for key, one in zip(reversed(keys), reversed(requests), strict=True)}
    places = {key: place for place, key in enumerate(first)}
    options: list[object] = [plain({name: getattr(one, name) for name in OPTIONS}) for one in first.values()]
    others = [{name: getattr(one, name) for name in OTHERS} for one in requests]
    return options, [{**fields, "options": places[key]} for key, fields in zip(keys, others, strict=True)]


def completion_bytes(completion: Completion) -> int:
    """Return how many bytes the arrays of a completion take."""
    arrays: list[NDArray[Any] | None] = [completion.prompt_token_ids, completion.prompt_logprobs]
    for output in completion.outputs:
        arrays += [output.token_ids, output.policy_versions, output.logprobs, output.routed_experts]
        arrays += [] if output.kept is None else [output.kept.ids, output.kept.sizes]
    return sum(array.nbytes for array in arrays if array is not None)


# -- messages ----------------------------------------------------------------------------------------------------------


def message(kind: str, body: object = None, driver: str = "") -> Frames:
    """Return the frames of a message."""
    return [msgspec.msgpack.encode((kind, driver)), *encode(body)]


def head_of(frames: Sequence[Buffer]) -> tuple[str, str]:
    """Return the kind and the driver of a message, whose body stays as it is."""
    try:
        return msgspec.msgpack.decode(frames[0], type=tuple[str, str])
    except (msgspec.MsgspecError, IndexError) as error:
        raise ValueError(str(error)) from error


def read(stream: Stream) -> Message:
    """Receive one message; ``EOFError`` or ``OSError``: the other side is gone, or what it sent is no message."""
    frames = stream.receive()
    try:
        return (*head_of(frames), decode(frames[1:]))
    except ValueError as error:
        LOG.warning("a connection is closed: what arrived is no message: %s", error)
        raise OSError(str(error)) from error


# -- the socket --------------------------------------------------------------------------------------------------------

COUNT, LENGTH = struct.Struct("<I"), struct.Struct("<Q")
GATHERED = 512  # buffers in one system call


def framed(frames: Sequence[Buffer]) -> list[memoryview]:
    """Return a message as it is written: the number of its frames, their lengths, the frames."""
    views = [memoryview(frame).cast("B") for frame in frames]
    header = COUNT.pack(len(views)) + b"".join(LENGTH.pack(len(view)) for view in views)
    return [memoryview(header), *views]


class Stream(Protocol):
    """Where messages are written and read; one thread may write while another reads."""

    moved_at: float
    """When the other side last took something, by the monotonic clock."""

    def send(self, frames: Sequence[Buffer]) -> None:
        """Write a message."""

    def receive(self) -> list[memoryview]:
        """Read a message; ``EOFError`` if the other side is gone, ``OSError`` if it is larger than it may be."""

    def hang_up(self) -> None:
        """End the traffic both ways without closing the socket, which another thread may be reading."""

    def close(self) -> None:
        """Close the socket."""


class SocketStream:
    """A :class:`Stream` over a connected socket: the number of frames, their lengths, the frames."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.moved_at = time.monotonic()

    def send(self, frames: Sequence[Buffer]) -> None:
        self._write(framed(frames))

    def receive(self) -> list[memoryview]:
        """Read a message, each frame into memory of its own."""
        (count,) = COUNT.unpack(self._take(COUNT.size))
        self._check(count, MOST_FRAMES, "frames")
        lengths = [length for (length,) in LENGTH.iter_unpack(self._take(count * LENGTH.size))]
        self._check(sum(lengths), MOST_BYTES, "bytes")
        return [self._take(length) for length in lengths]

    def _check(self, announced: int, most: int, what: str) -> None:
        if announced > most:
            raise OSError(f"a message of {announced} {what} was announced; at most {most} are allowed")

    def _write(self, views: list[memoryview]) -> None:
        for start in range(0, len(views), GATHERED):
            part = [view for view in views[start : start + GATHERED] if view]
            while part:
                sent = self._end.sendmsg(part)
                self.moved_at = time.monotonic()
                while part and sent >= len(part[0]):
                    sent -= len(part.pop(0))
                if sent:
                    part[0] = part[0][sent:]

    def _take(self, size: int) -> memoryview:
        view = np.empty(size, np.uint8).data
        done = 0
        while done < size:
            count = self._end.recv_into(view[done:])
            if not count:
                raise EOFError
            done += count
        return view

    def fileno(self) -> int:
        return self._end.fileno()

    def hang_up(self) -> None:
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._end.close()


class Outbox:
    """Writes messages in its own thread, so that no sender waits for a stuck reader.

    When the thread ends, for whatever reason, it hangs up: the other side would wait for a message that was lost in
    silence. It also hangs up when the reader falls too far behind: what waits is dropped, with a line in the log, and
    this side reads end of file, as if the other side had gone.
    """

    def __init__(
        self,
        stream: Stream,
        frame: Callable[[list[Any]], list[Frames]] = list,
        size: Callable[[Any], int] | None = None,
        limit: int = MOST_WAITING_BYTES,
        stuck_seconds: float = STUCK_SECONDS,
        reader: str = "the other side",
    ) -> None:
        self._stream = stream
        self._frame = frame
        self._size = size or _frames_size
        self._limit = limit
        self._reader = reader
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lock = threading.RLock()  # a finalizer may put a message while this thread puts another
        self._waiting = 0  # bytes
        self._stuck_seconds = stuck_seconds
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
                self._stream.moved_at = time.monotonic()
            is_stuck = time.monotonic() - self._stream.moved_at >= self._stuck_seconds
            allowed = self._limit if is_stuck else FAR_TOO_MUCH * self._limit
            if not self._waiting or self._waiting + size <= allowed:
                self._waiting += size
                self._queue.put((item, size))
                return
            self._over = self.overflowed = True
        LOG.warning(
            "%s does not keep up: %d bytes wait for it, and the connection is ended", self._reader, self._waiting
        )
        self._queue.put(None)
        self._stream.hang_up()  # the thread may be writing

    def finish(self) -> None:
        """Hang up once everything put so far is written; never waits."""
        self._queue.put(None)

    def close(self, timeout: float = 5.0) -> None:
        """Write everything put so far, hang up and end the thread."""
        self.finish()
        if threading.current_thread() is not self._thread:  # which may itself collect, and so end, its owner
            self._thread.join(timeout)

    def _run(self) -> None:
        closing = False
        try:
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
                    self._stream.send(frames)
                with self._lock:
                    self._waiting -= sum(size for _, size in entries)
        except OSError:  # the other side is gone, as the reader on this side finds too
            return
        finally:
            self._over = True
            self._stream.hang_up()


def _frames_size(frames: Frames) -> int:
    return sum(memoryview(frame).nbytes for frame in frames)
