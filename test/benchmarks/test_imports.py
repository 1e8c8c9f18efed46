"""Every file of the benchmarks can be imported: what they use of the package is there."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.mark.needs_vllm
@pytest.mark.parametrize("name", [".".join(path.parts) for path in FILES])
def test_it_can_be_imported(name: str) -> None:
    import_module(name)
