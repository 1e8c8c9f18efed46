"""TorchRL's GRPO over our classes: every form of the tour learns on real vLLM, and nothing but imports is ours."""

from __future__ import annotations

import ast
import inspect
import math
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tensordict import set_list_to_stack

from support import sources
from support.clusters import ClusterHolder
from support.engines import EngineShelf
from support.processes import PYTHONPATH
from torchrl_moe.modules import AsyncVLLM

SCRIPT = sources.ROOT / "tutorials" / "swap_the_import.py"
SWAPPED = {
    "torchrl_moe.modules": "torchrl.modules.llm",
    "torchrl_moe.objectives": "torchrl.objectives.llm",
    "torchrl_moe.weight_update": "torchrl.weight_update.llm",
}
SMALL = ["--prompts", "2", "--repeats", "4", "--max-tokens", "6"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The tour, as a module."""
    return sources.script(SCRIPT)


def imported_from_us(tree: ast.Module) -> dict[str, Any]:
    """Name -> TorchRL's own, of what the script's first lines import from us."""
    lines = [n for n in tree.body if isinstance(n, ast.ImportFrom) and (n.module or "").startswith("torchrl_moe")]
    assert {line.module for line in lines} == set(SWAPPED)
    names = [(SWAPPED[line.module or ""], alias.name) for line in lines for alias in line.names]
    return {name: getattr(import_module(module), name) for module, name in names}


def test_each_call_is_one_of_torchrls_own() -> None:
    """Every argument of ours has TorchRL's name and place; only vLLM's, and where the engine lives, pass by ``**``."""
    tree = ast.parse(SCRIPT.read_text(encoding="utf-8"))
    theirs, checked = imported_from_us(tree), set()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name, _, method = ast.unparse(call.func).partition(".")
        if name not in theirs:
            continue
        function = getattr(theirs[name], method) if method else theirs[name]
        inspect.signature(function).bind(*call.args, **{word.arg: None for word in call.keywords if word.arg})
        checked.add(name)
    assert checked == set(theirs)


@pytest.fixture(scope="module")
def served(shelf: EngineShelf, script: ModuleType) -> Iterator[AsyncVLLM]:
    """The engine that the tour starts, for all tests here."""
    shelf.clear()
    with script.get_engine(script.parse(["--model", str(shelf.folder("qwen3_moe"))])) as engine:
        yield engine


@pytest.fixture
def tour(
    served: AsyncVLLM, shelf: EngineShelf, script: ModuleType, monkeypatch: pytest.MonkeyPatch, one_thread: None
) -> Iterator[Any]:
    """Runs the tour on that engine."""
    monkeypatch.setattr(script, "get_engine", lambda _: nullcontext(served))
    folder = str(shelf.folder("qwen3_moe"))
    with set_list_to_stack(True):  # the tour's own setting ends here
        yield lambda *arguments: script.main([*SMALL, "--model", folder, *arguments])


def check(rows: list[dict[str, float]], steps: int) -> None:
    """What any form must show: it begins as the reference, learns, and leaves it."""
    assert len(rows) == steps
    assert all(math.isfinite(value) for row in rows for value in row.values())
    assert all(0 <= row["reward"] <= 1 for row in rows)
    assert rows[0]["kl_to_ref"] < 1e-6 < rows[-1]["kl_to_ref"]


@pytest.mark.engine
@pytest.mark.parametrize("module", ["torchrl.collectors.llm", "torchrl_moe.collectors"])
def test_a_batch_after_the_other(
    tour: Any, module: str, served: AsyncVLLM, script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "LLMCollector", import_module(module).LLMCollector)
    before = served.replica_table.latest_version
    rows = tour("--form", "sync", "--steps", "2")
    check(rows, 2)
    first = before + 1 if module.startswith("torchrl_moe") else 1  # the engine's number, or the collector's
    assert [row["policy_version"] for row in rows] == [first, first + 1]
    # each batch was sampled by the weights that score it, and by their experts
    assert max(abs(row["kl_approx"]) for row in rows) < 1e-5
    assert max(row["clip_fraction"] for row in rows) == 0
    assert served.replica_table.latest_version == before + 3


@pytest.mark.engine
def test_collected_while_it_learns(tour: Any, served: AsyncVLLM) -> None:
    before = served.replica_table.latest_version
    check(tour("--form", "async", "--steps", "2"), 2)
    assert served.replica_table.latest_version == before + 2  # at first, and after every second step


@pytest.mark.soak  # seven processes that import torch
@pytest.mark.ray
@pytest.mark.timeout(600)
def test_everything_in_ray(ray_cluster: ClusterHolder, tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH, "RAY_ADDRESS": ray_cluster.address}
    command = [sys.executable, str(SCRIPT), "--form", "ray", "--steps", "2", *SMALL]
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stderr[-4000:]
    steps = re.findall(r"step +(\d+)  policy (\d+)  .* to the sampler ([+-]\S+)", run.stdout)
    assert [(step, version) for step, version, _ in steps] == [("1", "1"), ("2", "2")]
    assert all(abs(float(distance)) < 1e-5 for *_, distance in steps)
