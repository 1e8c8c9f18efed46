"""The rollout tour runs end to end and refuses bad input in one line."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from tensordict import TensorDict

from support.engines import EngineShelf
from torchrl_moe.data import RoutedExperts

SCRIPT = Path(__file__).parents[3] / "tutorials" / "grpo" / "rollout.py"


@pytest.mark.engine
def test_the_tour_prints_routes_and_parity_and_saves_the_batch(
    no_engine: EngineShelf, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "batch"
    script = runpy.run_path(str(SCRIPT))  # in this process, which has imported vLLM already
    assert script["main"](["--prompts", "12", "--max-new-tokens", "8", "--out", str(out)]) == 0
    done = capsys.readouterr()
    assert "route mismatches 0 of" in done.out and "tokens/s" in done.out
    assert "generate" not in done.err  # a bar is for a terminal
    batch = TensorDict.load_memmap(str(out))
    assert batch.shape == (12,) and isinstance(batch[0]["routed_experts"], RoutedExperts)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "--replicas must be at least 1, got 0"),
        (["--temperature", "0"], "--temperature must be positive"),
        (["--family", "gpt2"], "invalid choice: 'gpt2'"),
    ],
)
def test_bad_input_is_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(SCRIPT))
    with pytest.raises(SystemExit, match="2"):
        script["parse"](arguments)
    assert message in capsys.readouterr().err
