"""A sample's turns: which ids a prompt sends, what its rows hold, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import closing
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.data.llm import History

from support.collecting import TOKENIZER, chat, policy_of
from torchrl_moe.collectors.environments import EnvironmentPool
from torchrl_moe.collectors.workflow import Conversation
from torchrl_moe.errors import RequestRefusedError
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest
from torchrl_moe.testing import FakeAsyncVLLM

REPLICAS = 1


def talk(
    policy: vLLMWrapper,
    script: Callable[[Conversation], Awaitable[Any]],
    data: TensorDictBase | None = None,
    **kwargs: Any,
) -> tuple[Conversation, Any]:
    """The conversation that a script had about ``query="q"``, and what the script returned."""

    async def generate(request: SampleRequest, _: int) -> Completion:
        return await policy.model.agenerate(**request.arguments)

    conversation = Conversation(policy, generate, TensorDict(query="q") if data is None else data, kwargs)
    return conversation, asyncio.run(script(conversation))


def history_policy(engine: FakeAsyncVLLM) -> vLLMWrapper:
    return policy_of(engine, prefer_tokens=True)


def as_chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def followed(answer: TensorDictBase, text: str = "and then?") -> History:
    return answer["history"].full.append(History(role="user", content=text), inplace=False, dim=-1)


def twice(engine: FakeAsyncVLLM, prompt: Any, follow: Callable[[TensorDictBase], Any] = followed, **kwargs: Any) -> Any:
    """A script of two turns, with new weights between them."""

    async def script(conversation: Conversation) -> list[TensorDictBase]:
        first = await conversation.ask(prompt, **kwargs)
        engine.replicas[0].version = 1
        return [first, await conversation.ask(follow(first))]

    return script


@pytest.mark.parametrize(
    "prompt",
    ["one", [{"role": "user", "content": "one"}], History.from_chats([[{"role": "user", "content": "one"}]])[0]],
)
def test_a_chat_is_text_messages_or_a_history(engine: FakeAsyncVLLM, prompt: Any) -> None:
    conversation, answer = talk(history_policy(engine), lambda conversation: conversation.ask(prompt))
    assert TOKENIZER.decode(answer["tokens", "prompt"]) == as_chat("one")
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
    assert TOKENIZER.decode(first["tokens", "prompt"]) == as_chat("one") + "It "
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


def test_a_turn_at_another_temperature_is_refused(engine: FakeAsyncVLLM) -> None:
    async def script(conversation: Conversation) -> None:
        first = await conversation.ask("one", temperature=0.5)
        with pytest.raises(ValueError, match=r"this turn's temperature is 0\.7, that of the turn before 0\.5"):
            await conversation.ask(followed(first), temperature=0.7)

    talk(history_policy(engine), script)


def test_ids_that_continue_keep_what_is_known(engine: FakeAsyncVLLM) -> None:
    script = twice(engine, [65, 66], lambda first: [*first["tokens", "full"].tolist(), 67])
    _, (first, second) = talk(policy_of(engine, input_mode="tokens"), script)
    assert second["policy_versions", "full"].tolist() == [-1] * 2 + [0] * 6 + [-1] + [1] * 6
    assert torch.equal(second["log_probs", "full"][2:8], first["log_probs", "response"])
    assert first["tokens", "prompt"].tolist() == [65, 66]


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


def test_a_conversation_of_nothing_has_no_rows(engine: FakeAsyncVLLM) -> None:
    with pytest.raises(ValueError, match="asked for no answer"):
        talk(history_policy(engine), lambda _: asyncio.sleep(0))[0].rows(1.0)


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


def test_what_is_written_into_the_data_stands_in_every_row(engine: FakeAsyncVLLM) -> None:
    data = TensorDict(query="q")

    async def script(conversation: Conversation) -> None:
        await conversation.ask("one")
        await conversation.ask("two")
        data["calls"] = torch.tensor(3)

    assert [int(row["calls"]) for row in talk(history_policy(engine), script, data)[0].rows(1.0)] == [3, 3]


def test_after_its_end_nothing_is_asked_and_what_is_under_way_is_aborted(engine: FakeAsyncVLLM) -> None:
    engine.replicas[0].token_seconds = 60.0

    async def script(conversation: Conversation) -> Any:
        late = asyncio.ensure_future(conversation.ask("one"))
        while not engine.replicas[0].last_stats.running:
            await asyncio.sleep(0.001)
        assert conversation.under_way == 1
        await conversation.close()
        with pytest.raises(RuntimeError, match="this episode has ended"):
            await conversation.ask("two")
        with pytest.raises(asyncio.CancelledError):
            await late
        while engine.replicas[0].last_stats.running:
            await asyncio.sleep(0.001)

    assert talk(history_policy(engine), script)[0].under_way == 0
