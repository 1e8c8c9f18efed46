"""Environments: one thread at a time, fit for their samples, their dataloader unharmed; an episode plays its turns."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import EnvBase, StepCounter, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv, DatasetChatEnv

from support.collecting import TOKENIZER, Questions, chat, policy_of
from support.waiting import HOUR
from torchrl_moe.collectors import AsyncLLMCollector, environments
from torchrl_moe.collectors.environments import (
    MOST_THREADS,
    EnvironmentPool,
    EnvironmentTimeoutError,
    gather,
    play_episode,
    take_dataloader,
    with_batch_size,
)
from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest
from torchrl_moe.testing import FakeAsyncVLLM

REPLICAS = 1


class Right(Transform):
    """Rewards as TorchRL's tasks do: the answer stands in ``next``, where the data loader's transform puts it."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        right = [answer == "4" for answer in next_tensordict["answer"]]
        next_tensordict.set("reward", torch.tensor(right).float().reshape(-1, 1, 1))
        return next_tensordict


def test_rewards_see_the_data_without_its_loader() -> None:
    env = DatasetChatEnv.from_dataloader(Questions(8), repeats=4, batch_size=(16,), tokenizer=TOKENIZER)
    bare, _, repeats = take_dataloader(env.append_transform(Right()))
    assert repeats == 4
    sample = TensorDict({"query": NonTensorData("2+2="), "answer": NonTensorData("4")})
    env = with_batch_size(bare, 2)
    root = env.reset(lazy_stack([sample, sample.copy()]))
    root["history"].full = root["history"].prompt
    assert env.step(root)["next", "reward"].flatten().tolist() == [1.0, 1.0]


def test_a_chat_of_another_size_is_made_again_with_all_it_has() -> None:
    base = ChatEnv(batch_size=(6,), tokenizer=TOKENIZER, system_prompt="be brief", data_key="question", user_role="you")
    env = with_batch_size(TransformedEnv(base, StepCounter(max_steps=3)), 4)
    again = env.base_env
    assert (again.system_prompt, again.data_key, again.user_role) == ("be brief", "question", "you")
    assert (env.batch_size, env.transform[0].max_steps) == ((4,), 3)

    class Mine(ChatEnv):
        """Of which nobody knows how it is made."""

    with pytest.raises(ValueError, match=r"batch size \[6\]: make it with \(1,\), .* or with \(4,\)"):
        with_batch_size(Mine(batch_size=(6,), tokenizer=TOKENIZER), 4)


@pytest.mark.parametrize(("given", "seen"), [({"thinking": False, "chat_template_name": "qwen"}, False), ({}, True)])
def test_arguments_of_an_environments_template_are_used(
    collect: Callable[..., AsyncLLMCollector], engine: FakeAsyncVLLM, given: dict[str, Any], seen: bool
) -> None:
    """TorchRL renders with them in text mode only."""
    template = "{{ [messages[0].content, thinking] | tojson }}"
    policy = policy_of(engine, chat_template=template, chat_template_kwargs={"thinking": True})
    env = ChatEnv(batch_size=(1,), tokenizer=TOKENIZER, template_kwargs=given)
    row = next(iter(collect(env.append_transform(StepCounter(max_steps=1)), policy=policy)))[0]
    assert json.loads(row["text"].prompt) == ["q0", seen]
    assert "chat_template_kwargs" not in row.keys()  # noqa: SIM118


async def lent(pool: EnvironmentPool, work: Any, seconds: float | None = None, calls: int = 1) -> list[Any]:
    """What so many calls of an episode return."""
    async with pool.lend(seconds) as in_thread:
        return [await in_thread(work) for _ in range(calls)]


def both_at_once(pool: EnvironmentPool, work: Any, count: int = 4) -> list[Any]:
    """What ``count`` episodes of two calls each return, played together."""

    async def main() -> list[Any]:
        return await asyncio.gather(*(lent(pool, work, calls=2) for _ in range(count)))

    return asyncio.run(main())


@pytest.fixture
def pool_of() -> Iterator[Callable[..., EnvironmentPool]]:
    """Make pools, and close them."""
    with ExitStack() as stack:

        def make(env: EnvBase, more: Callable[[], EnvBase] | None = None) -> EnvironmentPool:
            return stack.enter_context(closing(EnvironmentPool(env, more)))

        yield make


@pytest.fixture
def over() -> Iterator[threading.Event]:
    """What hangs waits for it, at most until its test is over."""
    event = threading.Event()
    yield event
    event.set()


Pools = Callable[..., EnvironmentPool]


def test_a_single_environment_is_used_by_one_thread_at_a_time(pool_of: Pools) -> None:
    busy, env = threading.Lock(), chat(2)

    def work(env: EnvBase) -> int:
        assert busy.acquire(blocking=False)
        time.sleep(0.002)
        busy.release()
        return id(env)

    assert both_at_once(pool_of(env), work) == [[id(env)] * 2] * 4


def test_an_environment_of_one_sample_is_kept_by_it_and_more_are_made_only_if_all_are_busy(pool_of: Pools) -> None:
    """Episodes wait for one another in their first call: so each has an environment."""
    together = threading.Barrier(4)
    pairs = both_at_once(pool_of(chat(1), lambda: chat(1)), lambda env: (together.wait(30), id(env))[1])
    assert all(first == second for first, second in pairs)
    assert len({first for first, _ in pairs}) == 4
    made: list[EnvBase] = []

    def make() -> EnvBase:
        made.append(env := chat(2))
        return env

    pool, together = pool_of(chat(2), make), threading.Barrier(3)
    both_at_once(pool, id, count=1)
    assert made == []
    both_at_once(pool, lambda env: together.wait(30), count=3)
    assert len(made) == 2


