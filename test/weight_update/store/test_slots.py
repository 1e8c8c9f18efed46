"""Slots: what is read is what was published, or an error that says why not."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.processes import exit_code_of
from support.waiting import in_thread
from torchrl_moe.errors import ManifestMismatch, SyncTimeout, WeightSyncError
from torchrl_moe.weight_update.store import Manifest, WeightStoreReader, WeightStoreWriter

DTYPES = [getattr(torch, name) for name in ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn"]]
DTYPES += [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]


@pytest.fixture
def writer(tmp_path: Path) -> WeightStoreWriter:
    return WeightStoreWriter(tmp_path / "store", lock_seconds=5.0)


@pytest.fixture
def reader(writer: Writer) -> WeightStoreReader:
    return WeightStoreReader(writer.folder)


Writer, Reader = WeightStoreWriter, WeightStoreReader


def publish(writer: Writer, *versions: int) -> list[Manifest]:
    return [writer.publish(constant(version).items(), version) for version in versions]


def constant(value: float, size: int = 1000) -> dict[str, Tensor]:
    return {"w": torch.full((size,), float(value)), "v": torch.full((3,), float(value))}


def read(reader: Reader, version: int) -> dict[str, Tensor]:
    with reader.reading(reader.manifest(version)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


def same_bits(a: Tensor, b: Tensor) -> bool:
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*bits)


# -- round trip -------------------------------------------------------------------------------------------------------
@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    """Any finite numbers in any dtype and shape, 0-d and empty ones too, contiguous or not."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.lists(st.integers(0, 5), max_size=3))
    count = torch.Size(shape).numel() * dtype.itemsize
    raw = torch.tensor(list(draw(st.binary(min_size=count, max_size=count))), dtype=torch.uint8)
    tensor = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    if dtype.is_floating_point:
        tensor = torch.where(tensor.double().isfinite(), tensor, torch.ones((), dtype=dtype))
    tensor = tensor.view(shape)
    return tensor.mT if len(shape) == 2 and draw(st.booleans()) else tensor


