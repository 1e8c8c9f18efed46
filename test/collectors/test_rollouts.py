"""The loop's side of a collector."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest
from tensordict import TensorDictBase

from support.collecting import Questions, chat, new_weights, policy_of
from torchrl_moe.collectors.environments import EnvironmentPool
from torchrl_moe.collectors.prompt_stream import PromptStream
from torchrl_moe.collectors.rollouts import CollectionStats, Rollouts, Settings
from torchrl_moe.collectors.schedule import Schedule
from torchrl_moe.errors import CollectionError, EngineError
from torchrl_moe.testing import FakeAsyncVLLM

REPLICAS = 1


def with_rollouts(engine: FakeAsyncVLLM, use: Callable[[Rollouts], Awaitable[Any]], **kwargs: Any) -> Any:
    """What ``use`` makes of rollouts of groups of 2, two a batch, in a loop."""
    policy = policy_of(engine)

    async def main() -> Any:
        settings = Settings(group_size=2, groups_per_batch=2, **kwargs)
        pool = EnvironmentPool(chat(2), None)
        schedule = Schedule(2, settings.max_staleness, "fifo")
        rollouts = Rollouts(policy, pool, PromptStream(Questions()), settings, schedule, CollectionStats())
        running = asyncio.ensure_future(rollouts.run())
        try:
            return await use(rollouts)
        finally:
            await rollouts.stop(CollectionError("over"))
            await running
            pool.close()

    return asyncio.run(main())


async def batch_of(rollouts: Rollouts) -> TensorDictBase:
    future: Future[TensorDictBase] = Future()
    rollouts.ask(future)
    return await asyncio.wrap_future(future)


def test_an_answer_that_somebody_aborts_is_no_answer(engine: FakeAsyncVLLM) -> None:
    engine.replicas[0].token_seconds = 60.0

    async def use(rollouts: Rollouts) -> None:
        waiting = asyncio.ensure_future(batch_of(rollouts))
        while not engine.replicas[0].submitted:
            await asyncio.sleep(0.01)
        engine.abort([request.request_id for request in engine.replicas[0].submitted])
        with pytest.raises(EngineError, match=r"request '.*' was aborted") as caught:
            await waiting
        assert len(caught.value.partial) == 1  # type: ignore[attr-defined]

    with_rollouts(engine, use)


def test_requests_ask_for_weights_that_are_new_enough(engine: FakeAsyncVLLM) -> None:
    """At version 5 with S = 1: the batch that is awaited may be one behind, the one after it may not."""
    new_weights(engine, 5)
    asked: list[int | None] = []
    generate = engine.agenerate

    async def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kwargs.get("min_version"))
        return await generate(*args, **kwargs)

    engine.agenerate = noted  # type: ignore[method-assign]

    async def use(rollouts: Rollouts) -> None:
        await batch_of(rollouts)
        while len(asked) < 8:
            await asyncio.sleep(0.01)

    with_rollouts(engine, use, max_staleness=1)
    assert sorted(asked[:8]) == [4] * 4 + [5] * 4


def test_what_everything_waits_for_is_said(engine: FakeAsyncVLLM) -> None:
    engine.replicas[0].token_seconds = 60.0

    async def use(rollouts: Rollouts) -> str:
        rollouts.ask(Future())
        while len(engine.replicas[0].submitted) < 4:
            await asyncio.sleep(0.01)
        return rollouts._waits()

    words = with_rollouts(engine, use, max_staleness=0)
    assert "2 groups are running (the oldest is 0), 0 are ready, 2 make a batch; 4 answers" in words
    assert "SERVING" in words
