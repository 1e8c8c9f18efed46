"""The directory of versions: whole or not there, collected, and never under a reader."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from support.processes import exit_code_of
from torchrl_moe.errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.store import Manifest, WeightStoreReader, WeightStoreWriter
from torchrl_moe.store.folder import PIN_SECONDS, is_in_memory, pinned


def tensors(**values: float) -> dict[str, Tensor]:
    return {name: torch.full((1000,), float(value)) for name, value in values.items()}


def publish(writer: WeightStoreWriter, *versions: int) -> Manifest:
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


def test_the_newest_versions_are_kept_and_the_marker_names_the_last(tmp_path: Path) -> None:
    writer = WeightStoreWriter(tmp_path, keep_versions=3, fsync=True)
    for version in range(1, 6):
        publish(writer, version)
        assert (tmp_path / "STABLE").read_text() == f"v{version}\n"
    assert files(tmp_path) == ["v3", "v4", "v5"]
    assert [read(tmp_path, version) for version in (3, 4, 5)] == [{"a": 3.0}, {"a": 4.0}, {"a": 5.0}]
    with pytest.raises(ManifestMismatch, match=r"version 2 is not in the store, which holds \[3, 4, 5\]"):
        read(tmp_path, 2)


def test_a_dead_readers_pin_is_forgotten(tmp_path: Path) -> None:
    writer = WeightStoreWriter(tmp_path)
    publish(writer, 1)

    def hold_and_die() -> None:
        with pinned(tmp_path, 1):
            (pin,) = (tmp_path / "pins").iterdir()
            assert (pin.name.partition("-")[0], pin.stat().st_mode & 0o777) == ("v1", 0o600)  # closed to other users
            os.kill(os.getpid(), signal.SIGKILL)

    assert exit_code_of(hold_and_die) == -signal.SIGKILL
    assert len(list((tmp_path / "pins").iterdir())) == 1
    publish(writer, 2, 3)
    assert (files(tmp_path), list((tmp_path / "pins").iterdir())) == (["v2", "v3"], [])


def test_where_a_file_system_has_no_locks_a_pin_is_forgotten_after_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = WeightStoreWriter(tmp_path)
    publish(writer, 1)

    def no_locks(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with pinned(tmp_path, 1):
        publish(writer, 2, 3)
        assert files(tmp_path) == ["v1", "v2", "v3"]
        (pin,) = (tmp_path / "pins").iterdir()
        os.utime(pin, (0, time.time() - PIN_SECONDS - 60))
        publish(writer, 4)
        assert (files(tmp_path), pin.exists()) == (["v3", "v4"], False)


def test_a_writer_looks_at_pins_again_once_a_version_is_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, reader = WeightStoreWriter(tmp_path), WeightStoreReader(tmp_path)
    publish(writer, 1, 2)
    looks: list[set[int]] = [{1}, set()]  # none at first, one that came when the file was moved away

    def look(_: Path) -> set[int]:
        if looks:
            return looks.pop()
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr("torchrl_moe.store.writer.pinned_versions", look)
        publish(writer, 3)
        assert (files(tmp_path), read(tmp_path, 1)) == (["v1", "v2", "v3"], {"a": 1.0})
        looks.append(set())
        with pytest.raises(OSError, match="Too many open files"):
            publish(writer, 4)
    assert read(tmp_path, 1) == {"a": 1.0}  # it was shown again
    # a writer that was killed has left it hidden, under a reader
    with reader.reading(reader.manifest(1)) as held:
        os.rename(tmp_path / "v1.safetensors", tmp_path / "bytes-of-v1.safetensors")
        publish(writer, 5, 6)
        assert held["a"].eq(1).all()
        assert (tmp_path / "bytes-of-v1.safetensors").exists()
    publish(writer, 7)
    assert files(tmp_path) == ["v6", "v7"]


def test_a_writer_without_its_lock_writes_nothing(tmp_path: Path) -> None:
    writer = WeightStoreWriter(tmp_path)
    publish(writer, 1)

    def forked() -> None:
        for attempt in (lambda: publish(writer, 2), lambda: writer.republish(1, 2)):
            with pytest.raises(WeightSyncError, match="this process was forked from its own"):
                attempt()

    assert exit_code_of(forked) == 0
    writer.close()
    with pytest.raises(WeightSyncError, match="was closed, its folder was removed"):
        publish(writer, 2)
    assert files(tmp_path) == ["v1"]


# -- patches ----------------------------------------------------------------------------------------------------------


def test_only_the_elements_that_changed_are_written(tmp_path: Path) -> None:
    """1 of 1000 numbers of 4 bytes: its bits and its distance are 6 bytes, padded to 8."""
    writer = WeightStoreWriter(tmp_path, delta=True)
    weights = {"a": torch.zeros(1000), "b": torch.ones(1000)}
    extents, bases = [], []
    for version in range(1, 5):
        manifest = writer.publish(weights.items(), version)
        extents.append(manifest.extent)
        bases.append(manifest.base)
        weights = {**weights, "a": weights["a"].clone()}
        weights["a"][7 * version] = version
    assert (extents, bases) == ([8000, 8, 8, 8], [None, 1, 2, 3])
    assert {entry.name: entry.changed for entry in manifest.entries} == {"a": 1, "b": 0}
    assert manifest.digest == WeightStoreWriter(tmp_path / "whole").publish([*_at(tmp_path, 4)], 4).digest


def _at(folder: Path, version: int) -> list[tuple[str, Tensor]]:
    reader = WeightStoreReader(folder)
    with reader.reading(reader.manifest(version), verify=True) as found:
        return [(name, tensor.clone()) for name, tensor in found.items()]


def test_distances_of_more_than_sixteen_bits_are_bridged(tmp_path: Path) -> None:
    writer, tensor = WeightStoreWriter(tmp_path, delta=True), torch.zeros(300_000, dtype=torch.int16)
    writer.publish([("a", tensor)], 1)
    for version, places in enumerate(([0], [65_535], [65_536], [299_999], [0, 65_536, 131_072, 299_999], []), start=2):
        tensor = tensor.clone()
        tensor[places] += 1
        manifest = writer.publish([("a", tensor)], version)
        # 0; 65535; 65535 and 1; 4 times 65535 and 37859; 0, 65535 and 1, 65535 and 1, 2 times 65535 and 37857
        assert manifest.entries[0].changed == {2: 1, 3: 1, 4: 2, 5: 5, 6: 8, 7: 0}[version]
        assert _at(tmp_path, version)[0][1].equal(tensor)


@settings(max_examples=20)
@given(st.integers(0, 1 << 32), st.lists(st.floats(0, 1), min_size=2, max_size=8), st.booleans())
def test_any_changes_come_back_bit_by_bit(seed: int, shares: list[float], delta: bool) -> None:
    """Whichever elements of whichever dtypes change, all versions that are kept, and the last, are what was sent."""
    rng = torch.Generator().manual_seed(seed)
    dtypes = [torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool]
    sent: dict[int, dict[str, Tensor]] = {}
    with tempfile.TemporaryDirectory() as folder:
        writer, reader = WeightStoreWriter(folder, delta=delta), WeightStoreReader(folder)
        weights = {f"{dtype}": torch.zeros(211, 3, dtype=dtype) for dtype in dtypes}
        for version, share in enumerate(shares, start=1):
            for name, tensor in weights.items():
                raw = tensor.clone().view(torch.uint8).reshape(-1, tensor.itemsize)
                hit = torch.rand(len(raw), generator=rng) < share**4
                raw[hit, 0] = (raw[hit, 0] + 1) % (2 if tensor.dtype == torch.bool else 100)
                weights[name] = raw.reshape(-1).view(tensor.dtype).view(tensor.shape)
            manifest = writer.publish(weights.items(), version)
            assert (reader.manifest(version), manifest.nbytes) == (manifest, 211 * 3 * (2 + 4 + 8 + 1 + 1 + 1))
            assert manifest.tensors == {name: (tensor.dtype, tensor.shape) for name, tensor in weights.items()}
            sent[version] = dict(weights)
            for kept in reader.versions():
                assert all(same(found, sent[kept][name]) for name, found in _at(Path(folder), kept))


def bases_of(writer: WeightStoreWriter, size: int, changes: Iterable[slice]) -> tuple[list[int | None], Tensor]:
    """What each version is a patch of, where a slice of so many numbers changes each time, and the last numbers."""
    tensor, bases = torch.zeros(size), []
    for version, places in enumerate(changes, start=1):
        tensor = tensor.clone()
        tensor[places] += 1
        bases.append(writer.publish([("a", tensor)], version).base)
    return bases, tensor


def test_a_version_is_whole_if_that_is_hardly_more_for_it_or_for_a_late_reader(tmp_path: Path) -> None:
    """A patch holds six bytes for four: 1/3 of the elements are half of the bytes."""
    writer = WeightStoreWriter(tmp_path / "new", keep_versions=9, delta=True)
    assert bases_of(writer, 3000, [slice(3000), slice(999), slice(1001)])[0] == [None, 1, None]
    # 100 of 1000 numbers, 600 of 4000 bytes: after six, 3600, a seventh would be too many
    folder = tmp_path / "long"
    writer = WeightStoreWriter(folder, delta=True)
    bases, tensor = bases_of(writer, 1000, [slice(n * 10, n * 10 + 100) for n in range(1, 16)])
    assert [version for version, base in enumerate(bases, start=1) if base is None] == [1, 8, 15]
    assert files(folder) == ["v14", "v15", *(f"(v{version})" for version in (10, 11, 12, 13, 8, 9))]
    tensor[150:250] -= 1
    assert _at(folder, 14)[0][1].equal(tensor)
    # one number each time: 32 patches after version 1, then a whole version, and 16 patches after that
    folder = tmp_path / "fifty"
    bases, tensor = bases_of(WeightStoreWriter(folder, delta=True), 10_000, [slice(n, n + 1) for n in range(1, 51)])
    assert [version for version, base in enumerate(bases, start=1) if base is None] == [1, 34]
    assert _at(folder, 50)[0][1].equal(tensor) and tensor.sum() == 50


def test_a_base_of_a_version_that_is_held_stays(tmp_path: Path) -> None:
    writer, reader = WeightStoreWriter(tmp_path, delta=True), WeightStoreReader(tmp_path)
    writer.publish(tensors(a=1, b=1).items(), 1)
    changed = tensors(a=1, b=1)
    changed["b"][5] = 2
    manifest = writer.publish(changed.items(), 2)
    with reader.reading(manifest) as held:
        for version in (3, 4, 5):
            writer.publish(tensors(a=version, b=version).items(), version)
        assert files(tmp_path) == ["v2", "v4", "v5", "(v1)"]
        reader.verify(manifest)
        assert (held["a"].eq(1).all(), held["b"].sum()) == (True, 1001)
    writer.publish(tensors(a=6, b=6).items(), 6)
    assert files(tmp_path) == ["v5", "v6"]


def test_a_tensor_more_or_less_is_no_matter(tmp_path: Path) -> None:
    writer, big = WeightStoreWriter(tmp_path, delta=True), torch.zeros(10_000)
    for version, names in enumerate(("ab", "a", "ac", "abc"), start=1):
        manifest = writer.publish([(name, big if name == "a" else torch.ones(3)) for name in names], version)
        assert [entry.name for entry in manifest.entries] == list(names)
        assert manifest.base == (version - 1 or None)
        assert [name for name, _ in _at(tmp_path, version)] == list(names)


@pytest.mark.parametrize("what", ["shape", "dtype", "new writer", "doubt", "damage", "removal", "failure"])
def test_a_base_that_may_not_be_there_is_not_referred_to(tmp_path: Path, what: str) -> None:
    writer, after = WeightStoreWriter(tmp_path, delta=True), torch.ones(1000)
    publish(writer, 1)
    match what:
        case "shape":
            after = after.view(500, 2)
        case "dtype":
            after = after.double()
        case "new writer":
            writer.close()
            writer = WeightStoreWriter(tmp_path, delta=True)
        case "doubt":  # a replica could not read it
            writer.doubt()
        case "damage":
            with (tmp_path / "v1.safetensors").open("r+b") as file:
                file.write(b"x")
        case "removal":
            (tmp_path / "v1.safetensors").unlink()
        case "failure":  # the image has half of a version that was not written
            with pytest.raises(WeightSyncError, match="1 of the 1000 numbers of a are NaN or infinite"):
                writer.publish([("a", torch.where(torch.arange(1000) == 999, torch.nan, 1.0))], 2)
    assert writer.publish([("a", after)], 2).base is None
    assert same(_at(tmp_path, 2)[0][1], after)


def test_a_number_that_one_writer_uses_twice_is_of_the_newer_contents(tmp_path: Path) -> None:
    writer = WeightStoreWriter(tmp_path, delta=True)
    publish(writer, 1)
    changed = torch.where(torch.arange(1000) == 999, 2.0, 1.0)
    assert writer.publish([("a", changed)], 1).base is None  # a patch would be one of itself
    assert same(_at(tmp_path, 1)[0][1], changed)


@pytest.mark.parametrize("marker", [b"", b"v", b"x", b"v-1", b"v1.5", b"v" + b"9" * 20, b"v\xff"])
def test_a_marker_that_names_no_version_is_none(tmp_path: Path, marker: bytes) -> None:
    publish(WeightStoreWriter(tmp_path), 1)
    (tmp_path / "STABLE").write_bytes(marker)
    assert WeightStoreReader(tmp_path).newest() is None


def test_a_number_that_is_used_again_takes_those_with_it_that_need_its_bytes(tmp_path: Path) -> None:
    writer, reader = WeightStoreWriter(tmp_path, keep_versions=3, delta=True), WeightStoreReader(tmp_path)
    writer.publish(tensors(a=1, b=1).items(), 1)
    manifest = writer.publish(tensors(a=1, b=2).items(), 2)
    writer.close()
    again = WeightStoreWriter(tmp_path, keep_versions=3, delta=True)
    with pinned(tmp_path, 1), pytest.raises(WeightSyncError, match="version 1 is there already, and a reader holds it"):
        again.publish(tensors(a=9, b=9).items(), 1)
    reader.verify(manifest)
    again.publish(tensors(a=9, b=9).items(), 1)
    with pytest.raises(ManifestMismatch, match=r"version 2 is not in the store, which holds \[1\]"):
        reader.verify(manifest)
    assert read(tmp_path, 1) == {"a": 9.0, "b": 9.0}
    assert reader.newest() == 1  # it counts again


# -- faults -----------------------------------------------------------------------------------------------------------


def test_a_writer_killed_while_it_writes_leaves_the_last_version_and_its_litter_is_cleared(folder: Path) -> None:
    kinds = {name: (torch.float32, torch.Size([1000])) for name in "ab"}

    def deadly() -> Iterator[tuple[str, Tensor]]:
        yield "a", torch.full((1000,), 2.0)
        os.kill(os.getpid(), signal.SIGKILL)

    def work() -> None:
        writer = WeightStoreWriter(folder)
        publish(writer, 1, 2)
        writer.publish(deadly(), 3, kinds)  # in memory, over the bytes of version 1

    assert exit_code_of(work) == -signal.SIGKILL
    assert [name for name in files(folder) if ".tmp-" in name] != []
    assert (WeightStoreReader(folder).newest(), read(folder, 2)) == (2, {"a": 2.0})
    writer = WeightStoreWriter(folder)
    publish(writer, 4)
    assert (files(folder)[-2:], read(folder, 4)) == (["v2", "v4"], {"a": 4.0})


@pytest.mark.parametrize(
    ("names", "fsync"), [(["large"], False), *((["big", "float64"], fsync) for fsync in (False, True))]
)
def test_a_full_disk_is_said_to_be_full_and_leaves_the_last_version(
    tmp_path: Path, names: list[str], fsync: bool
) -> None:
    """The limit on the size of a file stands in for the disk's end; a process of its own has it."""
    large = {**MIXED, "large": torch.full((1_000_000,), 2.0)}  # torch's threads do not live on in the other process

    def work() -> None:
        writer = WeightStoreWriter(tmp_path, fsync=fsync)
        publish(writer, 1)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))
        with pytest.raises(WeightSyncError, match=r"no room for [45] MB in .*: a weight store keeps more than one"):
            writer.publish([(name, large[name]) for name in names], 2)

    assert (exit_code_of(work), files(tmp_path), read(tmp_path, 1)) == (0, ["v1"], {"a": 1.0})


