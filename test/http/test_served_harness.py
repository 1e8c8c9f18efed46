"""Harnesses with real clients over real HTTP, in a collector over a fake engine; one is a program of its own."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI
from tensordict import TensorDictBase

from support.collecting import Questions, policy_of
from support.engines import EngineShelf
from support.http import serving
from support.waiting import PATIENCE, in_thread
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.http import HarnessEnv, HttpServer, run_process
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import FakeAsyncVLLM

pytestmark = pytest.mark.needs_vllm


@pytest.fixture(scope="module")
def folder(shelf: EngineShelf) -> Path:
    return shelf.folder("qwen3_moe")


@pytest.fixture
def engine() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(num_replicas=2) as engine:
        yield engine


@pytest.fixture
def server(engine: FakeAsyncVLLM, folder: Path) -> Iterator[HttpServer]:
    with serving(engine, folder) as (server, _):
        yield server


def first(engine: FakeAsyncVLLM, env: HarnessEnv, **kwargs: Any) -> TensorDictBase:
    kwargs = {"policy": policy_of(engine), **kwargs}
    collector = AsyncLLMCollector(env, dataloader=Questions(), group_size=2, max_staleness=0, **kwargs)
    try:
        return in_thread(lambda: next(iter(collector))).result(2 * PATIENCE)  # a deadline says more than this does
    finally:
        collector.shutdown()


def client_of(base_url: str) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base_url, api_key="none", http_client=httpx.AsyncClient(verify=False))


async def chat(base_url: str, row: dict[str, Any], model: str = "tiny") -> float:
    """Two turns, the second one a stream."""
    asked: list[Any] = [{"role": "user", "content": row["query"]}]
    async with client_of(base_url) as client:
        answer = await client.chat.completions.create(model=model, messages=asked, max_completion_tokens=6)
        asked += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
        stream = await client.chat.completions.create(
            model=model, messages=asked, max_completion_tokens=6, temperature=0.5, stream=True
        )
        text = "".join([piece.choices[0].delta.content or "" async for piece in stream])
    return float(len(text) > 0)


def test_a_client_of_openai_makes_rows_of_two_turns(engine: FakeAsyncVLLM, server: HttpServer) -> None:
    batch = first(engine, HarnessEnv(chat, server, sampling_params={"temperature": 1.0}))
    assert len(batch) == 2
    for row in batch:
        # the fake's bytes are no text, and are sent as they were sampled
        mask = row["masks", "all_assistant_mask"]
        assert int(mask.sum()) == 12
        assert int(mask.int().diff().eq(1).sum()) == 2
        assert float(row["sampling", "temperature"]) == 1.0
        assert float(row["next", "reward"]) == 1.0
        row["routed_experts"].validate(engine.routing_layout, num_tokens=len(row["tokens", "full"]))
    assert server.sessions.ids() == []


def test_a_server_of_its_own_begins_and_ends_with_the_collector(engine: FakeAsyncVLLM, folder: Path) -> None:
    urls = []

    async def run(base_url: str, row: dict[str, Any]) -> float:
        urls.append(base_url.partition("/sessions")[0])
        return await chat(base_url, row, model="policy")

    env = HarnessEnv(run, serve_options={"model": folder})
    batch = first(engine, env)
    # the harness asks at two temperatures, and a row is scored at one
    assert [float(row["sampling", "temperature"]) for row in batch] == [1.0, 0.5] * 2
    assert [int(row["masks", "all_assistant_mask"].sum()) for row in batch] == [6] * 4
    with pytest.raises(httpx.ConnectError):
        httpx.get(urls[0] + "/health")
    assert len(first(engine, env)) == 4  # with another one
    assert len(set(urls)) == 2


@pytest.mark.parametrize(
    ("asked", "temperature", "most"),
    [
        ({}, 0.7, 7),
        ({"max_completion_tokens": 3}, 0.7, 3),
        ({"max_completion_tokens": 50, "temperature": 0.5}, 0.5, 7),
    ],
)
def test_a_harness_samples_as_the_policy_does(
    asked: dict[str, Any], temperature: float, most: int, engine: FakeAsyncVLLM, folder: Path
) -> None:
    async def run(base_url: str, row: dict[str, Any]) -> float:
        async with client_of(base_url) as client:
            said: list[Any] = [{"role": "user", "content": row["query"]}]
            reply = await client.chat.completions.create(model="policy", messages=said, **asked)
        assert reply.usage is not None
        return float(reply.usage.completion_tokens)

    policy = vLLMWrapper(engine, generate_kwargs={"max_new_tokens": 7, "temperature": 0.7})
    batch = first(engine, HarnessEnv(run, serve_options={"model": folder}), policy=policy)
    assert [float(row["next", "reward"]) for row in batch] == [most] * 2
    assert [round(float(row["sampling", "temperature"]), 4) for row in batch] == [temperature] * 2


PROGRAM = """
import os, sys
from openai import OpenAI

client = OpenAI()
said = [{"role": "user", "content": sys.argv[1]}]
print(client.chat.completions.create(model="tiny", messages=said, max_completion_tokens=5).usage.completion_tokens)
"""


def test_a_program_of_its_own_process_is_a_harness(engine: FakeAsyncVLLM, server: HttpServer) -> None:
    async def run(base_url: str, row: dict[str, Any]) -> float:
        status, output = await run_process(base_url, [sys.executable, "-c", PROGRAM, row["query"]])
        assert status == 0, output
        return float(output)

    batch = first(engine, HarnessEnv(run, server, deadline=PATIENCE))
    assert [float(row["next", "reward"]) for row in batch] == [5.0, 5.0]
    assert [int(row["masks", "all_assistant_mask"].sum()) for row in batch] == [5, 5]
