"""One copy per node: made once, compared on the way, and gone when nobody needs it; also when its maker is killed."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

from support.waiting import until
from torchrl_moe._errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.weight_update.store import Manifest, VersionsWriter, WeightStoreReader, WeightStoreWriter, node_copy
from torchrl_moe.weight_update.store import memory as memory_of_node
from torchrl_moe.weight_update.store.node_copy import NodeCopies

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """Takes the test's folder for another host's."""
    monkeypatch.setattr(NodeCopies, "_is_near", lambda self, file: False)
    monkeypatch.setattr(node_copy, "PIECE_BYTES", 256)


@pytest.fixture
def near(tmp_path: Path) -> Path:
    return tmp_path / "near"


@pytest.fixture
def writer(tmp_path: Path) -> VersionsWriter:
    return VersionsWriter(tmp_path / "far", keep_versions=9)


@pytest.fixture
def new_reader(tmp_path: Path, near: Path) -> Callable[[], WeightStoreReader]:
    return lambda: WeightStoreReader(tmp_path / "far", copies=NodeCopies(near))


def publish(writer: VersionsWriter, version: int = 1, **changed: float) -> Manifest:
    values = {"a": float(version), "b": float(version), "none": 0.0} | changed
    sizes = {"a": 1, "b": 300, "none": 0}
    return writer.publish([(name, torch.full((sizes[name],), value)) for name, value in values.items()], version)


def spoil(path: Path) -> None:
    """Overwrite the last tensor's end, and leave no sign of it."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"x")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def is_right(reader: WeightStoreReader, manifest: Manifest) -> bool:
    with reader.reading(manifest, verify=True) as read:
        return all(read[name].eq(manifest.version).all() for name in ("a", "b")) and not read["none"].numel()


def files(near: Path) -> list[str]:
    return sorted(path.name for path in near.iterdir() if path.name != "lock")


