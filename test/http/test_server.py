"""A server over a fake engine: who may come in, what is refused and how, and what is left of clients that go."""

from __future__ import annotations

import asyncio
import base64
import gc
import io
import json
import math
import shutil
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from support.engines import EngineShelf
from support.http import ASKED, events, serving, text_of
from support.waiting import in_thread, until
from torchrl_moe.http import HttpServer, Limits, load_trajectories, serve_http
from torchrl_moe.modules.serving.replica_table import FaultPolicy
from torchrl_moe.testing import FakeAsyncVLLM

pytestmark = pytest.mark.needs_vllm
CHAT = "/v1/chat/completions"
Served = tuple[FakeAsyncVLLM, HttpServer, httpx.Client]


@pytest.fixture(scope="module")
def folder(shelf: EngineShelf) -> Path:
    return shelf.folder("qwen3_moe")


@pytest.fixture(scope="module")
def door(folder: Path) -> Iterator[Served]:
    """A server that most tests share: each leaves nothing behind."""
    with FakeAsyncVLLM(token_seconds=0.001) as engine, serving(engine, folder) as (server, client):
        yield engine, server, client


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a refused request, which has OpenAI's form and no stack trace."""
    assert response.status_code == status, response.text
    assert "Traceback" not in response.text
    error: dict[str, Any] = response.json()["error"]
    assert error["message"]
    assert error["code"] == status
    return error


# -- answers ----------------------------------------------------------------------------------------------------------


def test_a_stream_says_the_same_in_pieces(door: Served) -> None:
    _, _, client = door
    asked = {**ASKED, "max_tokens": 40, "n": 2}
    whole = client.post(CHAT, json=asked).json()
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", CHAT, json=asked) as response:
        chunks = events(response)
    assert len(chunks) > 10
    for choice in whole["choices"]:
        assert text_of(chunks, choice["index"]) == choice["message"]["content"]
    assert [c["finish_reason"] for chunk in chunks for c in chunk["choices"] if c["finish_reason"]] == ["length"] * 2
    assert chunks[-1]["usage"]["completion_tokens"] == 80


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_in_tokens_out_with_routes_and_versions(door: Served, stream: bool) -> None:
    engine, _, client = door
    asked = {"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 6, "logprobs": 0, "top_k": 3}, "stream": stream}
    direct = engine.generate([[5, 6, 7]], asked["sampling_params"], use_tqdm=False)[0].outputs[0]
    response = client.post("/inference/v1/generate", json=asked)
    chunks = events(response) if stream else [response.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert [token for choice in choices for token in choice["token_ids"]] == direct.token_ids.tolist()
    rows = np.load(io.BytesIO(base64.b64decode(choices[-1]["routed_experts"])))
    assert np.array_equal(rows, direct.routed_experts)
    if not stream:
        assert choices[0]["weight_versions"] == [{"version": "0", "start": 0, "end": 6}]
        assert choices[0]["sampling_mask"] == direct.kept.ids.reshape(6, 3).tolist()


def test_routes_come_with_a_chat_if_they_are_asked_for(door: Served) -> None:
    _, _, client = door
    assert client.post(CHAT, json=ASKED).json()["choices"][0]["routed_experts"] is None
    answer = client.post(CHAT, json={**ASKED, "routed_experts_prompt_start": 15}).json()
    rows = np.load(io.BytesIO(base64.b64decode(answer["choices"][0]["routed_experts"])))
    assert rows.shape == (answer["usage"]["prompt_tokens"] + 8 - 1 - 15, 4, 2)
    error_of(client.post(CHAT, json={**ASKED, "routed_experts_prompt_start": 1000}), 400)


def test_completions_of_several_prompts(door: Served) -> None:
    _, _, client = door
    answer = client.post("/v1/completions", json={"model": "tiny", "prompt": ["ab", "cd"], "max_tokens": 3}).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["choices"][0]["text"] != answer["choices"][1]["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_tool_is_called(folder: Path, stream: bool) -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 1, "y": 2}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    with (
        FakeAsyncVLLM(script=lambda _: call, token_seconds=0.001) as engine,
        serving(engine, folder, tool_call_parser="hermes") as (_, client),
    ):
        response = client.post(CHAT, json={**ASKED, "max_tokens": 200, "tools": tools, "stream": stream})
    choices = [one for chunk in (events(response) if stream else [response.json()]) for one in chunk["choices"]]
    calls = [call for one in choices for call in one["delta" if stream else "message"].get("tool_calls", [])]
    names = [name for call in calls if (name := call["function"].get("name"))]
    arguments = "".join(call["function"].get("arguments") or "" for call in calls)
    assert (names, arguments.replace(" ", "")) == (["add"], '{"x":1,"y":2}')
    assert choices[-1]["finish_reason"] == "tool_calls"


@pytest.mark.parametrize(
    ("options", "asked", "temperature", "top_k"),
    [
        ({}, {}, 0.25, 7),
        ({}, {"temperature": 0.75}, 0.75, 7),
        ({"override_generation_config": {"temperature": 0.5}}, {}, 0.5, 7),
        ({"generation_config": "vllm"}, {}, 1.0, 0),
    ],
    ids=["the model's", "the request's", "an option", "vLLM's own"],
)
def test_what_a_request_leaves_out_is_the_models_and_not_the_engines(
    folder: Path, tmp_path: Path, options: dict[str, Any], asked: dict[str, Any], temperature: float, top_k: int
) -> None:
    shutil.copytree(folder, model := tmp_path / "moe")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "top_k": 7}))
    own = {"temperature": 0.1, "top_k": 3, "min_p": 0.5}
    with FakeAsyncVLLM(sampling_params=own) as engine, serving(engine, model, **options) as (_, client):
        assert client.post(CHAT, json={**ASKED, **asked}).status_code == 200
        (request,) = engine.replicas[0].submitted
    assert [request.param(name) for name in ("temperature", "top_k", "min_p")] == [temperature, top_k, 0.0]


