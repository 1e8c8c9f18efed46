"""Each Python block of README and docs runs as it is pasted, but for those whose comment says what they need.

A block without a comment runs after those above it on its page. The pages continue the loop of ``docs/loop.md``: they
start with its names, after a step of it; a path is that of its model, and runs take one step. A comment above a block,
``<!-- not run: needs Ray -->``, says why not.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines import EngineShelf
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules import AsyncVLLM

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>.+?) -->\n\n?)?```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
REASONS = {"needs a GPU", "needs Ray", "needs verifiers", "files of your own"}
SHARE = 0.85
"""The least share of the blocks that run."""
MODEL = re.compile(r"path/to/(your/)?(moe|model)")


def blocks(page: Path) -> list[tuple[str | None, str]]:
    """Why a block is not run, and its code."""
    return [(found["why"], found["code"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


WITH_BLOCKS = [page for page in PAGES if any(why is None for why, _ in blocks(page))]


def test_what_is_not_run_says_why_and_is_little() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    assert {why for why, _ in every if why} <= REASONS
    assert sum(why is None for why, _ in every) >= SHARE * len(every)


def test_a_block_that_needs_ray_or_a_gpu_names_it() -> None:
    signs = {"needs Ray": 'backend="ray"', "needs a GPU": "devices=", "needs verifiers": "import verifiers"}
    wrong = [
        (page.name, code) for page in PAGES for why, code in blocks(page) if why in signs and signs[why] not in code
    ]
    assert wrong == []


def loop_of(code: str) -> str:
    """The loop's statements without its last, which shuts all down: one step of it, in the names of a notebook."""
    (main,) = (node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    before = [node for node in ast.parse(code).body[:-1] if getattr(node, "name", "") != "main"]
    text = "\n".join(ast.unparse(node) for node in [*before, *main.body[:-1]])
    assert "steps = ('runs/tiny-moe', 20)" in text
    return text.replace("('runs/tiny-moe', 20)", "('runs/tiny-moe', 1)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(scope="module")
def names(folder: Path, shelf: EngineShelf) -> Iterator[dict[str, Any]]:
    """What the loop leaves."""
    shelf.clear()
    (_, code), *_ = blocks(ROOT / "docs" / "loop.md")
    found: dict[str, Any] = {"__name__": "loop"}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(compile(loop_of(code), "loop.md", "exec"), found)
        (folder / "moe").symlink_to("runs/tiny-moe")  # engines are called by the last part of their path
        yield found
        for part in ("collector", "sender", "engine"):
            found[part].shutdown()


@pytest.fixture
def ends_engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ends the engines that a page starts."""
    started: list[AsyncVLLM] = []
    made: Callable[..., AsyncVLLM] = AsyncVLLM.from_pretrained

    def from_pretrained(*args: Any, **kwargs: Any) -> AsyncVLLM:
        started.append(made(*args, **kwargs))
        return started[-1]

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", from_pretrained)
    yield
    for engine in started:
        engine.shutdown()


@pytest.mark.engine
@pytest.mark.usefixtures("ends_engines")
@pytest.mark.parametrize("page", WITH_BLOCKS, ids=lambda page: page.stem)
def test_the_blocks_run_as_they_are_pasted(page: Path, names: dict[str, Any], folder: Path) -> None:
    there = dict(names)
    for number, (why, code) in enumerate(blocks(page)):
        if why is None and "def main():" not in code:  # the loop itself has run
            code = MODEL.sub(str(folder / "moe"), code).replace("steps=100", "steps=1")  # one shows it all
            exec(compile(code, f"{page.name}, block {number}", "exec"), there)
    for name, part in there.items():
        if part is not names.get(name) and isinstance(part, AsyncLLMCollector):
            part.shutdown()
