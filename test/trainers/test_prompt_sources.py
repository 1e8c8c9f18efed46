"""Where rows come from: each kind of source, and one clear line for what is none."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from support.data_sets import FakeDataset, FakeDatasetDict, FakeStream
from torchrl_moe.trainers.prompt_sources import read_source

ROWS = [{"prompt": f"q{i}", "answer": i} for i in range(4)]
MODULE = """
ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]

def rows(count=2):
    return ROWS[:count]

def pair(count=1):
    return ROWS[:count], tuple(ROWS[count:])

def stream():
    yield from ROWS

def splits():
    return {"train": ROWS[:1], "test": ROWS[1:]}

def number():
    return 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of the user's."""
    (tmp_path / "task_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "task_of_a_user", raising=False)
    return "task_of_a_user"


# -- objects ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [ROWS, tuple(ROWS), ROWS[:2], iter(ROWS)])
def test_rows_are_themselves(source: Any) -> None:
    expected = ROWS[:2] if source == ROWS[:2] else ROWS
    assert read_source(source) == (expected, None)


def test_a_data_set_stays_where_it_is() -> None:
    data = FakeDataset(ROWS)
    train, held_out = read_source(data)
    assert train is data
    assert held_out is None


@pytest.mark.parametrize(
    ("splits", "train", "held_out"),
    [
        (("train",), "train", None),
        (("train", "test"), "train", "test"),
        (("test", "validation", "train"), "train", "validation"),
        (("train", "test", "held_out", "validation"), "train", "held_out"),
        (("train", "extra"), "train", None),
        (("main",), "main", None),
        (("test",), "test", None),
    ],
)
@pytest.mark.parametrize("kind", [FakeDatasetDict, dict])
def test_splits_by_name(kind: type, splits: tuple[str, ...], train: str, held_out: str | None) -> None:
    data = kind({split: FakeDataset([{"prompt": split}]) for split in splits})
    assert read_source(data) == (data[train], None if held_out is None else data[held_out])


def test_splits_without_one_to_train_on() -> None:
    splits = FakeDatasetDict(test=FakeDataset(ROWS), validation=FakeDataset(ROWS))
    with pytest.raises(ValueError, match="a FakeDatasetDict has no split 'train'; it has test, validation"):
        read_source(splits)
    with pytest.raises(ValueError, match="a dict has no split 'train'; it has none"):
        read_source({})


def test_a_stream_has_no_places() -> None:
    with pytest.raises(ValueError, match="a FakeStream is a streamed dataset, whose rows cannot be indexed"):
        read_source(FakeStream())


@pytest.mark.parametrize("source", [3, None, object(), b"rows"])
def test_another_kind_is_refused(source: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts must be rows, a dataset, a \.jsonl file or a folder of them"):
        read_source(source)


@pytest.mark.parametrize("row", ["1+1=", 3, ["prompt"], None])
def test_a_row_of_another_kind_is_refused(row: Any) -> None:
    with pytest.raises(ValueError, match="a list: row 1 must be a mapping of columns, such as "):
        read_source([ROWS[0], row, ROWS[1]])


def test_only_functions_and_the_hub_take_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="arguments are for a function or a name on the hub, not for a list"):
        read_source(ROWS, {"count": 1})
    with pytest.raises(ValueError, match=r"not for '.*rows\.jsonl'"):
        read_source(tmp_path / "rows.jsonl", {"count": 1})


# -- JSON Lines -------------------------------------------------------------------------------------------------------


def write(file: Path, *lines: Any) -> Path:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


@pytest.mark.parametrize("kind", [str, Path])
def test_a_file_of_objects(tmp_path: Path, kind: type) -> None:
    rows = [*ROWS, {"prompt": [{"role": "user", "content": "ä"}], "tests": [1, None, 2.5]}]
    file = write(tmp_path / "rows.jsonl", *rows[:2], "", *rows[2:])
    assert read_source(kind(file)) == (rows, None)


def test_any_name_will_do_for_a_file_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "rows.txt", *ROWS)
    monkeypatch.chdir(tmp_path)
    assert read_source("rows.txt") == (ROWS, None)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_source("~/rows.txt") == (ROWS, None)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.jsonl", ROWS[2], ROWS[3])
    write(tmp_path / "a.jsonl", ROWS[0], ROWS[1])
    write(tmp_path / "notes.txt", "not JSON")
    assert read_source(str(tmp_path)) == (ROWS, None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([ROWS[0], "{'prompt': 1}"], "line 2: not JSON (Expecting property name"),
        (["", "", "{"], "line 3: not JSON ("),
        ([ROWS[0], [1, 2]], "line 2: must be an object, got [1, 2]"),
        (['"' + "a" * 100 + '"'], f"line 1: must be an object, got '{'a' * 56}..."),
    ],
)
def test_an_error_names_file_and_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    file = write(tmp_path / "rows.jsonl", *lines)
    for source in (file, tmp_path):
        with pytest.raises(ValueError) as error:
            read_source(source)
        assert str(error.value).startswith(f"{file}, {message}")
        assert "\n" not in str(error.value)


