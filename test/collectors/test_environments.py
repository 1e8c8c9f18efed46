"""Environments: one thread at a time, fit for their samples, their dataloader unharmed; an episode plays its turns."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.envs.llm.transforms import DataLoadingPrimer

from support.collecting import TOKENIZER, Questions, chat, policy_of
from support.waiting import HOUR
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.collectors.environments import (
    MOST_THREADS,
    EnvironmentPool,
    EnvironmentTimeoutError,
    Episode,
    gather,
    take_dataloader,
    with_batch_size,
)
from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest
from torchrl_moe.testing import FakeAsyncVLLM

REPLICAS = 1


def dataset_env() -> TransformedEnv:
    env = DatasetChatEnv.from_dataloader(Questions(8), repeats=4, batch_size=(16,), tokenizer=TOKENIZER)
    return env.append_transform(StepCounter(max_steps=1))


def test_a_dataloader_is_taken_from_a_copy() -> None:
    env = dataset_env()
    bare, dataloader, repeats = take_dataloader(env)
    assert isinstance(dataloader, Questions)
    assert repeats == 4
    assert not any(isinstance(transform, DataLoadingPrimer) for transform in bare.transform)
    assert ([type(transform) for transform in bare.transform][1:], len(env.transform)) == ([StepCounter], 2)


class Right(Transform):
    """Rewards as TorchRL's tasks do: the answer stands in ``next``, where the data loader's transform puts it."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        right = [answer == "4" for answer in next_tensordict["answer"]]
        next_tensordict.set("reward", torch.tensor(right).float().reshape(-1, 1, 1))
        return next_tensordict


def test_rewards_see_the_data_without_its_loader() -> None:
    bare, _, _ = take_dataloader(dataset_env().append_transform(Right()))
    sample = TensorDict({"query": NonTensorData("2+2="), "answer": NonTensorData("4")})
    env = with_batch_size(bare, 2)
    root = env.reset(lazy_stack([sample, sample.copy()]))
    root["history"].full = root["history"].prompt
    assert env.step(root)["next", "reward"].flatten().tolist() == [1.0, 1.0]


def test_an_environment_without_one_is_itself() -> None:
    env = chat(2)
    assert take_dataloader(env) == (env, None, None)


@pytest.mark.parametrize("size", [1, 4])
def test_an_environment_that_fits_is_itself(size: int) -> None:
    env = chat(size)
    assert with_batch_size(env, 4) is env


def test_a_chat_of_another_size_is_made_again_with_all_it_has() -> None:
    base = ChatEnv(batch_size=(6,), tokenizer=TOKENIZER, system_prompt="be brief", data_key="question", user_role="you")
    env = with_batch_size(TransformedEnv(base, StepCounter(max_steps=3)), 4)
    assert env.batch_size == (4,)
    again = env.base_env
    assert (again.system_prompt, again.data_key, again.user_role) == ("be brief", "question", "you")
    assert env.transform[0].max_steps == 3


def test_another_kind_of_environment_is_refused() -> None:
    class Mine(ChatEnv):
        pass

    with pytest.raises(ValueError, match=r"batch size \[6\]: make it with \(1,\), .* or with \(4,\)"):
        with_batch_size(Mine(batch_size=(6,), tokenizer=TOKENIZER), 4)


def test_arguments_of_an_environments_template_are_used(collect: Callable[..., AsyncLLMCollector]) -> None:
    """TorchRL renders with them in text mode only."""
    template = "{{ [messages[0].content, thinking] | tojson }}"
    with FakeAsyncVLLM() as engine:
        for given, seen in ({"thinking": False, "chat_template_name": "qwen"}, False), ({}, True):
            env = ChatEnv(batch_size=(1,), tokenizer=TOKENIZER, template_kwargs=given)
            policy = policy_of(engine, chat_template=template, chat_template_kwargs={"thinking": True})
            with_end = env.append_transform(StepCounter(max_steps=1))
            row = next(iter(collect(with_end, policy=policy, dataloader=Questions(1))))[0]
            assert json.loads(row["text"].prompt) == ["q0", seen]
            assert "chat_template_kwargs" not in row.keys()  # noqa: SIM118


def both_at_once(pool: EnvironmentPool, work: Any, count: int = 4) -> list[Any]:
    """What ``count`` episodes of two calls each return, played together."""

    async def episode() -> list[Any]:
        async with pool.lend(None) as in_thread:
            return [await in_thread(work), await in_thread(work)]

    async def main() -> list[Any]:
        return await asyncio.gather(*(episode() for _ in range(count)))

    return asyncio.run(main())


def test_a_single_environment_is_used_by_one_thread_at_a_time() -> None:
    busy = threading.Lock()

    def work(env: EnvBase) -> int:
        assert busy.acquire(blocking=False)
        time.sleep(0.002)
        busy.release()
        return id(env)

    env = chat(2)
    pool = EnvironmentPool(env, None)
    assert both_at_once(pool, work) == [[id(env)] * 2] * 4
    pool.close()


def test_an_environment_of_one_sample_is_kept_by_it() -> None:
    """Four episodes wait for one another in their first call: so each has an environment, and has it in both."""
    together = threading.Barrier(4)

    def work(env: EnvBase) -> int:
        together.wait(30)
        return id(env)

    pool = EnvironmentPool(chat(1), lambda: chat(1))
    pairs = both_at_once(pool, work)
    assert all(first == second for first, second in pairs)
    assert len({first for first, _ in pairs}) == 4
    pool.close()