@settings(max_examples=60)
@given(st.lists(st.dictionaries(st.text(max_size=8), tensors(), max_size=6), min_size=1, max_size=4))
def test_every_version_comes_back_bit_by_bit(versions: list[dict[str, Tensor]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = WeightStoreWriter(folder), WeightStoreReader(folder)
        for number, weights in enumerate(versions, start=1):
            manifest = writer.publish(weights.items(), number)
            assert reader.manifest(number) == manifest
            reader.verify(manifest)
            again = read(reader, number)
            assert list(again) == list(weights)
            assert all(same_bits(again[name], weights[name]) for name in weights)
            assert manifest.tensors == {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
            assert manifest.nbytes == sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def test_the_digest_is_of_names_dtypes_shapes_and_bytes(writer: Writer) -> None:
    zeros = torch.zeros(4)
    kinds = [{"a": zeros}, {"b": zeros}, {"a": zeros.view(2, 2)}, {"a": zeros.int()}, {"a": zeros + 1}]
    digests = [writer.publish(each.items(), n).digest for n, each in enumerate([*kinds, {"a": zeros, "b": zeros}])]
    assert (len(set(digests)), writer.publish({"a": torch.zeros(4)}.items(), 9).digest) == (6, digests[0])


def test_a_name_that_comes_twice_is_refused(writer: Writer, reader: Reader) -> None:
    with pytest.raises(ManifestMismatch, match="version 1 names a tensor twice"):
        writer.publish([("a", torch.ones(1)), ("a", torch.ones(1))], 1)
    with pytest.raises(ManifestMismatch, match=r"version 1 is not in the store, which holds \[\]"):
        reader.manifest(1)


# -- slots ------------------------------------------------------------------------------------------------------------
def test_two_slots_take_turns_and_the_third_version_ends_the_first(writer: Writer, reader: Reader) -> None:
    slots = [publish(writer, version)[0].slot for version in (1, 2, 3)]
    assert (slots, [read(reader, version)["w"][0].item() for version in (2, 3)]) == ([1, 0, 1], [2.0, 3.0])
    with pytest.raises(ManifestMismatch, match=r"version 1 is not in the store, which holds \[2, 3\]"):
        reader.manifest(1)


def test_a_version_may_grow_and_shrink(writer: Writer, reader: Reader) -> None:
    for version, size in enumerate((10, 10, 5_000, 100_000, 3, 0, 200_000), start=1):
        writer.publish(constant(version, size).items(), version)
        reader.verify(reader.manifest(version))
        assert read(reader, version)["w"].tolist() == [version] * size


def test_a_writer_that_counts_again_leaves_no_manifest_without_its_bytes(writer: Writer, reader: Reader) -> None:
    publish(writer, 7, 8)
    writer.close()
    WeightStoreWriter(writer.folder).publish(constant(1).items(), 1)
    with pytest.raises(ManifestMismatch, match=r"version 7 is not in the store, which holds \[1, 8\]"):
        reader.manifest(7)
    reader.verify(reader.manifest(8))
    reader.verify(reader.manifest(1))


def test_a_manifest_that_was_published_again_is_refused(writer: Writer, reader: Reader) -> None:
    old = publish(writer, 1)[0]
    writer.publish(constant(2).items(), 1)
    with pytest.raises(ManifestMismatch, match="version 1 was published again"):
        reader.verify(old)


def test_a_reader_that_comes_late_is_told_that_the_slot_was_used_again(writer: Writer, reader: Reader) -> None:
    manifest = publish(writer, 1)[0]
    publish(writer, 2, 3)
    with pytest.raises(ManifestMismatch, match="version 1 is not in the store"), reader.reading(manifest):
        pass


# -- locks ------------------------------------------------------------------------------------------------------------
def test_a_reader_holds_the_writer_of_its_slot_back_and_no_other(writer: Writer, reader: Reader) -> None:
    (manifest,) = publish(writer, 1)
    with reader.reading(manifest) as tensors:
        publish(writer, 2)  # the other slot
        writing = in_thread(lambda: publish(writer, 3))
        time.sleep(0.1)
        assert not writing.done()
        assert tensors["w"].eq(1.0).all()
        assert reader.manifest(1) == manifest  # not gone before it must
    writing.result(60.0)
    assert read(reader, 3)["w"].eq(3.0).all()


def test_a_writer_does_not_wait_for_ever(tmp_path: Path) -> None:
    writer, reader = WeightStoreWriter(tmp_path, lock_seconds=0.05), WeightStoreReader(tmp_path)
    manifest = publish(writer, 1)[0]
    publish(writer, 2)
    with reader.reading(manifest), pytest.raises(SyncTimeout, match=r"a reader has held slot-1\.weights for 0\.05 s"):
        publish(writer, 3)
    reader.verify(manifest)  # nothing was lost
    publish(writer, 3)


def test_a_process_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """As a trainer forks workers of a data loader: they have its open files."""
    writer, reader = WeightStoreWriter(tmp_path, lock_seconds=0.05), WeightStoreReader(tmp_path, lock_seconds=0.05)
    manifest = publish(writer, 1)[0]
    waiting, go = os.pipe()
    with reader.reading(manifest), writer._holding(0):
        child = os.fork()
        if not child:
            os.close(go)
            os.read(waiting, 1)
            os._exit(0)
    try:
        publish(writer, 3)
        reader.verify(publish(writer, 4)[0])
        writer.close()
        WeightStoreWriter(tmp_path).close()
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(waiting)


def test_a_reader_waits_until_the_new_manifest_is_shown(writer: Writer, reader: Reader) -> None:
    """While a slot is written there is no manifest of it, and none is read from a half-written one."""
    (manifest,) = publish(writer, 1)
    with (writer.folder / "slot-1.weights").open("ab") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the writer of version 3
        reading = in_thread(lambda: reader.verify(manifest))
        time.sleep(0.1)
        assert not reading.done()
        (writer.folder / "manifest-1.json").unlink()
    with pytest.raises(ManifestMismatch, match=r"^version 1 is not in the store, which holds \[\]:"):
        reading.result(60.0)


# -- damage -----------------------------------------------------------------------------------------------------------


def test_a_writer_killed_while_it_writes_leaves_the_last_version(writer: Writer, reader: Reader) -> None:
    """Killed for good, in a process of its own, with half of version 3 in the slot of version 1."""
    publish(writer, 1, 2)
    writer.close()

    def deadly() -> Iterator[tuple[str, Tensor]]:
        yield "w", torch.full((1000,), 3.0)
        os.kill(os.getpid(), signal.SIGKILL)

    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in constant(3).items()}
    assert exit_code_of(lambda: WeightStoreWriter(writer.folder).publish(deadly(), 3, kinds)) == -signal.SIGKILL
    with pytest.raises(ManifestMismatch, match=r"version 1 is not in the store, which holds \[2\]"):
        reader.manifest(1)
    reader.verify(reader.manifest(2))
    assert read(reader, 2)["w"].eq(2.0).all()
    again = WeightStoreWriter(writer.folder)  # the locks went with the process
    again.publish(constant(4).items(), 4)
    reader.verify(reader.manifest(4))


def test_a_draft_of_a_manifest_is_no_version(writer: Writer, reader: Reader) -> None:
    publish(writer, 1)
    (writer.folder / ".manifest-2.json.tmp").write_text('{"version": 2, "slot"')
    with pytest.raises(ManifestMismatch, match=r"version 2 is not in the store, which holds \[1\]"):
        reader.manifest(2)
    publish(writer, 2)
    assert sorted(path.name for path in writer.folder.glob("*manifest*")) == ["manifest-1.json", "manifest-2.json"]


def test_a_full_folder_is_said_to_be_full(writer: Writer, reader: Reader, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(writer, 1, 2)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    words = r"no room for 4 MB in .*store \(No space left on device\): a weight store keeps"
    with pytest.raises(WeightSyncError, match=words):
        writer.publish(constant(3, 1_000_000).items(), 3)
    reader.verify(reader.manifest(1))


# -- stress -----------------------------------------------------------------------------------------------------------
def test_a_reader_never_sees_a_torn_version_while_a_process_publishes(tmp_path: Path) -> None:
    """Each version is one value throughout; digests and values are looked at under the lock."""
    script = (
        "import sys, torch\n"
        "from torchrl_moe.weight_update.store import WeightStoreWriter\n"
        "torch.set_num_threads(1)\n"
        "writer = WeightStoreWriter(sys.argv[1])\n"
        "for v in range(1, 1001):\n"
        "    size = 20_000 + 1_000 * (v % 7)\n"
        "    writer.publish([('w', torch.full((size,), float(v))), ('v', torch.full((3,), v))], v)\n"
    )
    reader, checked, late, last = WeightStoreReader(tmp_path), 0, 0, 0
    process = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)])
    try:
        while process.poll() is None and checked < 400:
            versions = [int(path.stem.split("-")[1]) for path in tmp_path.glob("manifest-*.json")]
            if not versions:
                time.sleep(0.01)
                continue
            last = max(versions)
            try:
                manifest = reader.manifest(last)
                reader.verify(manifest)
                with reader.reading(manifest) as tensors:
                    assert all(tensor.eq(last).all() for tensor in tensors.values())
            except ManifestMismatch:
                late += 1
                continue
            checked += 1
    finally:
        process.kill()
        process.wait()
    print(f"{checked} versions read, {late} gone before they were, last {last}")
    assert checked > 20


