"""A host of the toy engine, as an actor has one, in this process."""

from __future__ import annotations

import threading
from typing import Any

from support import toy_kind
from support.processes import toy_environment
from torchrl_moe.modules.backends.ray.replica_host import ReplicaHost


class ToyHost(ReplicaHost):
    """Notes that its engine died."""

    def __init__(self, awaits_secrets: bool = False, **start: Any) -> None:
        self.died = threading.Event()
        super().__init__(
            4, toy_kind, {"model": "toy", "start": start}, toy_environment(), "127.0.0.1", awaits_secrets=awaits_secrets
        )

    def _engine_died(self) -> None:
        self.died.set()