def test_what_is_not_utf_8_is_named_too(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not JSON \('utf-8' codec"):
        read_source(file)


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such/folder", "no.jsonl", "~/no/such/folder"])
def test_a_path_where_nothing_is(name: str) -> None:
    with pytest.raises(ValueError, match="there is no file or folder "):
        read_source(name)


def test_what_is_no_list_of_rows_says_what_to_give(tmp_path: Path) -> None:
    frame = pytest.importorskip("pandas").DataFrame({"prompt": ["1+1="]})
    (tmp_path / "rows.csv").write_text("prompt\n1+1=\n")
    (tmp_path / "deep.jsonl").write_text('{"prompt":' + "[" * 100_000)
    for source, message in (
        (frame, r"give its to_dict\('records'\)"),
        ({"prompt": ["1+1="]}, "with prompt holds columns: write a list of rows"),
        ({"prompt": "1+1="}, "with prompt is one row: write a list of rows"),
        (["1+1="], r"such as {'prompt': text}, got '1\+1='"),
        (tmp_path / "rows.csv", "files are JSON Lines: read others yourself, and give the rows"),
        (str(tmp_path / "deep.jsonl"), "line 1: not JSON"),
        ("no.csv", "there is no file or folder 'no.csv'"),
    ):
        with pytest.raises(ValueError, match=message):
            read_source(source)


def test_a_folder_without_rows(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no \.jsonl file in the folder "):
        read_source(tmp_path)


# -- functions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "arguments", "train", "held_out"),
    [
        ("rows", None, 2, None),
        ("rows", {"count": 1}, 1, None),
        ("pair", {}, 1, 1),
        ("pair", {"count": 2}, 2, 0),
        ("stream", None, 2, None),
        ("splits", None, 1, 1),
    ],
)
def test_what_a_function_returns(
    module: str, function: str, arguments: dict[str, Any] | None, train: int, held_out: int | None
) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    expected = None if held_out is None else rows[len(rows) - held_out :]
    assert read_source(f"{module}:{function}", arguments) == (rows[:train], expected)


def test_a_function_that_returns_no_rows(module: str) -> None:
    with pytest.raises(ValueError, match=r"prompts must be rows, .*; got 3"):
        read_source(f"{module}:number")
    with pytest.raises(ValueError, match=f"there is no '{module}:nothing'"):
        read_source(f"{module}:nothing")
    with pytest.raises(TypeError, match="unexpected keyword argument 'size'"):
        read_source(f"{module}:rows", {"size": 3})


# -- the hub ----------------------------------------------------------------------------------------------------------


def test_any_other_text_is_a_name_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    hub = ModuleType("datasets")

    def load_dataset(path: str, **arguments: Any) -> Any:
        asked.append((path, arguments))
        return FakeDatasetDict(train=FakeDataset(ROWS[:3]), test=FakeDataset(ROWS[3:]))

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    train, held_out = read_source("openai/gsm8k", {"name": "main"})
    assert held_out is not None
    assert (list(train), list(held_out)) == (ROWS[:3], ROWS[3:])
    assert asked == [("openai/gsm8k", {"name": "main"})]


def test_without_the_package_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r"'openai/gsm8k' is no file.*: pip install datasets$") as error:
        read_source("openai/gsm8k")
    assert "\n" not in str(error.value)