# -- refusals ---------------------------------------------------------------------------------------------------------


IMAGE = [{"type": "image_url", "image_url": {"url": "data:,"}}]


@pytest.mark.parametrize(
    ("changes", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"messages": 3}, 400, None),
        ({"messages": []}, 400, None),
        ({"messages": [{"role": "user"}] * 2, "max_tokens": "many"}, 400, "body.max_tokens"),
        ({"max_tokens": -1}, 400, None),
        ({"n": 10**9}, 400, "n"),
        ({"temperature": -3}, 400, "temperature"),
        ({"temprature": 0.5}, 400, "temprature"),
        ({"logprobs": True, "top_logprobs": 5}, 400, "logprobs"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, None),
        ({"response_format": {"type": "json_schema"}}, 400, None),
        ({"messages": [{"role": "user", "content": IMAGE}]}, 400, None),
        *(({"logit_bias": {key: value}}, 400, None) for key, value in (("x", 1), ("5", "a"), ("-1", 1))),
        *(({"logit_bias": bias}, 400, None) for bias in ({"99999999": 1}, {"5": "nan"}, {"5": math.inf}, [1])),
        ({"logit_bias": {"5": math.nan}}, 400, "logit_bias"),
        # numbers as text, and fields of the API that vLLM has not
        ({"logit_bias": {"5": "1.5"}, "store": False, "metadata": {"a": "b"}}, 200, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_is_wrong_has_a_status(
    door: Served, changes: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    response = post(door, CHAT, json.dumps({**ASKED, **changes, "stream": stream}))
    if status == 200:
        assert response.status_code == 200
    else:
        error = error_of(response, status)
        assert param is None or error["param"] == param


def post(door: Served, path: str, body: bytes | str) -> httpx.Response:
    return door[2].post(path, content=body, headers={"content-type": "application/json"})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {"prompt": [5, 99999999]},
        {"prompt": [-1, 5]},
        {"stop_token_ids": [99999999]},
        {"allowed_token_ids": [99999999]},
        {"routed_experts_prompt_start": 3},
        {"priority": 2**31},
    ],
)
def test_ids_that_the_model_has_not(door: Served, changes: dict[str, Any], stream: bool) -> None:
    asked = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "stream": stream, **changes}
    error_of(post(door, "/v1/completions", json.dumps(asked)), 400)


