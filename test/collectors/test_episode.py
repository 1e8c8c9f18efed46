"""An episode plays its turns, shows the environment what it may see, and leaves no request behind."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import EnvBase, Transform

from support.collecting import chat, policy_of
from support.waiting import HOUR
from torchrl_moe.collectors.environments import Episode, gather
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def engine() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM() as engine:
        yield engine


def play(engine: FakeAsyncVLLM, env: EnvBase, **kwargs: Any) -> tuple[list[TensorDictBase], list[int]]:
    """The turns of an episode, and which samples asked in which order."""
    asked: list[int] = []

    async def generate(request: SampleRequest, index: int) -> Completion:
        asked.append(index)
        return await engine.agenerate(**request.arguments)

    async def in_thread(function: Any, *arguments: Any) -> Any:
        return function(env, *arguments)

    data = lazy_stack([TensorDict(query="q") for _ in range(env.batch_size[0])])
    turns = asyncio.run(Episode(policy_of(engine), generate, in_thread, **kwargs).run(data))
    return turns, asked


def test_each_sample_asks_once_a_turn(engine: FakeAsyncVLLM) -> None:
    turns, asked = play(engine, chat(3))
    assert [turn.batch_size for turn in turns] == [(3,)]
    assert asked == [0, 1, 2]


def test_turns_continue_until_the_environment_is_done(engine: FakeAsyncVLLM) -> None:
    turns, asked = play(engine, chat(1, turns=4))
    assert [turn["next", "done"].item() for turn in turns] == [False, False, False, True]
    assert asked == [0] * 4


def test_an_environment_sees_no_routes_and_they_are_in_the_rows(engine: FakeAsyncVLLM) -> None:
    seen: list[set[str]] = []

    class Look(Transform):
        def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
            seen.append(set(map(str, tensordict.keys())))
            return next_tensordict

    (turn,), _ = play(engine, chat(2).append_transform(Look()))
    hidden = {"routed_experts", "log_probs", "policy_versions", "policy_version", "masks"}
    assert not seen[0] & hidden
    assert {"history", "text", "tokens", "query"} <= seen[0]
    assert hidden <= set(turn.keys())


def test_arguments_of_generation_can_be_changed(engine: FakeAsyncVLLM) -> None:
    (turn,), _ = play(engine, chat(1), max_new_tokens=3, return_routed_experts=False)
    assert len(turn[0]["tokens", "response"]) == 3
    assert "routed_experts" not in turn.keys()  # noqa: SIM118


def test_the_first_failure_cancels_the_rest() -> None:
    cancelled = []

    async def fail() -> None:
        raise ZeroDivisionError

    async def wait() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled.append(1)
            raise

    with pytest.raises(ZeroDivisionError):
        asyncio.run(gather([wait(), fail(), wait()]))
    assert cancelled == [1, 1]


def test_a_cancelled_gathering_cancels_each_once() -> None:
    """What ends slowly is not cancelled a second time because another one has ended."""
    ended: list[str] = []

    async def quick() -> None:
        await asyncio.sleep(HOUR)

    async def slow() -> None:
        try:
            await asyncio.sleep(HOUR)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            ended.append("slow")
            raise

    async def main() -> None:
        gathering = asyncio.ensure_future(gather([slow(), quick()]))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        gathering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gathering

    asyncio.run(main())
    assert ended == ["slow"]


def test_a_gathering_that_failed_and_is_cancelled_then_cancels_each_once() -> None:
    """One of two fails; the other one waits for a thread before it ends. So with a group that fails and is stale."""

    async def main() -> list[str]:
        over, seen = asyncio.Event(), list[str]()

        async def slow() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                await over.wait()
                seen.append("ended by itself")
                raise

        async def quick() -> None:
            await asyncio.sleep(0)
            raise ZeroDivisionError

        group = asyncio.ensure_future(gather([quick(), slow()]))
        for _ in range(20):
            await asyncio.sleep(0)
        group.cancel()
        for _ in range(20):
            await asyncio.sleep(0)
        over.set()
        await asyncio.wait([group])
        for _ in range(20):
            await asyncio.sleep(0)
        return seen

    assert asyncio.run(main()) == ["ended by itself"]


def test_results_come_in_order() -> None:
    async def later(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert asyncio.run(gather([later(0.02), later(0.0), later(0.01)])) == [0.02, 0.0, 0.01]
