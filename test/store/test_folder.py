"""Folders, locks, files and memory of a writer, and bytes of tensors, piece by piece."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.store.content import PIECE_BYTES, lay_out, pieces_of
from torchrl_moe.store.folder import (
    WriterLock,
    available_memory,
    naming_full_disks,
    own_folder,
)


def test_a_folder_is_made_with_its_parents_or_closed_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in (tmp_path / "a" / "b", tmp_path / "c"):
        (tmp_path / "c").mkdir(mode=0o777, exist_ok=True)
        assert (own_folder(folder), stat.S_IMODE(folder.stat().st_mode)) == (folder, 0o700)
    folder = tmp_path / "shared"
    folder.mkdir(mode=0o755)
    (folder / "thesis.tex").touch()
    with pytest.raises(WeightSyncError, match="holds other things: name a folder of the weight store's own"):
        own_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    (folder / "writer").touch()  # it was a store before
    assert stat.S_IMODE(own_folder(folder).stat().st_mode) == 0o700
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(WeightSyncError, match="belongs to another user: name a folder of your own"):
        own_folder(folder)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO])
def test_a_file_system_without_locks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    def fail(*_: int) -> None:
        raise OSError(code, "no locks")

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OSError, match="no locks") if code == errno.EIO else nullcontext():
        WriterLock(tmp_path).close()


@pytest.mark.parametrize(("code", "is_full"), [(errno.ENOSPC, True), (errno.EDQUOT, True), (errno.EIO, False)])
def test_only_a_full_disk_is_called_full(tmp_path: Path, code: int, is_full: bool) -> None:
    with pytest.raises(WeightSyncError if is_full else OSError) as caught, naming_full_disks(tmp_path, 5_000_000):
        raise OSError(code, os.strerror(code))
    assert ("no room for 5 MB in" in str(caught.value)) is is_full


GB = 1 << 30


def unified(limit: Any, used: Any, inactive: int = 0, active: int = 0) -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {inactive * GB}\nactive_file {active * GB}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def legacy(limit: int, used: int, inactive: int = 0) -> dict[str, Any]:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive * GB}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used * GB, "memory.stat": stat}


@pytest.mark.parametrize(
    ("membership", "groups", "left"),
    [
        (None, {}, 16),
        (b"0::/user\n3:cpu:/x\n", {}, 16),  # without control groups it is the host's
        (b"0::/job\n", {"job": unified(8 * GB, 7 * GB, 1, 2)}, 4),  # files can be dropped
        (b"0::/job/step\n", {"job/step": unified("max", 6 * GB), "job": unified(8 * GB, 7 * GB)}, 1),
        (b"0::/docker/abc\n", {"": unified(4 * GB, 5 * GB)}, 0),  # a container may see its group as the root
        # the older kind has a tree for memory
        (b"4:memory:/job\n1:cpu:/job\n0::/\n", {"memory": legacy(1 << 63, 7), "memory/job": legacy(8 * GB, 7, 3)}, 4),
        (b"4:hugetlb,memory:/job\n", {"memory/job": legacy(8 * GB, 7)}, 1),  # which it may share
        (b"\n0::/job\n", {"job": unified(8 * GB, "")}, 16),  # figures that are none limit nothing
        (b"\n0::/job\n", {"job": unified(8 * GB, "many")}, 16),
        (b"0::/\xff\xfe\n", {}, 16),  # a name in no encoding
    ],
)
def test_what_the_host_has_and_groups_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: bytes | None, groups: dict[str, Any], left: int
) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GB))
    if membership is not None:
        (tmp_path / "membership").write_bytes(membership)
    for name, files in groups.items():
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (tmp_path / name / file).write_text(f"{text}\n")
    assert available_memory(tmp_path / "membership", tmp_path) == left * GB


BIG = PIECE_BYTES // 4 + 3  # elements of float32


def test_a_tensor_of_its_own_dtype_is_not_copied() -> None:
    tensor = torch.arange(BIG, dtype=torch.float32)
    first, second = pieces_of(tensor, torch.float32)
    assert (first.ctypes.data, second.ctypes.data) == (tensor.data_ptr(), tensor.data_ptr() + PIECE_BYTES)


def test_tensors_lie_one_after_another_those_of_odd_sizes_last() -> None:
    kinds = [(torch.int8, torch.Size([65])), (torch.float32, torch.Size([3])), (torch.bool, torch.Size([0]))]
    assert (lay_out(kinds), lay_out([])) == (([12, 0, 12], 77), ([], 0))
