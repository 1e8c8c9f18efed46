"""The notebooks as they are stored, and the cells of one. ``make notebooks`` runs all, and compares what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import notebooks
from support.engines import EngineShelf

SETTINGS = notebooks.Settings.read()


@pytest.mark.parametrize("path", notebooks.paths(), ids=lambda path: path.stem)
def test_what_is_stored_is_sound(path: Path) -> None:
    assert list(notebooks.problems(notebooks.read(path), path.stem, SETTINGS)) == []


@pytest.mark.engine
def test_the_cells_of_one_run(no_engine: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, which has imported vLLM already; a kernel pays half a minute for that."""
    monkeypatch.chdir(tmp_path)
    there = {"__name__": "notebook"}
    for cell in notebooks.read(notebooks.FOLDER / f"{SETTINGS.in_tests}.ipynb").cells:
        if cell.cell_type == "code" and notebooks.INSTALL not in cell.metadata.get("tags", []):
            exec(compile(cell.source, f"{SETTINGS.in_tests}, {cell.id}", "exec"), there)


@pytest.mark.soak
@pytest.mark.engine
def test_one_of_them_shows_what_it_stores(no_engine: EngineShelf) -> None:
    stored = notebooks.read(notebooks.FOLDER / f"{SETTINGS.in_tests}.ipynb")
    assert list(notebooks.differences(stored, notebooks.executed(stored))) == []
