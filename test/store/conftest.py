"""Where the tests of the store have theirs: on a disk, and in memory, where files are written over."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrl_moe.store.folder import is_in_memory


@pytest.fixture
def memory() -> Iterator[Path]:
    place = Path("/dev/shm")
    if not (place.is_dir() and is_in_memory(place)):
        pytest.skip("this machine has no /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="torchrl_moe-test-", dir=place))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(params=["disk", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / "store" if request.param == "disk" else request.getfixturevalue("memory")
