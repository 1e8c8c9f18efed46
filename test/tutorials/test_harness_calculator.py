"""The agent with a calculator: its conversations, and a run of two steps over a real engine and a real URL."""

from __future__ import annotations

import random
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from support.engines import EngineShelf

SCRIPT = Path(__file__).parents[2] / "tutorials" / "harness_calculator.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = spec_from_file_location("harness_calculator", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_is_shown_calls_and_guesses(script: ModuleType) -> None:
    draw = random.Random(0)
    chats = [script.shown(draw) for _ in range(200)]
    calls = [chat for chat in chats if len(chat) == 4]
    assert 30 < len(calls) < 90
    for question, call, result, answer in calls:
        first, second = map(int, question["content"].rstrip("=").split("+"))
        assert script.CALL.fullmatch(call["content"]).groups() == (f"{first:02}", f"{second:02}")
        assert result["content"] == answer["content"] == f"{first + second:03}"


@pytest.mark.soak
@pytest.mark.engine("qwen3_moe")  # for its process alone: the run starts an engine of its own
def test_two_steps_of_it_train(script: ModuleType, shelf: EngineShelf, tmp_path: Path) -> None:
    shelf.clear()
    rewards = script.train(tmp_path, steps=2, warmup=3, prompts=2, seed=0)
    assert len(rewards) == 2
    assert (tmp_path / "run" / "metrics.csv").exists()
