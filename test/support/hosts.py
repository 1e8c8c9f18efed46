"""A host of the toy engine, as an actor has one, in this process."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from support.processes import toy_environment, use_toy_engine
from torchrl_moe.modules.backends.ray.replica_host import ReplicaHost


class ToyHost(ReplicaHost):
    """Notes that its engine died."""

    def __init__(self, **start: Any) -> None:
        self.died = threading.Event()
        with pytest.MonkeyPatch.context() as patch:
            use_toy_engine(patch)
            super().__init__(4, {"model": "toy", "start": start}, toy_environment(), "127.0.0.1")

    def _engine_died(self) -> None:
        self.died.set()
