"""One run at a time in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrl_moe.trainers.config import ConfigError
from torchrl_moe.trainers.run_folder import RunLock


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    lock = RunLock(tmp_path / "run")
    with pytest.raises(ConfigError, match="is used by another run"):
        RunLock(tmp_path / "run")
    lock.close()
    lock.close()
    RunLock(tmp_path / "run").close()
    assert not list((tmp_path / "run").iterdir())


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"out=.*/file/run cannot be written to: Not a directory"):
        RunLock(tmp_path / "file" / "run")
