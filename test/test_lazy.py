"""A room's names load on first use, a broken submodule says so, and imports pause garbage collection."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from torchrl_moe._lazy import attach, without_collections

ROOM = """
from torchrl_moe._lazy import attach
__getattr__, __dir__, __all__ = attach(__name__, {
    ".late": "Late Absent", ".broken": "Broken", "fractions": "Fraction", "": "parts"
})
"""


@pytest.fixture
def room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    package = tmp_path / "a_lazy_room"
    package.mkdir()
    (package / "__init__.py").write_text(ROOM)
    (package / "late.py").write_text("class Late: pass\n")
    (package / "parts.py").write_text("")
    (package / "broken.py").write_text("import sys\nsys.no_such_name\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield import_module("a_lazy_room")
    for name in [name for name in sys.modules if name.startswith("a_lazy_room")]:
        del sys.modules[name]


def test_a_name_loads_on_first_use(room: ModuleType) -> None:
    from fractions import Fraction

    assert "a_lazy_room.late" not in sys.modules
    assert room.Late is sys.modules["a_lazy_room.late"].Late
    assert "Late" in vars(room)
    assert room.Fraction is Fraction  # another package is named in full
    assert "a_lazy_room.parts" not in sys.modules
    assert room.parts is sys.modules["a_lazy_room.parts"]  # a submodule is a name too
    from a_lazy_room import Late

    assert Late is room.Late


def test_dir_and_all_name_the_exports_without_loading_them_and_no_other_name_is_there(room: ModuleType) -> None:
    assert room.__all__ == ["Absent", "Broken", "Fraction", "Late", "parts"]
    assert {"Late", "Broken", "Absent", "parts", "__name__"} <= set(dir(room))
    assert "a_lazy_room.late" not in sys.modules
    with pytest.raises(AttributeError, match="module 'a_lazy_room' has no attribute 'late_'"):
        _ = room.late_


@pytest.mark.parametrize(("name", "cause"), [("Broken", "no_such_name"), ("Absent", "Absent")])
def test_a_submodule_that_cannot_give_the_name_is_an_import_error_with_the_cause(
    room: ModuleType, name: str, cause: str
) -> None:
    with pytest.raises(ImportError, match=rf"cannot load '{name}' of 'a_lazy_room'.*{cause}"):
        getattr(room, name)


def test_a_name_that_is_its_own_files_is_refused() -> None:
    with pytest.raises(ValueError, match="room exports figure of a file of the same name: rename the file"):
        attach("room", {".figure": "figure other"})


def test_collections_pause_in_an_import_and_are_afterwards_as_they_were() -> None:
    with without_collections():
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()
    with pytest.raises(ImportError), without_collections():
        raise ImportError("no such package")
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
