"""What `make install-check` installs, and what it writes; nothing is installed here."""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from requirements import install_check
from requirements.install_check import Pip, Uv, joined, of_lists, of_metadata, of_project, table

METADATA = """\
Requires-Dist: transformers<5.20.0,>=5.16.1
Requires-Dist: torchvision; platform_machine != "riscv64"
Requires-Dist: numpy
Requires-Dist: protobuf==7.36.1; platform_machine == "s390x-of-nobody"
Requires-Dist: fastapi[standard]<0.137.0,>=0.133.0
Requires-Dist: scipy; extra == "bench"
"""
LISTS = "-r common.txt\n# a comment\nnumba == 0.65.0 # another\ntorchaudio\ntriton @ https://example.com/triton.whl\n"
PROJECT = """\
[project]
dependencies = ["torch>=2.8", "Transformers>=5.10"]
[project.optional-dependencies]
vllm = ["vllm>=0.32,<0.34"]
"""


class FakeUv(Uv):
    """Knows the oldest releases."""

    def __init__(self) -> None:
        super().__init__(Path(), Pip("python", ""))

    def lowest(self, lines: Sequence[str]) -> dict[str, str]:
        oldest = {"torch": "2.13.0+cpu", "transformers": "5.16.1", "fastapi": "0.133.1", "starlette": "1.0.1"}
        names = [re.split("[<>=]", line)[0] for line in lines]
        assert names == ["torch", "transformers", "fastapi[standard]"]
        return oldest


def test_what_vllm_asks_for_here_but_not_what_breaks_transformers() -> None:
    assert [one.name for one in of_metadata(METADATA)] == ["transformers", "numpy", "fastapi"]
    assert [str(one) for one in of_lists([LISTS])] == ["numba==0.65.0"]


def test_what_is_asked_twice_is_joined_and_the_oldest_is_the_first_that_all_allow() -> None:
    ours, allowed = of_project(PROJECT)
    wanted = joined([*ours, *of_metadata(METADATA), Requirement("torch==2.13.0+cpu")])
    assert list(wanted) == ["torch", "transformers", "numpy", "fastapi"]
    assert "0.33.9" in allowed and "0.34.0" not in allowed
    found = install_check.oldest(wanted, FakeUv())
    assert found == ["torch==2.13.0+cpu", "transformers==5.16.1", "numpy", "fastapi[standard]==0.133.1"]


def test_python_files_are_of_one_vllm_and_compiled_ones_of_another(tmp_path: Path) -> None:
    packages = tmp_path / "site-packages"
    (packages / "vllm" / "deep").mkdir(parents=True)
    for name in ("_C.so", "deep/_D.so", "old.py"):
        packages.joinpath("vllm", name).write_text("old")
    archive = tmp_path / "vllm-9.0.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for name in ("vllm-9.0/vllm/new.py", "vllm-9.0/setup.py"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    for _ in range(2):
        install_check.lay_over(archive, packages)
        found = {str(path.relative_to(packages)) for path in packages.rglob("*") if path.is_file()}
        assert found == {"vllm/_C.so", "vllm/deep/_D.so", "vllm/new.py", "vllm-9.0+cpu.dist-info/METADATA"}


def test_the_page_has_a_row_per_environment_and_the_figures() -> None:
    assert install_check.SHOWN.search(install_check.PAGE.read_text(encoding="utf-8")) is not None
    versions = dict.fromkeys(install_check.COLUMNS, "1")
    found: dict[str, dict[str, Any]] = {
        "oldest": {"versions": versions, "figures": {"the whole vocabulary": 1.43e-6}},
        "newest": {"versions": {**versions, "vllm": "2"}, "figures": {"the whole vocabulary": 0.0, "score()": 2e-6}},
    }
    lines = table(found, "2026-11-26").splitlines()
    assert lines[4:6] == ["| oldest | 1 | 1 | 1 | 1 | 1 | 1 |", "| newest | 1 | 1 | 1 | 1 | 1 | 2 |"]
    assert lines[-2:] == ["| the whole vocabulary | 1.4e-06 | 0.0e+00 |", "| score() |  | 2.0e-06 |"]
