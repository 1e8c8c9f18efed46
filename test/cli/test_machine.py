"""What the machine has, read from the system."""

from __future__ import annotations

import shutil
from pathlib import Path

import psutil
import pytest
import torch

from torchrl_moe.cli.doctor import Machine, Place


def test_a_folder_that_is_not_there_is_no_place(tmp_path: Path) -> None:
    assert Place.of(str(tmp_path / "none"), "nothing") is None
    place = Place.of(str(tmp_path), "tests")
    assert place is not None
    assert (place.use, place.total) == ("tests", shutil.disk_usage(tmp_path).total)


def test_the_machine_is_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = Machine.look()
    assert machine.memory == psutil.virtual_memory().total
    assert 0 < machine.free_memory <= machine.memory
    assert machine.cores >= 1 and machine.gpus == ()
    assert machine.places[0].path == str(tmp_path)
    words = dict(machine.rows)
    assert words["GPUs"] == (
        "none: a build of torch for CPUs" if torch.version.cuda is None else "none that CUDA can use"
    )


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory = "Some GPU", 80_000_000_000

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    machine = Machine.look()
    assert machine.gpus == (("Some GPU", 80_000_000_000),) * 2
    assert dict(machine.rows)["GPUs"] == "Some GPU (80 GB), Some GPU (80 GB)"
