"""The README's first example runs as it stands, and prints what it shows; its picture is there for both themes."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from support.engines import EngineShelf

ROOT = Path(__file__).parents[1]


@pytest.mark.engine
def test_the_first_example_runs_as_it_stands(
    no_engine: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "README.md").read_text()
    block = re.search(r"```python\n((?:(?!```).)*)```\n\n```text\n(.*?)```", text, re.DOTALL)
    assert block is not None
    exec(compile(block[1], "README.md", "exec"), {"__name__": "__main__"})  # here, where vLLM was imported already
    printed, shown = capsys.readouterr().out, block[2]
    # 20 tokens of prompt, and an answer that may end before its limit: sampling depends on how requests are batched
    found = re.search(r"RoutedExperts\(shape=\[T=(\d+), L=4, K=4\], dtype=int8, coverage=(.*)%, nbytes=(\d+)", printed)
    assert found is not None, printed
    tokens = int(found[1])
    assert 20 < tokens <= 36
    assert (found[2], int(found[3])) == (f"{100 * (tokens - 1) / tokens:.1f}", tokens * 4 * 4)
    # the prompt's routes do not depend on what was sampled; their order depends on the kernel
    assert _row(printed, 0) == _row(shown, 0) == [{2, 15, 4, 13}, {5, 2, 7, 15}, {1, 14, 7, 6}]
    assert f"{tokens - 1} · · ·".split() in [line.split() for line in printed.splitlines()]
    gap = re.search(r"^largest gap of a log-prob: (0\.\d{3}) live, (0\.\d{3}) replayed$", printed, re.MULTILINE)
    assert gap is not None, printed
    assert 0 < float(gap[2]) < 0.1  # bfloat16 on one side, the same experts on both


@pytest.mark.engine
def test_the_loop_runs_as_it_stands(
    no_engine: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    block, *_ = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "loop.md").read_text(), re.DOTALL)
    assert len(block.splitlines()) <= 60
    block = block.replace('steps = "runs/tiny-moe", 20', 'steps = "runs/tiny-moe", 2')  # enough to see all parts move
    exec(compile(block, "loop.md", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()[-2:]
    for step, line in enumerate(lines):
        found = re.fullmatch(rf"step {step}: reward (0\.\d\d), KL to the engine (\S+), weights {step + 1}", line)
        assert found is not None, lines
        assert 0 < float(found[1]) < 1 and abs(float(found[2])) < 1


def _row(text: str, token: int) -> list[set[int]]:
    """Return the experts of a token by layer."""
    cells = next(line.split()[1:] for line in text.splitlines() if line.split()[:1] == [str(token)])
    return [{int(expert) for expert in cell.split(",")} for cell in cells]


def test_the_picture_differs_between_the_themes_in_colors_only() -> None:
    text = (ROOT / "README.md").read_text()
    dark, light = (re.search(rf'(?:srcset|src)="(docs/figures/\w+_{theme}\.svg)"', text) for theme in ("dark", "light"))
    assert dark is not None
    assert light is not None
    pictures = [re.sub(r"#[0-9a-f]{6}", "#", (ROOT / found[1]).read_text()) for found in (dark, light)]
    assert pictures[0] == pictures[1]
