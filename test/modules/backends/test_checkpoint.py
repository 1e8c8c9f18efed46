"""Names, dtypes and shapes out of safetensors headers, folders that lack weights, and tokenizers sent as files."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.checkpoint import (
    DTYPES,
    check_weights,
    checkpoint_metadata,
    load_tokenizer,
    tokenizer_files,
)
from torchrl_moe.modules.backends.process import link
from torchrl_moe.testing import ByteTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe, save_tiny_moe


def loaded(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size]]:
    tensors = {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "qwen3"])
def test_metadata_is_what_safetensors_loads(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    found = checkpoint_metadata(save_tiny_moe(tmp_path, family, dtype=dtype))
    assert found == loaded(tmp_path)
    assert {kind for kind, _ in found.values()} >= {dtype}


def test_shards_are_joined(tmp_path: Path) -> None:
    make_tiny_moe("mixtral").save_pretrained(tmp_path, max_shard_size="200KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert checkpoint_metadata(tmp_path) == loaded(tmp_path)


def test_the_same_weights_in_another_format_beside_the_model_are_not_counted(tmp_path: Path) -> None:
    single, sharded = tmp_path / "single", tmp_path / "sharded"
    for folder in (single, sharded):
        folder.mkdir()
        save_file({"layers.0.w1": torch.zeros(2)}, folder / "consolidated.safetensors")
    save_file({"model.a": torch.zeros(2)}, single / "model.safetensors")
    assert list(checkpoint_metadata(single)) == ["model.a"]
    save_file({"model.a": torch.zeros(2)}, sharded / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"model.a": "model-00001-of-00001.safetensors"}}
    (sharded / "model.safetensors.index.json").write_text(json.dumps(index))
    assert list(checkpoint_metadata(sharded)) == ["model.a"]


def test_every_dtype_that_torch_can_save_is_known(tmp_path: Path) -> None:
    dtypes = {name: getattr(torch, dtype) for name, dtype in DTYPES.items()}
    tensors = {name: torch.zeros(2, 3).to(dtype) for name, dtype in dtypes.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert checkpoint_metadata(tmp_path) == {name: (dtype, torch.Size([2, 3])) for name, dtype in dtypes.items()}


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"])
def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(EngineError, match=r"model\.safetensors' is not a readable safetensors file .*Git LFS"):
        checkpoint_metadata(tmp_path)


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F3", "shape": [1], "data_offsets": [0, 1]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(EngineError, match=r"tensor 'a' in .* has dtype 'F3'; known: F64"):
        checkpoint_metadata(tmp_path)


# -- folders that lack weights -----------------------------------------------------------------------------------------


def folder_with(path: Path, *names: str) -> Path:
    path.mkdir()
    for name in ("config.json", *names):
        (path / name).write_text("{}")
    return path


@pytest.mark.parametrize(
    "names",
    [
        ["model.safetensors"],
        ["consolidated.safetensors"],
        ["pytorch_model.bin"],
        ["pytorch_model.fp16.bin"],
        ["adapter_config.json"],
        ["model.gguf"],
    ],
)
def test_a_folder_may_have_its_weights_in_any_format(tmp_path: Path, names: list[str]) -> None:
    check_weights(folder_with(tmp_path / "model", *names))


@pytest.mark.parametrize("names", [[], ["tokenizer.json", "training_args.bin", "optimizer.pt"]])
def test_a_folder_without_weights_is_named_with_what_it_lacks(tmp_path: Path, names: list[str]) -> None:
    folder = folder_with(tmp_path / "model", *names)
    with pytest.raises(ValueError, match="has no weights") as caught:
        check_weights(folder)
    assert str(caught.value) == (
        f"{str(folder)!r} has no weights: no *.safetensors and no *.bin file. model.save_pretrained(path) writes them"
    )


def test_files_that_the_index_names_and_the_folder_lacks_are_listed(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", "model-2.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"w{i}": f"model-{i}.safetensors" for i in range(1, 7)}}))
    with pytest.raises(ValueError, match="lacks") as caught:
        check_weights(str(folder))
    assert str(caught.value) == (
        f"{str(folder)!r} lacks model-1.safetensors, model-3.safetensors, model-4.safetensors and 2 more files, "
        "which its model.safetensors.index.json names: copy them there"
    )
    for i in range(7):
        (folder / f"model-{i}.safetensors").touch()
    check_weights(folder)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"model\.safetensors\.index\.json' cannot be read"):
        check_weights(folder)


# -- tokenizers --------------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_was_sent_does_what_it_did() -> None:
    there = load_tokenizer(link.decode(link.encode(tokenizer_files(ByteTokenizer(), trust_remote_code=False))))
    here = ByteTokenizer()
    text = "é <|im_end|>"
    assert there.encode(text) == here.encode(text) == [195, 169, 32, 258]
    assert there.decode(there.encode(text)) == text
    chat = [{"role": "user", "content": "hi"}]
    assert there.apply_chat_template(chat, tokenize=False) == here.apply_chat_template(chat, tokenize=False)
    assert (there.eos_token_id, there.pad_token_id) == (here.eos_token_id, here.pad_token_id)


def test_nothing_of_it_stays_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load_tokenizer(tokenizer_files(ByteTokenizer(), trust_remote_code=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../outside.json", "/etc/outside.json", "a/../../outside.json"])
def test_a_file_outside_of_its_folder_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(ValueError, match="a tokenizer has no file"):
        load_tokenizer({"files": {name: b"{}"}, "trust_remote_code": False})
    assert list(tmp_path.rglob("outside.json")) == []