# -- folders and writers ----------------------------------------------------------------------------------------------


def test_more_slots_keep_more_versions(tmp_path: Path) -> None:
    writer, reader = WeightStoreWriter(tmp_path, slots=3), WeightStoreReader(tmp_path)
    publish(writer, *range(1, 6))
    assert [read(reader, version)["w"][0].item() for version in (3, 4, 5)] == [3.0, 4.0, 5.0]
    assert reader.newest() == 5
    writer.close()
    fewer = WeightStoreWriter(tmp_path, slots=2)  # version 6 goes where version 3 was, and 4 stays whole in slot 1
    fewer.publish(constant(6).items(), 6)
    reader.verify(reader.manifest(4))
    with pytest.raises(ManifestMismatch, match=r"version 3 is not in the store, which holds \[4, 5, 6\]"):
        reader.manifest(3)


@pytest.mark.parametrize("slots", [2, 3])
@pytest.mark.parametrize("back", [1, 2])
def test_an_older_version_comes_back_in_its_slot_which_is_the_last_to_be_written_over(
    tmp_path: Path, slots: int, back: int
) -> None:
    """By number, version 4 would go where version 1 or 2 lies."""
    writer, reader = WeightStoreWriter(tmp_path, slots=slots), WeightStoreReader(tmp_path)
    old = {version: writer.publish(constant(version).items(), version) for version in range(4 - slots, 4)}
    target = min(old) + back - 1
    again = writer.republish(target, 4)
    assert (again.version, again.slot, again.digest) == (4, old[target].slot, old[target].digest)
    assert reader.newest() == 4
    held = {target: target, 4: target}
    for version in range(5, 5 + slots - 1):  # into all slots but that one
        publish(writer, version)
        held[version] = version
        for number, value in held.items():
            assert read(reader, number)["w"].eq(value).all()
    assert reader.versions() == sorted(held)
    publish(writer, 9)
    assert reader.versions() == sorted({*range(5, 5 + slots - 1), 9})


