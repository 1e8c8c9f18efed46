"""Folders, locks and files of a writer."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from contextlib import nullcontext
from pathlib import Path

import pytest

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.weight_update.store.writing import WriterLock, naming_full_disks, own_folder, replace_text


def test_a_folder_is_made_with_its_parents_or_closed_to_others(tmp_path: Path) -> None:
    for folder in (tmp_path / "a" / "b", tmp_path / "c"):
        (tmp_path / "c").mkdir(mode=0o777, exist_ok=True)
        assert (own_folder(folder), stat.S_IMODE(folder.stat().st_mode)) == (folder, 0o700)


@pytest.mark.parametrize("mode", [0o755, 0o700])
def test_a_folder_of_other_things_is_left_as_it_is(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "shared"
    folder.mkdir(mode=mode)
    (folder / "thesis.tex").touch()
    with pytest.raises(WeightSyncError, match="holds other things: name a folder of the weight store's own"):
        own_folder(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == mode
    (folder / "writer").touch()  # it was a store before
    assert stat.S_IMODE(own_folder(folder).stat().st_mode) == 0o700


def test_another_users_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(WeightSyncError, match="belongs to another user: name a folder of your own"):
        own_folder(tmp_path)


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


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    for text in ("one", "two"):
        replace_text(tmp_path / "x", text, fsync=True)
        assert (tmp_path / "x").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["x"]
    assert stat.S_IMODE((tmp_path / "x").stat().st_mode) == 0o600
