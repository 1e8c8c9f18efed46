"""How requests and completions cross between a driver and an engine process: flat arrays over one socket.

Many requests travel in one message. Their token ids, log-probs and routes are concatenated into one array per kind,
pickled out of band (PEP 574), so no Python object exists per token on either side. This file knows neither vLLM nor
processes; it only packs, unpacks, frames and writes.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput, Request

__all__ = [
    "Outbox",
    "Packed",
    "Stream",
    "encode",
    "hang_up",
    "pack_completions",
    "pack_requests",
    "packed_ids",
    "receive",
    "rename",
    "unpack_completions",
    "unpack_requests",
]

NOWHERE = -1  # the replica of a completion that none has finished
Packed = dict[str, Any]
Frames: TypeAlias = "list[bytes | memoryview]"
"""One message as it is written: a pickle that counts its large buffers, then the buffers as they lie in memory."""


def encode(message: Any) -> Frames:
    """Return the frames of one message; its arrays are not copied, so leave them as they are until it is written."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(message, protocol=5, buffer_callback=buffers.append)
    return [pickle.dumps((head, len(buffers))), *(buffer.raw() for buffer in buffers)]


class Stream(Protocol):
    """What messages are written to and read from: a ``multiprocessing.connection.Connection``, or one to be."""

    def send_bytes(self, buf: bytes | memoryview) -> None:
        """Write one frame."""

    def recv_bytes(self) -> bytes:
        """Read one frame."""

    def fileno(self) -> int:
        """Return the descriptor of its socket."""

    def close(self) -> None:
        """Close it."""


def receive(connection: Stream) -> Any:
    """Receive one message. Its arrays share the received buffers and are read-only.

    Raises:
        EOFError: the other side is gone.
    """
    head, count = pickle.loads(connection.recv_bytes())
    return pickle.loads(head, buffers=[connection.recv_bytes() for _ in range(count)])


class Outbox:
    """Writes messages from a thread of its own, so that nobody who sends waits for a reader that is stuck.

    When the thread ends, it hangs up, whatever ended it: a message that is lost in silence would be waited for.

    Args:
        connection: where to.
        frame: turns what :meth:`put` got since the last write, one item or more, into messages.
    """

    def __init__(self, connection: Stream, frame: Callable[[list[Any]], list[Frames]]) -> None:
        self._connection = connection
        self._frame = frame
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="outbox", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Have an item written; never waits."""
        self._queue.put(item)

    def close(self, timeout: float = 5.0) -> None:
        """Write what was put so far, hang up and end the thread."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:  # which may collect, and so end, its owner
            self._thread.join(timeout)

    def _run(self) -> None:
        try:
            self._write_until_closed()
        except OSError:  # the other side is gone, as the reader on this side finds too
            return
        finally:
            hang_up(self._connection)

    def _write_until_closed(self) -> None:
        closing = False
        while not closing:
            batch = [self._queue.get()]
            while not self._queue.empty():
                batch.append(self._queue.get())
            closing = any(item is None for item in batch)
            items = [item for item in batch if item is not None]
            for frames in self._frame(items) if items else ():
                for part in frames:
                    self._connection.send_bytes(part)


