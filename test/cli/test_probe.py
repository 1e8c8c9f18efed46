"""``torchrl-moe probe`` over real engines, what it refuses, and its verdicts worked out by hand."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from tensordict import TensorDict
from transformers import AutoConfig

from support.engines import EngineShelf
from torchrl_moe.cli import models
from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.main import main
from torchrl_moe.cli.probe import read_prompts
from torchrl_moe.cli.probe_result import Figures, ProbeResult
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.policies.probe import DtypeGap
from torchrl_moe.objectives import MismatchMetrics


@pytest.fixture
def lend(monkeypatch: MonkeyPatch) -> Callable[[Any], None]:
    """Has commands start no engine, and take the one that is lent."""
    monkeypatch.delattr(AsyncVLLM, "from_pretrained")

    def lend(engine: Any) -> None:
        start = lambda *_, **__: contextlib.nullcontext(engine)  # noqa: E731
        monkeypatch.setattr(AsyncVLLM, "from_pretrained", start, raising=False)

    return lend


@pytest.mark.parametrize(
    ("name", "text", "prompts"),
    [
        ("a.txt", "one\n\n  two  \n", ["one", "two"]),
        ("a.jsonl", '{"prompt": "1 + 1 =", "answer": "2"}\n\n{"prompt": "2"}\n', ["1 + 1 =", "2"]),
        ("a.json", '{"prompt": "1"}\n{"prompt": "2"}\n', ["1", "2"]),
        ("b.txt", '{"a": 1} is a\n[1]\n', ['{"a": 1} is a', "[1]"]),
        ("none.txt", None, "cannot be read"),
        ("empty.txt", "\n\n", "there is no prompt in it"),
        ("bad.jsonl", '{"prompt": "a"}\n{"question": "b"}', "line 2: it must be an object with a key 'prompt'"),
        ("bad.jsonl", "[1]", "line 1: it must be an object"),
        ("bad.jsonl", '{"prompt": 3}', "line 1: the prompt must be text"),
        ("bad.jsonl", '{"prompt": ""}', "line 1: the prompt must be text"),
    ],
)
def test_prompts_are_lines_or_json_lines(tmp_path: Path, name: str, text: str | None, prompts: list[str] | str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    if isinstance(prompts, list):
        assert read_prompts(str(tmp_path / name)) == prompts
    else:
        with pytest.raises(BadUse, match=f"--prompts .*{prompts}"):
            read_prompts(str(tmp_path / name))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["tiny", "--max-new-tokens", "0"], "--max-new-tokens 0: at least 1"),
        (["tiny", "--temperature", "0"], "greedy answers say nothing"),
        (["tiny", "--prompts", "./none.txt"], "--prompts ./none.txt cannot be read"),
        (["tiny", "--engine-arg", "x"], "write it as KEY=VALUE"),
        (["tiny", "--engine", "transformers", "--engine-arg", "foo=1"], "engine='transformers' has no foo=1"),
        (["tiny", "--engine", "transformers", "--engine-arg", "max_model_len=abc"], "max_model_len must be an integer"),
        (["tiny", "--engine-arg", "model=x"], "the model is the first argument, MODEL"),
        pytest.param(
            ["tiny", "--engine-arg", "foo=1"], "vLLM has no engine argument foo=1", marks=pytest.mark.needs_vllm
        ),
    ],
)
def test_bad_use_starts_no_engine(
    arguments: list[str], said: str, lend: Any, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr(models, "model_folder", lambda source: pytest.fail("a model is made first"))
    assert main(["probe", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


IN_TRANSFORMERS = [("probe", "--engine", "transformers"), ("conformance", "--engine", "transformers")]
IN_VLLM = [pytest.param((name,), marks=pytest.mark.needs_vllm) for name in ("probe", "bisect", "conformance", "serve")]


@pytest.mark.parametrize("words", [*IN_TRANSFORMERS, *IN_VLLM], ids=" ".join)
def test_a_model_without_weights_or_a_tokenizer_starts_no_engine(
    words: tuple[str, ...], lend: Any, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    AutoConfig.for_model("qwen3_moe").save_pretrained(tmp_path)
    for said in ("no weights: no *.safetensors and no *.bin", "no tokenizer: tokenizer.save_pretrained("):
        assert main([words[0], str(tmp_path), *words[1:]]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"torchrl-moe {words[0]}: {str(tmp_path)!r} has {said}")
        (tmp_path / "model.safetensors").touch()


@pytest.mark.parametrize("command", ["probe", "bisect"])
def test_a_dense_model_is_refused(command: str, lend: Any, shelf: EngineShelf, capsys: CaptureFixture[str]) -> None:
    assert main([command, str(shelf.folder("qwen3"))]) == 2
    assert "it is a dense model, and there is nothing to replay" in capsys.readouterr().err


def test_plain_transformers_and_the_trainer_compute_the_same(
    second_engine: AsyncVLLM, lend: Any, shelf: EngineShelf, tmp_path: Path, capsys: CaptureFixture[str]
) -> None:
    lend(second_engine)
    (tmp_path / "mine.txt").write_text("1 + 1 =\nA mixture of experts\n")
    more = ["--engine", "transformers", "--dtype", "float32", "--prompts", str(tmp_path / "mine.txt")]
    assert main(["probe", str(shelf.folder("qwen3_moe")), *more, "--max-new-tokens", "6", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert 2 <= found["tokens"] <= 12  # an answer may end earlier
    assert list(found["agreement"]["layers"]) == ["1", "2", "3"]  # layer 0 is dense
    assert found["replayed"]["maximum"] < 1e-5 and found["verdict"].startswith("Nothing to remove")
    assert found["dtypes"] == []


def test_tensors_that_the_two_hold_in_different_dtypes_are_named(
    second_engine: AsyncVLLM, lend: Any, shelf: EngineShelf, capsys: CaptureFixture[str]
) -> None:
    """The engine is in float32, the trainer in bfloat16: its routers are not those that are rounded on their way."""
    lend(second_engine)
    more = ["--engine", "transformers", "--trainer-dtype", "bfloat16", "--max-new-tokens", "4"]
    main(["probe", str(shelf.folder("qwen3_moe")), *more])
    out = capsys.readouterr().out
    (line,) = (" ".join(line.split()) for line in out.splitlines() if line.startswith("routers "))
    assert line == "routers float32 bfloat16 3, such as model.layers.1.mlp.gate.weight"
    assert "router_dtype" not in out


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (None, "the engine records no routes: leave enable_return_routed_experts out"),
        ("some", "makes no tokens from a prompt: is it in the model's folder?"),
    ],
)
def test_an_engine_without_routes_or_a_tokenizer(
    layout: str | None, said: str, lend: Any, shelf: EngineShelf, capsys: CaptureFixture[str]
) -> None:
    lend(SimpleNamespace(routing_layout=layout, get_tokenizer=lambda: lambda text: {"input_ids": []}))
    assert main(["probe", str(shelf.folder("qwen3_moe")), "--engine", "transformers"]) == 2
    assert said in capsys.readouterr().err


# -- verdicts, by hand ------------------------------------------------------------------------------------------------
def metrics(gaps: list[float], agreement: list[float] | None = None) -> MismatchMetrics:
    """Of one sequence: a prompt token, and one that was sampled for each gap, trainer less engine."""
    tokens = len(gaps) + 1
    td = TensorDict(
        {
            ("tokens", "full"): torch.arange(tokens)[None],
            ("log_probs", "full"): torch.tensor([[math.nan, *[-1.0] * len(gaps)]]),
            ("masks", "all_attention_mask"): torch.ones(1, tokens, dtype=torch.bool),
        },
        [1],
    )
    if agreement is not None:
        td["routing", "agreement"] = torch.tensor([agreement])
        td["routing", "fallback"] = torch.tensor([1])
    found = MismatchMetrics(masking_strategy="generic", thresholds=None)
    found.update(td, torch.tensor([[0.0, *[gap - 1.0 for gap in gaps]]]))
    return found


def result(live: list[float], replayed: list[float], agreement: list[float] | None = None) -> ProbeResult:
    return ProbeResult.of("a model", metrics(replayed, agreement or [math.nan, 0.75, 1.0]), metrics(live))


def test_figures_are_those_of_the_sampled_tokens() -> None:
    found = Figures.of(metrics([0.1, -0.3, 0.2, 0.0]))
    assert found.mean == pytest.approx(0.15) and found.median == pytest.approx(0.15)
    assert found.maximum == pytest.approx(0.3) and found.k1 == pytest.approx(0.0, abs=1e-7)
    k3 = sum(math.exp(gap) - 1 - gap for gap in (0.1, -0.3, 0.2, 0.0)) / 4
    assert found.k3 == pytest.approx(k3, rel=1e-4)


@pytest.mark.parametrize(
    ("live", "replayed", "begins"),
    [
        ([0.1, -0.1], [0.05, -0.05], "R3 helps: it removes 50% of the mismatch (mean |Δ log-prob| 1.0e-01 -> 5.0e-02)"),
        ([2e-6, -2e-6], [1e-6, -1e-6], "Nothing to remove: engine and trainer compute the same function"),
        ([0.1, -0.1], [0.099, -0.1], "R3 makes little difference here"),
        ([0.05, -0.05], [0.1, -0.1], "R3 does not help here: the mismatch grows by 100%"),
        ([0.1, -0.1], [1.5, -1.5], "Even with replay, engine and trainer are far apart (KL (k3) "),
    ],
)
def test_the_verdict(live: list[float], replayed: list[float], begins: str) -> None:
    assert result(live, replayed).verdict.startswith(begins)


def test_a_mismatch_that_is_left_over_is_a_problem() -> None:
    found = result([0.1, -0.1], [3.0, -3.0])
    assert len(found.problems) == 2  # the two ratios, e^3 and e^-3: ess (e^3 + e^-3)^2 / 2 (e^6 + e^-6) = 0.505
    assert found.problems[1] == "100% of ratios beyond 2, at most 10%"
    skewed = result([0.1] * 4, [4.0, -0.1, -0.1, -0.1])
    assert any(problem.startswith("effective sample size 0.2") for problem in skewed.problems)


def test_text_and_data_say_the_same() -> None:
    narrow = DtypeGap("routers", "bfloat16", "float32", ("a.gate.weight", "b.gate.weight"))
    found = dataclasses.replace(result([0.1, -0.1], [0.05, -0.05]), dtypes=[narrow])
    assert found.agreement == {1: pytest.approx(0.75), 2: pytest.approx(1.0)}
    assert found.mean_agreement == pytest.approx(0.875) and found.removed == pytest.approx(0.5, rel=1e-5)
    assert found.problems == [] and found.verdict.endswith("chooses other experts in 12.5% of rows.")
    lines = found.text().splitlines()
    assert lines[0] == "a model; 2 tokens"
    assert [cell for cell in lines[2].split() if "e-" in cell] == ["1.0e-01", "5.0e-02"]
    assert any(line.split() == ["1", "75.00%", "#" * 25] for line in lines)
    assert "routers             bfloat16  float32  2, such as a.gate.weight" in lines
    assert "router_dtype='float32' keeps them in an engine" in found.text()
    data: dict[str, Any] = json.loads(json.dumps(found.to_dict()))
    assert (data["tokens"], data["verdict"]) == (2, found.verdict)
    assert data["agreement"]["layers"] == {"1": 0.75, "2": 1.0}
    names = ["a.gate.weight", "b.gate.weight"]
    assert data["dtypes"] == [{"kind": "routers", "engine": "bfloat16", "trainer": "float32", "names": names}]


def test_without_a_token_there_is_nothing_to_say() -> None:
    with pytest.raises(ValueError, match="no tokens to compare"):
        result([], [])


@pytest.mark.engine
def test_vllm_in_float32_is_the_same_function_too(
    engine: AsyncVLLM, shelf: EngineShelf, lend: Callable[[Any], None], capsys: CaptureFixture[str]
) -> None:
    lend(engine)
    folder: Any = shelf.folder("qwen3_moe")
    assert main(["probe", str(folder), "--dtype", "float32", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: vllm in float32, scored by transformers in float32; " in out
    assert "Nothing to remove" in out
