"""Benchmarks can be imported, and what one found is kept, whatever its numbers are made of."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.report import RESULTS, Row, finish, read_records, table
from support.sources import ROOT

FILES = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.mark.needs_vllm
@pytest.mark.parametrize("name", [".".join(path.parts) for path in FILES])
def test_it_can_be_imported(name: str) -> None:
    import_module(name)


@pytest.mark.parametrize("missed", [False, np.float64(1.08) <= 1.05, torch.tensor(1.08) <= 1.05])
def test_a_verdict_of_any_library_is_kept(missed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = Row(claim="time", value="1.08", target="<= 1.05", met=missed)
    assert row.met is False
    finish("one", [row, Row(claim="load", value="1.0")])
    assert read_records(RESULTS)["one"].rows == [row, Row(claim="load", value="1.0")]
    assert table([row]).endswith("| time | 1.08 | <= 1.05 | **no** |")