def test_collecting_holds_no_descriptors_and_no_mappings(tmp_path: Path) -> None:
    writer, reader, held = WeightStoreWriter(tmp_path, delta=True), WeightStoreReader(tmp_path), []
    for version in range(1, 50):
        reader.verify(writer.publish(tensors(a=version, b=1).items(), version))
        held.append(len(os.listdir("/proc/self/fd")))
    assert max(held) == max(held[:5])
    assert len(reader._mapped) <= 4


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
    WeightStoreWriter(tmp_path).publish(MIXED.items(), 3)
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


def test_a_file_that_was_damaged_anywhere_is_refused(tmp_path: Path) -> None:
    rng, writer = random.Random(5), WeightStoreWriter(tmp_path, delta=True)
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
    for version, content in contents.items():
        (tmp_path / f"v{version}.safetensors").unlink()
        reader = WeightStoreReader(tmp_path)
        with pytest.raises(ManifestMismatch):
            reader.verify(reader.manifest(2))
        (tmp_path / f"v{version}.safetensors").write_bytes(content)
    reader.verify(reader.manifest(2))


def test_a_dtype_that_no_manifest_names_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ManifestMismatch, match=r"tensors of torch\.complex64 cannot be sent; only float64"):
        WeightStoreWriter(tmp_path).publish([("a", torch.ones(2, dtype=torch.complex64))], 1)
    assert files(tmp_path) == []


