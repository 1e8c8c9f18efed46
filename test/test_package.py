"""What is installed: metadata, extras, files. ``make package`` builds both archives and installs one elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from support.sources import ROOT, package_sources
from torchrl_moe import __version__
from torchrl_moe.cli import doctor as packages
from torchrl_moe.cli import models as explain
from torchrl_moe.cli.services import ENGINES

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
EXTRAS: dict[str, list[str]] = PROJECT["project"]["optional-dependencies"]
BRACKETS = re.compile(r"torchrl_moe\[([\w, -]+)\]")
DATA = {".typed", ".yaml", ".json"}
IMPORT = "import torchrl_moe, sys; assert 'torch' not in sys.modules; print(torchrl_moe.__version__)"


def texts() -> list[tuple[str, str]]:
    """All that names an extra: code, pages, notebooks."""
    patterns = ("*.md", "docs/**/*.md", "tutorials/**/*.ipynb", "pyproject.toml")
    pages = [page for pattern in patterns for page in ROOT.glob(pattern) if "_build" not in page.parts]
    return [(str(source.path), source.text) for source in package_sources()] + [(str(p), p.read_text()) for p in pages]


def test_an_extra_that_is_named_exists() -> None:
    found = [(where, line) for where, text in texts() for line in BRACKETS.findall(text)]
    named = {(where, extra.strip()) for where, line in found for extra in line.split(",")}
    assert {extra for _, extra in named} >= {"prometheus", "render"}
    assert [(where, extra) for where, extra in sorted(named) if extra not in EXTRAS] == []


def test_the_command_line_knows_the_extras() -> None:
    assert set(packages.EXTRAS) <= set(EXTRAS)
    assert set(explain.EXTRAS.values()) <= set(EXTRAS)
    # by the names that are imported
    distributions = {
        "hydra": "hydra-core",
        "omegaconf": "hydra-core",
        "yaml": "pyyaml",
        "reasoning_gym": "reasoning-gym",
    }
    for module, extra in explain.EXTRAS.items():
        names = [re.split(r"[<>=\[ ]", line)[0] for line in EXTRAS[extra]]
        assert distributions.get(module, module) in names, (module, extra)
    assert ENGINES[0] in EXTRAS


def test_the_version_has_one_source_and_the_command_leads_somewhere() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "torchrl_moe.__version__"}
    assert re.search(rf"\[({re.escape(__version__)}|Unreleased)\]", (ROOT / "CHANGELOG.md").read_text())
    (script,) = PROJECT["project"]["scripts"].items()
    module, _, name = script[1].partition(":")
    assert script[0] == "torchrl-moe" and callable(getattr(import_module(module), name))


def package_data() -> set[str]:
    """The files of the package that are no Python, by the patterns of pyproject.toml."""
    folder = ROOT / "torchrl_moe"
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["torchrl_moe"]
    return {str(file.relative_to(ROOT)) for pattern in patterns for file in folder.glob(pattern)}


def test_every_file_of_the_package_is_code_or_named_data() -> None:
    files = [file for file in (ROOT / "torchrl_moe").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    others = {str(file.relative_to(ROOT)) for file in files if file.suffix != ".py"}
    assert others == package_data()
    assert {PurePosixPath(name).suffix or PurePosixPath(name).name[-6:] for name in others} == DATA


# -- the archives -----------------------------------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, cwd=cwd, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the two archives, the wheel made of the source archive; those of ``make package`` go first."""
    given = os.environ.get("TORCHRL_MOE_DIST")
    if given:
        return Path(given)
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


def names_in(built: Path) -> tuple[set[str], set[str]]:
    """The files in the source archive, without its folder, and in the wheel."""
    (source,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    with tarfile.open(source) as archive:
        of_source = {member.name.partition("/")[2] for member in archive.getmembers() if member.isfile()}
    with zipfile.ZipFile(wheel) as opened:
        return of_source, set(opened.namelist())


@pytest.mark.soak
def test_both_archives_hold_the_package_and_nothing_else(built: Path) -> None:
    code = {str(source.path) for source in package_sources()} | package_data()
    of_source, of_wheel = names_in(built)
    info = f"torchrl_moe-{__version__}.dist-info/"
    assert {name for name in of_wheel if not name.startswith(info)} == code
    assert f"{info}licenses/LICENSE" in of_wheel and f"{info}entry_points.txt" in of_wheel
    beside = {"LICENSE", "README.md", "CHANGELOG.md", "MANIFEST.in", "PKG-INFO"}
    beside |= {"pyproject.toml", "setup.cfg", "setup.py"}
    assert {name for name in of_source if ".egg-info/" not in name} == code | beside


@pytest.mark.soak
def test_the_wheel_works_elsewhere(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    run(sys.executable, "-m", "venv", tmp_path / "venv", cwd=tmp_path)
    binaries = tmp_path / "venv" / "bin"
    run(binaries / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    assert run(binaries / "python", "-W", "error", "-c", IMPORT, cwd=tmp_path) == f"{__version__}\n"
    assert run(binaries / "torchrl-moe", "--version", cwd=tmp_path) == f"torchrl_moe {__version__}\n"
    assert "doctor" in run(binaries / "torchrl-moe", "--help", cwd=tmp_path)
    assert "tiny_cpu" in run(binaries / "torchrl-moe", "train", "--list", cwd=tmp_path)