def hang_up(connection: Stream) -> None:
    """End the traffic both ways without closing the descriptor, which another thread may be reading."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
        duplicate.shutdown(socket.SHUT_RDWR)


def _concatenate(arrays: Sequence[NDArray[Any]], dtype: Any) -> NDArray[Any]:
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.empty(0, dtype)


def _split(flat: NDArray[Any], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
    """Copies: one piece that is kept must not keep the whole message."""
    stops = np.cumsum(lengths)
    return [flat[stop - length : stop].copy() for stop, length in zip(stops.tolist(), lengths.tolist(), strict=True)]


def packed_ids(packed: Packed) -> list[str]:
    """Return the request ids of packed requests or completions, in order."""
    return [row[0] for row in packed["rest"]]


def rename(packed: Packed, name: Callable[[str], str]) -> Packed:
    """Return packed requests or completions under other request ids; the arrays are shared."""
    return {**packed, "rest": [(name(row[0]), *row[1:]) for row in packed["rest"]]}


def pack_requests(requests: Sequence[Request]) -> Packed:
    """Flatten requests; a prompt given as text has length -1 in ``lengths``.

    What may hold a class that only the driver has is a pickle of its own, so the message can be read in any case.
    """
    ids = [request.prompt_token_ids for request in requests]
    resumed = {i: request.resume for i, request in enumerate(requests) if request.resume is not None}
    return {
        "ids": _concatenate([row for row in ids if row is not None], np.int32),
        "lengths": np.array([-1 if row is None else len(row) for row in ids], np.int64),
        "rest": [(r.request_id, r.prompt, r.priority, r.return_routed_experts) for r in requests],
        "objects": pickle.dumps([(r.sampling_params, r.lora_request, r.guided_options) for r in requests]),
        "resumed": list(resumed),
        "resume": pack_completions(list(resumed.values())) if resumed else None,
    }


def unpack_requests(packed: Packed) -> list[Request]:
    """Undo :func:`pack_requests`; raises whatever the objects of a user raise as they are unpickled."""
    lengths = packed["lengths"]
    ids = iter(_split(packed["ids"], lengths[lengths >= 0]))
    given = unpack_completions(packed["resume"], NOWHERE) if packed["resumed"] else []
    resumed = dict(zip(packed["resumed"], given, strict=True))
    requests = []
    rows = zip(lengths.tolist(), packed["rest"], pickle.loads(packed["objects"]), strict=True)
    for i, (length, row, objects) in enumerate(rows):
        request_id, prompt, priority, routes = row
        params, lora, guided = objects
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
            )
        )
    return requests


def pack_completions(completions: Sequence[Completion]) -> Packed:
    """Flatten completions. All routes of one engine share ``[L, K]`` and dtype, so they concatenate along rows."""
    outputs = [output for completion in completions for output in completion.outputs]
    logprobs = [output.logprobs for output in outputs]
    routes = [output.routed_experts for output in outputs]
    kept = [rows for rows in routes if rows is not None]
    return {
        "prompt_ids": _concatenate([c.prompt_token_ids for c in completions], np.int32),
        "prompt_lengths": np.array([len(c.prompt_token_ids) for c in completions], np.int64),
        "ids": _concatenate([o.token_ids for o in outputs], np.int32),
        "lengths": np.array([len(o.token_ids) for o in outputs], np.int64),
        "versions": _concatenate([o.policy_versions for o in outputs], np.int32),
        "logprobs": _concatenate([row for row in logprobs if row is not None], np.float32),
        "has_logprobs": [row is not None for row in logprobs],
        "routes": np.concatenate(kept) if kept else None,
        "route_lengths": np.array([-1 if rows is None else len(rows) for rows in routes], np.int64),
        "outputs": [(o.index, o.text, o.finish_reason, o.stop_reason) for o in outputs],
        "rest": [
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
    }


def unpack_completions(packed: Packed, replica: int) -> list[Completion]:
    """Undo :func:`pack_completions`; ``replica`` is stamped on the metrics."""
    outputs = iter(_unpack_outputs(packed))
    prompts = _split(packed["prompt_ids"].astype(np.int64), packed["prompt_lengths"])
    completions = []
    for prompt_ids, (request_id, prompt, cached, count, queued, first, total) in zip(
        prompts, packed["rest"], strict=True
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
            )
        )
    return completions


def _unpack_outputs(packed: Packed) -> list[CompletionOutput]:
    lengths, route_lengths = packed["lengths"], packed["route_lengths"]
    ids = _split(packed["ids"].astype(np.int64), lengths)
    versions = _split(packed["versions"], lengths)
    logprobs = iter(_split(packed["logprobs"], lengths[np.array(packed["has_logprobs"], bool)]))
    kept = route_lengths[route_lengths >= 0]
    routes = iter(_split(packed["routes"], kept) if len(kept) else ())
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
        )
        for i, (index, text, finish_reason, stop_reason) in enumerate(packed["outputs"])
    ]