# -- older versions ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("delta", [True, False])
def test_any_version_that_is_kept_may_be_read_while_a_newer_one_is_written(folder: Path, delta: bool) -> None:
    """In memory the oldest goes before, and its file is written over."""
    writer = WeightStoreWriter(folder, keep_versions=3, delta=delta)
    for version in (1, 2, 3):
        writer.publish(tensors(a=version, b=version // 2).items(), version)

    def stream() -> Iterator[tuple[str, Tensor]]:
        there = WeightStoreReader(folder).versions()
        assert there == ([2, 3] if is_in_memory(folder) else [1, 2, 3])
        assert [read(folder, version) for version in there] == [{"a": v, "b": v // 2} for v in there]
        yield from tensors(a=4, b=4).items()

    writer.publish(stream(), 4, {name: (torch.float32, torch.Size([1000])) for name in "ab"})
    assert files(folder)[:3] == ["v2", "v3", "v4"]


@pytest.mark.parametrize("delta", [True, False])
def test_an_older_version_comes_back_under_a_new_number_without_its_bytes(tmp_path: Path, delta: bool) -> None:
    writer = WeightStoreWriter(tmp_path, keep_versions=3, delta=delta)
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
    for version in range(10, 60):  # any number of times
        assert writer.republish(version - 1, version).base == 9
        assert read(tmp_path, version) == {"a": 9, "b": 9}
    assert files(tmp_path) == ["v57", "v58", "v59", "(v9)"]
