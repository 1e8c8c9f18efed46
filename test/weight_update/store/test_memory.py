from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from torchrl_moe.weight_update.store.writing import available_memory

GB = 1 << 30


@pytest.fixture(autouse=True)
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=16 * GB))


def member(tmp_path: Path, *lines: str) -> Path:
    file = tmp_path / "membership"
    file.write_text("".join(f"{line}\n" for line in lines))
    return file


def unified(folder: Path, limit: str | int, used: int | str, inactive: int = 0, active: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file {active}\n")


def legacy(folder: Path, limit: int, used: int, inactive: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"inactive_file 1\ntotal_inactive_file {inactive}\n")


def test_without_control_groups_it_is_the_hosts(tmp_path: Path) -> None:
    assert available_memory(tmp_path / "none", tmp_path) == 16 * GB
    assert available_memory(member(tmp_path, "0::/user", "3:cpu:/x"), tmp_path) == 16 * GB


def test_a_limit_leaves_what_is_not_used_and_files_that_can_be_dropped(tmp_path: Path) -> None:
    unified(tmp_path / "job", 8 * GB, 7 * GB, 1 * GB, 2 * GB)
    assert available_memory(member(tmp_path, "0::/job"), tmp_path) == 4 * GB


def test_a_group_around_it_may_leave_less(tmp_path: Path) -> None:
    unified(tmp_path / "job" / "step", "max", 6 * GB)
    unified(tmp_path / "job", 8 * GB, 7 * GB)
    assert available_memory(member(tmp_path, "0::/job/step"), tmp_path) == 1 * GB


def test_a_container_may_see_its_group_as_the_root(tmp_path: Path) -> None:
    unified(tmp_path, 4 * GB, 5 * GB)
    assert available_memory(member(tmp_path, "0::/docker/abc"), tmp_path) == 0


def test_the_older_kind_has_a_tree_for_memory(tmp_path: Path) -> None:
    legacy(tmp_path / "memory", 1 << 63, 7 * GB)  # as good as no limit
    legacy(tmp_path / "memory" / "job", 8 * GB, 7 * GB, 3 * GB)
    assert available_memory(member(tmp_path, "4:memory:/job", "1:cpu:/job", "0::/"), tmp_path) == 4 * GB


def test_memory_may_share_its_tree_with_others(tmp_path: Path) -> None:
    legacy(tmp_path / "memory" / "job", 8 * GB, 7 * GB)
    assert available_memory(member(tmp_path, "4:hugetlb,memory:/job"), tmp_path) == 1 * GB


@pytest.mark.parametrize("used", ["", "many"])
def test_figures_that_are_none_limit_nothing(tmp_path: Path, used: str) -> None:
    unified(tmp_path / "job", 8 * GB, used)
    assert available_memory(member(tmp_path, "", "0::/job"), tmp_path) == 16 * GB


def test_a_group_with_a_name_in_no_encoding_limits_nothing(tmp_path: Path) -> None:
    (tmp_path / "membership").write_bytes(b"0::/\xff\xfe\n")
    assert available_memory(tmp_path / "membership", tmp_path) == 16 * GB


def test_of_this_process_there_is_some() -> None:
    assert available_memory() > 0