def test_environments_of_groups_are_made_only_if_all_are_busy() -> None:
    made = []

    def make() -> EnvBase:
        made.append(chat(2))
        return made[-1]

    pool = EnvironmentPool(chat(2), make)
    both_at_once(pool, id, count=1)
    assert made == []
    together = threading.Barrier(3)
    both_at_once(pool, lambda env: together.wait(30), count=3)
    assert len(made) == 2
    pool.close()


def hang(pool: EnvironmentPool, over: threading.Event) -> None:
    async def main() -> None:
        async with pool.lend(0.02) as in_thread:
            await in_thread(lambda env: over.wait(60))

    asyncio.run(main())


def test_an_environment_that_hangs_is_given_up_for_another() -> None:
    over = threading.Event()
    pool = EnvironmentPool(chat(2), lambda: chat(2))
    try:
        with pytest.raises(EnvironmentTimeoutError, match=r"did not return within 0\.02 s"):
            hang(pool, over)
        assert both_at_once(pool, lambda env: 1, count=1) == [[1, 1]]
    finally:
        over.set()
        pool.close()


def test_one_that_has_no_other_says_so() -> None:
    over = threading.Event()
    pool = EnvironmentPool(chat(2), None)
    try:
        with pytest.raises(CollectionError, match="there is no other: pass a callable"):
            hang(pool, over)
    finally:
        over.set()
        pool.close()


def test_there_is_an_end_to_giving_up() -> None:
    over = threading.Event()
    pool = EnvironmentPool(chat(1), lambda: chat(1))

    async def episode() -> None:
        async with pool.lend(0.02) as in_thread:
            await in_thread(lambda env: over.wait(60))

    async def main() -> None:
        for _ in range(MOST_THREADS):
            with pytest.raises(EnvironmentTimeoutError):
                await episode()
        with pytest.raises(CollectionError, match=f"{MOST_THREADS + 1} environments did not return in time"):
            await episode()
        over.set()
        while pool._hung:
            await asyncio.sleep(0.01)
        async with pool.lend(None) as in_thread:  # they have come back
            assert await in_thread(lambda env: 3) == 3

    try:
        asyncio.run(main())
    finally:
        over.set()
        pool.close()


@pytest.mark.parametrize("error", [SystemExit(3), StopIteration(), KeyboardInterrupt(), asyncio.CancelledError()])
def test_what_would_end_a_loop_or_a_task_is_an_error_like_any(error: BaseException) -> None:
    def fail(env: EnvBase) -> None:
        raise error

    pool = EnvironmentPool(chat(2), None)
    with pytest.raises(RuntimeError, match=f"an environment raised {type(error).__name__}"):
        both_at_once(pool, fail, count=1)
    pool.close()


def test_a_cancelled_episode_gives_its_environment_back_when_the_call_is_over() -> None:
    inside, over = threading.Event(), threading.Event()
    used: list[str] = []

    def slow(env: EnvBase) -> None:
        inside.set()
        over.wait(60)
        used.append("first")

    async def main() -> None:
        pool = EnvironmentPool(chat(2), None)

        async def episode(work: Any) -> None:
            async with pool.lend(None) as in_thread:
                await in_thread(work)

        first = asyncio.ensure_future(episode(slow))
        await asyncio.to_thread(inside.wait, 60)
        first.cancel()
        second = asyncio.ensure_future(episode(lambda env: used.append("second")))
        await asyncio.sleep(0.02)
        over.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first
        pool.close()

    asyncio.run(main())
    assert used == ["first", "second"]


def closings(env: EnvBase, into: list[EnvBase]) -> EnvBase:
    env.close = lambda **_: into.append(env)
    return env


def test_an_environment_that_is_used_as_the_pool_closes_is_closed_after_that() -> None:
    closed: list[EnvBase] = []
    first, busy = closings(chat(1), closed), closings(chat(1), closed)
    pool = EnvironmentPool(first, lambda: busy)
    inside, over = threading.Event(), threading.Event()

    def slow(env: EnvBase) -> list[EnvBase]:
        if env is first:
            return []
        inside.set()
        over.wait(60)
        return list(closed)

    async def main() -> list[EnvBase]:
        async with pool.lend(None) as one, pool.lend(None) as two:
            assert await one(slow) == []
            call = asyncio.ensure_future(two(slow))
            await asyncio.to_thread(inside.wait, 60)
            pool.close()
            assert closed == [first]
            over.set()
            return await call

    assert (asyncio.run(main()), closed) == ([first], [first, busy])


def test_one_that_is_to_be_kept_is_not_closed_after_its_use_either() -> None:
    closed: list[EnvBase] = []
    env = closings(chat(2), closed)
    pool = EnvironmentPool(env, None)

    async def main() -> None:
        async with pool.lend(None) as in_thread:
            await in_thread(lambda env: pool.close(keep=env))

    asyncio.run(main())
    assert closed == []


def test_an_environment_that_is_made_as_the_pool_closes_is_closed() -> None:
    closed: list[EnvBase] = []
    first, late = closings(chat(1), closed), closings(chat(1), closed)
    inside, over = threading.Event(), threading.Event()

    def make() -> EnvBase:
        inside.set()
        over.wait(60)
        return late

    pool = EnvironmentPool(first, make)

    async def main() -> None:
        async with pool.lend(None):
            another = asyncio.ensure_future(pool.lend(None).__aenter__())
            await asyncio.to_thread(inside.wait, 60)
            pool.close()
            over.set()
            await another

    asyncio.run(main())
    assert closed == [first, late]


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
    assert ([turn.batch_size for turn in turns], asked) == ([(3,)], [0, 1, 2])


def test_turns_continue_until_the_environment_is_done(engine: FakeAsyncVLLM) -> None:
    turns, asked = play(engine, chat(1, turns=4))
    assert ([turn["next", "done"].item() for turn in turns], asked) == ([False, False, False, True], [0] * 4)


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
