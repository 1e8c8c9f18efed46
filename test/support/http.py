"""Servers for tests over HTTP, with clients of their own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from torchrl_moe.http import HttpServer, serve_http
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.engine import Engine

ASKED: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 8}
"""A chat that every server of these tests answers."""


@contextmanager
def serving(engine: Any, folder: Path | None, **options: Any) -> Iterator[tuple[HttpServer, httpx.Client]]:
    """A server, and a client of it."""
    options.setdefault("served_model_name", "tiny")
    with serve_http(engine, model=folder, **options) as server, httpx.Client(base_url=server.url, timeout=60) as client:
        yield server, client


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream of OpenAI's form."""
    lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def text_of(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text of one choice of a chat's stream."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(choice["delta"].get("content") or "" for choice in choices)


def tokens_under_way(engine: AsyncVLLM) -> int:
    """How many tokens the longest answer has that the first replica is making."""
    under_way = engine.replica_table[0].replica.call(Engine.snapshot, 60)
    return max((len(output.token_ids) for completion in under_way for output in completion.outputs), default=0)
