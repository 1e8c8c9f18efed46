"""The speed of gloo: a version's bytes sent by our transport, against a bare broadcast of one buffer of the same size.

The receiving end is the worker's receiver in a process of its own, without vLLM. Only the transfer is timed on either
side; in the arm with digests, they are computed during the transfer.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.report import Row, median_range
from benchmarks.syncing.store import tensors_of
from torchrl_moe.modules.backends.replica import StageReport
from torchrl_moe.store import Manifest, WeightStoreWriter
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.gloo import (
    GlooGroup,
    GlooReceiver,
    GlooTransport,
    Meeting,
    MeetingPlace,
)

NBYTES, COUNTS = 400_000_000, (231, 20_000)
ROUNDS, WARM_UP, PATIENCE = 7, 2, 60.0
TARGET = 0.8
ARMS = {"digest": "transfer with digests", "off": "transfer without", "whole": "whole staging"}


def ignore(_: int) -> None:
    """Compute no digest of a bucket."""


def receive_on_request(connection: Connection) -> None:
    """Run the receiving process: what a worker does with the commands of a replica, and a bare broadcast."""
    torch.set_num_threads(1)
    receiver: GlooReceiver | None = None
    bare: GlooGroup | None = None
    buffer = torch.ones(NBYTES, dtype=torch.uint8)
    while (message := connection.recv()) is not None:
        command, arguments = message
        if command == "init_weights":
            _, options = arguments
            receiver = GlooReceiver(options, 1)
            connection.send(None)
        elif command == "stage_weights":
            assert receiver is not None
            _, verify, threads, text = arguments
            manifest = Manifest.from_json(text)
            receiver.fetch(manifest, verify=verify == "digest", threads=threads)
            connection.send(StageReport(seconds=0.0, nbytes=manifest.nbytes, digest=manifest.digest))
        else:
            connection.send(None)  # before the group is made, which waits for the other end
            if bare is None:
                (where,) = arguments
                bare = GlooGroup(Meeting(where, PATIENCE), 1, 2, PATIENCE, NBYTES)
            bare.broadcast(buffer, time.monotonic() + PATIENCE, ignore)
    for group in (receiver, bare):
        if group is not None:
            group.close()


class Peer:
    """The receiving process, as the transport knows a replica."""

    index = 0

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=receive_on_request, args=(theirs,), daemon=True)
        self._process.start()

    def wait_ready(self, timeout: float) -> Any:
        """Report one worker."""
        del timeout
        return SimpleNamespace(tensor_parallel_size=1, pipeline_parallel_size=1, data_parallel_size=1)

    def is_alive(self) -> bool:
        """Whether the process lives."""
        return self._process.is_alive()

    def call(self, verb: Callable[..., Any], timeout: float, *args: Any) -> Any:
        """Run a verb of an engine there."""
        del timeout
        return self.command(verb.__name__, *args)

    def command(self, name: str, *args: Any) -> Any:
        """Run a command there."""
        self._connection.send((name, args))
        return self._connection.recv()

    def end(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


class Stopwatch:
    """Times only the broadcasts of this process, without the code around them."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._broadcast = GlooGroup.broadcast

    def __enter__(self) -> Stopwatch:
        watch, broadcast = self, self._broadcast

        def timed(group: GlooGroup, *args: Any, **kwargs: Any) -> None:
            started = time.perf_counter()
            broadcast(group, *args, **kwargs)
            watch.seconds = time.perf_counter() - started

        GlooGroup.broadcast = timed  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        GlooGroup.broadcast = self._broadcast  # type: ignore[method-assign]


def race(count: int) -> dict[str, list[float]]:
    """Return the seconds of a bare broadcast and of ours, with and without digests, round by round."""
    folder = tempfile.mkdtemp(prefix="torchrl_moe-bench-", dir="/dev/shm")
    peer: Any = Peer()
    transport, place = GlooTransport(folder), MeetingPlace()
    where = place.begin()
    seconds: dict[str, list[float]] = {"bare": [], "digest": [], "off": [], "whole": []}
    try:
        manifest = WeightStoreWriter(folder).publish(tensors_of(NBYTES, count)[1].items(), 1)
        transport.open(peer, PATIENCE)
        peer.command("bare", where)
        group = GlooGroup(place.meet(where, PATIENCE), 0, 2, PATIENCE, NBYTES)
        buffer = torch.ones(NBYTES, dtype=torch.uint8)
        group.broadcast(buffer, time.monotonic() + PATIENCE, ignore)
        with Stopwatch() as watch:
            for _ in range(WARM_UP + ROUNDS):
                peer.command("bare", where)
                group.broadcast(buffer, time.monotonic() + PATIENCE, ignore)
                seconds["bare"].append(watch.seconds)
                for verify in ("digest", "off"):
                    started = time.perf_counter()
                    transport.stage(peer, manifest, StageOptions(verify=verify), PATIENCE)
                    seconds[verify].append(watch.seconds)
                    if verify == "digest":
                        seconds["whole"].append(time.perf_counter() - started)
        peer.end()
        group.close()
    finally:
        transport.close()
        place.close()
        shutil.rmtree(folder)
    return {name: values[WARM_UP:] for name, values in seconds.items()}


def against_bare() -> list[Row]:
    """Return how fast our transfer is, as a share of a bare broadcast's speed."""
    rows = []
    for count in COUNTS:
        seconds = race(count)
        name = f"gloo, 400 MB in {count} tensors"
        for arm, claim in (
            ("digest", "transfer with digests"),
            ("off", "transfer without"),
            ("whole", "whole staging"),
        ):
            values = [bare / ours for bare, ours in zip(seconds["bare"], seconds[arm], strict=True)]
            promised = count == COUNTS[0] and arm == "digest"
            rows.append(
                Row(
                    claim=f"{name}: speed of {claim} / of a bare broadcast",
                    value=median_range(values),
                    target=f">= {TARGET:.1f}" if promised else "",
                    met=statistics.median(values) >= TARGET if promised else None,
                )
            )
    return rows
