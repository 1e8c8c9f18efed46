"""Senders that are shut down when their test is over."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.weights import Connect
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