def test_errors_of_its_threads_name_what_the_user_wrote(
    pool_of: Pools, over: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environments, "MOST_GIVEN_UP", 2)
    inside: list[int] = []

    def hanging() -> EnvBase:
        inside.append(1)
        over.wait(60)
        return chat(1)

    pool = pool_of(chat(1).append_transform(StepCounter()), hanging)

    async def main() -> None:
        async with pool.lend(None) as in_thread:
            with pytest.raises(RuntimeError, match=r"^ChatEnv raised StopIteration"):
                await in_thread(lambda _: next(iter(())))
            for count in (1, 2):
                waiting = asyncio.ensure_future(pool.lend(None).__aenter__())
                while len(inside) < count:
                    await asyncio.sleep(0.01)
                waiting.cancel()
                await asyncio.wait([waiting])
            with pytest.raises(CollectionError, match=r"2 calls that were given up .* of .*\.hanging: a function"):
                await pool.lend(None).__aenter__()

    asyncio.run(main())


def test_an_environment_that_hangs_is_given_up_for_another_but_there_is_an_end_to_it(
    pool_of: Pools, over: threading.Event
) -> None:
    pool = pool_of(chat(1), lambda: chat(1))

    async def main() -> None:
        for _ in range(MOST_THREADS):
            with pytest.raises(EnvironmentTimeoutError, match=r"did not return within 0\.02 s"):
                await lent(pool, lambda env: over.wait(60), 0.02)
        assert await lent(pool, lambda env: 3) == [3]
        with pytest.raises(CollectionError, match=f"{MOST_THREADS + 1} environments did not return in time"):
            await lent(pool, lambda env: over.wait(60), 0.02)
        with pytest.raises(CollectionError, match="there is no other: pass a callable"):
            await lent(pool_of(chat(2)), lambda env: over.wait(60), 0.02)
        over.set()
        while pool._hung:
            await asyncio.sleep(0.01)
        assert await lent(pool, lambda env: 3) == [3]  # they have come back

    asyncio.run(main())


def test_a_cancelled_episode_gives_its_environment_back_when_the_call_is_over(
    pool_of: Pools, over: threading.Event
) -> None:
    inside, pool = threading.Event(), pool_of(chat(2))
    used: list[str] = []

    def slow(env: EnvBase) -> None:
        inside.set()
        over.wait(60)
        used.append("first")

    async def main() -> None:
        first = asyncio.ensure_future(lent(pool, slow))
        await asyncio.to_thread(inside.wait, 60)
        first.cancel()
        second = asyncio.ensure_future(lent(pool, lambda env: used.append("second")))
        await asyncio.sleep(0.02)
        over.set()
        await second
        with pytest.raises(asyncio.CancelledError):
            await first

    asyncio.run(main())
    assert used == ["first", "second"]


def closings(env: EnvBase, into: list[EnvBase]) -> EnvBase:
    env.close = lambda **_: into.append(env)
    return env


@pytest.mark.parametrize("is_kept", [False, True])
def test_an_environment_that_is_used_as_the_pool_closes_is_closed_after_that_unless_it_is_kept(
    over: threading.Event, is_kept: bool
) -> None:
    closed: list[EnvBase] = []
    first, busy = closings(chat(1), closed), closings(chat(1), closed)
    pool, inside = EnvironmentPool(first, lambda: busy), threading.Event()

    def slow(env: EnvBase) -> list[EnvBase]:
        inside.set()
        over.wait(60)
        return list(closed)

    async def main() -> list[EnvBase]:
        async with pool.lend(None) as one, pool.lend(None) as two:
            await one(id)
            call = asyncio.ensure_future(two(slow))
            await asyncio.to_thread(inside.wait, 60)
            pool.close(keep=busy if is_kept else None)
            assert closed == [first]
            over.set()
            return await call

    assert asyncio.run(main()) == [first]
    assert closed == [first, busy][: 1 if is_kept else 2]


def test_an_environment_that_is_made_as_the_pool_closes_is_closed() -> None:
    closed: list[EnvBase] = []
    first, late = closings(chat(1), closed), closings(chat(1), closed)

    def make() -> EnvBase:
        pool.close()  # meanwhile
        return late

    pool = EnvironmentPool(first, make)

    async def main() -> None:
        async with pool.lend(None), pool.lend(None):
            pass

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
    turns = asyncio.run(play_episode(policy_of(engine), generate, in_thread, data, **kwargs))
    return turns, asked


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


async def noting(noted: list[str], seconds: float = 0.0) -> None:
    """Wait; if it is cancelled, note it after so many seconds."""
    try:
        await asyncio.sleep(HOUR)
    except asyncio.CancelledError:
        await asyncio.sleep(seconds)
        noted.append("cancelled")
        raise


async def failing() -> None:
    await asyncio.sleep(0)
    raise ZeroDivisionError


def test_the_first_failure_cancels_the_rest() -> None:
    noted: list[str] = []
    with pytest.raises(ZeroDivisionError):
        asyncio.run(gather([noting(noted), failing(), noting(noted)]))
    assert noted == ["cancelled"] * 2


@pytest.mark.parametrize("fails", [True, False])
def test_a_gathering_that_is_cancelled_cancels_each_once(fails: bool) -> None:
    """What ends slowly is not cancelled again: because another one has ended, or as a failed group becomes stale."""
    noted: list[str] = []

    async def main() -> None:
        group = asyncio.ensure_future(gather([failing() if fails else asyncio.sleep(HOUR), noting(noted, 0.05)]))
        for _ in range(20):
            await asyncio.sleep(0)
        group.cancel()
        await asyncio.wait([group])
        await asyncio.sleep(0.2)  # the other one ends meanwhile

    asyncio.run(main())
    assert noted == ["cancelled"]
