"""Staging: a thread fetches a version and checks it, while the worker's loop keeps generating.

The thread must not slow the steps down. So it computes with one core and at a lower priority, and Python switches
threads more often: with the usual 5 ms, a step would wait for the interpreter lock at each of its many short calls.

Imported in vLLM's worker processes only.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torchrl_moe import _compat
from torchrl_moe._errors import WeightSyncError
from torchrl_moe.weight_update.store import Manifest
from torchrl_moe.weight_update.transports.base import Receiver

__all__ = ["Staging", "TensorStream"]

NICENESS = 5
TURN_SECONDS = 0.0005  # of Python's interpreter lock, instead of 5 ms


class TensorStream:
    """A version's tensors, one by one, for a model's loader. ``taken`` counts how many it took.

    Args:
        tensors: name -> tensor.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.taken = 0
        self._tensors = tensors

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            self.taken += 1
            yield name, tensor

    def check_taken(self, version: int) -> None:
        """Raise a ``WeightSyncError`` if the model left tensors behind."""
        if self.taken != len(self._tensors):
            raise WeightSyncError(f"the model took {self.taken} of {len(self._tensors)} tensors of version {version}")


class Staging:
    """Fetches one version.

    Args:
        manifest: the version's, as JSON.
        receiver: the source.
        verify: whether to compare the digests of what arrives.
        threads: number of threads that read and hash.

    Attributes:
        manifest: the version's, once the thread has read it.
    """

    def __init__(self, manifest: str, receiver: Receiver, *, verify: bool, threads: int) -> None:
        self.manifest: Manifest | None = None
        self._text, self._receiver = manifest, receiver
        self._verify, self._threads = verify, threads
        self._fetched = 0.0
        self._job = _run_politely(self._fetch)

    @property
    def running(self) -> bool:
        """Whether the thread is still running."""
        return not self._job.done()

    def report(self) -> dict[str, Any]:
        """Return its progress, as plain data."""
        if self.running:
            return {"running": True}
        error = self._job.exception()
        return {
            "running": False,
            "fetched": self._fetched,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }

    def _fetch(self) -> None:
        started = time.perf_counter()
        self.manifest = manifest = Manifest.from_json(self._text)
        self._receiver.fetch(manifest, verify=self._verify, threads=self._threads)
        self._fetched = time.perf_counter() - started


def _run_politely(work: Callable[[], None]) -> Future[None]:
    """Run a function in its own thread, which yields to the worker's loop."""
    executor = ThreadPoolExecutor(1, "weights")
    job = executor.submit(_polite()(work))
    executor.shutdown(wait=False)  # the thread ends with its job
    return job


@contextmanager
def _polite() -> Iterator[None]:
    if sys.platform == "linux":  # only there a thread has its own priority
        thread = threading.get_native_id()
        # only upwards: lowering the nice value needs a privilege
        os.setpriority(os.PRIO_PROCESS, thread, max(NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
    _compat.compute_with_one_thread()
    before = sys.getswitchinterval()
    sys.setswitchinterval(TURN_SECONDS)
    try:
        yield
    finally:
        sys.setswitchinterval(before)
