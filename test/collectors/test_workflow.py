"""An async function plays samples: its time, its errors, its end; and in a collector it is an environment like any."""

from __future__ import annotations

import asyncio
import functools
import inspect
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from support.collecting import TOKENIZER, Questions, chat, new_weights, policy_of, queries
from support.waiting import PATIENCE, in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector, environments, workflow
from torchrl_moe.collectors.async_collector import evaluate
from torchrl_moe.collectors.environments import EnvironmentTimeoutError
from torchrl_moe.collectors.workflow import Ask, Workflow, is_episode_function
from torchrl_moe.errors import CollectionError
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.trainers.samples import PromptEpisode, Rewards

Collect = Callable[..., AsyncLLMCollector]


async def one_turn(data: TensorDictBase, ask: Ask) -> float:
    await ask(data["query"])
    return float(data["query"][1:])


def then(end: Callable[[str], Any]) -> Any:
    """An episode of one answer, which ends with what a function, maybe an async one, makes of its query."""

    async def episode(data: TensorDictBase, ask: Ask) -> Any:
        await ask(data["query"])
        value = end(data["query"])
        return await value if inspect.isawaitable(value) else value

    return episode


async def for_ever(_: str) -> float:
    await asyncio.Event().wait()
    return 1.0


def hold(engine: FakeAsyncVLLM) -> None:
    """Let answers take a minute a token."""
    for replica in engine.replicas:
        replica.token_seconds = 60.0


def play(
    engine: FakeAsyncVLLM,
    episode: Any,
    timeout: float | None = None,
    meanwhile: Callable[[], Awaitable[Any]] | None = None,
) -> list[TensorDictBase]:
    """One sample, alone; ``meanwhile`` is called while each answer is generated."""

    async def generate(request: SampleRequest, _: int) -> Completion:
        if meanwhile is not None:
            await meanwhile()
        return await engine.agenerate(**request.arguments)

    workflow = Workflow(episode)
    try:
        return asyncio.run(workflow.play(policy_of(engine), generate, TensorDict(query="q7"), timeout))
    finally:
        workflow.close()


async def an_hour() -> None:
    """Let an hour pass on the clock of the running loop, and let it do what is due."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + 3600.0  # type: ignore[method-assign]
    for _ in range(5):
        await asyncio.sleep(0)


def soon(function: Callable[[], Any]) -> Any:
    """What a function returns, which would else wait for ever."""
    return in_thread(function).result(PATIENCE)


def running(engine: FakeAsyncVLLM) -> int:
    return sum(replica.last_stats.running for replica in engine.replicas)


# -- what one is ------------------------------------------------------------------------------------------------------
class Agent:
    """Called like an async function."""

    async def __call__(self, data: TensorDictBase, ask: Ask) -> float:
        return await one_turn(data, ask)

    async def episode(self, data: TensorDictBase, ask: Ask) -> float:
        return await one_turn(data, ask)


@pytest.mark.parametrize("episode", [one_turn, Agent(), Agent().episode, functools.partial(one_turn)])
def test_async_functions_and_what_is_called_like_one(engine: FakeAsyncVLLM, episode: Any) -> None:
    assert is_episode_function(episode)
    (turn,) = play(engine, episode)
    assert (turn.batch_size, turn["next", "reward"].tolist()) == ((1,), [[[7.0]]])


@pytest.mark.parametrize("other", [Agent, chat, lambda: chat(1), chat(1), 3])
def test_anything_else_is_not(other: Any) -> None:
    assert not is_episode_function(other)


# -- what user code does ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, asyncio.CancelledError])
@pytest.mark.parametrize("where", ["reward", "reward's coroutine", "task", "thread"])
def test_code_that_ends_the_program_costs_its_group(collect: Collect, where: str, error: type[BaseException]) -> None:
    """Plain rewards, async ones, and tasks and threads that an episode starts."""

    def ends() -> None:
        raise error(3)

    async def ends_too() -> None:
        ends()

    async def starts() -> None:
        await asyncio.gather(ends_too(), asyncio.sleep(0) if where == "task" else asyncio.to_thread(ends))

    end = {"reward": ends, "reward's coroutine": ends_too}.get(where, starts)
    if where.startswith("reward"):
        played: Any = PromptEpisode("query", Rewards(lambda query: end() if query == "q1" else 1.0), TOKENIZER)
    else:
        played = then(lambda query: end() if query == "q1" else 1.0)
    collector = collect(played, groups_per_batch=2, max_failures=1)
    seen = soon(lambda: [query for batch in islice(collector, 2) for query in queries(batch)[::2]])
    assert seen == ["q0", "q2", "q3", "q4"]
    assert collector.stats()["collector/groups_dropped/failed"] == 1


def test_code_that_ends_the_program_ends_a_run_with_its_name(collect: Collect) -> None:
    def generated(completion: str) -> float:
        return exec("import sys; sys.exit(3)") or 0.0

    episode = PromptEpisode("query", Rewards(generated), TOKENIZER)
    collector = collect(episode)
    for ask in (lambda: next(iter(collector)), lambda: collector.evaluate(episode, 1, dataloader=Questions(1))):
        with pytest.raises(RuntimeError, match=r"the reward function 'generated' raised SystemExit\(3\)"):
            soon(ask)


@pytest.mark.parametrize("where", ["reward", "thread of an episode"])
def test_calls_that_hang_cost_threads_and_not_the_others(
    collect: Collect, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More of them than there are threads at a time; then as many as are borne."""
    monkeypatch.setattr(workflow, "MOST_THREADS", 4)
    monkeypatch.setattr(environments, "MOST_GIVEN_UP", 12)
    released, hangs = threading.Event(), threading.Event()

    def slow(query: str) -> float:
        if hangs.is_set() or int(query[1:]) % 6 == 0:
            released.wait()  # a shutdown that waited for it would not return either
        return 1.0

    in_episode = then(lambda query: asyncio.to_thread(slow, query))
    played = PromptEpisode("query", Rewards(slow), TOKENIZER) if where == "reward" else in_episode
    batches = iter(collect(played, groups_per_batch=2, max_failures=100, reward_timeout=1.0, max_staleness=0))
    try:
        seen = soon(lambda: [query for _ in range(8) for query in queries(next(batches))])  # past q0, q6 and q12
        assert all(int(query[1:]) % 6 for query in seen)
        hangs.set()
        with pytest.raises(CollectionError, match=r"12 calls that were given up still run .* of .*slow: a function"):
            soon(lambda: list(batches))
    finally:
        released.set()


