"""How much memory there is, as the host and the control groups around a process say."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from torchrl_moe.weight_update.store.writing import available_memory

GB = 1 << 30


def unified(limit: Any, used: Any, inactive: int = 0, active: int = 0) -> dict[str, Any]:
    stat = f"anon 5\ninactive_file {inactive * GB}\nactive_file {active * GB}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def legacy(limit: int, used: int, inactive: int = 0) -> dict[str, Any]:
    stat = f"inactive_file 1\ntotal_inactive_file {inactive * GB}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("membership", "groups", "left"),
    [
        (None, {}, 16),
        (b"0::/user\n3:cpu:/x\n", {}, 16),  # without control groups it is the host's
        (b"0::/job\n", {"job": unified(8 * GB, 7 * GB, 1, 2)}, 4),  # files can be dropped
        (b"0::/job/step\n", {"job/step": unified("max", 6 * GB), "job": unified(8 * GB, 7 * GB)}, 1),
        (b"0::/docker/abc\n", {"": unified(4 * GB, 5 * GB)}, 0),  # a container may see its group as the root
        (
            b"4:memory:/job\n1:cpu:/job\n0::/\n",  # the older kind has a tree for memory
            {"memory": legacy(1 << 63, 7 * GB), "memory/job": legacy(8 * GB, 7 * GB, 3)},
            4,
        ),
        (b"4:hugetlb,memory:/job\n", {"memory/job": legacy(8 * GB, 7 * GB)}, 1),  # which it may share
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


def test_of_this_process_there_is_some() -> None:
    assert available_memory() > 0
