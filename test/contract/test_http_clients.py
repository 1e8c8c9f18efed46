"""Clients as they are on PyPI, against a server over a real engine."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from support.http import serving
from support.waiting import until
from torchrl_moe.http import HttpServer
from torchrl_moe.modules import AsyncVLLM

pytestmark = [pytest.mark.needs_vllm, pytest.mark.engine]
CHAT: list[Any] = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"model": "tiny", "messages": CHAT, "max_tokens": 40, "temperature": 0}
IDS = [257, *b"system\nbe brief", 258, *b"\n", 257, *b"user\nhi", 258, *b"\n", 257, *b"assistant\n"]
PICK: dict[str, Any] = {
    "name": "pick",
    "parameters": {
        "type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False,
    },
}  # fmt: skip


@pytest.fixture
def server(engine: AsyncVLLM) -> Iterator[HttpServer]:
    with serving(engine, None, tool_call_parser="hermes") as (server, _):
        yield server


@pytest.fixture
def client(server: HttpServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openai_chat(engine: AsyncVLLM, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(**GREEDY, logprobs=True, extra_body={"return_token_ids": True})
    direct = engine.generate([IDS], {"max_tokens": 40, "temperature": 0, "logprobs": 0}, use_tqdm=False)[0].outputs[0]
    (choice,) = answer.choices
    assert choice.model_extra["token_ids"] == direct.token_ids.tolist()
    assert choice.message.content == direct.text
    assert [one.logprob for one in choice.logprobs.content] == pytest.approx(direct.logprobs.tolist(), abs=1e-5)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(IDS), len(direct.token_ids))


def test_openai_stream(engine: AsyncVLLM, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(**{**GREEDY, "max_tokens": 60}, extra_body={"ignore_eos": True})
    stream = client.chat.completions.create(
        **{**GREEDY, "max_tokens": 60},
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    assert len(chunks) > 5
    assert "".join(c.delta.content or "" for one in chunks for c in one.choices) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == 60


@pytest.mark.parametrize("included", [False, True])
def test_a_stop_string_is_never_shown_in_part(client: openai.OpenAI, included: bool) -> None:
    """The stop string is of the greedy answer's own characters, across several tokens."""
    asked, more = {**GREEDY, "max_tokens": 120}, {"ignore_eos": True, "include_stop_str_in_output": included}
    text = client.chat.completions.create(**asked, extra_body=more).choices[0].message.content
    place = next(i for i in range(30, 110) if text[i : i + 3].isascii() and text.find(text[i : i + 3]) == i)
    stop = text[place : place + 3]
    chunks = list(client.chat.completions.create(**asked, stop=[stop], stream=True, extra_body=more))
    shown = "".join(c.delta.content or "" for one in chunks for c in one.choices)
    assert shown == text[: place + 3 * included]
    assert chunks[-1].choices[0].finish_reason == "stop"


def test_openai_structured_output(client: openai.OpenAI) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "pick", "schema": PICK["parameters"], "strict": True}}
    for stream in (False, True):
        made = client.chat.completions.create(
            model="tiny", messages=CHAT, max_tokens=200, response_format=schema, stream=stream
        )
        if stream:
            text = "".join(choice.delta.content or "" for chunk in made for choice in chunk.choices)
        else:
            text = made.choices[0].message.content
        assert json.loads(text)["x"] in (1, 2)


def test_openai_completions_and_responses(engine: AsyncVLLM, client: openai.OpenAI) -> None:
    made = client.completions.create(model="tiny", prompt=[5, 6, 7], max_tokens=20, temperature=0, logprobs=0)
    direct = engine.generate([[5, 6, 7]], {"max_tokens": 20, "temperature": 0, "logprobs": 0}, use_tqdm=False)[0]
    assert made.choices[0].text == direct.outputs[0].text
    assert made.choices[0].logprobs.token_logprobs == pytest.approx(direct.outputs[0].logprobs.tolist(), abs=1e-5)
    asked: dict[str, Any] = {
        "model": "tiny", "instructions": "be brief", "input": "hi", "max_output_tokens": 20, "temperature": 0,
    }  # fmt: skip
    answer = client.responses.create(**asked)
    chat = client.chat.completions.create(**{**GREEDY, "max_tokens": 20})
    assert answer.output_text == chat.choices[0].message.content
    with client.responses.stream(
        model="tiny", instructions="be brief", input="hi", max_output_tokens=20, temperature=0
    ) as s:
        text = "".join(event.delta for event in s if event.type == "response.output_text.delta")
    assert text == answer.output_text


