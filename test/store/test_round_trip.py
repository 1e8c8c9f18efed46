"""What is read is what was published, in memory, where files are written over, as on a disk; or an error says why."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.store import Manifest, WeightStoreReader, WeightStoreWriter
from torchrl_moe.store.folder import pinned


@pytest.fixture
def writer(folder: Path) -> WeightStoreWriter:
    return WeightStoreWriter(folder)


@pytest.fixture
def reader(folder: Path) -> WeightStoreReader:
    return WeightStoreReader(folder)


Writer, Reader = WeightStoreWriter, WeightStoreReader


def publish(writer: Writer, *versions: int) -> list[Manifest]:
    return [writer.publish(constant(version).items(), version) for version in versions]


def constant(value: float, size: int = 1000) -> dict[str, Tensor]:
    return {"w": torch.full((size,), float(value)), "v": torch.full((3,), float(value))}


def read(reader: Reader, version: int) -> dict[str, Tensor]:
    with reader.reading(reader.manifest(version)) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


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
        assert not list(reader.folder.glob("*.tmp-*"))
    assert reader.newest() == 2
    reader.verify(reader.manifest(2))


def test_a_version_may_grow_and_shrink_and_takes_its_number_from_another(writer: Writer, reader: Reader) -> None:
    for version, size in enumerate((10, 10, 5_000, 100_000, 3, 0, 200_000), start=1):
        writer.publish(constant(version, size).items(), version)
        reader.verify(reader.manifest(version))
        assert read(reader, version)["w"].tolist() == [version] * size
    old = publish(writer, 1)[0]
    writer.publish(constant(2).items(), 1)
    with pytest.raises(ManifestMismatch, match="version 1 was published again"):
        reader.verify(old)


# -- in memory --------------------------------------------------------------------------------------------------------


def inodes(folder: Path) -> dict[str, int]:
    return {path.stem: path.stat().st_ino for path in folder.glob("v*.safetensors")}


def test_files_in_memory_are_written_over_in_turns_and_stay_mapped(memory: Path) -> None:
    writer, reader, pointers = WeightStoreWriter(memory), WeightStoreReader(memory), set()
    publish(writer, 1, 2)
    before = set(inodes(memory).values())
    for version in range(3, 9):
        with reader.reading(publish(writer, version)[0], verify=True) as found:
            pointers.add(found["w"].data_ptr())
        assert set(inodes(memory).values()) == before
        assert sorted(inodes(memory)) == [f"v{version - 1}", f"v{version}"]
    assert len(pointers) == 2


def test_a_version_that_is_read_is_neither_removed_nor_written_over(
    writer: Writer, reader: Reader, folder: Path
) -> None:
    (manifest,) = publish(writer, 1)
    with reader.reading(manifest) as tensors:
        publish(writer, 2, 3, 4)
        assert tensors["w"].eq(1.0).all()
        assert reader.versions() == [1, 3, 4]
        reader.verify(manifest)
    publish(writer, 5)
    assert (reader.versions(), list((folder / "pins").iterdir())) == ([4, 5], [])
    assert sum(path.stat().st_size for path in folder.glob("*v*")) < 3 * 4_500


def test_patches_in_memory_keep_what_they_are_patches_of(memory: Path) -> None:
    writer, reader, weights = WeightStoreWriter(memory, delta=True), WeightStoreReader(memory), constant(0, 100_000)
    for version in range(1, 40):
        weights = {**weights, "w": weights["w"].clone()}
        weights["w"][version] = version
        writer.publish(weights.items(), version)
        found = read(reader, version)
        assert found["w"].equal(weights["w"])
    assert sum(path.stat().st_size for path in memory.glob("*v*")) < 2 * 401_000


def test_a_process_forked_meanwhile_holds_no_version(folder: Path) -> None:
    """As a trainer forks workers of a data loader: they have its open files."""
    writer, reader = WeightStoreWriter(folder), WeightStoreReader(folder)
    publish(writer, 1)
    waiting, go = os.pipe()
    with pinned(folder, 1):
        child = os.fork()
        if not child:
            os.close(go)
            os.read(waiting, 1)
            os._exit(0)
    try:
        publish(writer, 3, 4)
        assert reader.versions() == [3, 4]
        writer.close()
        WeightStoreWriter(folder).close()
    finally:
        os.close(go)
        os.waitpid(child, 0)
        os.close(waiting)


@pytest.mark.parametrize("delta", [True, False])
def test_a_reader_never_sees_a_torn_version_while_a_process_publishes(folder: Path, delta: bool) -> None:
    """Digests and values are looked at under a pin. TorchRL's own scheme writes in place: half of such reads tore."""

    def publish_many() -> None:
        torch.set_num_threads(1)
        writer = WeightStoreWriter(folder, delta=delta)
        for version in range(1, 1001):  # with delta, one in two is a patch
            sizes = {"w": 20_000 + 1_000 * (version // 2 % 7), "v": 3}
            values = {"w": version // 2, "v": version}
            writer.publish([(name, torch.full((size,), float(values[name]))) for name, size in sizes.items()], version)
        os._exit(0)

    reader, checked = WeightStoreReader(folder), 0
    process = multiprocessing.get_context("fork").Process(target=publish_many)  # nothing is imported again
    process.start()
    try:
        while process.is_alive() and checked < 100:
            last = max((int(path.stem[1:]) for path in folder.glob("v*.safetensors")), default=None)
            if last is None:
                time.sleep(0.01)
                continue
            with contextlib.suppress(ManifestMismatch):  # it came and went
                manifest = reader.manifest(last)
                reader.verify(manifest)
                with reader.reading(manifest) as found:
                    assert found["w"].eq(last // 2).all() and found["v"].eq(last).all()
                    checked += 1
    finally:
        process.kill()
        process.join()
    assert checked > 20
