"""Versions of an adapter in a store: whole or not there, copied with a check, old ones collected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import xxhash

from torchrl_moe._errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.weight_update.store import AdapterWriter, Manifest, copy_adapter
from torchrl_moe.weight_update.store.adapters import ADAPTER_FILES, adapter_versions

CONFIG, MODEL = ADAPTER_FILES


def files(text: bytes) -> dict[str, bytes]:
    return {CONFIG: b"{}", MODEL: text}


def test_a_version_is_copied_as_it_was_written(tmp_path: Path) -> None:
    writer = AdapterWriter(tmp_path / "store")
    manifest = writer.publish(files(b"weights"), 3)
    (tmp_path / "copy").mkdir()
    assert copy_adapter(tmp_path / "store", 3, tmp_path / "copy") == manifest
    assert {path.name: path.read_bytes() for path in (tmp_path / "copy").iterdir()} == files(b"weights")
    assert (manifest.version, manifest.nbytes) == (3, 2 + 7)
    assert [entry.digest for entry in manifest.entries] == [xxhash.xxh3_64_hexdigest(b) for b in (b"{}", b"weights")]
    assert manifest.digest != writer.publish(files(b"Weights"), 4).digest
    assert (tmp_path / "store").stat().st_mode & 0o777 == 0o700


def test_old_versions_are_collected_and_a_number_may_come_again(tmp_path: Path) -> None:
    writer = AdapterWriter(tmp_path, keep_versions=2)
    for version in (9, 10, 11):
        writer.publish(files(b"%d" % version), version)
    assert adapter_versions(tmp_path) == {10, 11}
    writer.publish(files(b"first"), 2)  # of a trainer that counts from the beginning
    assert adapter_versions(tmp_path) == {11, 2}
    assert sorted(path.name for path in tmp_path.glob("adapter-*")) == ["adapter-v11", "adapter-v2"]
    writer.publish(files(b"again"), 2)
    (tmp_path / "copy").mkdir()
    copy_adapter(tmp_path, 2, tmp_path / "copy")
    assert (tmp_path / "copy" / MODEL).read_bytes() == b"again"


def flip(place: Path) -> None:
    (place / MODEL).write_bytes(b"weightz")


def cut(place: Path) -> None:
    (place / CONFIG).write_bytes(b"{")


def rename(place: Path) -> None:
    text = (place / "manifest.json").read_text()
    (place / "manifest.json").write_text(Manifest(8, None, Manifest.from_json(text).entries).to_json())


def lose(place: Path) -> None:
    (place / MODEL).unlink()


def garble(place: Path) -> None:
    (place / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    ("spoil", "kind", "words"),
    [
        (flip, DigestMismatch, "files of adapter version 7 .* are not what was published"),
        (cut, DigestMismatch, "files of adapter version 7"),
        (rename, DigestMismatch, "files of adapter version 7"),
        (lose, WeightSyncError, "no adapter of version 7 .*it was collected, or the store is not shared"),
        (garble, ManifestMismatch, "is not JSON"),
    ],
)
def test_what_was_not_published_so_is_not_copied(tmp_path: Path, spoil: Any, kind: Any, words: str) -> None:
    store, copy = tmp_path / "store", tmp_path / "copy"
    AdapterWriter(store).publish(files(b"weights"), 7)
    copy.mkdir()
    spoil(store / "adapter-v7")
    with pytest.raises(kind, match=words):
        copy_adapter(store, 7, copy)
    assert list(copy.iterdir()) == []
    with pytest.raises(WeightSyncError, match="no adapter of version 8"):
        copy_adapter(store, 8, copy)


def test_a_version_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = AdapterWriter(tmp_path)

    def fail(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(WeightSyncError, match="no room for"):
        writer.publish(files(b"weights"), 1)
    assert list(tmp_path.glob("adapter-*")) == []


def test_a_killed_writers_draft_is_cleared_and_a_second_writer_is_kept_out(tmp_path: Path) -> None:
    AdapterWriter(tmp_path).close()
    os.mkdir(tmp_path / "adapter-v1.tmp-0")
    writer = AdapterWriter(tmp_path)
    assert list(tmp_path.glob("adapter-*")) == []
    with pytest.raises(WeightSyncError, match="one trainer per folder"):
        AdapterWriter(tmp_path)
    writer.close()
    AdapterWriter(tmp_path).close()
