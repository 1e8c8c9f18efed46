"""Staging: a thread brings a version into a worker, while the worker's loop keeps generating.

.. code-block:: text

    worker's loop:   step  step  step  step  step  | pause: swap |  step  step
    staging thread:  fetch -> check digests -> load into the shadow   (then it ends)

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
from typing import Any, Literal

from torch import Tensor

from torchrl_moe import _compat
from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.vllm.weights.shadow import ShadowModel
from torchrl_moe.weight_update.store import Manifest
from torchrl_moe.weight_update.transports.base import Receiver

__all__ = ["Staging", "TensorStream", "run_politely"]

NICENESS = 5
TURN_SECONDS = 0.0005  # of Python's interpreter lock, instead of 5 ms


class TensorStream:
    """A version's tensors, one by one, for a model's loader. ``taken`` counts how many it took.

    Args:
        tensors: name -> tensor.
        cancelled: once it is set, the stream ends with an error.
    """

    def __init__(self, tensors: Mapping[str, Tensor], cancelled: threading.Event | None = None) -> None:
        self.taken = 0
        self._tensors, self._cancelled = tensors, cancelled

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._tensors.items():
            if self._cancelled is not None and self._cancelled.is_set():
                raise WeightSyncError("another version was staged meanwhile")
            self.taken += 1
            yield name, tensor

    def check_taken(self, version: int) -> None:
        """Raise a ``WeightSyncError`` if the model left tensors behind."""
        if self.taken != len(self._tensors):
            raise WeightSyncError(f"the model took {self.taken} of {len(self._tensors)} tensors of version {version}")


class Staging:
    """Fetches one version, and loads it into the shadow.

    Args:
        manifest: the version's, as JSON.
        receiver: the source.
        shadow: the second model to load it into.
        reason: why loading waits for the pause; empty if it does not. With a reason, a shadow drops what it held.
        verify: whether to compare digests, of what arrives or of what is loaded into the shadow.
        threads: number of threads that read and hash.

    Attributes:
        manifest: the version's, once the thread has read it.
    """

    def __init__(
        self,
        manifest: str,
        receiver: Receiver,
        shadow: ShadowModel | None,
        reason: str,
        *,
        verify: bool,
        threads: int,
    ) -> None:
        self.manifest: Manifest | None = None
        self._text = manifest
        self._receiver, self._shadow, self._reason = receiver, shadow, reason
        self._verify, self._threads = verify, threads
        self._remark = ""  # of the receiver
        self._fetched = self._loaded = 0.0
        self._cancelled = threading.Event()
        self._job = run_politely(self._run)

    @property
    def running(self) -> bool:
        """Whether the thread is still running."""
        return not self._job.done()

    @property
    def stage(self) -> Literal["shadow", "plain"]:
        """The result, once the thread has ended."""
        return "plain" if self._reason or self._job.exception() is not None else "shadow"

    def cancel(self) -> None:
        """Ask the thread to end; it ends at the next tensor."""
        self._cancelled.set()

    def report(self) -> dict[str, Any]:
        """Return its progress, as plain data."""
        if self.running:
            return {"running": True}
        error = self._job.exception()
        return {
            "running": False,
            "stage": self.stage,
            "reason": "; ".join(filter(None, (self._reason, self._remark))),
            "fetched": self._fetched,
            "loaded": self._loaded,
            "error": None if error is None else f"{type(error).__name__}: {error}",
        }

    def _run(self) -> None:
        try:
            self._fetch_and_load()
        finally:
            if self._shadow is not None:
                self._shadow.end_reservation()

    def _fetch_and_load(self) -> None:
        started = time.perf_counter()
        self.manifest = manifest = Manifest.from_json(self._text)
        self._remark = self._receiver.fetch(manifest, verify=self._verify, threads=self._threads) or ""
        fetched = time.perf_counter()
        self._fetched = fetched - started
        if self._shadow is None:
            return
        if self._reason:
            self._shadow.release()
            return
        self._load(manifest, self._shadow)
        self._loaded = time.perf_counter() - fetched

    def _load(self, manifest: Manifest, shadow: ShadowModel) -> None:
        with self._receiver.reading(manifest, verify=self._verify) as tensors:
            stream = TensorStream(tensors, self._cancelled)
            self._reason = shadow.load(stream)
        stream.check_taken(manifest.version)


def run_politely(work: Callable[[], None]) -> Future[None]:
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