def test_who_comes_later_reads_the_copy(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], tmp_path: Path, near: Path
) -> None:
    manifest, first, second = publish(writer), new_reader(), new_reader()
    assert first.bring(manifest) == ""
    spoil(tmp_path / "far" / "v1.safetensors")
    with pytest.raises(DigestMismatch):
        WeightStoreReader(tmp_path / "far", copies=NodeCopies(tmp_path / "elsewhere")).verify(manifest)
    assert second.bring(manifest) == ""
    for reader in (first, second):
        assert is_right(reader, manifest)
        reader.verify(manifest)
    assert near.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_of_processes_that_come_at_once_one_reads(
    writer: VersionsWriter,
    new_reader: Callable[[], WeightStoreReader],
    near: Path,
    monkeypatch: pytest.MonkeyPatch,
    threads: int,
) -> None:
    manifest, began, count = publish(writer), FORK.Barrier(3), FORK.Value(ctypes.c_int64)
    read = node_copy._Copier._read

    def counting(self: Any, into: memoryview, offset: int) -> int:
        number = read(self, into, offset)
        with count.get_lock():
            count.value += number
        return number

    def bring() -> None:
        reader = new_reader()
        began.wait()
        right = reader.bring(manifest, threads) == "" and is_right(reader, manifest)
        os._exit(0 if right else 1)

    monkeypatch.setattr(node_copy._Copier, "_read", counting)
    children = [FORK.Process(target=bring) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    (copy,) = files(near)
    assert count.value == (near / copy).stat().st_size


def start_and_stop_midway(
    new_reader: Callable[[], WeightStoreReader], manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> BaseProcess:
    """Start a process that copies one piece of a tensor, and no more."""
    midway, read = FORK.Event(), node_copy._Copier._read

    def stopping(self: Any, into: memoryview, offset: int) -> int:
        if offset > 256 and len(into) == 256:
            midway.set()
            signal.pause()
        return read(self, into, offset)

    with monkeypatch.context() as patch:
        patch.setattr(node_copy._Copier, "_read", stopping)
        child = FORK.Process(target=lambda: new_reader().bring(manifest))
        child.start()
    midway.wait()
    return child


def test_who_is_killed_midway_leaves_nothing_in_the_way(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, reader = publish(writer), new_reader()
    child = start_and_stop_midway(new_reader, manifest, monkeypatch)
    assert files(near) == ["draft"]
    assert is_right(reader, manifest)  # where it lies
    child.kill()
    child.join()
    assert files(near) == ["draft"]
    assert reader.bring(manifest) == ""
    assert is_right(reader, manifest)
    (copy,) = files(near)
    assert copy != "draft"


def test_who_stops_midway_is_not_waited_for(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, reader = publish(writer), new_reader()
    child = start_and_stop_midway(new_reader, manifest, monkeypatch)
    monkeypatch.setattr(node_copy, "STALL_SECONDS", 0.01)
    assert reader.bring(manifest) == (
        "each replica of this node reads the shared file system by itself: another process copies, without "
        "progress for 0.01 s"
    )
    assert is_right(reader, manifest)
    reader.close()  # does not wait either
    child.kill()
    child.join()


def test_who_gets_on_is_waited_for(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, reader, looks = publish(writer), new_reader(), []
    lock_slot = node_copy.lock_slot

    def busy(descriptor: int, kind: int, seconds: float) -> bool:
        looks.append(seconds)
        if len(looks) < 5:
            os.utime(descriptor, (len(looks), len(looks)))
            return False
        return lock_slot(descriptor, kind, seconds)

    monkeypatch.setattr(node_copy, "lock_slot", busy)
    assert reader.bring(manifest) == ""
    assert looks == [60.0] * 5


@pytest.mark.parametrize("threads", [1, 2, 9])
def test_bytes_that_were_not_published_are_not_copied(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], tmp_path: Path, near: Path, threads: int
) -> None:
    manifest = publish(writer)
    spoil(tmp_path / "far" / "v1.safetensors")
    with pytest.raises(DigestMismatch, match="version 1: bytes of b are not those published; publish it again"):
        new_reader().bring(manifest, threads)
    assert files(near) == []


def test_a_file_that_cannot_be_read_is_an_error_and_not_mapped(
    writer: VersionsWriter,
    new_reader: Callable[[], WeightStoreReader],
    tmp_path: Path,
    near: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest, path = publish(writer), tmp_path / "far" / "v1.safetensors"
    with monkeypatch.context() as patch:

        def broken(*_: Any) -> int:
            raise OSError(errno.EIO, "Input/output error")

        patch.setattr(os, "preadv", broken)
        with pytest.raises(WeightSyncError, match=r"v1\.safetensors cannot be read: Input/output error"):
            new_reader().bring(manifest)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(ManifestMismatch, match=r"v1\.safetensors ends at \d+ bytes: the file was cut short"):
        new_reader().bring(manifest)
    path.unlink()
    with pytest.raises(ManifestMismatch, match="version 1 is not in the store any more"):
        new_reader().bring(manifest)
    assert files(near) == []


@pytest.mark.parametrize("short_of", ["shared memory", "memory", "permission"])
def test_without_room_the_file_is_read_where_it_lies(
    writer: VersionsWriter,
    new_reader: Callable[[], WeightStoreReader],
    tmp_path: Path,
    near: Path,
    monkeypatch: pytest.MonkeyPatch,
    short_of: str,
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    publish(writer, 1)
    manifest, reader = publish(writer, 2), new_reader()
    if short_of == "shared memory":
        monkeypatch.setattr(os, "posix_fallocate", full)
        why = f"no room for 0 MB in {tmp_path} (No space left on device)"
    elif short_of == "memory":
        monkeypatch.setattr(memory_of_node, "available_memory", lambda: 0)
        why = "0.0 GB are needed beside the model, 0.0 GB are free"
    else:
        near.mkdir()
        near.chmod(0o777)
        why = f"{near} is not a folder of this user's alone"
    assert reader.bring(manifest) == f"each replica of this node reads the shared file system by itself: {why}"
    assert is_right(reader, manifest)
    assert files(near) == []
    reader.close()


def test_a_folder_that_others_may_write_to_is_not_read(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path
) -> None:
    manifest, reader = publish(writer), new_reader()
    reader.bring(manifest)
    (copy,) = files(near)
    spoil(near / copy)
    with pytest.raises(DigestMismatch):
        reader.verify(manifest)
    near.chmod(0o770)
    reader.verify(manifest)


def test_a_file_in_the_same_memory_is_not_copied(
    writer: VersionsWriter,
    new_reader: Callable[[], WeightStoreReader],
    tmp_path: Path,
    near: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.undo()
    manifest, reader = publish(writer), new_reader()
    assert reader.bring(manifest) == ""
    assert is_right(reader, manifest)
    assert files(near) == []
    slots = WeightStoreWriter(tmp_path / "slots")
    reader = WeightStoreReader(tmp_path / "slots", copies=NodeCopies(near))
    assert reader.bring(slots.publish([("a", torch.ones(2))], 1)) == ""


def test_a_copy_stays_as_long_as_somebody_needs_it(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path
) -> None:
    one, other, manifests = new_reader(), new_reader(), [publish(writer, version) for version in (1, 2, 3)]
    for reader in (one, other):
        reader.bring(manifests[0])
    (first,) = files(near)
    one.bring(manifests[1])
    assert len(files(near)) == 2
    assert first in files(near)
    other.bring(manifests[2])
    assert len(files(near)) == 2
    assert first not in files(near)
    for reader in (one, one, other):
        reader.close()
    assert files(near) == []


def test_what_a_killed_process_needed_goes(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path
) -> None:
    ready, manifests = FORK.Event(), [publish(writer, version) for version in (1, 2)]

    def hold() -> None:
        new_reader().bring(manifests[0])
        ready.set()
        signal.pause()

    child = FORK.Process(target=hold)
    child.start()
    ready.wait()
    (held,) = files(near)
    reader = new_reader()
    reader.bring(manifests[1])
    assert held in files(near)
    child.kill()
    child.join()
    new_reader().bring(manifests[1])
    assert held not in files(near)
    assert len(files(near)) == 1
    assert is_right(reader, manifests[1])


def test_of_a_version_that_shares_bytes_only_the_new_ones_are_copied(
    tmp_path: Path, new_reader: Callable[[], WeightStoreReader], near: Path
) -> None:
    writer, reader = VersionsWriter(tmp_path / "far", keep_versions=1, delta=True), new_reader()
    reader.bring(publish(writer, 1))
    (first,) = files(near)
    changed = publish(writer, 2, b=1.0)  # of version 1 there are only the bytes left
    reader.bring(changed)
    assert len(files(near)) == 2
    assert first in files(near)
    for path in (tmp_path / "far").glob("*.safetensors"):
        spoil(path)
    with reader.reading(changed, verify=True) as read:
        assert (read["a"].tolist(), read["b"].unique().tolist()) == ([2.0], [1.0])
    again = writer.republish(2, 3)
    reader.bring(again)
    assert len(files(near)) == 2
    reader.verify(again)


def test_a_number_that_is_used_again_has_another_copy(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path
) -> None:
    reader = new_reader()
    reader.bring(publish(writer, 1, a=5.0, b=5.0))
    manifest = publish(writer, 1)
    assert is_right(reader, manifest)  # there is no copy yet
    reader.bring(manifest)
    assert is_right(reader, manifest)
    assert len(files(near)) == 1


def test_who_closes_while_a_copy_is_made_is_not_held_up(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest, reader, go, at_it = publish(writer), new_reader(), threading.Event(), threading.Event()
    read = node_copy._Copier._read

    def waiting(self: Any, into: memoryview, offset: int) -> int:
        at_it.set()
        go.wait()
        return read(self, into, offset)

    monkeypatch.setattr(node_copy._Copier, "_read", waiting)
    thread = threading.Thread(target=reader.bring, args=(manifest,))
    thread.start()
    at_it.wait()
    reader.close()
    go.set()
    thread.join()
    until(lambda: files(near) == [])


def test_who_is_locked_out_on_closing_leaves_the_copy_to_others(
    writer: VersionsWriter, new_reader: Callable[[], WeightStoreReader], near: Path
) -> None:
    manifest, reader = publish(writer), new_reader()
    reader.bring(manifest)
    with (near / "lock").open() as busy:
        fcntl.flock(busy, fcntl.LOCK_EX)
        reader.close()
    assert len(files(near)) == 1
    new_reader().close()
    assert files(near) == []