def test_openai_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="other"):
        client.chat.completions.create(model="other", messages=CHAT)
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x" * 600}])
    with pytest.raises(openai.BadRequestError, match="top_logprobs"):
        client.chat.completions.create(**GREEDY, logprobs=True, top_logprobs=3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/chat/completions", {"logit_bias": {"99999999": 1}}),
        ("/chat/completions", {"logit_bias": {"5": math.nan}}),
        ("/completions", {"prompt": [5, 99999999]}),
        ("/completions", {"prompt": [-1, 5]}),
        ("/completions", {"prompt": "hi", "stop_token_ids": [99999999]}),
        ("/completions", {"prompt": "hi", "allowed_token_ids": [99999999]}),
        ("/completions", {"prompt": "hi", "routed_experts_prompt_start": 3}),
    ],
)
def test_ids_that_the_model_has_not(server: HttpServer, path: str, changes: dict[str, Any], stream: bool) -> None:
    asked = {"model": "tiny", "max_tokens": 4, "stream": stream, **changes}
    if path != "/completions":
        asked["messages"] = CHAT
    answer = httpx.post(
        f"{server.url}/v1{path}", content=json.dumps(asked), headers={"content-type": "application/json"}, timeout=60
    )
    assert answer.status_code == 400, answer.text
    good = httpx.post(
        f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "hi", "max_tokens": 2}, timeout=60
    )
    assert good.status_code == 200  # the engine has not ended


def test_anthropic(engine: AsyncVLLM, server: HttpServer, client: openai.OpenAI) -> None:
    import anthropic  # two seconds, of each worker that collects this file

    chat = client.chat.completions.create(**GREEDY)
    asked: dict[str, Any] = {
        "model": "tiny", "max_tokens": 40, "system": "be brief", "messages": CHAT[1:],
        "extra_body": {"temperature": 0},
    }  # fmt: skip
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
    url, chat, replies = f"{server.url}/sessions/{api}", list(CHAT), []
    for turn in range(3):
        if api == "openai":
            with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as one:
                if turn == 1:
                    chunks = one.chat.completions.create(model="tiny", messages=chat, max_tokens=30, stream=True)
                    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
                    reply: Any = {"role": "assistant", "content": text}
                else:
                    made = one.chat.completions.create(model="tiny", messages=chat, max_tokens=30)
                    reply = made.choices[0].message.model_dump(exclude_none=True)
        else:
            import anthropic

            with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as claude:
                asked: dict[str, Any] = {"model": "tiny", "max_tokens": 30, "system": "be brief", "messages": chat[1:]}
                if turn == 1:
                    with claude.messages.stream(**asked) as stream:
                        content = stream.get_final_message().content
                else:
                    content = claude.messages.create(**asked).content
                reply = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in content]}
        replies.append(reply)
        chat += [reply, {"role": "user", "content": "more"}]
    (trajectory,) = server.session(api).trajectories()
    mask, full = trajectory["masks", "all_assistant_mask"], trajectory["tokens", "full"]
    assert full[: len(IDS)].tolist() == IDS
    assert bool(trajectory["log_probs", "full"][mask].isfinite().all())
    # scored by the engine in one piece, each sampled token has the log-prob that it was sampled with
    scores = engine.score([full.tolist()])[0]
    assert float((scores - trajectory["log_probs", "full"])[mask].abs().max()) < 1e-4
    assert int(mask.sum()) > 60
    server.sessions.close(api)


def test_an_async_client_that_leaves_aborts_its_request(engine: AsyncVLLM, server: HttpServer) -> None:
    async def leave() -> None:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            asked: dict[str, Any] = {
                "model": "tiny",
                "messages": CHAT,
                "max_tokens": 400,
                "extra_body": {"ignore_eos": True},
            }
            stream = await client.chat.completions.create(**asked, stream=True)
            await anext(aiter(stream))
            await stream.close()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.chat.completions.create(**asked), 0.1)

    before = engine.stats()[0]["generated_tokens"]
    asyncio.run(leave())
    until(lambda: server.requests == 0)
    until(lambda: engine.stats()[0]["running"] == 0)
    assert engine.replica_table[0].inflight == 0
    assert engine.stats()[0]["generated_tokens"] - before < 600


def test_metrics_are_the_engines_and_the_servers(engine: AsyncVLLM, server: HttpServer) -> None:
    text = httpx.get(f"{server.url}/metrics").text
    assert "torchrl_moe_generated_tokens_total" in text
    assert "torchrl_moe_http_requests 0" in text
