"""So many answers at a time; replicas with older weights are waited for; what somebody aborts is an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from torchrl_moe.collectors.group import CollectionStats
from torchrl_moe.collectors.rollouts import GenerationSlots
from torchrl_moe.errors import EngineError, StaleReplicaError
from torchrl_moe.testing import FakeAsyncVLLM


class Engine:
    """Answers once it is let; notes how many ask at a time."""

    def __init__(self, stats: CollectionStats, stale: int = 0) -> None:
        self.stats, self.stale, self.most, self.asked = stats, stale, 0, 0

    async def agenerate(self, **arguments: Any) -> Any:
        self.asked += 1
        if self.stale:
            self.stale -= 1
            raise StaleReplicaError("none holds version 3")
        self.most = max(self.most, self.stats.in_flight)
        await asyncio.sleep(0)
        return type("Whole", (), {"aborted": False, **arguments})


@pytest.mark.parametrize(("count", "most"), [(3, 3), ("auto", 8)])
def test_no_more_than_so_many_are_in_flight(count: Any, most: int) -> None:
    async def run() -> None:
        stats = CollectionStats()
        engine = Engine(stats)
        slots = GenerationSlots(engine, count, stats)
        answers = await asyncio.gather(*(slots.answer({"number": i}) for i in range(8)))
        assert [answer.number for answer in answers] == list(range(8))
        assert (engine.most, stats.in_flight) == (most, 0)

    asyncio.run(run())


def test_a_replica_with_new_weights_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_moe.collectors.rollouts.RETRY_SECONDS", 0.0)
    stats = CollectionStats()
    engine = Engine(stats, stale=2)
    asyncio.run(GenerationSlots(engine, 1, stats).answer({}))
    assert engine.asked == 3


def test_an_answer_that_somebody_aborted_is_an_error_with_what_there_is() -> None:
    async def run(engine: FakeAsyncVLLM) -> None:
        slots = GenerationSlots(engine, "auto", CollectionStats())
        ids = {"prompt_token_ids": [1, 2], "sampling_params": {"max_tokens": 4}, "request_id": "x"}
        answer = asyncio.ensure_future(slots.answer(ids))
        while not engine.replicas[0].last_stats.running:  # type: ignore[union-attr]
            await asyncio.sleep(0.001)
        engine.abort("x")
        with pytest.raises(EngineError, match="request 'x' was aborted") as caught:
            await answer
        assert len(caught.value.partial) == 1  # type: ignore[attr-defined]

    with FakeAsyncVLLM(token_seconds=3600.0) as engine:
        asyncio.run(run(engine))
