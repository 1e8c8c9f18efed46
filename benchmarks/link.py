"""CPU that answers cost on their way from an engine process to its driver, beside pickle's out-of-band buffers.

256 answers of 384 tokens with the routes of 48 layers, 52 MB, and 2048 small requests go through a socket of this
process: encoded, written, read and decoded. pickle (protocol 5, arrays out of band) over the same socket is what Python
gives for that; it runs whatever it reads, which ours does not.
"""

from __future__ import annotations

import pickle
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from benchmarks.report import Row, finish, median_range
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.process.link import Frames, SocketStream
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, Request

ANSWERS, PROMPT, TOKENS, LAYERS, TOP_K = 256, 128, 384, 48, 8
REQUESTS, ROUNDS = 2048, 11


def answers() -> list[Completion]:
    """Return a batch of answers with log-probs, versions and routes."""
    random = np.random.default_rng(0)
    return [
        Completion(
            request_id=f"r{number}",
            prompt=None,
            prompt_token_ids=random.integers(0, 1000, PROMPT),
            num_cached_tokens=0,
            outputs=[
                CompletionOutput(
                    index=0,
                    token_ids=random.integers(0, 1000, TOKENS),
                    text="x" * TOKENS,
                    finish_reason="length",
                    policy_versions=np.zeros(TOKENS, np.int32),
                    logprobs=np.zeros(TOKENS, np.float32),
                    routed_experts=random.integers(0, 128, (PROMPT + TOKENS - 1, LAYERS, TOP_K)).astype(np.uint8),
                )
            ],
        )
        for number in range(ANSWERS)
    ]


def requests() -> list[Request]:
    """Return requests that share their parameters, as those of one call do."""
    params, ids = {"max_tokens": 16, "top_p": 0.9}, np.arange(100, dtype=np.int32)
    return [Request(request_id=f"r{i}", sampling_params=params, prompt_token_ids=ids + i) for i in range(REQUESTS)]


def pickled(batch: object) -> Frames:
    """Return a pickle and its arrays."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    return [head, *(buffer.raw() for buffer in buffers)]


def unpickled(frames: list[memoryview]) -> Any:
    """Undo :func:`pickled`."""
    return pickle.loads(frames[0], buffers=frames[1:])


def cpu_seconds(batch: object, write: Callable[[Any], Frames], read: Callable[[Any], Any]) -> float:
    """Return the CPU seconds of this process, which is both ends, for one batch."""
    ours, theirs = map(SocketStream, socket.socketpair())
    with ThreadPoolExecutor(1) as pool:
        began = time.process_time()
        received = pool.submit(lambda: read(theirs.receive()))
        ours.send(write(batch))
        count = len(received.result())
        spent = time.process_time() - began
    assert count == len(batch)  # type: ignore[arg-type]
    ours.close()
    theirs.close()
    return spent


def race(name: str, batch: object) -> list[Row]:
    """Return CPU and ratio of both, round by round."""
    pairs = [
        (cpu_seconds(batch, link.encode, link.decode), cpu_seconds(batch, pickled, unpickled)) for _ in range(ROUNDS)
    ]
    ratios = [mine / other for mine, other in pairs]
    return [
        Row(claim=f"{name}: CPU of the link, ms", value=median_range([1e3 * mine for mine, _ in pairs], 1)),
        Row(
            claim=f"{name}: CPU of pickle over the same socket, ms", value=median_range([1e3 * o for _, o in pairs], 1)
        ),
        Row(claim=f"{name}: link / pickle", value=median_range(ratios)),
    ]


def main() -> None:
    """Measure answers and requests."""
    finish("link", [*race(f"{ANSWERS} answers, 52 MB", answers()), *race(f"{REQUESTS} requests", requests())])


if __name__ == "__main__":
    main()
