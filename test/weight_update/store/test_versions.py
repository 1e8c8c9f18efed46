"""The directory of versions: whole or not there, collected, and never under a reader."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import Tensor

from support.processes import exit_code_of
from support.waiting import in_thread
from torchrl_moe.errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.weight_update.store import Manifest, VersionsWriter, WeightStoreReader
from torchrl_moe.weight_update.store.versions import PIN_SECONDS, pinned


def tensors(**values: float) -> dict[str, Tensor]:
    return {name: torch.full((1000,), float(value)) for name, value in values.items()}


def publish(writer: VersionsWriter, *versions: int) -> Manifest:
    """Versions of one value each; return the last one's manifest."""
    return [writer.publish(tensors(a=version).items(), version) for version in versions][-1]


def read(folder: Path, version: int) -> dict[str, float]:
    reader = WeightStoreReader(folder)
    manifest = reader.manifest(version)
    reader.verify(manifest)
    with reader.reading(manifest) as found:
        assert all(tensor.eq(tensor[0]).all() for tensor in found.values())
        return {name: tensor[0].item() for name, tensor in found.items()}


def files(folder: Path) -> list[str]:
    """Versions by name, and in brackets those that are kept for their bytes only."""
    whole = [path.name.removesuffix(".safetensors") for path in folder.glob("v*")]
    return sorted(whole) + sorted(f"({path.stem.removeprefix('bytes-of-')})" for path in folder.glob("bytes-of-v*"))


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_newest_versions_are_kept_and_the_marker_names_the_last(tmp_path: Path) -> None:
    writer = VersionsWriter(tmp_path, keep_versions=3, fsync=True)
    for version in range(1, 6):
        assert writer.publish(tensors(a=version, b=-version).items(), version).slot is None
        assert (tmp_path / "STABLE").read_text() == f"v{version}\n"
    assert files(tmp_path) == ["v3", "v4", "v5"]
    assert [read(tmp_path, version) for version in (3, 4, 5)] == [{"a": v, "b": -v} for v in (3.0, 4.0, 5.0)]
    with pytest.raises(ManifestMismatch, match=r"version 2 is not in the store, which holds \[3, 4, 5\]"):
        read(tmp_path, 2)


def test_a_version_that_a_reader_holds_stays_until_it_lets_go(tmp_path: Path) -> None:
    writer, reader = VersionsWriter(tmp_path), WeightStoreReader(tmp_path)
    manifest = publish(writer, 1)
    with reader.reading(manifest) as held:
        publish(writer, 2, 3, 4)
        assert files(tmp_path) == ["v1", "v3", "v4"]
        assert held["a"].eq(1).all()
        reader.verify(manifest)
    publish(writer, 5)
    assert (files(tmp_path), list((tmp_path / "pins").iterdir())) == (["v4", "v5"], [])


def test_a_lease_of_a_dead_reader_is_forgotten(tmp_path: Path) -> None:
    writer = VersionsWriter(tmp_path)
    publish(writer, 1)
    (tmp_path / "pins").mkdir(exist_ok=True)
    old = tmp_path / "pins" / "v1-of-the-dead"
    old.touch()
    publish(writer, 2, 3)
    assert files(tmp_path) == ["v1", "v2", "v3"]
    os.utime(old, (0, time.time() - PIN_SECONDS - 60))
    publish(writer, 4)
    assert files(tmp_path) == ["v3", "v4"]
    assert not old.exists()


def test_a_reader_that_pins_in_the_last_moment_keeps_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = VersionsWriter(tmp_path)
    publish(writer, 1, 2)
    looks: list[set[int]] = [set(), {1}]  # none at first, one when the folder was moved away
    monkeypatch.setattr(writer, "_pinned", lambda: looks.pop(0))
    publish(writer, 3)
    assert (files(tmp_path), read(tmp_path, 1)) == (["v1", "v2", "v3"], {"a": 1.0})


