"""The notebooks as they are stored; one of them runs, and shows what it stores. ``make notebooks`` runs them all."""

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
def test_one_of_them_shows_what_it_stores(no_engine: EngineShelf) -> None:
    stored = notebooks.read(notebooks.FOLDER / f"{SETTINGS.in_tests}.ipynb")
    assert list(notebooks.differences(stored, notebooks.executed(stored))) == []
