"""The loop's side of a collector, and how a batch gets from there to the trainer: it has one owner at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from support.collecting import Questions, chat, new_weights, policy_of
from support.waiting import in_thread, until
from torchrl_moe.collectors.arguments import Settings
from torchrl_moe.collectors.environments import EnvironmentPool
from torchrl_moe.collectors.group import CollectionStats
from torchrl_moe.collectors.prompt_stream import PromptStream
from torchrl_moe.collectors.rollouts import Delivery, Rollouts
from torchrl_moe.collectors.schedule import Schedule
from torchrl_moe.errors import EngineError
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
        try:
            return await use(rollouts)
        finally:
            await rollouts.stop()
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
        return rollouts.waits()

    words = with_rollouts(engine, use, max_staleness=0)
    assert "2 groups are running (the oldest is 0), 0 are ready, 2 make a batch; 4 answers" in words
    assert "SERVING" in words


def batch(number: int) -> TensorDict:
    return TensorDict({"number": torch.tensor([number])}, batch_size=[1])


class Source:
    """Fulfils futures with numbered batches, unless it was asked with them before."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def __call__(self, future: Future[Any]) -> None:
        if future not in self.asked:
            self.asked.append(future)
            future.set_result(batch(len(self.asked) - 1))


def take(delivery: Delivery, ask: Callable[[Future[Any]], object], accept: Callable[[TensorDict], Any]) -> Any:
    return delivery.take(ask, accept, nullcontext())


def number_of(given: TensorDict) -> int:
    return int(given["number"])


def refuse(_: Any) -> None:
    raise ArithmeticError("no")


def test_what_was_not_accepted_is_given_again() -> None:
    delivery, source = Delivery(), Source()
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            take(delivery, source, refuse)
    assert [take(delivery, source, number_of) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("when", ["before it is asked", "after"])
def test_a_ctrl_c_as_it_asks_loses_nothing(when: str) -> None:
    delivery, source = Delivery(), Source()

    def interrupted(future: Future[Any]) -> None:
        if when == "after":
            source(future)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(delivery, interrupted, number_of)
    assert [take(delivery, source, number_of) for _ in range(2)] == [0, 1]


def test_after_an_error_another_batch_is_asked_for() -> None:
    delivery, source = Delivery(), Source()
    with pytest.raises(OSError, match="disk"):
        take(delivery, lambda future: future.set_exception(OSError("disk")), number_of)
    assert take(delivery, source, number_of) == 0


def test_a_batch_that_is_not_accepted_yet_is_known() -> None:
    delivery, source, seen = Delivery(), Source(), []

    def accept(given: TensorDict) -> None:
        with delivery.hold() as awaited:
            seen.append(awaited)

    take(delivery, source, accept)
    assert seen == source.asked
    with delivery.hold() as awaited:
        assert awaited is None


def test_nothing_is_accepted_while_it_stands_still() -> None:
    delivery, source = Delivery(), Source()
    with delivery.hold():
        taking = in_thread(lambda: take(delivery, source, number_of))
        assert not source.asked
    assert taking.result(60) == 0


def test_the_wait_is_over_as_it_is_accepted() -> None:
    delivery, source, log = Delivery(), Source(), []

    @contextmanager
    def waiting() -> Iterator[None]:
        log.append("waits")
        yield
        log.append("has it")

    delivery.take(source, lambda given: log.append("accepts"), waiting())
    assert log == ["waits", "has it", "accepts"]


def test_two_threads_get_different_batches() -> None:
    delivery, futures = Delivery(), []

    def ask(future: Future[Any]) -> None:
        if future not in futures:
            futures.append(future)

    taking = [in_thread(lambda: take(delivery, ask, number_of)) for _ in range(2)]
    for number in range(2):
        until(lambda count=number: len(futures) > count)
        futures[number].set_result(batch(number))
    assert (sorted(one.result(60) for one in taking), len(futures)) == ([0, 1], 2)
