"""``make faults``: each row fits the code as it is, and a fault is put into a copy, noticed, and taken out again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support import hidden_faults
from support.fault_table import FAULTS, Fault
from support.hidden_faults import Result, Run, files_of, introduced, judge
from support.mutants import ROOMS
from support.sources import ROOT

ROW = "two-is-three: A number was another one (60 s)\nnumber.py: test_number.py LOSSES\n-NUMBER = 2\n+NUMBER = 3"
FAULT = Fault.read(ROW)


def test_a_row_is_read() -> None:
    assert (FAULT.name, FAULT.title, FAULT.patience) == ("two-is-three", "A number was another one", 60)
    assert (FAULT.file, FAULT.mended, FAULT.faulty) == ("number.py", "NUMBER = 2\n", "NUMBER = 3\n")
    assert FAULT.tests == ("test_number.py", "objectives/", "contract/test_loss*.py")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_the_table_changes_code_that_is_there_once_and_is_read(fault: Fault) -> None:
    text = (ROOT / "torchrl_moe" / fault.file).read_text(encoding="utf-8")
    faulty = fault.introduced(text)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text))
    assert all(files_of((pattern,), ROOT) for pattern in fault.tests)


def test_faults_have_names_of_their_own_and_rooms_of_mutants_have_sources_and_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30  # names are told apart
    for room in ROOMS.values():
        assert [*(ROOT / "torchrl_moe").glob(room.sources)]
        assert all([*(ROOT / "test").glob(pattern)] for pattern in room.tests)


@pytest.mark.parametrize("text", ["NUMBER = 4\n", "NUMBER = 2\nNUMBER = 2\n"])
def test_a_mended_text_that_is_not_there_once_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"two-is-three: number\.py"):
        FAULT.introduced(text)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A checkout of one file and its test."""
    (tmp_path / "torchrl_moe").mkdir()
    (tmp_path / "test").mkdir()
    (tmp_path / "torchrl_moe" / "number.py").write_text("NUMBER = 2\n")
    test = "def test_number() -> None:\n    assert 'NUMBER = 2' in open('torchrl_moe/number.py').read()\n"
    (tmp_path / "test" / "test_number.py").write_text(test)
    return tmp_path


def test_a_fault_is_taken_out_again_and_no_byte_code_of_it_is_left(tree: Path) -> None:
    compiled = tree / "torchrl_moe" / "__pycache__" / "number.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    with pytest.raises(KeyError), introduced(FAULT, tree):
        assert not compiled.exists()
        assert (tree / "torchrl_moe" / "number.py").read_text() == "NUMBER = 3\n"
        compiled.touch()
        raise KeyError
    assert (tree / "torchrl_moe" / "number.py").read_text() == "NUMBER = 2\n" and not compiled.exists()


def test_patterns_are_folders_or_globs_and_keep_their_order(tree: Path) -> None:
    (tree / "test" / "room").mkdir()
    for name in ("test_a.py", "test_b.py", "helper.py"):
        (tree / "test" / "room" / name).touch()
    found = files_of(("room/test_b*.py", "room/", "none/", "test_*.py"), tree)
    assert found == [["test/room/test_b.py"], ["test/room/test_a.py"], ["test/test_number.py"]]


def test_a_fault_that_a_test_notices_is_caught_by_it(tree: Path) -> None:
    result = judge(FAULT, tree, 60)
    assert (result.end, result.test) == ("caught", "test/test_number.py::test_number")
    assert result.said.startswith("AssertionError") or "NUMBER" in result.said


TEST = "test/test_number.py::test_number"
ENDS = {"survived": [Run(5)], "broken": [Run(1, "test/test_number.py")], "unsteady": [Run(1, TEST), Run(1, TEST)]}
ENDS |= {"hung": [Run(None, TEST)], "killed": [Run(-9, TEST)]}


@pytest.mark.parametrize("end", ENDS)
def test_what_becomes_of_a_fault(end: str, tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = iter(ENDS[end])
    monkeypatch.setattr(hidden_faults, "run_tests", lambda *_: next(runs))
    assert judge(FAULT, tree).end == end
    assert Result(end).is_caught == (end == "hung")
    assert next(runs, None) is None
