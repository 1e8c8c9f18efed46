"""The README's first example runs as it stands, and prints the routes that it shows."""

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
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    exec(compile(block[1], "README.md", "exec"), {"__name__": "__main__"})  # here, where vLLM was imported already
    printed = capsys.readouterr().out
    # 20 tokens of prompt, and an answer that may end before its limit: sampling depends on how requests are batched
    found = re.search(r"RoutedExperts\(shape=\[T=(\d+), L=4, K=4\], dtype=int8, coverage=(.*)%, nbytes=(\d+)", printed)
    assert found is not None, printed
    tokens = int(found[1])
    assert 20 < tokens <= 36
    assert (found[2], int(found[3])) == (f"{100 * (tokens - 1) / tokens:.1f}", tokens * 4 * 4)
    # the prompt's routes do not depend on what was sampled
    for row in ("    0  2,15,4,13   5,2,15,7    1,14,7,6", f"{tokens - 1}          ·          ·           ·"):
        assert row.split() in [line.split() for line in printed.splitlines()]
