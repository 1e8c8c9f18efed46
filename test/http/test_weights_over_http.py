"""A weight update in the middle of a stream, which its client does not see; a session goes on with the new weights."""

from __future__ import annotations

import json
from typing import Any

import pytest

from support.http import ASKED, serving
from support.versions import Versions
from torchrl_moe.modules import AsyncVLLM

pytestmark = pytest.mark.needs_vllm


@pytest.mark.engine("qwen3_moe")
@pytest.mark.parametrize(("pause", "clear_cache"), [("abort", False), ("keep", True)])
def test_a_stream_across_an_update(engine: AsyncVLLM, versions: Versions, pause: str, clear_cache: bool) -> None:
    before, manifest = versions.now, versions.prepare(61)
    asked: dict[str, Any] = {
        **ASKED, "max_tokens": 120, "stream": True, "return_token_ids": True, "ignore_eos": True, "logprobs": True,
    }  # fmt: skip
    tokens: list[int] = []
    logprobs: list[float] = []
    with serving(engine, None) as (server, client):
        with client.stream("POST", "/sessions/one/v1/chat/completions", json=asked) as response:
            swapped = False
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line[len("data: ") :])
                assert "error" not in event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                    logprobs += [one["logprob"] for one in (choice.get("logprobs") or {}).get("content") or []]
                if len(tokens) >= 20 and not swapped:
                    swapped = True
                    versions.swap(manifest, pause, clear_cache)
        (trajectory,) = server.session("one").trajectories()
    mask = trajectory["masks", "all_assistant_mask"]
    assert len(tokens) == 120
    assert trajectory["tokens", "full"][mask].tolist() == tokens
    assert trajectory["log_probs", "full"][mask].tolist() == pytest.approx(logprobs, abs=1e-5)
    assert set(trajectory["policy_versions", "full"][mask].tolist()) == {before, versions.now}
    assert trajectory["resume"] == "forced"