@pytest.mark.parametrize("body", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"null", b"[1]", b'"text"'])
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/responses", "/inference/v1/generate"])
def test_a_body_that_is_no_request(door: Served, path: str, body: bytes) -> None:
    error_of(post(door, path, body), 400)


ANTHROPIC: dict[str, Any] = {"model": "tiny", "max_tokens": 3, "messages": ASKED["messages"]}


@pytest.mark.parametrize(
    ("body", "status", "text"),
    [
        (json.dumps({**ANTHROPIC, "model": "other"}), 404, "other"),
        (json.dumps({**ANTHROPIC, "max_tokens": "many"}), 400, "max_tokens"),
        ("{", 400, "JSON"),
        ("[" * 100_000, 400, ""),
    ],
)
def test_anthropic_has_errors_of_its_own_form(door: Served, body: str, status: int, text: str) -> None:
    answer = post(door, "/v1/messages", body)
    assert answer.status_code == status
    assert sorted(answer.json()) == ["error", "type"]
    assert sorted(answer.json()["error"]) == ["message", "type"]
    assert text in answer.json()["error"]["message"]
    assert sorted(door[2].get("/v1/messages").json()["error"]) == ["message", "type"]


DEEP = '{"a":' * 3000 + "1" + "}" * 3000


@pytest.mark.parametrize(
    ("path", "call"),
    [
        (CHAT, {"tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": DEEP}}]}),
        ("/v1/messages", {"content": [{"type": "tool_use", "id": "1", "name": "f", "input": "DEEP"}]}),
    ],
)
@pytest.mark.parametrize("session", ["", "/sessions/deep"])
def test_a_tool_call_with_arguments_that_are_nested_too_deeply(
    door: Served, path: str, call: dict[str, Any], session: str
) -> None:
    messages = [*ASKED["messages"], {"role": "assistant", **call}]
    answer = post(door, session + path, json.dumps({**ANTHROPIC, "messages": messages}).replace('"DEEP"', DEEP))
    assert answer.status_code == 400, answer.text
    assert "Traceback" not in answer.text
    door[2].delete("/sessions/deep")


@pytest.mark.parametrize("path", ["/", "/docs", "/collective_rpc", "/scale_elastic_ep", "/sleep", "/v1/nothing"])
def test_there_is_nothing_else(door: Served, path: str) -> None:
    error_of(door[2].get(path), 404)
    assert door[2].post(path, json={}).status_code == 404


def test_an_engine_that_refuses_a_request(folder: Path) -> None:
    with FakeAsyncVLLM(refuse=lambda _: "not that one") as engine, serving(engine, folder) as (_, client):
        assert "not that one" in error_of(client.post(CHAT, json=ASKED), 400)["message"]


def test_replicas_that_are_gone(folder: Path) -> None:
    with FakeAsyncVLLM(faults=FaultPolicy(restart=False)) as engine, serving(engine, folder) as (_, client):
        assert client.get("/health").status_code == 200
        engine.replicas[0].die("a reason\nthe end of a log")
        until(lambda: client.get("/health").status_code == 503)
        error = error_of(client.post(CHAT, json=ASKED), 503)
        assert "end of a log" not in error["message"]
        engine.shutdown()
        error_of(client.post(CHAT, json=ASKED), 503)


# -- keys and addresses -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        *(({"host": host}, "pass api_key=") for host in ("0.0.0.0", "::", "192.0.2.1", "example.com")),
        ({"port": 70_000}, "port"),
        ({"api_key": ""}, "api_key"),
        ({"host": ""}, "host"),
        ({"tool_parser": "hermes"}, "tool_call_parser"),
        ({"model": None}, "model="),
    ],
)
def test_arguments_that_are_wrong(arguments: dict[str, Any], text: str) -> None:
    with FakeAsyncVLLM() as engine, pytest.raises(ValueError, match=text):
        serve_http(engine, **{"model": "nowhere", **arguments})


