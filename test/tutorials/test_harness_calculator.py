"""The agent with a calculator: its conversations, and a run of two steps over a real engine and a real URL."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest

from support.engines import EngineShelf
from support.sources import ROOT, script


@pytest.fixture(scope="module")
def calculator() -> ModuleType:
    return script(ROOT / "tutorials" / "harness_calculator.py")


def test_it_is_shown_calls_and_guesses(calculator: ModuleType) -> None:
    draw = random.Random(0)
    chats = [calculator.shown(draw) for _ in range(200)]
    calls = [chat for chat in chats if len(chat) == 4]
    assert 30 < len(calls) < 90
    for question, call, result, answer in calls:
        first, second = map(int, question["content"].rstrip("=").split("+"))
        assert calculator.CALL.fullmatch(call["content"]).groups() == (f"{first:02}", f"{second:02}")
        assert result["content"] == answer["content"] == f"{first + second:03}"


@pytest.mark.soak
@pytest.mark.engine("qwen3_moe")  # for its process alone: the run starts an engine of its own
def test_two_steps_of_it_train(calculator: ModuleType, shelf: EngineShelf, tmp_path: Path) -> None:
    shelf.clear()
    rewards = calculator.train(tmp_path, steps=2, warmup=3, prompts=2, seed=0)
    assert len(rewards) == 2
    assert (tmp_path / "run" / "metrics.csv").exists()
