"""Harnesses from PyPI at a server over a real engine; each in a process with packages of its own.

They need what ``requirements/clients.txt`` lists in the folder that ``TORCHRL_MOE_CLIENTS`` names.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from support.engines import EngineShelf
from support.http import serving
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.http import HarnessEnv
from torchrl_moe.modules import AsyncVLLM, vLLMWrapper

FOLDER = os.environ.get("TORCHRL_MOE_CLIENTS", "")
pytestmark = [
    pytest.mark.needs_vllm,
    pytest.mark.engine,
    pytest.mark.skipif(not FOLDER, reason="needs requirements/clients.txt, see there"),
]
RENDERERS = """
import asyncio, json, sys
import openai
from renderers import create_renderer
from renderers.base import load_tokenizer
from renderers.client import generate

async def main(url, folder):
    renderer = create_renderer(load_tokenizer(folder))
    client = openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0)
    messages = [{"role": "user", "content": "hi"}]
    params = {"max_tokens": 12, "top_p": 0.9, "temperature": 0.7}
    found = await generate(
        client=client, renderer=renderer, messages=messages, model="tiny", sampling_params=params
    )
    names = ("prompt_ids", "completion_ids", "completion_logprobs", "routed_experts", "sampling_mask")
    print(json.dumps([found[name] for name in names]))

asyncio.run(main(*sys.argv[1:]))
"""
VERIFIERS = """
import asyncio, json, sys
import verifiers.v1 as vf
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.types import SamplingConfig

async def main(url, folder):
    client = vf.resolve_client(vf.TrainClientConfig(base_url=url, renderer_model_name=folder))
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
    found = await client.get_response(ChatDialect(), body, SamplingConfig(max_tokens=12), session_id="one")
    tokens = found.tokens
    print(json.dumps([tokens.prompt_ids, tokens.completion_ids, tokens.completion_logprobs, tokens.routed_experts]))

asyncio.run(main(*sys.argv[1:]))
"""
OPENENV = """
import dataclasses, json, sys
from openenv.core.harness.capture.validate_llm import validate_llm

report = validate_llm(sys.argv[1], "tiny", check_tools=False)
print(json.dumps(dataclasses.asdict(report), default=str))
"""
ENVIRONMENT = """
import verifiers.v1 as vf

class Data(vf.TaskData):
    answer: str

class Sum(vf.Task[Data]):
    @vf.reward
    async def length(self, trace) -> float:
        if self.data.answer == "1":
            raise ValueError("no rubric for 1")
        return 100.0 * int(self.data.answer) + len(trace.last_reply)

class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self):
        for a in range(3):
            yield Sum(Data(prompt=f"{a}+1=", answer=str(a + 1)))

__all__ = ["Sums"]
"""


def run(package: str, program: str, *arguments: str) -> Any:
    """The last line that a program prints, as JSON."""
    environment = {**os.environ, "PYTHONPATH": f"{FOLDER}/{package}", "OPENAI_API_KEY": "any", "PRIME_API_KEY": "any"}
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, env=environment, timeout=240
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("program", [RENDERERS, VERIFIERS], ids=["renderers", "verifiers"])
def test_renderers_and_verifiers_get_tokens_masks_and_routes(
    engine: AsyncVLLM, shelf: EngineShelf, program: str
) -> None:
    with serving(engine, None) as (server, _):
        found = run("verifiers", program, f"{server.url}/sessions/one/v1", str(shelf.folder("qwen3_moe")))
        (trajectory,) = server.session("one").trajectories()
    prompt, completion, logprobs, routes, *masks = found
    assert prompt + completion == trajectory["tokens", "full"].tolist()
    assert logprobs == pytest.approx(trajectory["log_probs", "full"][len(prompt) :].tolist(), abs=1e-5)
    assert routes
    for mask in masks:
        assert all(token in words for token, words in zip(completion, mask, strict=True) if words)


def test_openenv_finds_the_server_fit_for_training(engine: AsyncVLLM) -> None:
    with serving(engine, None) as (server, _):
        report = run("openenv", OPENENV, f"{server.url}/sessions/one/v1")
    assert report["ok"] and report["capture_level"] == "tokens", report
    assert report["n_prompt_ids"] > 0 and report["n_completion_ids"] > 0


def verifiers_harness(folder: Path) -> Any:
    """``tutorials/verifiers_harness.py``, and a Python that has the package and an environment in ``folder``."""
    (folder / "sums.py").write_text(ENVIRONMENT)
    python = folder / "python"
    python.write_text(
        f'#!/bin/sh\nPATH="{FOLDER}/verifiers/bin:$PATH" PYTHONPATH="{FOLDER}/verifiers:{folder}" '
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    file = Path(__file__).parents[2] / "tutorials" / "verifiers_harness.py"
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Verifiers, str(python)


def test_a_verifiers_environment_plays_in_a_collector(engine: AsyncVLLM, shelf: EngineShelf, tmp_path: Path) -> None:
    verifiers, python = verifiers_harness(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(shelf.folder("qwen3_moe"))
    policy = vLLMWrapper(engine, tokenizer=tokenizer, generate_kwargs={"max_new_tokens": 8})
    with verifiers("sums", python) as harness:
        assert harness.harnesses == {"agent": "null"}  # which runs no code of the model
        assert [row["prompt"] for row in harness.rows] == ["0+1=", "1+1=", "2+1="]
        env = HarnessEnv(harness, serve_options={"tool_call_parser": "hermes"})
        turns = {"dialog_turns_per_batch": 4, "total_dialog_turns": 4}
        # the rows come again and again
        kwargs: dict[str, Any] = {"policy": policy, "dataloader": harness.rows, "group_size": 2, "max_failures": 100}
        collector = AsyncLLMCollector(env, **kwargs, **turns)
        (batch,) = collector
        for row in batch.unbind(0):
            assert "routed_experts" in row.keys()  # noqa: SIM118
            assert 1 <= len(row["tokens", "response"]) <= 8  # the policy's
            assert int(row["next", "reward"]) // 100 == int(row["task"]) + 1
        assert "'sums', task 0" in str(collector.first_failure)
        assert "no rubric for 1" in str(collector.first_failure)
        collector.shutdown()


def test_a_verifiers_environment_that_is_not_there(tmp_path: Path) -> None:
    verifiers, python = verifiers_harness(tmp_path)
    with pytest.raises(RuntimeError, match=r"'nothing' in .*: ModuleNotFoundError"):
        verifiers("nothing", python)
