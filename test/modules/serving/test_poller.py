"""The poller: figures of those that serve, and patience with those that do not answer."""

from __future__ import annotations

import time

from torchrl_moe._errors import EngineError
from torchrl_moe.modules.backends.replica import ReplicaStats
from torchrl_moe.modules.serving.load_balancer import LoadBalancer
from torchrl_moe.modules.serving.poller import Poller
from torchrl_moe.modules.serving.states import ReplicaState


class Gauge:
    """A replica of which only figures are asked."""

    def __init__(self, usage: float) -> None:
        self.usage = usage
        self.asked = 0
        self.error: Exception | None = None

    def stats(self, timeout: float) -> ReplicaStats:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return ReplicaStats(running=77, cache_usage=self.usage)


def usages(lb: LoadBalancer) -> list[float | None]:
    return [stats["cache_usage"] for stats in lb.get_stats()["actor_stats"]]


def test_it_notes_the_usage_of_those_that_serve_and_no_load() -> None:
    lb = LoadBalancer([Gauge(0.25), Gauge(1.0000001), Gauge(0.75)], "kv-cache")
    lb.roster.set_state(2, ReplicaState.SYNCING)
    Poller(lb).poll()
    assert usages(lb) == [0.25, 1.0, None]
    assert [entry.load for entry in lb.roster] == [0, 0, 0]
    assert lb.acquire().index == 0


def test_one_that_does_not_answer_keeps_its_old_figure_and_holds_up_nobody() -> None:
    gauges = [Gauge(0.25), Gauge(0.5)]
    lb = LoadBalancer(gauges, "kv-cache")
    poller = Poller(lb)
    poller.poll()
    gauges[0].error = EngineError("busy")
    gauges[0].usage = gauges[1].usage = 0.9
    poller.poll()
    assert usages(lb) == [0.25, 0.9]


def test_it_goes_on_until_it_is_stopped() -> None:
    gauge = Gauge(0.5)
    poller = Poller(LoadBalancer([gauge]), seconds=0.001)
    poller.start()
    deadline = time.monotonic() + 5.0
    while gauge.asked < 3:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    poller.stop()
    poller._thread.join(5.0)
    assert not poller._thread.is_alive()
