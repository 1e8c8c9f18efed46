"""The Ray cluster that tests share: two nodes on this machine. It starts in five seconds and is asked for by few."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.engines import start_engine
from support.processes import PYTHONPATH
from support.waiting import PATIENCE
from torchrl_moe.modules import AsyncVLLM

FEW_PROCESSES = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
STORE_BYTES = 80 << 20  # Ray's least; our messages do not go through it


class ClusterHolder:
    """Holds the cluster while tests ask for it."""

    def __init__(self) -> None:
        self._cluster: Any = None
        self._pair: AsyncVLLM | None = None

    def start(self) -> None:
        """Start it and join it, unless that was done."""
        if self._cluster is not None:
            return
        import ray
        from ray.cluster_utils import Cluster

        ray.shutdown()
        node = {"num_cpus": 2, "resources": {"slot": 1}, "object_store_memory": STORE_BYTES}
        with pytest.MonkeyPatch.context() as patch:  # what its workers import is what this process imports
            patch.setenv("PYTHONPATH", PYTHONPATH)
            patch.setenv("RAY_worker_niceness", "0")  # at Ray's 15 a busy machine starves actors: 10 s became 100
            cluster = Cluster(initialize_head=True, head_node_args={**node, **FEW_PROCESSES})
            try:
                cluster.add_node(wait=False, **node)
                cluster.wait_for_nodes(PATIENCE)  # by itself it gives a node 30 s, which a busy machine may need
                ray.init(address=cluster.address, log_to_driver=False, logging_level="error")
            except BaseException:
                cluster.shutdown()  # the next test tries again
                raise
        self._cluster = cluster

    @property
    def address(self) -> str:
        """For other drivers."""
        return str(self._cluster.address)

    def pair(self, folder: Path) -> AsyncVLLM:
        """Return two replicas of a model, on two nodes, started once, and again if a test has ended them."""
        if self._pair is None or not self._pair.is_running:
            resources = {"CPU": 1.0, "slot": 1.0}
            self._pair = start_engine(folder, 2, backend="ray", name="test-pair", resources=resources)
        return self._pair

    def clear(self) -> None:
        """End it."""
        if self._pair is not None:
            self._pair.shutdown()
            self._pair = None
        if self._cluster is not None:
            import ray

            ray.shutdown()
            self._cluster.shutdown()
            self._cluster = None
