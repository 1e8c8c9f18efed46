"""The reader: mappings that outlive versions, damage, who may write; adapters."""

from __future__ import annotations

import os
import signal
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from torch import Tensor

from support.processes import exit_code_of
from torchrl_moe.errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.store import (
    Manifest,
    TensorEntry,
    WeightStoreReader,
    WeightStoreWriter,
    adapter_tensors,
    copy_adapter,
)
from torchrl_moe.store.content import header_of
from torchrl_moe.store.reader import ADAPTER_FILES


@pytest.fixture
def writer(tmp_path: Path) -> WeightStoreWriter:
    return WeightStoreWriter(tmp_path)


def tensors(value: float = 1.0) -> dict[str, Tensor]:
    return {f"t{i}": torch.full((i, 100), float(value)) for i in range(5)}


def test_tensors_are_mapped_without_a_copy_or_a_warning_and_outlive_their_reader(
    writer: WeightStoreWriter, tmp_path: Path
) -> None:
    manifest, reader = writer.publish(tensors(3).items(), 1), WeightStoreReader(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with reader.reading(manifest) as once:
            pointers = {name: tensor.data_ptr() for name, tensor in once.items()}
            kept = once["t4"]
        with reader.reading(manifest) as again:
            assert {name: tensor.data_ptr() for name, tensor in again.items()} == pointers
    offsets = {entry.name: entry.offset for entry in manifest.entries if entry.nbytes}
    assert all(pointers[name] - pointers["t1"] == offsets[name] - offsets["t1"] for name in offsets)
    del reader, once, again
    assert kept.eq(3).all()


def test_who_writes_into_a_mapped_tensor_dies_and_damages_nothing(writer: WeightStoreWriter, tmp_path: Path) -> None:
    manifest = writer.publish(tensors().items(), 1)

    def scribble() -> None:
        with WeightStoreReader(tmp_path).reading(manifest) as read:
            read["t1"].fill_(7)

    assert exit_code_of(scribble) == -signal.SIGSEGV
    WeightStoreReader(tmp_path).verify(manifest)


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_any_number_of_threads_finds_a_flipped_byte(writer: WeightStoreWriter, tmp_path: Path, threads: int) -> None:
    manifest, reader = writer.publish(tensors().items(), 1), WeightStoreReader(tmp_path)
    reader.verify(manifest, threads)
    with (tmp_path / "v1.safetensors").open("r+b") as data:
        data.seek(len(header_of(manifest)) + manifest.entries[3].end - 1)
        data.write(b"x")
    with pytest.raises(DigestMismatch, match="version 1: bytes of t3 are not those published; publish it again"):
        reader.verify(manifest, threads)
    with reader.reading(manifest, verify=True) as read:
        assert read["t2"].eq(1).all()
        assert (list(read), len(read)) == ([f"t{i}" for i in range(5)], 5)
        with pytest.raises(DigestMismatch, match="bytes of t3"):
            read["t3"]


def test_a_file_that_was_cut_short_is_refused_before_it_is_read(writer: WeightStoreWriter, tmp_path: Path) -> None:
    manifest, reader = writer.publish(tensors().items(), 1), WeightStoreReader(tmp_path)
    reader.verify(manifest)
    path = tmp_path / "v1.safetensors"
    os.truncate(path, path.stat().st_size - manifest.entries[4].nbytes)
    for attempt in (reader.verify, lambda manifest: reader.reading(manifest).__enter__()):
        with pytest.raises(ManifestMismatch, match=r"has \d+ bytes of tensors, t4 ends at \d+: the file was"):
            attempt(manifest)
    path.unlink()
    with pytest.raises(ManifestMismatch, match=r"of the weight store is gone|version 1 is not in the store"):
        reader.verify(manifest)


def test_what_is_no_version_of_this_number_is_refused(writer: WeightStoreWriter, tmp_path: Path) -> None:
    manifest = writer.publish(tensors().items(), 1)
    path = tmp_path / "v1.safetensors"
    (tmp_path / "v9.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(ManifestMismatch, match="the manifest of version 9 is that of version 1"):
        WeightStoreReader(tmp_path).manifest(9)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")  # a link is not followed
    with pytest.raises((ManifestMismatch, OSError), match=r"cannot be opened|symbolic links"):
        WeightStoreReader(tmp_path).verify(manifest)


def test_flat_bytes_are_those_of_a_whole_version_and_a_patch_has_none(tmp_path: Path) -> None:
    writer, reader = WeightStoreWriter(tmp_path, keep_versions=9, delta=True), WeightStoreReader(tmp_path)
    first = writer.publish(tensors(2).items(), 1)
    with reader.flat(first) as (whole, flat):
        assert (whole, len(flat)) == (first, first.extent)
        entry = first.entries[4]
        assert (flat[entry.offset : entry.end].view(np.float32) == 2).all()
        assert not flat.flags.writeable
    changed = tensors(2)
    changed["t3"][0, 0] = 5
    patch = writer.publish(changed.items(), 2)
    with pytest.raises(ManifestMismatch, match="version 2 is a patch: read it tensor by tensor"):
        reader.flat(patch).__enter__()
    # a version that was published again has those of the first
    with reader.flat(writer.republish(1, 3)) as (whole, flat), reader.flat(first) as (_, before):
        assert (whole.version, whole.base, whole.entries, whole.digest) == (3, None, first.entries, first.digest)
        assert flat.tobytes() == before.tobytes()


def test_a_patch_of_a_tensor_of_another_kind_is_refused(tmp_path: Path) -> None:
    """A file that someone wrote so: its checksum is right, its base has other tensors."""
    writer = WeightStoreWriter(tmp_path)
    writer.publish([("a", torch.ones(4))], 1)
    for version, name, dtype, shape in ((2, "a", "int32", (2, 2)), (3, "b", "float32", (4,))):
        entry = TensorEntry(name, dtype, shape, 0, "0" * 16, 0)
        (tmp_path / f"v{version}.safetensors").write_bytes(header_of(Manifest(version, 1, (entry,))))
        reader = WeightStoreReader(tmp_path)
        with pytest.raises(ManifestMismatch, match=f"{name} of version {version} is not what it is a patch of"):
            reader.verify(reader.manifest(version))


def test_a_version_that_is_protected_stays_until_another_is(tmp_path: Path) -> None:
    writer, reader = WeightStoreWriter(tmp_path), WeightStoreReader(tmp_path)
    for version in range(1, 7):
        writer.publish(tensors(version).items(), version)
        if version in (1, 4):
            writer.protected = version
        held = {1: [1], 2: [1, 2], 3: [1, 3], 4: [1, 4], 5: [4, 5], 6: [4, 6]}[version]
        assert set(reader.versions()) >= set(held)
        for each in held:
            with reader.reading(reader.manifest(each), verify=True) as read:
                assert read["t3"].eq(each).all()


def test_only_the_owner_may_enter_and_read(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    WeightStoreWriter(tmp_path / "store").publish(tensors().items(), 1)
    found = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    assert {(path.is_dir(), path.stat().st_mode & 0o777) for path in found} == {(True, 0o700), (False, 0o600)}


def test_a_second_writer_is_refused_until_the_first_is_closed(writer: WeightStoreWriter, tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match=rf"is written by process {os.getpid()} on .*: one trainer per folder"):
        WeightStoreWriter(tmp_path)
    writer.close()
    writer.close()
    WeightStoreWriter(tmp_path).publish(tensors().items(), 1)


def test_what_is_gone_or_would_come_before_itself_is_refused(writer: WeightStoreWriter, tmp_path: Path) -> None:
    for version in (1, 2, 3):
        writer.publish(tensors().items(), version)
    with pytest.raises(ManifestMismatch, match=r"version 1 is not there, only \[2, 3\]"):
        writer.republish(1, 4)
    with pytest.raises(ValueError, match="version 3 can be published again only under a higher number, got 3"):
        writer.republish(3, 3)
    assert WeightStoreReader(tmp_path).versions() == [2, 3]


# -- an adapter: published as tensors of bytes, copied as files with a check -------------------------------------------

CONFIG, MODEL = ADAPTER_FILES


def files(text: bytes) -> dict[str, bytes]:
    return {CONFIG: b"{}", MODEL: text}


def publish_adapter(store: Path, version: int, text: bytes) -> Manifest:
    writer = WeightStoreWriter(store)
    manifest = writer.publish(adapter_tensors(files(text)).items(), version)
    writer.close()
    return manifest


@pytest.mark.parametrize("text", [b"weights", b"x" * ((5 << 20) + 1)], ids=len)
def test_a_version_is_copied_as_it_was_written(tmp_path: Path, text: bytes) -> None:
    manifest = publish_adapter(tmp_path / "store", 3, text)
    (tmp_path / "copy").mkdir()
    assert copy_adapter(tmp_path / "store", 3, tmp_path / "copy") == manifest
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == files(text)
    assert (manifest.version, manifest.nbytes) == (3, 2 + len(text))
    assert [entry.digest for entry in manifest.entries] == [xxhash.xxh3_64_hexdigest(b) for b in (b"{}", text)]
    assert manifest.digest != publish_adapter(tmp_path / "store", 4, text + b"!").digest


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
    publish_adapter(store, 7, b"weights")
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
