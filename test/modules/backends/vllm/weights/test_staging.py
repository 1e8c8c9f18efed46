"""A version on its way into a worker, over a receiver that does as it is told."""

from __future__ import annotations

import os
import sys
import threading
from typing import Any

import pytest
import torch

from support.waiting import until
from torchrl_moe._errors import DigestMismatch, WeightSyncError
from torchrl_moe.modules.backends.vllm.weights import staging
from torchrl_moe.modules.backends.vllm.weights.staging import Staging, TensorStream
from torchrl_moe.weight_update.store import Manifest

TENSORS = {"a": torch.zeros(1), "b": torch.ones(1), "c": torch.ones(2)}


class FakeReceiver:
    """Has three tensors, and notes how it was asked for them."""

    def __init__(self) -> None:
        self.fetched: list[tuple[int, bool, int]] = []
        self.error: Exception | None = None
        self.hold: threading.Event | None = None
        self.during: dict[str, Any] = {}

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, 0, ())

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        self.during = {
            "thread": threading.current_thread(),
            "turn": sys.getswitchinterval(),
            "torch": torch.get_num_threads(),
            "priority": os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
        }
        self.fetched.append((manifest.version, verify, threads))
        if self.hold is not None:
            assert self.hold.wait(60.0)
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Nothing is held."""


def run(receiver: FakeReceiver) -> Staging:
    begun = Staging(Manifest(3, 0, ()).to_json(), receiver, verify=True, threads=2)  # type: ignore[arg-type]
    until(lambda: not begun.running)
    return begun


def test_a_version_is_fetched_in_the_thread_and_its_manifest_is_kept() -> None:
    receiver = FakeReceiver()
    begun = run(receiver)
    report = begun.report()
    assert report.pop("fetched") > 0
    assert report == {"running": False, "error": None}
    assert receiver.fetched == [(3, True, 2)]
    assert begun.manifest == Manifest(3, 0, ())


def test_until_it_has_ended_it_says_only_that_it_runs() -> None:
    receiver = FakeReceiver()
    receiver.hold = threading.Event()
    begun = Staging(Manifest(3, 0, ()).to_json(), receiver, verify=False, threads=1)  # type: ignore[arg-type]
    assert (begun.running, begun.report()) == (True, {"running": True})
    receiver.hold.set()
    until(lambda: not begun.running)
    assert begun.report()["error"] is None


def test_what_goes_wrong_in_the_thread_is_reported() -> None:
    receiver = FakeReceiver()
    receiver.error = DigestMismatch("bytes of a")
    report = run(receiver).report()
    assert (report["error"], report["fetched"]) == ("DigestMismatch: bytes of a", 0.0)
    begun = Staging("no manifest", receiver, verify=False, threads=1)  # type: ignore[arg-type]
    until(lambda: not begun.running)
    assert begun.report()["error"].startswith("ManifestMismatch: ")
    assert begun.manifest is None


def test_its_thread_is_polite_and_alone_in_that() -> None:
    receiver = FakeReceiver()
    before = (sys.getswitchinterval(), torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0))
    run(receiver)
    assert receiver.during["thread"] is not threading.current_thread()
    assert receiver.during["turn"] == pytest.approx(staging.TURN_SECONDS)
    assert receiver.during["torch"] == 1
    if sys.platform == "linux":
        assert receiver.during["priority"] == max(before[2], staging.NICENESS)
    assert (sys.getswitchinterval(), torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0)) == before


@pytest.mark.skipif(sys.platform != "linux", reason="only there a priority may be a thread's own")
def test_a_nicer_worker_stays_so_for_only_the_privileged_may_raise_a_priority() -> None:
    receiver = FakeReceiver()

    def nicely() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 12)
        run(receiver)

    thread = threading.Thread(target=nicely)
    thread.start()
    thread.join()
    assert receiver.during["priority"] == 12


def test_a_stream_counts_what_was_taken() -> None:
    stream = TensorStream(TENSORS)
    taking = iter(stream)
    assert next(taking)[0] == "a"
    with pytest.raises(WeightSyncError, match="the model took 1 of 3 tensors of version 9"):
        stream.check_taken(9)
    assert [name for name, _ in taking] == ["b", "c"]
    stream.check_taken(9)
