"""A version on its way into a worker, over a receiver and a shadow that do as they are told."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

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
        self.remark: str | None = None
        self.during: dict[str, Any] = {}
        self.open = 0
        self.read_verifying: bool | None = None

    def manifest(self, version: int) -> Manifest:
        return Manifest(version, 0, ())

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> str | None:
        self.during = {
            "thread": threading.current_thread(),
            "turn": sys.getswitchinterval(),
            "torch": torch.get_num_threads(),
            "priority": os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
        }
        self.fetched.append((manifest.version, verify, threads))
        if self.error is not None:
            raise self.error
        return self.remark

    @contextmanager
    def reading(self, manifest: Manifest, *, verify: bool) -> Iterator[Mapping[str, Tensor]]:
        self.read_verifying = verify
        self.open += 1
        yield TENSORS
        self.open -= 1

    def close(self) -> None:
        """Nothing is held."""


class FakeShadow:
    """Takes tensors; ``says`` is why it cannot change places, ``most`` how many it takes, ``hold`` stops before b."""

    def __init__(self, says: str = "", most: int = 3) -> None:
        self.says, self.most = says, most
        self.names: list[str] = []
        self.hold: threading.Event | None = None
        self.released = self.ended = 0

    def end_reservation(self) -> None:
        self.ended += 1

    def release(self) -> None:
        self.released += 1

    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        for name, _ in tensors:
            self.names.append(name)
            if self.hold is not None:
                self.hold.wait(60.0)
            if len(self.names) == self.most:
                break
        return self.says


def run(receiver: FakeReceiver, shadow: FakeShadow | None, reason: str = "") -> Staging:
    begun: Any = Staging(Manifest(3, 0, ()).to_json(), receiver, shadow, reason, verify=True, threads=2)  # type: ignore[arg-type]
    until(lambda: not begun.running)
    assert shadow is None or shadow.ended == 1  # whatever came of it
    return begun  # type: ignore[no-any-return]


def test_a_version_is_fetched_and_loaded_into_the_shadow() -> None:
    receiver, shadow = FakeReceiver(), FakeShadow()
    begun = run(receiver, shadow)
    report = begun.report()
    assert report["fetched"] > 0
    assert report["loaded"] > 0
    assert {key: report[key] for key in ("running", "stage", "reason", "error")} == {
        "running": False,
        "stage": "shadow",
        "reason": "",
        "error": None,
    }
    assert (receiver.fetched, shadow.names, receiver.open) == ([(3, True, 2)], ["a", "b", "c"], 0)
    assert receiver.read_verifying is True


def test_without_a_shadow_it_is_fetched_only_and_the_reason_is_reported() -> None:
    receiver = FakeReceiver()
    report = run(receiver, None, "the model is quantised").report()
    assert (report["stage"], report["reason"], report["loaded"]) == ("plain", "the model is quantised", 0.0)
    assert receiver.fetched == [(3, True, 2)]
    shadow = FakeShadow()
    assert run(FakeReceiver(), shadow, "no room").report()["stage"] == "plain"
    assert (shadow.names, shadow.released) == ([], 1)


def test_a_shadow_that_cannot_change_places_leaves_the_plain_way() -> None:
    report = run(FakeReceiver(), FakeShadow(says="head is tied")).report()
    assert (report["stage"], report["reason"], report["error"]) == ("plain", "head is tied", None)


def test_what_a_receiver_remarks_is_reported_and_no_hindrance_to_a_shadow() -> None:
    receiver = FakeReceiver()
    receiver.remark = "no room for a copy"
    report = run(receiver, FakeShadow()).report()
    assert (report["stage"], report["reason"]) == ("shadow", "no room for a copy")
    report = run(receiver, FakeShadow(says="head is tied")).report()
    assert (report["stage"], report["reason"]) == ("plain", "head is tied; no room for a copy")


def test_what_goes_wrong_in_the_thread_is_reported() -> None:
    receiver = FakeReceiver()
    receiver.error = DigestMismatch("bytes of a")
    begun = run(receiver, FakeShadow())
    assert (begun.report()["error"], begun.stage) == ("DigestMismatch: bytes of a", "plain")
    few = run(FakeReceiver(), FakeShadow(most=2)).report()
    assert few["error"] == "WeightSyncError: the model took 2 of 3 tensors of version 3"
    assert few["stage"] == "plain"


def test_it_can_be_told_to_stop_and_then_stops_at_the_next_tensor() -> None:
    receiver, shadow = FakeReceiver(), FakeShadow()
    shadow.hold = threading.Event()
    begun: Any = Staging(Manifest(3, 0, ()).to_json(), receiver, shadow, "", verify=False, threads=1)  # type: ignore[arg-type]
    assert begun.report() == {"running": True}
    begun.cancel()
    shadow.hold.set()
    until(lambda: not begun.running)
    assert begun.report()["error"] == "WeightSyncError: another version was staged meanwhile"
    assert shadow.names == ["a"]


def test_its_thread_is_polite_and_alone_in_that() -> None:
    receiver = FakeReceiver()
    before = (sys.getswitchinterval(), torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, 0))
    run(receiver, None)
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
        run(receiver, None)

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
