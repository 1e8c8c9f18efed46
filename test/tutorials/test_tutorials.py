"""The notebooks as they are stored, the cells of one, and the agent with a calculator. ``make notebooks`` runs all."""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType

import pytest

from support import notebooks
from support.engines import EngineShelf
from support.sources import ROOT, script

SETTINGS = notebooks.Settings.read()


@pytest.mark.parametrize("path", notebooks.paths(), ids=lambda path: path.stem)
def test_what_is_stored_is_sound(path: Path) -> None:
    assert list(notebooks.problems(notebooks.read(path), path.stem, SETTINGS)) == []


@pytest.mark.engine
def test_the_cells_of_one_run(no_engine: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported vLLM already; a kernel pays half a minute for that."""
    monkeypatch.chdir(tmp_path)
    there = {"__name__": "notebook"}
    for cell in notebooks.read(notebooks.FOLDER / f"{SETTINGS.in_tests}.ipynb").cells:
        if cell.cell_type == "code" and notebooks.INSTALL not in cell.metadata.get("tags", []):
            exec(compile(cell.source, f"{SETTINGS.in_tests}, {cell.id}", "exec"), there)


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
