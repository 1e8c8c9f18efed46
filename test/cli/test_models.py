"""The model that a command is given, and errors as one line with what to do."""

from __future__ import annotations

import errno
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.main import main
from torchrl_moe.cli.models import config_of, explain, load, model_folder, try_replay
from torchrl_moe.errors import ReplicaDiedError, RequestRefusedError
from torchrl_moe.testing import make_tiny_moe


def test_the_tiny_model_is_made_and_removed() -> None:
    with model_folder("tiny") as folder:
        config = AutoConfig.from_pretrained(folder)
        assert (config.num_hidden_layers, config.num_experts, config.num_experts_per_tok) == (8, 32, 4)
        assert (Path(folder) / "tokenizer.json").is_file()
    assert not Path(folder).exists()


def test_a_folder_of_that_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text("{}")
    with model_folder("tiny") as folder:
        assert folder == "tiny"


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("./none", "there is no folder './none'"),
        ("{}/none", "there is no folder"),
        ("a/b/c", "there is no folder 'a/b/c': name one that holds config.json, a hub name, or tiny"),
        ("", "there is no folder ''"),
        ("{}", "holds no model: it has no config.json"),
        ("{}/file", "is a file: name the folder"),
    ],
)
def test_a_wrong_path_says_what_to_do(source: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadUse, match=said), model_folder(source.format(tmp_path)):
        pass


def test_a_hub_that_does_not_answer_is_asked_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[str] = []

    def ask(url: str, **_: Any) -> None:
        asked.append(url)
        raise ConnectionError("no route")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", ask)
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda source: pytest.fail("it would try again and again"))
    with pytest.raises(
        BadUse, match=r"there is no folder 'no/such', nothing .* does not answer \(no route\)\)\. Check"
    ):
        config_of("no/such")
    assert len(asked) == 1
    monkeypatch.setitem(sys.modules, "transformers", None)  # nothing heavy is loaded first
    assert main(["probe", "no/such", "--engine", "transformers"]) == 2
    said, refused = capsys.readouterr().err.splitlines()
    assert said == "there is no folder no/such: asking the Hugging Face hub for it ..."
    assert refused.startswith("torchrl-moe probe: there is no folder 'no/such', nothing of that name")
    assert len(asked) == 2


def test_a_configuration_that_cannot_be_had_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        BadUse, match=r"the hub gave no configuration of 'no/such-model' \(.*without a network, name a folder"
    ):
        config_of("no/such-model")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(BadUse, match=r"transformers cannot read its config\.json"):
        config_of(str(tmp_path))


def test_weights_that_are_not_there_are_one_line(tmp_path: Path) -> None:
    AutoConfig.for_model("qwen3_moe").save_pretrained(tmp_path)
    with pytest.raises(BadUse, match="transformers cannot load") as caught:
        load(str(tmp_path), "float32")
    assert "\n" not in str(caught.value)


# -- whether it can be replayed ---------------------------------------------------------------------------------------
def sizes(kind: str, **changes: Any) -> Any:
    return AutoConfig.for_model(kind, **{"hidden_size": 64, "num_hidden_layers": 4, **changes})


@pytest.mark.parametrize(
    ("config", "answer", "why"),
    [
        (lambda: make_tiny_moe("qwen3").config, False, "it is a dense model"),
        (lambda: sizes("phimoe", num_attention_heads=2, num_key_value_heads=2), False, "sparsemixer"),
        (lambda: sizes("qwen3_moe", num_hidden_layers=12, mlp_only_layers=[0, 1, 2]), True, ""),
        pytest.param(
            *(lambda: sizes("deepseek_v3", num_hidden_layers=20, first_k_dense_replace=9), True, ""),
            marks=pytest.mark.parity,  # a second way to begin with dense layers: seven seconds
        ),
        (lambda: sizes("gpt_oss", num_hidden_layers=6), True, ""),  # it has a list with an entry for each layer
        # the first layers of a hybrid have no attention, and cannot run by themselves
        (lambda: sizes("qwen3_next", num_hidden_layers=48), True, ""),
        (lambda: AutoConfig.for_model("qwen3_moe", num_experts=1 << 16, num_experts_per_tok=2), None, "billion param"),
        (lambda: sizes("qwen3_moe", num_key_value_heads=0), None, "cannot be built or run: "),
    ],
    ids=["dense", "another router", "dense first", "many dense first", "typed", "hybrid", "too large", "broken"],
)
def test_a_narrow_model_of_the_same_code_is_tried(config: Any, answer: bool | None, why: str) -> None:
    found = try_replay(config())
    assert found.answer is answer and why in found.why, found.why


# -- errors -----------------------------------------------------------------------------------------------------------
def raised_from(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


FULL = OSError(errno.ENOSPC, "No space left on device", "/data/run/model.safetensors")
BUSY = OSError(errno.EADDRINUSE, "Address already in use")


@pytest.mark.parametrize(
    ("error", "line", "code"),
    [
        (BadUse("name a model"), "^name a model$", 2),
        (RequestRefusedError("too long"), "^too long$", 2),
        (ReplicaDiedError("it died"), "^it died$", 1),
        (ReplicaDiedError("it died\nits log"), r"^it died \(--traceback shows the rest, with the engine's log\)$", 1),
        (
            ReplicaDiedError(
                "it did not start: RuntimeError: See root cause above.\n(core) ValueError: no room for the cache\n"
                "(core) more\nRuntimeError: See root cause above."
            ),
            r"^it did not start: RuntimeError: .* It was ValueError: no room for the cache \(--traceback shows",
            1,
        ),
        (ModuleNotFoundError("", name="hydra.core"), r"^needs hydra, .* pip install 'torchrl_moe\[train\]'$", 2),
        (
            raised_from(ImportError("cannot load it"), ModuleNotFoundError("no rich", name="rich")),
            r"^needs rich, .* pip install 'torchrl_moe\[render\]'$",
            2,
        ),
        (FULL, "^the disk is full at /data/run/model.safetensors: .* TMPDIR", 1),
        (OSError(errno.ENOSPC, "No space left", "standard output"), "^standard output cannot .* redirect it", 1),
        (BUSY, "Address already in use: free the port, or use another$", 2),
        (PermissionError(errno.EACCES, "denied", "/root/x"), "'/root/x': use a folder that you may read and write$", 2),
        (MemoryError(), r"^out of memory \(MemoryError\): use a narrower dtype, or a smaller model$", 1),
        (
            raised_from(ValueError("cannot import 'mine'"), ModuleNotFoundError("No module named 'mine'", name="mine")),
            "^cannot import 'mine'$",
            2,
        ),
        (KeyError("a"), r"^KeyError: 'a' \(--traceback shows where it comes from\)$", 1),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_an_error_is_one_line(error: Exception, line: str, code: int) -> None:
    said, found = explain(error)
    assert re.search(line, said) and "\n" not in said
    assert found == code


def test_a_full_disk_without_a_name_names_both_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    line, _ = explain(OSError(errno.ENOSPC, "No space left on device"))
    assert str(tmp_path) in line and "TMPDIR" in line