def test_a_reward_that_is_late_is_named(collect: Collect) -> None:
    async def quick(completion: str) -> float:
        return 1.0

    async def late(completion: str) -> float:
        return await for_ever(completion)

    collector = collect(PromptEpisode("query", Rewards([quick, late]), TOKENIZER), reward_timeout=0.05)
    with pytest.raises(EnvironmentTimeoutError, match=r"within 0.05 s: it waits for the reward function 'late'"):
        soon(lambda: next(iter(collector)))


def test_an_episode_that_does_not_end_is_ended(collect: Collect) -> None:
    async def endless(data: TensorDictBase, ask: Ask) -> float:
        while True:
            await ask(data["query"])

    with pytest.raises(ValueError, match=r"asks for another answer after max_turns=3: end it, .* or raise max_turns"):
        soon(lambda: next(iter(collect(endless, max_turns=3))))


# -- in a collector ---------------------------------------------------------------------------------------------------


def test_samples_wait_for_their_tools_side_by_side(collect: Collect) -> None:
    """Each sample's tool waits until all four samples are at theirs: one after the other they would wait for ever."""
    waiting: list[asyncio.Event] = []

    async def meet(_: str) -> float:
        waiting.append(mine := asyncio.Event())
        if len(waiting) == 4:
            for other in waiting:
                other.set()
        return float(await mine.wait())

    batch = next(iter(collect(then(meet), groups_per_batch=2, max_staleness=0, heartbeat_timeout=60.0)))
    assert (batch.batch_size, len(waiting)) == ((4,), 4)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        *(
            (value, TypeError, "an episode must return its reward, a number or one number per turn, got")
            for value in ([[1.0], [2.0]], {"reward": 1.0}, "1.0", [None], [1.0, "a"], torch.ones(1, 1))
        ),
        *(
            (value, ValueError, "a reward must be finite")
            for value in (float("nan"), [float("inf")], np.float32("nan"), 10**400, torch.tensor([torch.nan]))
        ),
        ([1.0, 2.0], ValueError, "returned 2 rewards for 1 turns"),
        ([], ValueError, "returned 0 rewards for 1 turns"),
    ],
)
def test_what_is_no_reward_is_refused(engine: FakeAsyncVLLM, value: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        play(engine, then(lambda _: value))


def test_a_sample_without_a_reward_is_left_out(collect: Collect, engine: FakeAsyncVLLM) -> None:
    plays: Counter[str] = Counter()

    async def episode(data: TensorDictBase, ask: Ask) -> float | None:
        plays[data["query"]] += 1
        number = plays[data["query"]]
        await ask(data["query"])
        return None if number == 2 else float(number)

    batch = next(iter(collect(episode, group_size=3)))
    assert (batch["next", "reward"].flatten().tolist(), set(batch["group_id"].tolist())) == ([1.0, 3.0], {0})
    odd = then(lambda query: 1.0 if int(query[1:]) % 2 else None)
    assert queries(evaluate(policy_of(engine), odd, 4, Questions(9))) == ["q1", "q3"]
    with pytest.raises(ValueError, match="none of 1 answers has a reward"):
        evaluate(policy_of(engine), odd, 1, Questions(9))


def test_a_filter_a_seed_and_a_checkpoint_are_those_of_any_collector(collect: Collect) -> None:
    def is_odd(rows: TensorDictBase) -> bool:
        assert threading.current_thread().name.startswith("torchrl_moe-workflow")
        return int(rows[0]["query"][1:]) % 2 == 1

    first = collect(one_turn, group_filter=is_odd, order="fifo")
    assert first.set_seed(3) == 4
    batches = iter(first)
    assert [queries(next(batches))[0] for _ in range(2)] == ["q1", "q3"]
    state = first.state_dict()
    first.shutdown()
    second = collect(one_turn, group_filter=is_odd, order="fifo")
    second.load_state_dict(state)
    assert queries(next(iter(second)))[0] == "q5"


@pytest.mark.parametrize("method", ["state_dict", "pause"])
def test_an_episode_that_would_wait_for_its_own_loop_is_told_so(collect: Collect, method: str) -> None:
    async def saving(_: str) -> float:
        with pytest.raises(RuntimeError, match=r"await asyncio\.to_thread"):
            enter()
        await asyncio.to_thread(enter)
        return 1.0

    def enter() -> None:
        if method == "pause":
            with collector.pause():
                return
        assert collector.state_dict()["frames"] == 0

    collector = collect(then(saving), max_staleness=0)
    assert next(iter(collector))["next", "reward"].flatten().tolist() == [1, 1]


# -- failures ---------------------------------------------------------------------------------------------------------


def test_a_failure_ends_the_answers_of_the_rest_of_its_group(collect: Collect, engine: FakeAsyncVLLM) -> None:
    hold(engine)
    samples: list[int] = []

    async def episode(data: TensorDictBase, ask: Ask) -> float:
        samples.append(1)
        if len(samples) == 1:
            while not running(engine):
                await asyncio.sleep(0.001)
            raise ZeroDivisionError
        await ask(data["query"])
        return 1.0

    with pytest.raises(ZeroDivisionError):
        next(iter(collect(episode, max_staleness=0)))
    until(lambda: not running(engine))


def test_a_shutdown_cancels_it_and_aborts_its_answers(collect: Collect, engine: FakeAsyncVLLM) -> None:
    hold(engine)
    cancelled: list[str] = []

    async def episode(data: TensorDictBase, ask: Ask) -> float:
        try:
            if data["query"] == "q0":
                await asyncio.Event().wait()
            await ask(data["query"])
        except asyncio.CancelledError:
            cancelled.append(data["query"])
            raise
        return 1.0

    collector = collect(episode, groups_per_batch=2, max_staleness=0)
    trainer = in_thread(lambda: next(iter(collector), None))
    until(lambda: running(engine) == 2)
    collector.shutdown()
    assert trainer.result(60) is None
    assert sorted(cancelled) == ["q0", "q0", "q1", "q1"]
    until(lambda: not running(engine))


def test_stale_groups_are_cancelled(collect: Collect, engine: FakeAsyncVLLM) -> None:
    held = threading.Barrier(3)  # both samples of the group, and who updates the weights
    cancelled: list[str] = []

    async def end(query: str) -> float:
        if query != "q1":
            return 1.0
        arrived = asyncio.create_task(asyncio.to_thread(held.wait, 60))
        try:
            return await for_ever(query)
        except asyncio.CancelledError:
            cancelled.append("q1")
            await arrived
            raise

    update = in_thread(lambda: (held.wait(60), new_weights(engine, 1)))
    batch = next(iter(collect(then(end), max_staleness=0, on_stale="drop", groups_per_batch=2)))
    update.result()
    assert "q1" not in queries(batch)
    assert cancelled == ["q1", "q1"]


# -- its time ---------------------------------------------------------------------------------------------------------


def test_the_time_in_which_answers_are_generated_does_not_count(engine: FakeAsyncVLLM) -> None:
    """Two answers at a time and then one, of an hour each; a minute is allowed."""

    async def episode(data: TensorDictBase, ask: Ask) -> float:
        await asyncio.gather(ask("one"), ask("two"))
        await ask("three")
        return 1.0

    assert len(play(engine, episode, 60.0, an_hour)) == 3


@pytest.mark.parametrize("questions", [0, 1])
def test_time_without_an_answer_under_way_does(engine: FakeAsyncVLLM, questions: int) -> None:
    async def episode(data: TensorDictBase, ask: Ask) -> float:
        for _ in range(questions):
            await ask("one")
        await an_hour()
        return 1.0

    with pytest.raises(EnvironmentTimeoutError, match="the episode did not continue within 60 s"):
        play(engine, episode, 60.0)


def test_a_timeout_of_its_own_tool_is_its_own(engine: FakeAsyncVLLM) -> None:
    with pytest.raises(TimeoutError) as caught:
        play(engine, then(lambda query: asyncio.wait_for(for_ever(query), 0.01)), timeout=60.0)
    assert not isinstance(caught.value, EnvironmentTimeoutError)


def test_an_answer_that_nobody_waits_for_is_refused_and_aborted(engine: FakeAsyncVLLM) -> None:
    hold(engine)
    lost: list[Any] = []

    async def episode(data: TensorDictBase, ask: Ask) -> float:
        lost.append(asyncio.ensure_future(ask("one")))
        while not running(engine):
            await asyncio.sleep(0.001)
        return 1.0

    with pytest.raises(ValueError, match="returned before 1 of its answers had come"):
        play(engine, episode)
    until(lambda: not running(engine))
    assert lost[0].cancelled()