# -- delta ------------------------------------------------------------------------------------------------------------
def test_only_what_changed_is_written_and_every_kept_version_is_whole(tmp_path: Path) -> None:
    writer = VersionsWriter(tmp_path, delta=True)
    steps = [dict(zip("abc", map(float, step), strict=True)) for step in ("111", "121", "123", "123", "555", "565")]
    written, bases = [], []
    for version, values in enumerate(steps, start=1):
        manifest = writer.publish(tensors(**values).items(), version)
        written.append(sum(entry.nbytes for entry in manifest.entries if entry.base is None) // 4000)
        bases.append([entry.base for entry in manifest.entries])
        assert read(tmp_path, version) == values
        assert version == 1 or read(tmp_path, version - 1) == steps[version - 2]
    assert (written, bases[3], files(tmp_path)) == ([3, 1, 1, 0, 3, 1], [1, 2, 3], ["v5", "v6"])


def test_an_old_version_may_live_on_for_its_bytes_only(tmp_path: Path) -> None:
    writer = VersionsWriter(tmp_path, delta=True)
    for version in range(1, 5):
        writer.publish(tensors(a=1, b=version).items(), version)
    assert files(tmp_path) == ["v3", "v4", "(v1)"]
    with pytest.raises(ManifestMismatch, match=r"holds \[3, 4\]"):
        read(tmp_path, 1)
    assert read(tmp_path, 4) == {"a": 1.0, "b": 4.0}


def test_a_base_of_a_version_that_is_held_stays(tmp_path: Path) -> None:
    writer, reader = VersionsWriter(tmp_path, delta=True), WeightStoreReader(tmp_path)
    writer.publish(tensors(a=1, b=1).items(), 1)
    manifest = writer.publish(tensors(a=1, b=2).items(), 2)
    with reader.reading(manifest) as held:
        for version in (3, 4, 5):
            writer.publish(tensors(a=version, b=version).items(), version)
        assert files(tmp_path) == ["v2", "v4", "v5", "(v1)"]
        reader.verify(manifest)
        assert held["a"].eq(1).all()
    writer.publish(tensors(a=6, b=6).items(), 6)
    assert files(tmp_path) == ["v5", "v6"]


@pytest.mark.parametrize("after", [{"a": torch.ones(500, 2)}, {"a": torch.ones(1000, dtype=torch.float64)}])
def test_a_tensor_of_another_kind_has_changed(tmp_path: Path, after: dict[str, Tensor]) -> None:
    writer = VersionsWriter(tmp_path, delta=True)
    publish(writer, 1)
    assert [entry.base for entry in writer.publish(after.items(), 2).entries] == [None]


def test_a_new_writer_begins_with_a_whole_version(tmp_path: Path) -> None:
    writer = VersionsWriter(tmp_path, delta=True)
    publish(writer, 1)
    writer.close()
    assert VersionsWriter(tmp_path, delta=True).publish(tensors(a=1).items(), 2).entries[0].base is None


def test_a_writer_that_counts_again_replaces_versions(tmp_path: Path) -> None:
    writer = VersionsWriter(tmp_path)
    publish(writer, 7, 8)
    writer.close()
    again = VersionsWriter(tmp_path)
    for version in (1, 2, 7):
        again.publish(tensors(a=-version).items(), version)
        assert (WeightStoreReader(tmp_path).newest(), read(tmp_path, version)) == (version, {"a": -version})


def test_a_number_that_is_used_again_takes_those_with_it_that_need_its_bytes(tmp_path: Path) -> None:
    writer, reader = VersionsWriter(tmp_path, keep_versions=3, delta=True), WeightStoreReader(tmp_path)
    writer.publish(tensors(a=1, b=1).items(), 1)
    manifest = writer.publish(tensors(a=1, b=2).items(), 2)
    writer.close()
    again = VersionsWriter(tmp_path, keep_versions=3, delta=True)
    with pinned(tmp_path, 1), pytest.raises(WeightSyncError, match="version 1 is there already, and a reader holds it"):
        again.publish(tensors(a=9, b=9).items(), 1)
    reader.verify(manifest)
    again.publish(tensors(a=9, b=9).items(), 1)
    with pytest.raises(ManifestMismatch, match=r"version 2 is not in the store, which holds \[1\]"):
        reader.verify(manifest)
    assert read(tmp_path, 1) == {"a": 9.0, "b": 9.0}


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_writer_killed_while_it_writes_leaves_the_last_version_and_its_litter_is_cleared(tmp_path: Path) -> None:
    kinds = {name: (torch.float32, torch.Size([1000])) for name in "ab"}

    def deadly() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.full((1000,), 2.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        writer = VersionsWriter(tmp_path)
        publish(writer, 1)
        writer.publish(deadly(), 2, kinds)

    assert exit_code_of(work) == -signal.SIGKILL
    assert [name for name in files(tmp_path) if ".tmp-" in name] != []
    assert (WeightStoreReader(tmp_path).newest(), read(tmp_path, 1)) == (1, {"a": 1.0})
    writer = VersionsWriter(tmp_path)
    assert files(tmp_path) == ["v1"]
    writer.publish(tensors(a=3).items(), 2)
    assert read(tmp_path, 2) == {"a": 3.0}


@pytest.mark.parametrize(
    ("names", "fsync"), [(["large"], False), *((["big", "float64"], fsync) for fsync in (False, True))]
)
def test_a_full_disk_is_said_to_be_full_and_leaves_the_last_version(
    tmp_path: Path, names: list[str], fsync: bool
) -> None:
    """The limit on the size of a file stands in for the disk's end; a process of its own has it."""
    large = {**MIXED, "large": torch.full((1_000_000,), 2.0)}  # torch's threads do not live on in the other process

    def work() -> None:
        writer = VersionsWriter(tmp_path, fsync=fsync)
        publish(writer, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        with pytest.raises(WeightSyncError, match=r"no room for [45] MB in .*: a weight store keeps more than one"):
            writer.publish([(name, large[name]) for name in names], 2)

    assert (exit_code_of(work), files(tmp_path), read(tmp_path, 1)) == (0, ["v1"], {"a": 1.0})


def test_a_version_that_fails_leaves_no_litter(tmp_path: Path) -> None:
    kinds = {name: (torch.float32, torch.Size([3])) for name in "ab"}
    with pytest.raises(ManifestMismatch, match="1 tensors did not come: b"):
        VersionsWriter(tmp_path).publish([("a", torch.ones(3))], 1, kinds)
    assert (files(tmp_path), WeightStoreReader(tmp_path).newest()) == ([], None)


@pytest.mark.parametrize("delta", [True, False])
def test_a_reader_never_sees_a_torn_version_while_another_thread_publishes(tmp_path: Path, delta: bool) -> None:
    """TorchRL's own scheme writes in place: half of such reads there were torn between two versions."""
    writer, stop = VersionsWriter(tmp_path, delta=delta), threading.Event()
    writer.publish(tensors(a=0, b=1).items(), 1)

    def look() -> int:
        reader, count = WeightStoreReader(tmp_path), 0
        while not stop.is_set():
            version = reader.newest()
            assert version is not None
            with contextlib.suppress(ManifestMismatch):  # it came and went
                manifest = reader.manifest(version)
                reader.verify(manifest)
                with reader.reading(manifest) as found:
                    assert found["a"].eq(version // 2).all() and found["b"].eq(version).all()
                    count += 1
        return count

    looks = [in_thread(look) for _ in range(2)]
    for version in range(2, 150):
        writer.publish(tensors(a=version // 2, b=version).items(), version)
    stop.set()
    assert sum(one.result(60.0) for one in looks) > 0
    assert size(tmp_path) < 60_000


def test_collecting_holds_no_descriptors_and_no_mappings(tmp_path: Path) -> None:
    writer, reader, held = VersionsWriter(tmp_path, delta=True), WeightStoreReader(tmp_path), []
    for version in range(1, 50):
        reader.verify(writer.publish(tensors(a=version, b=1).items(), version))
        held.append(len(os.listdir("/proc/self/fd")))
    assert max(held) == max(held[:5])
    assert len(reader._mapped) <= 3


# -- safetensors ------------------------------------------------------------------------------------------------------
MIXED: dict[str, Tensor] = {
    "bool": torch.tensor([True, False, True]),
    "bfloat16": torch.arange(5, dtype=torch.bfloat16),
    'quoted "\n} é 雪': torch.arange(3, dtype=torch.float32),
    "scalar": torch.tensor(2.5, dtype=torch.float64),
    "empty": torch.empty(0, 3, dtype=torch.int64),
    "float8_e4m3fn": torch.arange(7).to(torch.float8_e4m3fn),
    "float8_e5m2": torch.arange(6).to(torch.float8_e5m2),
    "float8_e8m0fnu": torch.ones(1).to(torch.float8_e8m0fnu),
    "int64": torch.arange(4),
    "version": torch.arange(9, dtype=torch.int16),
    "float16": torch.randn(3, 3, dtype=torch.float16).mT,
    "uint64": torch.tensor([1, 1 << 62], dtype=torch.uint64),
    "big": torch.arange((5 << 20) + 1, dtype=torch.uint8),
    "float64": torch.arange(3, dtype=torch.float64),
}


def same(found: Tensor, tensor: Tensor) -> bool:
    kind = (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    return kind and found.reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8))


def test_any_tool_opens_a_version_and_finds_each_tensor_aligned(tmp_path: Path) -> None:
    VersionsWriter(tmp_path).publish(MIXED.items(), 3)
    path = tmp_path / "v3.safetensors"
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == MIXED.keys()
    assert all(same(loaded[name], tensor) for name, tensor in MIXED.items())
    with safe_open(path, "pt") as file:
        assert (file.metadata()["version"], file.get_slice("float64")[1:].tolist()) == ("3", [1.0, 2.0])
    reader = WeightStoreReader(tmp_path)
    manifest = reader.manifest(3)
    assert [entry.name for entry in manifest.entries] == list(MIXED)
    with reader.reading(manifest, verify=True) as found:
        assert all(same(found[name], tensor) for name, tensor in MIXED.items())
        assert all(found[name].data_ptr() % tensor.itemsize == 0 for name, tensor in MIXED.items() if tensor.numel())
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(("v", "tmp"))] == ["v3.safetensors"]


def test_tensors_of_every_kind_come_and_go_in_deltas(tmp_path: Path) -> None:
    """Which ones change is drawn; each file is whole for any tool, and the reader gets every version."""
    rng, tensors = random.Random(3), {name: tensor for name, tensor in MIXED.items() if name != "big"}
    writer, reader = VersionsWriter(tmp_path, delta=True), WeightStoreReader(tmp_path)
    for version in range(1, 30):
        changed = {name for name in tensors if version == 1 or rng.random() < 0.3}
        for name in changed - {"empty"}:
            raw = torch.randint(0, 2, (tensors[name].nbytes,), dtype=torch.uint8)
            tensors[name] = raw.view(tensors[name].dtype).view(tensors[name].shape)
        manifest = writer.publish(tensors.items(), version)
        assert [entry.name for entry in manifest.entries] == list(tensors)
        with reader.reading(reader.manifest(version), verify=True) as found:
            assert all(same(found[name], tensor) for name, tensor in tensors.items())
        loaded = safetensors.torch.load_file(tmp_path / f"v{version}.safetensors")
        assert loaded.keys() == {entry.name for entry in manifest.entries if entry.base is None}
        assert all(same(loaded[name], tensors[name]) for name in loaded)


def test_the_longest_header_finds_room(tmp_path: Path) -> None:
    """Tensors that lie elsewhere take more words than those that lie here."""
    writer = VersionsWriter(tmp_path, keep_versions=3, delta=True)
    values = {f"{i}": torch.full((1,), i % 251, dtype=torch.uint8) for i in range(3000)}
    for version, changed in [(10**17, ()), (10**18, ("2999",)), (10**18 + 1, ("0",)), (10**18 + 2, values)]:
        for name in changed:
            values[name] = values[name] + 1
        writer.publish(values.items(), version)
        copy_of = WeightStoreReader(tmp_path)
        with copy_of.reading(copy_of.manifest(version), verify=True) as found:
            assert all(same(found[name], tensor) for name, tensor in values.items())


def test_a_file_that_was_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    rng, writer = random.Random(5), VersionsWriter(tmp_path, delta=True)
    small = {name: tensor for name, tensor in MIXED.items() if name != "big"}
    writer.publish(small.items(), 1)
    writer.publish((small | {"int64": -small["int64"]}).items(), 2)
    contents = {version: (tmp_path / f"v{version}.safetensors").read_bytes() for version in (1, 2)}
    for _ in range(120):
        version = rng.choice([1, 2])
        content = bytearray(contents[version])
        at = rng.choice([rng.randrange(len(content)), rng.randrange(16)])
        if rng.random() < 0.3:
            del content[at:]
        else:
            content[at] ^= rng.randrange(1, 256)
        (tmp_path / f"v{version}.safetensors").write_bytes(content)
        reader = WeightStoreReader(tmp_path)
        with pytest.raises((ManifestMismatch, DigestMismatch)):
            reader.verify(reader.manifest(2))
            reader.verify(reader.manifest(1))
        (tmp_path / f"v{version}.safetensors").write_bytes(contents[version])
    reader.verify(reader.manifest(2))


def test_a_dtype_that_no_manifest_names_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ManifestMismatch, match=r"tensors of torch\.complex64 cannot be sent; only float64, "):
        VersionsWriter(tmp_path).publish([("a", torch.ones(2, dtype=torch.complex64))], 1)
    assert files(tmp_path) == []


# -- older versions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("delta", [True, False])
def test_any_version_that_is_kept_may_be_read_while_a_newer_one_is_written(tmp_path: Path, delta: bool) -> None:
    writer = VersionsWriter(tmp_path, keep_versions=3, delta=delta)
    for version in (1, 2, 3):
        writer.publish(tensors(a=version, b=version // 2).items(), version)

    def stream() -> Iterator[tuple[str, Tensor]]:
        for version in (1, 2, 3):
            assert read(tmp_path, version) == {"a": version, "b": version // 2}
        yield from tensors(a=4, b=4).items()

    writer.publish(stream(), 4, {name: (torch.float32, torch.Size([1000])) for name in "ab"})
    assert files(tmp_path)[:3] == ["v2", "v3", "v4"]


@pytest.mark.parametrize("delta", [True, False])
def test_an_older_version_comes_back_under_a_new_number_without_its_bytes(tmp_path: Path, delta: bool) -> None:
    writer = VersionsWriter(tmp_path, keep_versions=3, delta=delta)
    old = [writer.publish(tensors(a=version, b=1).items(), version) for version in (1, 2, 3)]
    again = writer.republish(1, 4)
    assert (again.version, again.digest) == (4, old[0].digest)
    assert (tmp_path / "v4.safetensors").stat().st_size < 1000
    assert ((tmp_path / "STABLE").read_text(), files(tmp_path)) == ("v4\n", ["v2", "v3", "v4", "(v1)"])
    assert [read(tmp_path, version)["a"] for version in (2, 3, 4)] == [2, 3, 1]
    assert writer.republish(4, 5).entries == again.entries
    writer.publish(tensors(a=6, b=1).items(), 6)
    assert [read(tmp_path, version)["a"] for version in (4, 5, 6)] == [1, 1, 6]
    for version in (7, 8, 9):
        writer.publish(tensors(a=version, b=version).items(), version)
    assert files(tmp_path) == ["v7", "v8", "v9"]


def test_only_what_would_leave_others_unaligned_is_written_twice(tmp_path: Path) -> None:
    """Tensors of one dtype lie as they came; beside a wider one, those of odd sizes come last."""
    odd = [(f"{i}", torch.ones(3, dtype=torch.float32)) for i in range(3)]
    writer = VersionsWriter(tmp_path)
    assert [entry.offset for entry in writer.publish(odd, 1).entries] == [0, 12, 24]
    wide = [*odd, ("wide", torch.ones(2, dtype=torch.int64)), ("even", torch.ones(2))]
    assert [entry.offset for entry in writer.publish(wide, 2).entries] == [24, 36, 48, 0, 16]