def test_any_version_that_is_kept_may_be_read_while_a_newer_one_is_written(tmp_path: Path) -> None:
    writer, reader = WeightStoreWriter(tmp_path, slots=3), WeightStoreReader(tmp_path)
    publish(writer, 1, 2, 3)

    def stream() -> Iterator[tuple[str, Tensor]]:
        with pytest.raises(ManifestMismatch, match=r"which holds \[2, 3\]"):
            reader.manifest(1)
        for version in (2, 3):
            assert read(reader, version)["w"].eq(version).all()
        yield from constant(4).items()

    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in constant(4).items()}
    writer.publish(stream(), 4, kinds)
    assert reader.versions() == [2, 3, 4]


def test_a_new_writer_knows_which_slot_was_shown_last(writer: Writer, reader: Reader) -> None:
    publish(writer, 1, 2)
    writer.republish(1, 3)
    writer.close()
    publish(WeightStoreWriter(writer.folder), 4)
    assert reader.versions() == [1, 3, 4]
    assert read(reader, 3)["w"].eq(1).all()


def test_a_slot_that_was_cut_short_or_replaced_is_mapped_again(writer: Writer, reader: Reader) -> None:
    publish(writer, 1, 2)
    os.truncate(writer.folder / "slot-1.weights", 10)
    copy = writer.folder / "copy"
    copy.write_bytes((writer.folder / "slot-0.weights").read_bytes())
    copy.rename(writer.folder / "slot-0.weights")
    for version in (3, 4):
        publish(writer, version)
        reader.verify(reader.manifest(version))
        assert read(reader, version)["w"].eq(version).all()


# -- tensors that come one by one -------------------------------------------------------------------------------------
def test_tensors_are_cast_to_what_was_announced_whatever_order_they_come_in(writer: Writer, reader: Reader) -> None:
    big, numbers = torch.linspace(-3, 3, 100_001), torch.tensor([1, 2])
    kinds = {"a": (torch.bfloat16, big.shape), "n": (torch.int64, torch.Size([2]))}
    manifest = writer.publish(iter([("n", numbers), ("a", big)]), 1, kinds)
    assert list(manifest.tensors.items()) == list(kinds.items())
    reader.verify(manifest)
    got = read(reader, 1)
    assert torch.equal(got["a"], big.bfloat16()) and torch.equal(got["n"], numbers)
    assert writer.publish([("a", big.bfloat16()), ("n", numbers)], 2).digest == manifest.digest


def test_tensors_that_are_not_as_announced_end_the_version_and_leave_the_one_before(
    writer: Writer, reader: Reader
) -> None:
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in constant(1, 5).items()}
    writer.publish(constant(2, 5).items(), 2)
    for tensors, words in (
        ([("w", torch.ones(5))], "1 tensors did not come: v"),
        ([("w", torch.ones(5)), ("w", torch.ones(5))], "w came twice"),
        ([("x", torch.ones(5))], "x came unannounced"),
        ([("w", torch.ones(4))], r"w came with shape \[4\], announced \[5\]"),
    ):
        with pytest.raises(ManifestMismatch, match=words):
            writer.publish(tensors, 3, kinds)
    assert reader.newest() == 2
    reader.verify(reader.manifest(2))


def test_a_writer_that_keeps_fewer_removes_what_is_too_many_once_its_own_are_newer(tmp_path: Path) -> None:
    many, reader = WeightStoreWriter(tmp_path, slots=4), WeightStoreReader(tmp_path)
    publish(many, *range(1, 7))
    many.close()
    few = WeightStoreWriter(tmp_path)
    assert reader.versions() == [3, 4, 5, 6]
    publish(few, 7, 8)
    assert reader.versions() == [7, 8]
    assert sorted(path.name for path in tmp_path.glob("slot-*")) == ["slot-0.weights", "slot-1.weights"]
