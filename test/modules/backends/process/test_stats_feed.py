"""Figures that are sent by themselves: when they changed, and with the pace at which tokens are made."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from torchrl_moe.modules.backends.process import engine_program as stats_feed
from torchrl_moe.modules.backends.process.engine_program import Load, StatsFeed
from torchrl_moe.modules.backends.replica import ReplicaStats


class Bench:
    """A feed, its clock, and what it sent."""

    def __init__(self) -> None:
        self.now = 100.0
        self.load = Load()
        self.requests = 0
        self.sent: list[ReplicaStats] = []
        self.feed = StatsFeed(
            self.load, lambda: ReplicaStats(requests=self.requests), self._send, clock=lambda: self.now
        )

    def _send(self, message: tuple[str, ReplicaStats]) -> None:
        kind, stats = message
        assert kind == "stats"
        self.sent.append(stats)

    def tick(self, tokens: int = 0) -> None:
        self.now += 0.25
        self.load.tokens += tokens
        self.feed.tick()


def test_only_what_changed_is_sent() -> None:
    bench = Bench()
    for requests in (0, 0, 3, 3, 3, 4):
        bench.requests = requests
        bench.tick()
    assert [stats.requests for stats in bench.sent] == [0, 3, 4]


def test_the_pace_is_that_of_the_last_second_and_falls_to_0_when_nothing_is_made() -> None:
    bench = Bench()
    rates = []
    for tokens in (10, 10, 10, 10, 30, 0, 0, 0, 0):
        bench.tick(tokens)
        rates.append(bench.feed.stats().tokens_per_second)
    assert rates == [40.0, 40.0, 40.0, 40.0, 60.0, 50.0, 40.0, 30.0, 0.0]
    sent = len(bench.sent)
    assert bench.sent[-1].tokens_per_second == 0.0
    for _ in range(5):
        bench.tick()
    assert len(bench.sent) == sent  # an idle engine is silent


def test_two_readings_at_one_time_are_no_error() -> None:
    bench = Bench()
    bench.feed.tick()
    assert bench.sent == [ReplicaStats()]


def test_stats_that_are_asked_for_do_not_move_the_pace() -> None:
    bench = Bench()
    bench.tick(10)
    bench.load.tokens += 1000
    bench.requests = 9
    assert bench.feed.stats() == dataclasses.replace(bench.sent[-1], requests=9)


def test_it_ticks_until_it_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_feed, "FEED_SECONDS", 0.001)
    bench = Bench()

    async def main() -> None:
        task = asyncio.create_task(bench.feed.run())
        async with asyncio.timeout(60.0):
            while len(bench.sent) < 3:
                bench.requests += 1
                await asyncio.sleep(0.002)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    asyncio.run(main())
