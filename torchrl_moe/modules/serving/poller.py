"""Reads the replicas' own figures every so often, for strategies that look at them."""

from __future__ import annotations

import threading

from torchrl_moe._errors import EngineError
from torchrl_moe.modules.serving.load_balancer import LoadBalancer
from torchrl_moe.modules.serving.states import ReplicaState

__all__ = ["Poller"]


class Poller:
    """A thread that notes the KV-cache usage of every serving replica in a balancer.

    Only that: requests are counted where they are handed out, and a figure that lags would blur the count.

    Args:
        balancer: notes the figures.
        seconds: from one round to the next, and how long one replica may take to answer.
    """

    def __init__(self, balancer: LoadBalancer, seconds: float = 0.5) -> None:
        self._balancer = balancer
        self._seconds = seconds
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torchrl_moe-poller", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, without waiting for an answer that is under way."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.is_set():
            self.poll()
            self._stopped.wait(self._seconds)

    def poll(self) -> None:
        """Ask every serving replica once; one that does not answer keeps its old figure until that has aged."""
        for entry in self._balancer.roster:
            if entry.state is not ReplicaState.SERVING or self._stopped.is_set():
                continue
            try:
                figures = entry.replica.stats(self._seconds)
            except EngineError:  # dead, or busy: others find that out
                continue
            self._balancer.observe(entry.index, cache_usage=min(max(figures.cache_usage, 0.0), 1.0))
