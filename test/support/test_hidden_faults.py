"""``make faults``: each row fits the code as it is, and a fault is put into a copy, noticed, and taken out again."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from support import hidden_faults
from support.fault_table import FAULTS, Fault
from support.hidden_faults import files_of, judge, replaced
from support.mutants import ROOMS, mutants_of
from support.sources import ROOT

ROW = "two-is-three: A number was another one (60 s)\nnumber.py: test_number.py LOSSES\n-NUMBER = 2\n+NUMBER = 3"
FAULT = Fault.read(ROW)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_the_table_changes_code_that_is_there_once_and_is_read(fault: Fault) -> None:
    text = (ROOT / "torchrl_moe" / fault.file).read_text(encoding="utf-8")
    faulty = fault.introduced(text)
    assert ast.dump(ast.parse(faulty)) != ast.dump(ast.parse(text))
    assert all(files_of((pattern,), ROOT) for pattern in fault.tests)


def test_faults_have_names_of_their_own_and_rooms_of_mutants_have_sources_and_tests() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 30  # names are told apart
    for sources, *patterns in ROOMS.values():
        assert [*(ROOT / "torchrl_moe").glob(sources)]
        assert all(files_of((pattern,), ROOT) for pattern in patterns)


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
    path = tree / "torchrl_moe" / "number.py"
    compiled = path.parent / "__pycache__" / "number.cpython-311.pyc"
    compiled.parent.mkdir()
    compiled.touch()
    with pytest.raises(KeyError), replaced(path, FAULT.introduced(path.read_text())):
        assert not compiled.exists()
        assert path.read_text() == "NUMBER = 3\n"
        compiled.touch()
        raise KeyError
    assert path.read_text() == "NUMBER = 2\n" and not compiled.exists()


def test_patterns_are_folders_or_globs_and_keep_their_order(tree: Path) -> None:
    (tree / "test" / "room").mkdir()
    for name in ("test_a.py", "test_b.py", "helper.py"):
        (tree / "test" / "room" / name).touch()
    found = files_of(("room/test_b*.py", "room/", "none/", "test_*.py"), tree)
    assert found == [["test/room/test_b.py"], ["test/room/test_a.py"], ["test/test_number.py"]]


TEST = "test/test_number.py::test_number"


def test_a_fault_that_a_test_notices_is_caught_by_it(tree: Path) -> None:
    assert judge(FAULT, tree, 60) == (True, f"caught by {TEST}")


@pytest.mark.parametrize(
    ("runs", "is_caught", "end"),
    [
        ([(5, "")], False, "SURVIVED"),
        ([(0, "")], False, "SURVIVED"),
        ([(1, "test/test_number.py")], False, "NOT KNOWN"),  # it could not be imported
        ([(-9, TEST)], False, "NOT KNOWN"),
        ([(1, TEST), (1, TEST)], False, "UNSTEADY"),
        ([(None, TEST)], True, "caught: the tests did not end"),
    ],
)
def test_what_becomes_of_a_fault(
    runs: list[tuple[int | None, str]], is_caught: bool, end: str, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_faults, "run_tests", lambda *_: runs.pop(0))
    found = judge(FAULT, tree)
    assert found[0] == is_caught and found[1].startswith(end)
    assert runs == []


def test_a_mutant_is_the_file_with_one_change_and_no_word_of_an_error_or_a_type_changes() -> None:
    text = (
        'def f(x: "A" = 1) -> int:\n    if x:\n        raise KeyError(x + 1)\n    return max(ü < 2,\n        3)  # ü\n'
    )
    found = [(one.line, one.kind, one.text) for one in mutants_of("a.py", text)]
    assert found == [
        (1, "constant", text.replace("= 1", "= 2")),
        (2, "condition", text.replace("if x", "if (not (x))")),
        (3, "no check", text.replace("raise KeyError(x + 1)", "pass")),
        (4, "function", text.replace("max", "min")),
        (4, "comparison", text.replace("ü < 2", "(ü <= 2)")),
        (4, "constant", text.replace("< 2", "< 3")),
        (5, "constant", text.replace("3)", "4)")),
    ]
