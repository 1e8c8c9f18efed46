"""An async function plays samples: its time, its errors, its end; and what its conversation asks and has for rows."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from itertools import islice
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History

from support.collecting import TOKENIZER, Questions, chat, new_weights, policy_of, queries
from support.waiting import PATIENCE, in_thread, until
from torchrl_moe.collectors import AsyncLLMCollector, environments, workflow
from torchrl_moe.collectors.async_collector import evaluate
from torchrl_moe.collectors.environments import EnvironmentPool, EnvironmentTimeoutError
from torchrl_moe.collectors.workflow import Ask, Conversation, Workflow, is_episode_function
from torchrl_moe.errors import CollectionError, RequestRefusedError
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.trainers.samples import PromptEpisode, Rewards

REPLICAS = 1
Collect = Callable[..., AsyncLLMCollector]


async def one_turn(data: TensorDictBase, ask: Ask) -> float:
    await ask(data["query"])
    return float(data["query"][1:])


async def of_nothing(data: TensorDictBase, ask: Ask) -> float:
    return 1.0


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
    who = "the reward function '<lambda>' " if where.startswith("reward") else ""
    assert f"{who}raised {error.__name__}(3)" in str(collector.first_failure)


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


def test_a_call_for_which_the_system_has_no_thread_is_not_made_later(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, made = environments.Threads(1, "few"), []
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            threads.submit(made.append, "refused")
    threads.submit(made.append, "taken").result(PATIENCE)
    assert made == ["taken"]


@pytest.mark.parametrize("where", [pytest.param("reward", marks=pytest.mark.parity), "thread of an episode"])
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
            for value in (float("nan"), [float("inf")], np.float32("nan"), 1e39, 10**400, torch.tensor([torch.nan]))
        ),
        ([1.0, 2.0], ValueError, "returned 2 rewards for 1 turns"),
        ([], ValueError, "returned 0 rewards for 1 turns"),
    ],
)
def test_what_is_no_reward_is_refused(engine: FakeAsyncVLLM, value: Any, kind: Any, words: str) -> None:
    with pytest.raises(kind, match=words):
        play(engine, then(lambda _: value))


def test_a_sample_without_a_reward_is_left_out_of_an_evaluation(engine: FakeAsyncVLLM) -> None:
    odd = then(lambda query: 1.0 if int(query[1:]) % 2 else None)
    assert queries(evaluate(policy_of(engine), odd, 4, Questions(9))) == ["q1", "q3"]
    with pytest.raises(ValueError, match="none of 1 answers has a reward"):
        evaluate(policy_of(engine), odd, 1, Questions(9))


def test_a_filter_and_a_seed_are_those_of_any_collector(collect: Collect) -> None:
    def is_odd(rows: TensorDictBase) -> bool:
        assert threading.current_thread().name.startswith("torchrl_moe-workflow")
        return int(rows[0]["query"][1:]) % 2 == 1

    collector = collect(one_turn, group_filter=is_odd, order="fifo")
    assert collector.set_seed(3) == 4
    assert [queries(batch)[0] for batch in islice(collector, 2)] == ["q1", "q3"]


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


# -- a conversation: which ids a prompt sends, what its rows hold, and what is refused --------------------------------
def talk(policy: vLLMWrapper, script: Callable[[Conversation], Awaitable[Any]]) -> tuple[Conversation, Any]:
    """The conversation that a script had about ``query="q"``, and what the script returned."""

    async def generate(request: SampleRequest, _: int) -> Completion:
        return await policy.model.agenerate(**request.arguments)

    conversation = Conversation(policy, generate, TensorDict(query="q"), {})
    return conversation, asyncio.run(script(conversation))


def history_policy(engine: FakeAsyncVLLM) -> vLLMWrapper:
    return policy_of(engine, prefer_tokens=True)


def followed(answer: TensorDictBase, text: str = "and then?") -> History:
    return answer["history"].full.append(History(role="user", content=text), inplace=False, dim=-1)


def twice(engine: FakeAsyncVLLM, prompt: Any, follow: Callable[[TensorDictBase], Any] = followed) -> Any:
    """A script of two turns, with new weights between them."""

    async def script(conversation: Conversation) -> list[TensorDictBase]:
        first = await conversation.ask(prompt)
        engine.replicas[0].version = 1
        return [first, await conversation.ask(follow(first))]

    return script


@pytest.mark.parametrize(
    "prompt",
    ["one", [{"role": "user", "content": "one"}], History.from_chats([[{"role": "user", "content": "one"}]])[0]],
)
def test_a_chat_is_text_messages_or_a_history(engine: FakeAsyncVLLM, prompt: Any) -> None:
    conversation, answer = talk(history_policy(engine), lambda conversation: conversation.ask(prompt))
    assert TOKENIZER.decode(answer["tokens", "prompt"]) == "<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
    assert answer["history"].full.content == ["one", answer["history"].response.content[0]]
    (row,) = conversation.rows(2.5)
    assert torch.equal(row["tokens", "full"], answer["tokens", "full"])


def test_a_question_has_its_own_tools_and_arguments_of_the_template(engine: FakeAsyncVLLM) -> None:
    """And whatever a message has, which a ``History`` has no field for."""
    template = "{{ [messages[-1], tools, thinking] | tojson }}"
    policy = policy_of(engine, chat_template=template, chat_template_kwargs={"thinking": True})
    said = {"role": "tool", "content": "42", "name": "search", "tool_call_id": "c1"}
    chat = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1"}]},
        said,
    ]

    async def script(conversation: Conversation) -> list[TensorDictBase]:
        tools = [{"name": "search"}]
        asked = [conversation.ask(chat), conversation.ask(chat, tools=tools, chat_template_kwargs={"thinking": False})]
        return [await one for one in asked]

    conversation, answers = talk(policy, script)
    texts = [json.loads(answer["text"].prompt) for answer in answers]
    assert texts == [[said, None, True], [said, [{"name": "search"}], False]]
    for row, answer in zip(conversation.rows([1.0, 2.0]), answers, strict=True):
        assert row["history"].prompt.content == ["q", "", "42"]
        assert row["next", "history"].prompt.content[:3] == ["q", "", "42"]
        assert set(row.keys()) == {"query", *answer.keys(), "next", "done", "terminated", "truncated"}


def test_an_answer_that_continues_a_message_can_be_followed_up(engine: FakeAsyncVLLM) -> None:
    chat = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "It "}]
    _, (first, second) = talk(history_policy(engine), twice(engine, chat))
    assert TOKENIZER.decode(first["tokens", "prompt"]).endswith("one<|im_end|>\n<|im_start|>assistant\nIt ")
    assert first["history"].full.content == ["one", f"It {first['history'].response.content[0]}"]
    assert torch.equal(second["tokens", "prompt"][: len(first["tokens", "full"])], first["tokens", "full"])


def test_text_and_ids_are_sent_as_they_are(engine: FakeAsyncVLLM) -> None:
    _, answer = talk(policy_of(engine, input_mode="text"), lambda one: one.ask("one"))
    assert answer["tokens", "prompt"].tolist() == [111, 110, 101]
    for ids in ([111, 110, 101], torch.tensor([111, 110, 101]), np.array([111, 110, 101], np.int32)):
        _, answer = talk(policy_of(engine, input_mode="tokens"), lambda one, ids=ids: one.ask(ids))
        assert answer["tokens", "prompt"].tolist() == [111, 110, 101]


@pytest.mark.parametrize(
    ("mode", "prompt", "words"),
    [
        ("history", [111, 110], r"mode='history' takes a History \[turns\], messages, or text, got \[111"),
        ("history", History.from_chats([[{"role": "user", "content": "one"}]]), "a History"),
        ("history", [], r"got \[\]"),
        ("text", [111, 110], "input_mode='text' takes text, got"),
        ("tokens", "one", "input_mode='tokens' takes token ids, got 'one'"),
        ("tokens", [{"role": "user", "content": "one"}], "takes token ids"),
        ("text", "with tools", "tools: for chats, and the policy has input_mode='text'"),
    ],
)
def test_a_prompt_of_another_kind_is_refused(engine: FakeAsyncVLLM, mode: Any, prompt: Any, words: str) -> None:
    tools = {"tools": [{"name": "f"}]} if prompt == "with tools" else {}
    with pytest.raises(TypeError, match=words):
        talk(policy_of(engine, input_mode=mode), lambda one: one.ask(prompt, **tools))


def test_a_prompt_continues_from_the_answer_that_it_repeats_or_from_none(engine: FakeAsyncVLLM) -> None:
    """A tree: two turns continue from the first answer, one from the second of these, then a new chat.

    The weights change before each, so each value of an earlier turn would be another one if it were made again.
    """

    async def script(conversation: Conversation) -> list[TensorDictBase]:
        root = await conversation.ask("one")
        engine.replicas[0].version = 1
        left = await conversation.ask(followed(root, "left"))
        engine.replicas[0].version = 2
        right = await conversation.ask(followed(root, "right"))
        engine.replicas[0].version = 3
        return [root, left, right, await conversation.ask(followed(right, "leaf")), await conversation.ask("two")]

    _, (root, *turns, leaf, new) = talk(history_policy(engine), script)
    had = len(root["tokens", "full"])
    response = slice(had - 6, had)
    for version, turn in enumerate(turns, 1):
        assert torch.equal(turn["tokens", "prompt"][:had], root["tokens", "full"])
        assert turn["policy_versions", "full"][response].tolist() == [0] * 6
        assert turn["policy_versions", "full"][-6:].tolist() == [version] * 6
        assert (turn["policy_versions", "full"] == version).sum() == 6
        assert torch.equal(turn["log_probs", "full"][response], root["log_probs", "response"])
        assert torch.equal(turn["routed_experts", "full"][: had - 1], root["routed_experts", "full"][:-1])
        assert (turn["routed_experts", "full"][had - 1, 1:] != -1).all()
    assert [(leaf["policy_versions", "full"] == version).sum() for version in range(4)] == [6, 0, 6, 6]
    assert set(new["policy_versions", "full"].tolist()) == {-1, 3}


def test_rows_are_laid_out_as_those_of_an_environment(engine: FakeAsyncVLLM) -> None:
    """The same keys, shapes and dtypes, turn by turn; the tokens too, for the prompts are the same."""
    policy = history_policy(engine)

    async def script(conversation: Conversation) -> None:
        await conversation.ask(followed(await conversation.ask("q")))

    async def generate(request: SampleRequest, _: int) -> Completion:
        return await engine.agenerate(**request.arguments)

    ours = talk(policy, script)[0].rows([1.0, 1.0])
    with closing(EnvironmentPool(chat(1, 2, reward=lambda _: 1.0), None)) as pool:
        theirs = [turn[0] for turn in asyncio.run(pool.play(policy, generate, TensorDict(query="q"), None))]
    for our, their in zip(ours, theirs, strict=True):
        their = their.exclude("step_count", ("next", "step_count"))  # a transform's
        assert {str(key) for key in our.keys(True, True)} == {str(key) for key in their.keys(True, True)}
        assert set(our.keys()) == set(their.keys())
        for key in their.keys(True, True):
            if isinstance(their[key], torch.Tensor) and key not in (("next", "truncated"), ("next", "terminated")):
                assert our[key].dtype == their[key].dtype, key
                assert torch.equal(our[key], their[key]) or our[key].isnan().any(), key
        assert our["query"] == their["query"]
        assert our["next", "history"].prompt.content[:3] == their["next", "history"].prompt.content[:3]
        assert type(our["next", "history"]) is type(their["next", "history"])
    assert [row["next", "truncated"].item() for row in ours] == [False, False]
    assert [row["next", "terminated"].item() for row in ours] == [False, True]


@pytest.mark.parametrize(
    ("reward", "expected"),
    [(2, [0, 0, 2]), (True, [0, 0, 1]), ([1, 2, 3.5], [1, 2, 3.5]), (torch.tensor(0.5), [0, 0, 0.5]),
     (np.float32(0.5), [0, 0, 0.5]), (torch.tensor([1.0, 0.0, 2.0]), [1, 0, 2])],
)  # fmt: skip
def test_a_reward_is_the_last_turns_or_one_for_each(engine: FakeAsyncVLLM, reward: Any, expected: list[float]) -> None:
    async def script(conversation: Conversation) -> None:
        for text in ("one", "two", "three"):
            await conversation.ask(text)

    rows = talk(history_policy(engine), script)[0].rows(reward)
    assert [row["next", "reward"].tolist() for row in rows] == [[[value]] for value in expected]
    assert [row["next", "done"].tolist() for row in rows] == [[False], [False], [True]]
    assert {row["next", "reward"].dtype for row in rows} == {torch.float32}


def test_turns_stand_in_the_order_in_which_they_were_asked_for_and_those_that_failed_do_not(
    engine: FakeAsyncVLLM,
) -> None:
    """The first question's answer comes after the last one's; the second question is refused."""

    async def script() -> Conversation:
        last_came = asyncio.Event()

        async def generate(request: SampleRequest, _: int) -> Completion:
            (text,) = request.prompts.chats[0].history.content
            if text == "bad":
                raise RequestRefusedError("no")
            if text == "first":
                await last_came.wait()
            return await engine.agenerate(**request.arguments)

        conversation = Conversation(history_policy(engine), generate, TensorDict(query="q"), {})

        async def ask(text: str) -> None:
            await conversation.ask(text)
            if text == "last":
                last_came.set()

        outcomes = await asyncio.gather(*(ask(text) for text in ("first", "bad", "last")), return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [type(None), RequestRefusedError, type(None)]
        return conversation

    rows = asyncio.run(script()).rows(1.0)
    assert [row["history"].prompt.content for row in rows] == [["first"], ["last"]]


def test_what_is_written_into_the_data_stands_in_every_row_and_after_its_end_nothing_is_asked(
    engine: FakeAsyncVLLM,
) -> None:
    asks = []

    async def episode(data: TensorDictBase, ask: Ask) -> float:
        asks.append(ask)
        await ask("one")
        await ask("two")
        data["calls"] = torch.tensor(3)
        return 1.0

    assert [turn["calls"].tolist() for turn in play(engine, episode)] == [[3], [3]]
    with pytest.raises(RuntimeError, match="this episode has ended"):
        asyncio.run(asks[0]("three"))
    with pytest.raises(ValueError, match="asked for no answer"):
        play(engine, of_nothing)
