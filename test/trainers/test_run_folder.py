"""A run's folder: it takes another's place or that one is back, and holds one run at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from pytest import MonkeyPatch

from torchrl_moe.trainers.checkpoints import exchange, recover
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.run_record import locked_folder


def folder(path: Path, content: str) -> Path:
    path.mkdir()
    (path / "file").write_text(content)
    return path


def names(path: Path) -> list[str]:
    return sorted(item.name for item in path.iterdir())


@pytest.mark.parametrize("has_older", [False, True])
def test_a_draft_takes_the_place(tmp_path: Path, has_older: bool) -> None:
    if has_older:
        folder(tmp_path / "run", "old")
    folder(tmp_path / ".run.older", "left by a kill")
    exchange(folder(tmp_path / ".draft", "new"), tmp_path / "run")
    assert (tmp_path / "run" / "file").read_text() == "new" and names(tmp_path) == ["run"]


def test_what_a_kill_left_between_two_renamings_is_put_back(tmp_path: Path) -> None:
    recover(folder(tmp_path / ".run.older", "the only copy"))
    recover(folder(tmp_path / ".run.older", "replaced"))
    assert (tmp_path / "run" / "file").read_text() == "the only copy"


@pytest.mark.parametrize("older", ["run", ".run.older"])
def test_what_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: MonkeyPatch, older: str) -> None:
    """Where a kill left it, too."""
    folder(tmp_path / older, "old")
    draft, replace = folder(tmp_path / ".draft", "new"), os.replace

    def fail(source: Any, target: Any) -> None:
        if Path(source) == draft:
            raise OSError("no such luck")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no such luck"):
        exchange(draft, tmp_path / "run")
    assert (tmp_path / "run" / "file").read_text() == "old"


def test_a_second_run_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    config = GRPOConfig(out=str(tmp_path / "run"))
    with locked_folder(config), pytest.raises(ConfigError, match="is used by another run"), locked_folder(config):
        pass
    with locked_folder(config):
        assert not list((tmp_path / "run").iterdir())


def test_a_place_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = GRPOConfig(out=str(tmp_path / "file" / "run"))
    with pytest.raises(ConfigError, match=r"out=.*/file/run cannot be written to: Not a directory"):
        locked_folder(config).__enter__()
