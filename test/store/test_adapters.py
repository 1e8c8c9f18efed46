"""An adapter in a store: published as tensors of bytes, and copied as files with a check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from torchrl_moe.errors import DigestMismatch, ManifestMismatch
from torchrl_moe.store import Manifest, WeightStoreWriter, adapter_tensors, copy_adapter
from torchrl_moe.store.reader import ADAPTER_FILES

CONFIG, MODEL = ADAPTER_FILES


def files(text: bytes) -> dict[str, bytes]:
    return {CONFIG: b"{}", MODEL: text}


def publish(store: Path, version: int, text: bytes) -> Manifest:
    writer = WeightStoreWriter(store)
    manifest = writer.publish(adapter_tensors(files(text)).items(), version)
    writer.close()
    return manifest


@pytest.mark.parametrize("text", [b"weights", b"x" * ((5 << 20) + 1)], ids=len)
def test_a_version_is_copied_as_it_was_written(tmp_path: Path, text: bytes) -> None:
    manifest = publish(tmp_path / "store", 3, text)
    (tmp_path / "copy").mkdir()
    assert copy_adapter(tmp_path / "store", 3, tmp_path / "copy") == manifest
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == files(text)
    assert (manifest.version, manifest.nbytes) == (3, 2 + len(text))
    assert [entry.digest for entry in manifest.entries] == [xxhash.xxh3_64_hexdigest(b) for b in (b"{}", text)]
    assert manifest.digest != publish(tmp_path / "store", 4, text + b"!").digest


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (lambda text: text.replace(b"weights", b"weightz"), DigestMismatch, "7: bytes of adapter_model.safetensors "),
        (lambda text: text[:-1], ManifestMismatch, "the file was cut short"),
        (lambda text: text.replace(b'"version":"7"', b'"version":"8"'), ManifestMismatch, "is damaged"),
        (None, ManifestMismatch, r"7 is not in the store, which holds \[\]: it was removed, or .* not shared"),
        (lambda text: text[:100], ManifestMismatch, "is damaged"),
    ],
)
def test_what_was_not_published_so_is_not_copied(tmp_path: Path, spoil: Any, kind: Any, words: str) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    publish(store, 7, b"weights")
    copy.mkdir()
    file = store / "v7.safetensors"
    file.write_bytes(spoil(file.read_bytes())) if spoil else file.unlink()
    with pytest.raises(kind, match=words):
        copy_adapter(store, 7, copy)
    assert list(copy.iterdir()) == []


def test_weights_are_no_adapter(tmp_path: Path) -> None:
    WeightStoreWriter(tmp_path / "store").publish([("a", torch.ones(2))], 1)
    with pytest.raises(ManifestMismatch, match=r"version 1 in .* is not one of an adapter"):
        copy_adapter(tmp_path / "store", 1, tmp_path)
