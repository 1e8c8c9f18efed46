"""Senders that are shut down when their test is over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.weights import Connect
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.sender import VLLMWeightSender


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Make a sender for an engine."""
    senders = []

    def make(engine: Any, **choices: Any) -> VLLMWeightSender:
        sender = VLLMWeightSyncScheme(**{"timeout_seconds": 5.0, **choices}).create_sender()
        senders.append(sender)
        sender.init_all_workers_group(None, vllm_engine=engine)
        return sender

    yield make
    for sender in senders:
        sender.shutdown()


@pytest.fixture
def fleet(connect: Connect) -> Callable[..., tuple[FakeFleet, VLLMWeightSender]]:
    """Make an engine of so many fake replicas, and a sender for it."""

    def make(count: int, **choices: Any) -> tuple[FakeFleet, VLLMWeightSender]:
        fakes = {name: choices.pop(name) for name in ("expected", "late", "token_seconds") if name in choices}
        engine = FakeFleet(count, **fakes)
        return engine, connect(engine, **choices)

    return make