def test_a_port_in_use_and_an_engine_that_is_not_running(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, FakeAsyncVLLM() as engine, pytest.raises(OSError):
        serve_http(engine, port=taken.getsockname()[1], model=folder)
    with pytest.raises(RuntimeError, match="not running"):
        serve_http(engine, model="nowhere")


def test_a_key_is_asked_for_everywhere_but_of_health(folder: Path) -> None:
    with FakeAsyncVLLM() as engine, serving(engine, folder, api_key="secret") as (server, client):
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/sessions/a", "/inference/v1/generate", "/"):
            error_of(client.get(path), 401)
        error_of(client.post("/sessions/a/v1/chat/completions", json=ASKED), 401)
        assert not server.sessions.ids()
        ways = ({"authorization": "Bearer secret"}, {"authorization": "bearer  secret"}, {"x-api-key": "secret"})
        for headers in ways:
            assert client.post(CHAT, json=ASKED, headers=headers).status_code == 200
        for key in ("Secret", "secre", "secrets", "é"):
            error_of(client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()}), 401)


# -- limits -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"), [("requests", 0), ("body_bytes", 1.5), ("client_seconds", -1), ("session_seconds", None)]
)
def test_limits_are_checked(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        Limits(**{name: value})


def at_once(client: httpx.Client, count: int, path: str = CHAT) -> list[int]:
    """The statuses of requests that are made at the same time."""
    with ThreadPoolExecutor(count) as pool:
        asked = [pool.submit(client.post, path, json=ASKED) for _ in range(count)]
    return sorted(one.result().status_code for one in asked)


def test_too_many_at_a_time(folder: Path) -> None:
    limits = Limits(requests=3, requests_per_session=2, tokens=1000, answers=2, body_bytes=2000, sessions=2)
    with FakeAsyncVLLM(token_seconds=0.05) as engine, serving(engine, folder, limits=limits) as (server, client):
        assert at_once(client, 5) == [200] * 3 + [429] * 2
        assert at_once(client, 3, "/sessions/a/v1/chat/completions") == [200] * 2 + [429]
        error_of(client.post(CHAT, json={**ASKED, "max_tokens": 990}), 429)
        error_of(client.post(CHAT, json={**ASKED, "n": 3}), 400)
        error_of(client.post(CHAT, json={**ASKED, "user": "x" * 2000}), 413)
        error_of(client.post(CHAT, content=(b" " * 500 for _ in range(5))), 413)
        assert client.post("/sessions/b/v1/chat/completions", json=ASKED).status_code == 200
        error_of(client.post("/sessions/c/v1/chat/completions", json=ASKED), 429)
        client.delete("/sessions/a")
        assert client.post("/sessions/c/v1/chat/completions", json=ASKED).status_code == 200
        error_of(client.post(f"/sessions/{'d' * 300}/v1/chat/completions", json=ASKED), 400)
        assert server.requests == 0


def test_a_request_that_takes_too_long(folder: Path) -> None:
    with (
        FakeAsyncVLLM(token_seconds=0.5) as engine,
        serving(engine, folder, limits=Limits(request_seconds=0.2)) as (_, client),
    ):
        error_of(client.post(CHAT, json=ASKED), 504)
        until(lambda: engine.replicas[0].last_stats.running == 0)


# -- clients that go --------------------------------------------------------------------------------------------------


async def come_and_go(url: str, number: int) -> None:
    """A client that leaves: before its answer, within its stream, or once it has all."""
    stream, is_short = number % 3 > 0, number % 5 == 0
    asked = {**ASKED, "max_tokens": 5 if is_short else 2000, "stream": stream}
    path = CHAT if number % 2 else f"/sessions/{number % 7}/v1/chat/completions"
    async with httpx.AsyncClient(base_url=url, timeout=None, verify=False) as client:
        if stream:
            async with client.stream("POST", path, json=asked) as response:
                async for _ in response.aiter_lines():
                    if not is_short:
                        return
        else:
            with suppress(TimeoutError):
                await asyncio.wait_for(client.post(path, json=asked), 0.05 + 0.001 * (number % 40))


def test_clients_that_come_and_go_leave_nothing(folder: Path) -> None:
    async def crowd(url: str) -> None:
        for first in range(0, 150, 50):
            await asyncio.gather(*(come_and_go(url, number) for number in range(first, first + 50)))

    with FakeAsyncVLLM(2, token_seconds=0.005) as engine, serving(engine, folder) as (server, client):
        asyncio.run(crowd(server.url))
        until(lambda: server.requests == 0)
        until(lambda: sum(replica.last_stats.running for replica in engine.replicas) == 0)
        assert sum(len(replica._running) for replica in engine.replicas) == 0
        assert engine.admission.taken == engine.admission.waiting == 0
        text = client.get("/metrics").text
        for metric in ("http_requests 0", "http_tokens 0", "generated_tokens_total"):  # the server's, and the engine's
            assert f"torchrl_moe_{metric}" in text
        for name in server.sessions.ids():
            assert "under_way=0" in repr(server.session(name))
            client.delete(f"/sessions/{name}")
        assert server.sessions.ids() == []
        assert client.post(CHAT, json=ASKED).status_code == 200


def small_buffers(address: tuple[str, int], create: Any = socket.create_server, **how: Any) -> socket.socket:
    """A listening socket whose connections hold little of what is not read."""
    listening: socket.socket = create(address, **how)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    return listening


def test_a_client_that_does_not_read_is_dropped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And its request aborted at once: by itself it would take minutes."""
    monkeypatch.setattr(socket, "create_server", small_buffers)
    with (
        FakeAsyncVLLM(token_seconds=0.05) as engine,
        serving(engine, folder, limits=Limits(client_seconds=0.5)) as (server, _),
        socket.socket() as slow,
    ):
        asked = {**ASKED, "max_tokens": 3000, "n": 8, "stream": True, "logprobs": True}
        body = httpx.Request("POST", server.url + CHAT, json=asked)
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", httpx.URL(server.url).port))
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        slow.sendall(f"{head}content-length: {len(body.content)}\r\n\r\n".encode() + body.content)
        until(lambda: engine.replicas[0].last_stats.running == 1)
        until(lambda: server.requests == 0)
        gc.disable()
        try:
            until(lambda: engine.replicas[0].last_stats.running == 0)
        finally:
            gc.enable()


def test_a_client_that_does_not_send_is_dropped(folder: Path) -> None:
    """Silent from the start, in the middle of the headers, of those of a second request, or of a body."""
    health, chat = b"GET /health HTTP/1.1\r\nhost: a\r\n", f"POST {CHAT} HTTP/1.1\r\nhost: a\r\n".encode()
    cases: dict[bytes, list[bytes]] = {b"": [], b"GET /hea": [], health: [], health + b"\r\n" + health: [b"200"]}
    cases[chat + b"content-length: 100\r\n\r\n{"] = [b"408"]
    with FakeAsyncVLLM() as engine, serving(engine, folder, limits=Limits(client_seconds=0.3)) as (server, client):
        address = "127.0.0.1", httpx.URL(server.url).port

        def answers(sent: bytes) -> list[bytes]:
            with socket.create_connection(address, timeout=60) as connection:  # type: ignore[arg-type]
                connection.sendall(sent)
                received = b""
                while piece := connection.recv(1 << 16):  # until the server closes it
                    received += piece
            return [line.split()[1] for line in received.splitlines() if line.startswith(b"HTTP/1.1 ")]

        with ThreadPoolExecutor(len(cases)) as pool:
            assert list(pool.map(answers, cases)) == list(cases.values())
        until(lambda: server.requests == 0)
        # what is answered and what is in time stays
        assert [client.get("/health").status_code for _ in range(3)] == [200] * 3


@pytest.mark.parametrize("name_ends", [False, True])
def test_headers_are_bounded(folder: Path, name_ends: bool) -> None:
    with FakeAsyncVLLM() as engine, serving(engine, folder, limits=Limits(head_bytes=4096)) as (server, client):
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nx" + b": " * name_ends)
            answer, sent = b"", 0
            while not answer and sent < 1 << 24:
                connection.sendall(b"a" * 1024)
                sent += 1024
                connection.settimeout(0.01)
                try:
                    answer = connection.recv(1 << 16)
                except TimeoutError:
                    continue
            connection.settimeout(60)
        assert answer.startswith(b"HTTP/1.1 400") and b"may have 4096 bytes" in answer
        # bodies are none of it, and neither is the next request of a connection
        chat = {**ASKED, "messages": [{"role": "user", "content": "a" * 200}], "max_tokens": 1}
        for _ in range(3):
            assert client.post(CHAT, json=chat, headers={"x-some": "b" * 3000}).status_code == 200


def test_closing_the_server_ends_what_is_under_way(folder: Path) -> None:
    with FakeAsyncVLLM(token_seconds=0.01) as engine, FakeAsyncVLLM() as other:
        before = [thread for thread in threading.enumerate() if thread.name == "http"]
        server = serve_http(engine, model=folder, served_model_name="tiny")
        with httpx.Client(base_url=server.url, timeout=60) as client:
            with client.stream("POST", CHAT, json={**ASKED, "max_tokens": 3000, "stream": True}) as response:
                next(response.iter_lines())
                server.close()
                server.close()
            with pytest.raises(httpx.HTTPError):
                client.get("/health")
        until(lambda: engine.replicas[0].last_stats.running == 0)
        assert engine.generate("1", use_tqdm=False)
        assert other.is_running
        assert [thread for thread in threading.enumerate() if thread.name == "http"] == before


def test_a_session_that_is_closed_ends_its_requests(folder: Path) -> None:
    with FakeAsyncVLLM(token_seconds=0.01) as engine, serving(engine, folder) as (_, client):
        path, asked = "/sessions/a/v1/chat/completions", {**ASKED, "max_tokens": 3000}
        answer = in_thread(lambda: client.post(path, json=asked))
        until(lambda: engine.replicas[0].last_stats.running == 1)
        assert client.delete("/sessions/a").status_code == 204
        error_of(answer.result(60.0), 409)
        until(lambda: engine.replicas[0].last_stats.running == 0)


def test_watching_the_metrics_uses_no_session(folder: Path) -> None:
    with FakeAsyncVLLM() as engine, serving(engine, folder, limits=Limits(session_seconds=0.2)) as (server, client):
        client.post("/sessions/a/v1/chat/completions", json=ASKED)
        until(lambda: "torchrl_moe_http_sessions 0" in client.get("/metrics").text)
        engine.shutdown()
        assert "the engine has no metrics" in client.get("/metrics").text
        assert server.sessions.open() == []


def test_a_server_that_does_not_start_in_time_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrl_moe.http.server.START_SECONDS", 0.0)
    before = [thread for thread in threading.enumerate() if thread.name == "http"]
    with FakeAsyncVLLM() as engine:
        with pytest.raises(TimeoutError):
            serve_http(engine, model=folder)
        assert [thread for thread in threading.enumerate() if thread.name == "http"] == before


# -- sessions and versions --------------------------------------------------------------------------------------------


def test_ids_that_a_client_gives_are_sent_as_they_are_and_text_as_it_was_sampled(door: Served) -> None:
    """Byte 200 alone is no UTF-8: its text is U+FFFD, which has three bytes of its own."""
    engine, server, client = door
    prompt, sampled = [*b"ab"], [200]
    whole = engine.generate([prompt], {"max_tokens": 1, "logprobs": 0}, use_tqdm=False)[0]
    answer = replace(whole.outputs[0], token_ids=np.array(sampled), text="\ufffd")
    server.session("ids").record(prompt, replace(whole, outputs=[answer]))
    given = [*"ab\ufffdc".encode()]
    texts = {"prompt": "ab\ufffdc", "model": "tiny", "max_tokens": 2}
    tokens = {"token_ids": given, "sampling_params": {"max_tokens": 2}}
    for path, asked, sent in (
        ("/v1/completions", texts, [*prompt, *sampled, *b"c"]),
        ("/v1/completions", {**texts, "prompt": given}, given),
        ("/inference/v1/generate", tokens, given),
    ):
        assert client.post(f"/sessions/ids{path}", json=asked).status_code == 200
        assert engine.replicas[0].submitted[-1].prompt_token_ids.tolist() == sent
    client.delete("/sessions/ids")


def test_a_session_that_was_closed_for_good_begins_no_other(door: Served) -> None:
    _, server, client = door
    server.session("over")
    server.sessions.close("over", for_good=True)
    error_of(client.post("/sessions/over/v1/chat/completions", json=ASKED), 409)
    assert server.sessions.ids() == []


def test_a_session_over_http(door: Served) -> None:
    _, server, client = door
    error_of(client.get("/sessions/none"), 404)
    error_of(client.delete("/sessions/none"), 404)
    assert client.post("/sessions/a%2Fb/v1/chat/completions", json={**ASKED, "n": 2}).status_code == 200
    (own, _), got = server.session("a/b").trajectories(), client.get("/sessions/a%2Fb")
    read, _ = load_trajectories(got.content)
    assert read["tokens", "full"].tolist() == own["tokens", "full"].tolist()
    assert read["log_probs", "full"].nan_to_num().tolist() == own["log_probs", "full"].nan_to_num().tolist()
    without = client.get("/sessions/a%2Fb?routes=false").content
    assert len(without) < len(got.content)
    routes = client.get("/sessions/a%2Fb/routes/0")
    assert routes.status_code == 200
    error_of(client.get("/sessions/a%2Fb/routes/7"), 404)
    error_of(client.get("/sessions/a%2Fb/routes/x"), 404)
    error_of(client.post("/sessions/a%2Fb", json={}), 405)
    assert client.post(CHAT, json=ASKED, headers={"X-Session-Id": "a/b"}).status_code == 200
    assert server.session("a/b").num_calls == 2  # by a header, it is the same session
    # a slash at the end does not lose the session, by a redirection
    slash = client.post("/sessions/a%2Fb/v1/chat/completions/", json=ASKED, headers={"Host": "evil.example"})
    assert (slash.status_code, slash.headers.get("location")) == (404, None)
    assert client.delete("/sessions/a%2Fb").status_code == 204
    assert server.sessions.ids() == []


def test_versions(folder: Path) -> None:
    with FakeAsyncVLLM(2) as engine, serving(engine, folder) as (_, client):

        def ask(version: str | None, session: str = "a") -> httpx.Response:
            headers = {} if version is None else {"X-Weight-Version": version}
            return client.post(f"/sessions/{session}/v1/chat/completions", json=ASKED, headers=headers)

        def update(index: int, version: int) -> None:
            engine.replicas[index].version = version
            engine.replica_table.set_version(index, version)

        assert ask("pin").headers["x-weight-version"] == "0"
        update(0, 1)  # replica 1 still has version 0
        for _ in range(4):
            assert ask("pin").headers["x-weight-version"] == "0"
            assert ask("latest", "b").headers["x-weight-version"] == "1"
            assert ask("1", "c").headers["x-weight-version"] == "1"
        update(1, 1)
        assert "version" in error_of(ask("pin"), 409)["message"]
        assert client.delete("/sessions/a").status_code == 204
        assert ask("pin").headers["x-weight-version"] == "1"  # another session of that name
        assert ask(None).headers["x-weight-version"] == "1"
        error_of(ask("new"), 400)
        error_of(client.post(CHAT, json=ASKED, headers={"X-Weight-Version": "pin"}), 400)


def test_a_stream_goes_on_after_its_replica_has_died(folder: Path) -> None:
    with FakeAsyncVLLM(2, token_seconds=0.01) as engine, serving(engine, folder) as (server, client):
        asked = {**ASKED, "max_tokens": 60, "stream": True, "return_token_ids": True}
        with client.stream("POST", "/sessions/a/v1/chat/completions", json=asked) as response:
            lines = response.iter_lines()
            for _ in range(12):
                next(lines)
            next(replica for replica in engine.replicas if replica.last_stats.running).die()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        (trajectory,) = server.session("a").trajectories()
        assert int(trajectory["masks", "all_assistant_mask"].sum()) == 60
        assert trajectory["resume"] == "live"
