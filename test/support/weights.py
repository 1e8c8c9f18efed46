"""Weights that are sent to fakes, and failures that these report."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_moe.modules.backends.replica import this_process
from torchrl_moe.store import Manifest
from torchrl_moe.testing.fake_weights import FakeFleet, SoftError
from torchrl_moe.weight_update import VLLMWeightSender, VLLMWeightSyncScheme

Connect = Callable[..., VLLMWeightSender]
Fleet = Callable[..., tuple[FakeFleet, VLLMWeightSender]]
THIS_DRIVER = this_process()
"""As replicas name the driver that owns their weights."""


@contextmanager
def senders(**common: Any) -> Iterator[Connect]:
    """A function that makes a sender for an engine; they are shut down at the end."""
    made = []

    def make(engine: Any, **choices: Any) -> VLLMWeightSender:
        sender = VLLMWeightSyncScheme(**{"timeout_seconds": 5.0, **common, **choices}).create_sender()
        made.append(sender)
        sender.init_all_workers_group(None, vllm_engine=engine)
        return sender

    yield make
    for sender in made:
        sender.shutdown()


def fleets(connect: Connect) -> Fleet:
    """A function that makes an engine of so many fake replicas, and a sender for it."""

    def make(count: int, **choices: Any) -> tuple[FakeFleet, VLLMWeightSender]:
        fakes = {name: choices.pop(name) for name in ("expected", "late", "token_seconds") if name in choices}
        engine = FakeFleet(count, **fakes)
        return engine, connect(engine, **choices)

    return make


class UpdateCounter:
    """A collector, as far as a sender knows one."""

    count = 0

    def increment_version(self) -> None:
        self.count += 1


def values(engine: FakeFleet) -> list[float | None]:
    """Of the weights that each replica has."""
    return [value_in(engine, index) for index in range(len(engine.fakes))]


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {"a": torch.full((2, 2), float(value)), "b": torch.full((3,), int(value))}


def value_in(engine: FakeFleet, index: int) -> float | None:
    """Of the weights that a replica has."""
    held = engine.fakes[index].weights
    return held["a"][0, 0].item() if held else None


def soft(*times: int) -> Callable[[int], Exception | None]:
    """Fail softly the given times (0 is the first)."""
    return lambda asked: SoftError("it went wrong") if asked in times else None


def always(error: Exception) -> Callable[[int], Exception]:
    return lambda asked: error


def note_made(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[threading.Thread]]:
    """Return by version the threads in which this process makes manifests from now on."""
    made: dict[int, list[threading.Thread]] = defaultdict(list)
    plain = Manifest.__init__

    def note(self: Manifest, version: int, *rest: Any) -> None:
        made[version].append(threading.current_thread())
        plain(self, version, *rest)

    monkeypatch.setattr(Manifest, "__init__", note)
    return made
