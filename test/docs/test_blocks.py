"""Each Python block of README and docs runs as it is pasted, but for those whose comment says what they need.

A block without a comment runs after those above it on its page. The pages continue the loop of ``docs/loop.md``: they
start with its names, after two steps of it; a path is that of its model, and runs take one small step. A comment above
a block, ``<!-- not run: needs Ray -->``, says why not.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.engines import EngineShelf
from support.sources import ROOT
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules import AsyncVLLM

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>.+?) -->\n\n?)?```python\n(?P<code>.*?)^```", re.DOTALL | re.MULTILINE)
NEEDS = {"needs Ray": 'backend="ray"', "needs a GPU": "devices=", "needs verifiers": "verifiers"}
"""Why a block does not run -> what it must then hold; files of one's own are another reason."""
SHARE = 0.85
"""The least share of the blocks that run."""
MODEL = re.compile(r"path/to/(your/)?(moe|model)")
FEW = "rollout={'prompts_per_step': 2, 'group_size': 2, 'max_new_tokens': 8}"
SMALL = {"steps=100": f"steps=1, {FEW}", "steps=2": "steps=1", 'rollout={"max_new_tokens": 8}': FEW}
SMALL |= {'"max_tokens": 512': '"max_tokens": 64'}
"""In the place of a text's settings: one step with few answers shows it all, and so do short answers."""


def blocks(page: Path) -> list[tuple[str | None, str]]:
    """Why a block is not run, and its code."""
    return [(found["why"], found["code"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


WITH_BLOCKS = [page for page in PAGES if any(why is None for why, _ in blocks(page))]


def test_what_is_not_run_says_why_and_is_little() -> None:
    every = [block for page in PAGES for block in blocks(page)]
    assert {why for why, _ in every if why} <= {*NEEDS, "files of your own"}
    assert sum(why is None for why, _ in every) >= SHARE * len(every)
    assert [code for why, code in every if why in NEEDS and NEEDS[why] not in code] == []


def loop_of(code: str) -> str:
    """The loop's statements without its last, which shuts all down: two steps of it, in the names of a notebook."""
    (main,) = (node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef) and node.name == "main")
    before = [node for node in ast.parse(code).body[:-1] if getattr(node, "name", "") != "main"]
    text = "\n".join(ast.unparse(node) for node in [*before, *main.body[:-1]])
    assert "steps = ('runs/tiny-moe', 20)" in text
    return text.replace("('runs/tiny-moe', 20)", "('runs/tiny-moe', 2)")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("blocks")


@pytest.fixture(scope="module")
def names(folder: Path, shelf: EngineShelf) -> Iterator[dict[str, Any]]:
    """What the loop leaves, and under ``printed`` what it prints."""
    shelf.clear()
    (_, code), *_ = blocks(ROOT / "docs" / "loop.md")
    found: dict[str, Any] = {"__name__": "loop"}
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.chdir(folder)
        exec(compile(loop_of(code), "loop.md", "exec"), found)
    (folder / "moe").symlink_to("runs/tiny-moe")  # engines are called by the last part of their path
    yield {**found, "printed": printed.getvalue()}
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
def test_the_blocks_run_as_they_are_pasted(
    page: Path, names: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    there = dict(names)
    for number, (why, code) in enumerate(blocks(page)):
        if why is None and "def main():" not in code:  # the loop itself has run
            code = MODEL.sub(str(folder / "moe"), code)
            for shown, small in SMALL.items():
                code = code.replace(shown, small)
            exec(compile(code, f"{page.name}, block {number}", "exec"), there)
    for name, part in there.items():
        if part is not names.get(name) and isinstance(part, AsyncLLMCollector):
            part.shutdown()
    if page.stem == "README":
        check_first_example(page.read_text(), capsys.readouterr().out)


def check_first_example(page: str, printed: str) -> None:
    """The example prints what the README shows."""
    found = re.search(r"RoutedExperts\(shape=\[T=(\d+), L=4, K=4\], dtype=int8, coverage=(.*)%, nbytes=(\d+)", printed)
    assert found is not None, printed
    # 20 tokens of prompt, and an answer that may end before its limit: sampling depends on how requests are batched
    tokens = int(found[1])
    assert 20 < tokens <= 36
    assert (found[2], int(found[3])) == (f"{100 * (tokens - 1) / tokens:.1f}", tokens * 4 * 4)
    # the prompt's routes do not depend on what was sampled; their order depends on the kernel
    shown = page[page.index("```text\n") :]
    assert first_row(printed) == first_row(shown) == [{2, 15, 4, 13}, {5, 2, 7, 15}, {1, 14, 7, 6}]
    assert f"{tokens - 1} · · ·".split() in [line.split() for line in printed.splitlines()]
    gap = re.search(r"^largest gap of a log-prob: (0\.\d{3}) live, (0\.\d{3}) replayed$", printed, re.MULTILINE)
    assert gap is not None, printed
    assert 0 < float(gap[2]) < 0.1  # bfloat16 on one side, the same experts on both


def first_row(text: str) -> list[set[int]]:
    """The experts of token 0 by layer."""
    cells = next(line.split()[1:] for line in text.splitlines() if line.split()[:1] == ["0"])
    return [{int(expert) for expert in cell.split(",")} for cell in cells]


@pytest.mark.engine
def test_the_loop_is_short_and_says_how_it_learns(names: dict[str, Any]) -> None:
    (_, code), *_ = blocks(ROOT / "docs" / "loop.md")
    assert len(code.splitlines()) <= 60
    for step, line in enumerate(names["printed"].splitlines()[-2:]):
        found = re.fullmatch(rf"step {step}: reward (0\.\d\d), KL to the engine (\S+), weights {step + 1}", line)
        assert found is not None, line
        assert 0 < float(found[1]) < 1 and abs(float(found[2])) < 1
