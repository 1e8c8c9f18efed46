"""Clients as they are on PyPI, against a server over a real engine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from support.http import serving
from torchrl_moe.http import HttpServer
from torchrl_moe.modules import AsyncVLLM

pytestmark = [pytest.mark.needs_vllm, pytest.mark.engine]
CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "temperature": 0}
IDS = [257, *b"system\nbe brief", 258, *b"\n", 257, *b"user\nhi", 258, *b"\n", 257, *b"assistant\n"]
PICK: dict[str, Any] = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
PICK["additionalProperties"] = False


@pytest.fixture
def server(engine: AsyncVLLM) -> Iterator[HttpServer]:
    with serving(engine, None, tool_call_parser="hermes") as (server, _):
        yield server


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def text_of(made: Any) -> str:
    """Of an answer to a chat: whole, a stream, or its chunks."""
    if isinstance(made, openai.Stream | list):
        return "".join(choice.delta.content or "" for chunk in made for choice in chunk.choices)
    return made.choices[0].message.content or ""


def test_openai_chat(engine: AsyncVLLM, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, extra_body={"return_token_ids": True})
    direct = engine.generate([IDS], {"max_tokens": 40, "temperature": 0, "logprobs": 0}, use_tqdm=False)[0].outputs[0]
    (choice,) = answer.choices
    assert choice.model_extra["token_ids"] == direct.token_ids.tolist()
    assert choice.message.content == direct.text
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(direct.logprobs.tolist(), abs=1e-5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS), len(direct.token_ids))


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_is_never_shown_in_part(client: openai.OpenAI, included: bool) -> None:
    """The stop string is of the greedy answer's own characters, across several tokens."""
    asked, more = {**GREEDY, "max_tokens": 120}, {"ignore_eos": True, "include_stop_str_in_output": included}
    text = client.chat.completions.create(**asked, extra_body=more).choices[0].message.content
    place = next(i for i in range(30, 110) if text[i : i + 3].isascii() and text.find(text[i : i + 3]) == i)
    stop = text[place : place + 3]
    chunks = list(client.chat.completions.create(**asked, stop=[stop], stream=True, extra_body=more))
    assert text_of(chunks) == text[: place + 3 * included]
    assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_openai_structured_output(client: openai.OpenAI, stream: bool) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "pick", "schema": PICK, "strict": True}}
    asked: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 200, "response_format": schema}
    assert json.loads(text_of(client.chat.completions.create(**asked, stream=stream)))["x"] in (1, 2)


def test_openai_completions_and_responses(engine: AsyncVLLM, client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=20, temperature=0, logprobs=0)
    direct = engine.generate([[5, 6, 7]], {"max_tokens": 20, "temperature": 0, "logprobs": 0}, use_tqdm=False)[0]
    assert made.choices[0].text == direct.outputs[0].text
    assert made.choices[0].logprobs.token_logprobs == pytest.approx(direct.outputs[0].logprobs.tolist(), abs=1e-5)
    asked: dict[str, Any] = {"model": "tiny", "instructions": "be brief", "input": "hi", "max_output_tokens": 20}
    answer = client.responses.create(**asked, temperature=0)
    assert answer.output_text == text_of(client.chat.completions.create(**{**GREEDY, "max_tokens": 20}))
    with client.responses.stream(**asked, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == answer.output_text


def test_anthropic(engine: AsyncVLLM, server: HttpServer, client: openai.OpenAI) -> None:
    import anthropic  # two seconds, of each worker that collects this file

    chat = client.chat.completions.create(**GREEDY)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 40, "system": "be brief", "messages": CHAT[1:]}
    asked["extra_body"] = {"temperature": 0}
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as claude:
        answer = claude.messages.create(**asked)
        assert answer.content[0].text == chat.choices[0].message.content
        assert answer.usage.input_tokens == len(IDS)
        with claude.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text
        assert claude.messages.count_tokens(model="tiny", system="be brief", messages=CHAT[1:]).input_tokens == len(IDS)
        with pytest.raises(anthropic.NotFoundError, match="other"):
            claude.messages.create(**{**asked, "model": "other"})


@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_a_session_keeps_the_sampled_ids_of_any_client(engine: AsyncVLLM, server: HttpServer, api: str) -> None:
    """A random model's bytes are no text: what the client sends back would be other ids."""
    import anthropic

    url, chat = f"{server.url}/sessions/{api}", list(CHAT)
    asked: dict[str, Any] = {"model": "tiny", "max_tokens": 30}
    with (
        openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as gpt,
        anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as claude,
    ):
        for stream in (False, True, False):
            if api == "openai":
                content: Any = text_of(gpt.chat.completions.create(**asked, messages=chat, stream=stream))
            else:
                said: dict[str, Any] = {**asked, "system": "be brief", "messages": chat[1:]}
                if stream:
                    with claude.messages.stream(**said) as events:
                        blocks = events.get_final_message().content
                else:
                    blocks = claude.messages.create(**said).content
                content = [block.model_dump(exclude_none=True) for block in blocks]
            chat += [{"role": "assistant", "content": content}, {"role": "user", "content": "more"}]
    (trajectory,) = server.session(api).trajectories()
    mask, full = trajectory["masks", "all_assistant_mask"], trajectory["tokens", "full"]
    assert full[: len(IDS)].tolist() == IDS
    assert bool(trajectory["log_probs", "full"][mask].isfinite().all())
    # scored by the engine in one piece, each sampled token has the log-prob that it was sampled with
    scores = engine.score([full.tolist()])[0]
    assert float((scores - trajectory["log_probs", "full"])[mask].abs().max()) < 1e-4
    assert int(mask.sum()) > 60
    server.sessions.close(api)
