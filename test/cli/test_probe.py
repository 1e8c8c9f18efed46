"""``torchrl-moe probe`` over real engines, and what it refuses before one is started."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from support.engines import EngineShelf
from torchrl_moe.cli import probe
from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.main import main
from torchrl_moe.cli.probe import read_prompts
from torchrl_moe.modules import AsyncVLLM


def lend(engine: AsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have commands start no engine, and take this one."""
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda *_, **__: contextlib.nullcontext(engine))


def test_prompts_are_lines_or_json_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n  two  \n")
    (tmp_path / "a.jsonl").write_text('{"prompt": "1 + 1 =", "answer": "2"}\n\n{"prompt": "2"}\n')
    assert read_prompts(str(tmp_path / "a.txt")) == ["one", "two"]
    assert read_prompts(str(tmp_path / "a.jsonl")) == ["1 + 1 =", "2"]
    (tmp_path / "a.json").write_text('{"prompt": "1"}\n{"prompt": "2"}\n')
    assert read_prompts(str(tmp_path / "a.json")) == ["1", "2"]
    (tmp_path / "b.txt").write_text('{"a": 1} is a\n[1]\n')
    assert read_prompts(str(tmp_path / "b.txt")) == ['{"a": 1} is a', "[1]"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("none.txt", None, "cannot be read"),
        ("empty.txt", "\n\n", "there is no prompt in it"),
        ("bad.jsonl", '{"prompt": "a"}\n{"question": "b"}', "line 2: it must be an object with a key 'prompt'"),
        ("bad.jsonl", "[1]", "line 1: it must be an object"),
        ("bad.jsonl", '{"prompt": 3}', "line 1: the prompt must be text"),
        ("bad.jsonl", '{"prompt": ""}', "line 1: the prompt must be text"),
    ],
)
def test_prompts_that_cannot_be_read_are_named(tmp_path: Path, name: str, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(BadUse, match="--prompts") as caught:
        read_prompts(str(tmp_path / name))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["./none"], "there is no folder './none'"),
        (["tiny", "--max-new-tokens", "0"], "--max-new-tokens 0: at least 1"),
        (["tiny", "--temperature", "0"], "greedy answers say nothing"),
        (["tiny", "--prompts", "./none.txt"], "--prompts ./none.txt cannot be read"),
        (["tiny", "--engine-arg", "x"], "write it as KEY=VALUE"),
        (["tiny", "--engine", "transformers", "--engine-arg", "foo=1"], "engine='transformers' has no foo=1"),
        (["tiny", "--engine", "transformers", "--engine-arg", "max_num_seqs=1.5"], "max_num_seqs must be an integer"),
        (["tiny", "--engine", "transformers", "--engine-arg", "max_model_len=abc"], "max_model_len must be an integer"),
        (["tiny", "--engine-arg", "model=x"], "the model is the first argument, MODEL"),
        pytest.param(
            ["tiny", "--engine-arg", "foo=1"], "vLLM has no engine argument foo=1", marks=pytest.mark.needs_vllm
        ),
    ],
)
def test_bad_use_starts_no_engine(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(AsyncVLLM, "from_pretrained")
    monkeypatch.setattr(probe, "model_folder", lambda source: pytest.fail("a model is made first"))
    assert main(["probe", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_model_without_weights_starts_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(AsyncVLLM, "from_pretrained")
    AutoConfig.for_model("qwen3_moe").save_pretrained(tmp_path)
    for command in ("probe", "conformance"):
        assert main([command, str(tmp_path), "--engine", "transformers"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(
            f"torchrl-moe {command}: {str(tmp_path)!r} has no weights: no *.safetensors and no *.bin"
        )


def test_a_dense_model_is_refused(shelf: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", str(shelf.folder("qwen3"))]) == 2
    assert "it is a dense model, and there is nothing to replay" in capsys.readouterr().err


def test_plain_transformers_and_the_trainer_compute_the_same(
    second_engine: AsyncVLLM,
    shelf: EngineShelf,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lend(second_engine, monkeypatch)
    (tmp_path / "mine.txt").write_text("1 + 1 =\nA mixture of experts\n")
    more = ["--engine", "transformers", "--dtype", "float32", "--prompts", str(tmp_path / "mine.txt")]
    arguments = ["probe", str(shelf.folder("qwen3_moe")), *more, "--max-new-tokens", "6", "--json"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert 2 <= found["tokens"] <= 12  # an answer may end earlier
    assert list(found["agreement"]["layers"]) == ["1", "2", "3"]  # layer 0 is dense
    assert found["replayed"]["maximum"] < 1e-5
    assert found["verdict"].startswith("Nothing to remove")


def test_an_engine_without_routes_or_a_tokenizer(
    shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Mute:
        routing_layout: Any = None

        def get_tokenizer(self) -> Any:
            return lambda text: {"input_ids": []}

    lend(Mute(), monkeypatch)  # type: ignore[arg-type]
    command = ["probe", str(shelf.folder("qwen3_moe")), "--engine", "transformers"]
    assert main(command) == 2
    assert "the engine records no routes: leave enable_return_routed_experts out" in capsys.readouterr().err
    Mute.routing_layout = "some"
    assert main(command) == 2
    assert "makes no tokens from a prompt: is it in the model's folder?" in capsys.readouterr().err


@pytest.mark.engine
def test_vllm_in_float32_is_the_same_function_too(
    engine: AsyncVLLM, shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lend(engine, monkeypatch)
    folder: Any = shelf.folder("qwen3_moe")
    assert main(["probe", str(folder), "--dtype", "float32", "--max-new-tokens", "12"]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: vllm in float32, scored by transformers in float32; " in out
    assert "Nothing to remove" in out
