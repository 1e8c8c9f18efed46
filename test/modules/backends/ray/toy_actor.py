"""An actor whose engine process is the toy engine's: Ray's part is real, and a replica starts in a second."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_moe.modules.backends.ray.actor import ReplicaActor
from torchrl_moe.modules.backends.ray.ray_service import RayService
from torchrl_moe.modules.backends.vllm import child

TESTS = Path(__file__).parents[3]


class ToyActor(ReplicaActor):
    """Put in the place of ``ReplicaActor``."""

    def __init__(self, index: int, service: RayService, forwarded: Mapping[str, str], group: Any, number: int) -> None:
        child.MODULE = "modules.backends.vllm.toy_engine"
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
        super().__init__(index, service, forwarded, group, number)

    def pids(self) -> tuple[int, int]:
        """Return the actor's process and the engine's."""
        return os.getpid(), self._child.process.pid
