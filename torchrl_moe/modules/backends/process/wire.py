"""How messages travel between a driver and an engine process: frames of plain data and flat arrays over one socket.

A message is a head, its plain form in msgpack (``plain.py``), and its large arrays as they lie in memory. One message
holds many requests or completions, packed by ``packing.py``, so no Python object exists per token on either side.
Nothing that is read here runs code. This file knows neither vLLM nor processes; it only frames, reads and writes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.process.plain import NUMBERS, from_plain, to_plain

__all__ = [
    "MOST_FRAME_BYTES",
    "Frames",
    "Outbox",
    "Parcel",
    "Stream",
    "encode",
    "hang_up",
    "open_parcel",
    "parcel",
    "receive",
]

LOG = logging.getLogger(__name__)
Buffer: TypeAlias = "bytes | bytearray | memoryview"
Frames: TypeAlias = "list[bytes | memoryview]"
"""One message as it is written: a count of its large buffers and its head, then the buffers."""
Parcel: TypeAlias = "list[NDArray[np.uint8]]"
"""A message inside another; a process that passes it on does not decode it."""

MOST_FRAME_BYTES = 1 << 32
MOST_WAITING_BYTES = 1 << 30
STUCK_SECONDS = 30.0
FAR_TOO_MUCH = 8  # times what may wait
ARRAY = 1  # the extension code of our arrays in msgpack
COUNT_BYTES = 4
INLINE_BYTES = 1 << 10  # an array that is smaller lies in the head: a frame of its own costs more


def encode(message: Any) -> Frames:
    """Return the frames of one message; its arrays are not copied, so leave them as they are until it is written.

    Raises:
        ValueError: something in it has no plain form, or an array is larger than a frame may be.
    """
    buffers: list[memoryview] = []

    def put_aside(array: Any) -> Any:
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
    """Undo :func:`encode`; the arrays share the buffers and are read-only.

    Raises:
        ValueError: this is no message.
    """

    def take(code: int, data: memoryview) -> NDArray[Any]:
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


def parcel(message: Any) -> Parcel:
    """Encode a message that goes into another one; see :func:`encode`."""
    return [np.frombuffer(frame, np.uint8) for frame in encode(message)]


def open_parcel(parcel: Parcel) -> Any:
    """Undo :func:`parcel`."""
    return decode(parcel[0].data, [buffer.data for buffer in parcel[1:]])


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
    """Receive one message. Its arrays share the received buffers and are read-only.

    Raises:
        EOFError: the other side is gone.
        OSError: it is gone, or what it sent is no message; the latter is logged.
    """
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

    Args:
        connection: what to write to.
        frame: turns what :meth:`put` got since the last write, one item or more, into messages.
        size: how many bytes of memory an item holds; by default an item is the frames of one message.
        limit: how many bytes may wait, beside one item of any size, for a reader that has read nothing for
            ``stuck_seconds``; eight times as many for one that reads, however slowly.
        stuck_seconds: see above.
        reader: its name, for the log.
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
