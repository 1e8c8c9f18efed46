"""Where rows come from, which are prompts, and the order in which a collector reads them."""

from __future__ import annotations

import json
import pickle
import sys
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pytest import MonkeyPatch

from support.data_sets import FakeDataset, FakeDatasetDict, FakeStream
from torchrl_moe.collectors.prompt_stream import PromptStream
from torchrl_moe.trainers.prompt_sources import PromptSet, load_prompts, read_source

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
def module(tmp_path: Path, monkeypatch: MonkeyPatch) -> str:
    """A module of the user's."""
    (tmp_path / "task_of_a_user.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "task_of_a_user", raising=False)
    return "task_of_a_user"


# -- objects ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", [ROWS, tuple(ROWS), iter(ROWS)])
def test_rows_are_themselves(source: Any) -> None:
    assert read_source(source) == (ROWS, None)
    data = FakeDataset(ROWS)
    assert read_source(data)[0] is data  # a data set stays where it is
    assert read_source(data)[1] is None


@pytest.mark.parametrize(
    ("splits", "train", "held_out"),
    [
        (("train",), "train", None), (("train", "test"), "train", "test"),
        (("test", "validation", "train"), "train", "validation"),
        (("train", "test", "held_out", "validation"), "train", "held_out"),
        (("train", "extra"), "train", None), (("main",), "main", None), (("test",), "test", None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", [FakeDatasetDict, dict])
def test_splits_by_name(kind: type, splits: tuple[str, ...], train: str, held_out: str | None) -> None:
    data = kind({split: FakeDataset([{"prompt": split}]) for split in splits})
    assert read_source(data) == (data[train], None if held_out is None else data[held_out])


# -- JSON Lines -------------------------------------------------------------------------------------------------------
def write(file: Path, *lines: Any) -> Path:
    file.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return file


def test_a_file_has_any_name_and_a_folder_the_order_of_names(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    rows = [*ROWS, {"prompt": [{"role": "user", "content": "ä"}], "tests": [1, None, 2.5]}]
    file = write(tmp_path / "rows.txt", *rows[:2], "", *rows[2:])
    write(tmp_path / "b.jsonl", ROWS[2], ROWS[3])
    write(tmp_path / "a.jsonl", ROWS[0], ROWS[1])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source in (file, str(file), "rows.txt", "~/rows.txt"):
        assert read_source(source) == (rows, None)
    assert read_source(str(tmp_path)) == (ROWS, None)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([ROWS[0], "{'prompt': 1}"], "line 2: not JSON (Expecting property name"),
        (["", "", "{"], "line 3: not JSON ("),
        ([ROWS[0], [1, 2]], "line 2: must be an object, got [1, 2]"),
        (['"' + "a" * 100 + '"'], f"line 1: must be an object, got '{'a' * 79}..."),
    ],
)
def test_an_error_names_file_and_line(tmp_path: Path, lines: list[Any], message: str) -> None:
    file = write(tmp_path / "rows.jsonl", *lines)
    for source in (file, tmp_path):
        with pytest.raises(ValueError) as error:
            read_source(source)
        assert str(error.value).startswith(f"{file}, {message}") and "\n" not in str(error.value)


# -- what is refused --------------------------------------------------------------------------------------------------
def test_what_is_no_source_of_rows_says_what_to_give(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # as if it were not installed
    frame = pytest.importorskip("pandas").DataFrame({"prompt": ["1+1="]})
    (tmp_path / "rows.csv").write_text("prompt\n1+1=\n")
    (tmp_path / "deep.jsonl").write_text('{"prompt":' + "[" * 100_000)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "a"}\n{"prompt": "\xff"}\n')
    (tmp_path / "empty").mkdir()
    data = FakeDataset(ROWS)
    kinds = r"prompts must be rows, a dataset, a \.jsonl file or a folder of them"
    a_row = "a list: row 1 must be a mapping of columns, such as "
    for source, message in (
        *((other, kinds) for other in (3, None, object(), b"rows")),
        *(([ROWS[0], row, ROWS[1]], a_row) for row in ("1+1=", 3, ["prompt"], None)),
        (FakeDatasetDict(test=data, other=data), "a FakeDatasetDict has no split 'train'; it has test, other"),
        ({}, "a dict has no split 'train'; it has none"),
        (FakeStream(), "a FakeStream is a streamed dataset, whose rows cannot be indexed"),
        (frame, r"give its to_dict\('records'\)"),
        ({"prompt": ["1+1="]}, "with prompt holds columns: write a list of rows"),
        ({"prompt": "1+1="}, "with prompt is one row: write a list of rows"),
        (["1+1="], r"such as {'prompt': text}, got '1\+1='"),
        (tmp_path / "rows.csv", "files are JSON Lines: read others yourself, and give the rows"),
        (str(tmp_path / "deep.jsonl"), "line 1: not JSON"),
        (tmp_path / "latin.jsonl", r"latin\.jsonl, line 2: not JSON \('utf-8' codec"),
        (tmp_path / "empty", r"there is no \.jsonl file in the folder "),
        *((name, "there is no file or folder ") for name in ("./no/such", "/no/such", "no.jsonl", "~/no", "no.csv")),
    ):
        with pytest.raises(ValueError, match=message):
            read_source(source)
    with pytest.raises(ImportError, match=r"'openai/gsm8k' is no file.*: pip install .torchrl_moe\[hub\].$"):
        read_source("openai/gsm8k")
    for source, shown in ((ROWS, "a list"), (tmp_path / "rows.jsonl", r"'.*rows\.jsonl'")):
        with pytest.raises(ValueError, match=f"arguments are for a function or a name on the hub, not for {shown}"):
            read_source(source, {"count": 1})


# -- functions --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "arguments", "train", "held_out"),
    [
        ("rows", None, 2, None), ("rows", {"count": 1}, 1, None), ("pair", {}, 1, 1), ("pair", {"count": 2}, 2, 0),
        ("stream", None, 2, None), ("splits", None, 1, 1),
    ],
)  # fmt: skip
def test_what_a_function_returns(module: str, function: str, arguments: Any, train: int, held_out: Any) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    expected = None if held_out is None else rows[len(rows) - held_out :]
    assert read_source(f"{module}:{function}", arguments) == (rows[:train], expected)


def test_a_function_that_returns_no_rows(module: str) -> None:
    for function, arguments, message in (
        ("number", {}, r"prompts must be rows, .*; got 3"),
        ("rows", {"size": 3}, "unexpected keyword argument 'size'"),
    ):
        with pytest.raises((TypeError, ValueError), match=message):
            read_source(f"{module}:{function}", arguments)


# -- the hub ----------------------------------------------------------------------------------------------------------
def test_any_other_text_is_a_name_on_the_hub(monkeypatch: MonkeyPatch) -> None:
    asked = []
    hub = ModuleType("datasets")

    def load_dataset(path: str, **arguments: Any) -> Any:
        asked.append((path, arguments))
        return FakeDatasetDict(train=FakeDataset(ROWS[:3]), test=FakeDataset(ROWS[3:]))

    hub.load_dataset = load_dataset  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", hub)
    train, held_out = read_source("openai/gsm8k", {"name": "main"})
    assert held_out is not None and (list(train), list(held_out)) == (ROWS[:3], ROWS[3:])
    assert asked == [("openai/gsm8k", {"name": "main"})]


TWENTY = [{"prompt": f"q{i}", "answer": i} for i in range(20)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
MIXED: dict[str, Any] = {
    "prompt": CHAT, "text": "a text", "number": 3, "share": 0.5, "flag": True, "tests": ["a", "b"], "empty": [],
    "nested": {"x": [1, {"y": None}]}, "nothing": None,
}  # fmt: skip


def prompts_of(rows: Any) -> list[Any]:
    return [row["prompt"] for row in rows]


# -- what is held out -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("source", [TWENTY, FakeDataset(TWENTY)], ids=["rows", "data set"])
def test_rows_are_split_by_a_seed(source: Any) -> None:
    prompts = load_prompts(source, held_out=5, seed=1)
    train, held_out = prompts_of(prompts.train), prompts_of(prompts.held_out)
    assert (len(train), len(held_out)) == (15, 5) and {*train, *held_out} == set(prompts_of(TWENTY))
    assert train == [name for name in prompts_of(TWENTY) if name in train]  # in the order of the data
    again = load_prompts(source, held_out=5, seed=1)
    assert (prompts_of(again.train), prompts_of(again.held_out)) == (train, held_out)
    assert prompts_of(load_prompts(source, held_out=5, seed=2).held_out) != held_out


def test_nothing_is_held_out_unless_it_is_asked_for() -> None:
    prompts = load_prompts(TWENTY)
    assert prompts.train == TWENTY and len(prompts.held_out) == 0 and prompts.prompt == "prompt"
    assert prompts.columns == ("prompt", "answer")
    own = load_prompts([{"a": 1, "b": 2}], prompt=None)  # for functions that make their own prompts
    assert (own.columns, own.prompt) == (("a", "b"), None)


@pytest.mark.parametrize(
    "source", [(TWENTY[:15], TWENTY[15:]), {"train": TWENTY[:15], "test": FakeDataset(TWENTY[15:])}]
)
def test_a_held_out_part_is_kept_or_drawn_from(source: Any) -> None:
    whole, drawn = load_prompts(source), load_prompts(source, held_out=2, seed=3)
    assert prompts_of(whole.train) == prompts_of(drawn.train) == prompts_of(TWENTY[:15])
    assert prompts_of(whole.held_out) == prompts_of(TWENTY[15:]) and len(drawn.held_out) == 2
    assert set(prompts_of(drawn.held_out)) < set(prompts_of(TWENTY[15:]))
    with pytest.raises(ValueError, match="held_out=6 is more than the 5 rows"):
        load_prompts(source, held_out=6)


@pytest.mark.parametrize(
    ("source", "held_out", "message"),
    [
        (TWENTY, 20, "held_out=20 leaves none of 20 rows to train on"),
        (TWENTY, 21, "held_out=21 leaves none of 20 rows to train on"),
        (TWENTY, -1, "held_out must be an integer of at least 0, got -1"),
        ([], 0, "there are no rows to train on"),
        (([], TWENTY), 0, "there are no rows to train on"),
        (FakeDatasetDict(train=FakeDataset([]), test=FakeDataset(TWENTY)), 0, "there are no rows to train on"),
    ],
)
def test_too_little_data_is_refused(source: Any, held_out: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_prompts(source, held_out=held_out)


# -- what is a prompt -------------------------------------------------------------------------------------------------
PARTS = [{"role": "user", "content": [{"type": "text", "text": "1+1="}]}]
TOOL = [CHAT[1], {"role": "assistant", "tool_calls": [{"id": "c"}]}, {"role": "tool", "content": "2", "name": "add"}]


@pytest.mark.parametrize("prompt", ["1+1=", CHAT, tuple(CHAT), [{**CHAT[1], "name": None}], PARTS, TOOL])
def test_text_and_messages_are_prompts(prompt: Any) -> None:
    assert load_prompts([{"question": prompt}], prompt="question").train[0]["question"] == prompt


USER = {"role": "user"}
KINDS = ": column 'prompt' must be text or a list of messages, "
NO_CHAT = ", column 'prompt': a chat is a list of messages, {'role': text, "


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": 3}, f"{KINDS}got 3"),
        ({"prompt": None}, f"{KINDS}got None"),
        ({"prompt": {**USER, "content": "a"}}, f"{KINDS}got {{'role'"),
        ({"prompt": ""}, f"{KINDS}and not empty"),
        ({"prompt": []}, f"{KINDS}and not empty"),
        ({"prompt": ["1+1="]}, NO_CHAT),
        ({"prompt": [1, 2, 3]}, NO_CHAT),
        ({"prompt": [USER]}, ", column 'prompt': a message is {'role': text, "),
        ({"prompt": [{**USER, "content": [{"type": "image"}]}]}, ", column 'prompt': a message is "),
        ({"prompt": "a \ud800"}, ".*surrogates not allowed"),  # half of a pair
        ({"prompt": [{**USER, "content": "\ud800"}]}, ".*surrogates not allowed"),
        ({"prompt": "a", "tools": "add"}, ": tools must be a list of JSON schemas or functions, or its JSON text"),
        ({"prompt": "a", "chat_template_kwargs": 3}, ": chat_template_kwargs must be a mapping of names to values"),
    ],
)
def test_what_a_template_could_not_read_is_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^train row 2{message}") as error:
        load_prompts([*TWENTY[:2], row])
    assert "\n" not in str(error.value)


def test_a_missing_column_is_named_with_those_there_are() -> None:
    there = r"train row 0 has no column 'question'; its columns are 'prompt', .* config\.data\.prompt"
    with pytest.raises(ValueError, match=there):
        load_prompts(TWENTY, prompt="question")
    with pytest.raises(ValueError, match="held_out row 1 has no column 'prompt'; its columns are 'question'"):
        load_prompts((TWENTY, [TWENTY[0], {"question": "a"}]))
    with pytest.raises(ValueError, match="its columns are none"):
        load_prompts([{}])
    with pytest.raises(ValueError, match="columns must be named by text, got 'prompt', 3"):
        PromptSet([{"prompt": "a", 3: "b"}], [], "prompt")  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="there are no rows to train on"):
        PromptSet([], TWENTY, "prompt")


# -- for a collector --------------------------------------------------------------------------------------------------
def test_a_pass_is_a_shuffle_and_the_next_another_by_the_seed_and_not_torchs() -> None:
    def order(seed: int) -> list[str]:
        torch.rand(1)  # whatever else draws numbers
        return [prompt.data["prompt"] for prompt in islice(PromptStream(load_prompts(TWENTY).loader(seed)), 60)]

    found = order(0)
    assert found == order(0) != order(1)
    passes = [found[:20], found[20:40], found[40:]]
    assert all(sorted(one) == sorted(prompts_of(TWENTY)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0] and passes[0] != prompts_of(TWENTY)


@pytest.mark.parametrize("read", [1, 20, 33])
def test_a_position_is_restored(read: int) -> None:
    prompts = load_prompts(TWENTY)
    stream = PromptStream(prompts.loader(seed=5))
    for _ in range(read):
        next(stream)
    state = pickle.loads(pickle.dumps(stream.state_dict()))
    expected = [next(stream).data["prompt"] for _ in range(30)]
    restored = PromptStream(pickle.loads(pickle.dumps(prompts.loader(seed=6))))  # its order is the state's
    restored.load_state_dict(state)
    assert [next(restored).data["prompt"] for _ in range(30)] == expected


def test_held_out_rows_come_in_order_and_draw_no_numbers() -> None:
    prompts = load_prompts((TWENTY[:5], TWENTY[5:]))
    before = torch.get_rng_state()
    for _ in range(2):
        assert prompts_of(prompts.held_out_loader()) == prompts_of(TWENTY[5:])
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="no rows are held out: load them with held_out=n"):
        load_prompts(TWENTY).held_out_loader()


def test_each_column_travels_as_it_is() -> None:
    prompts = load_prompts(([MIXED], [MIXED]))
    for loader in (prompts.loader(seed=0), prompts.held_out_loader()):
        row = next(PromptStream(loader)).data
        assert row.batch_size == torch.Size([]) and row.to_dict() == MIXED
        for name, value in MIXED.items():
            assert row[name] == value and type(row[name]) is type(value)


def test_a_row_without_a_column_has_none_there() -> None:
    prompts = load_prompts([{"prompt": "a", "answer": 1}, {"prompt": "b", "hint": "c"}])
    assert prompts.columns == ("prompt", "answer", "hint")
    rows = sorted((row.to_dict() for row in prompts.loader(seed=0)), key=lambda row: row["prompt"])
    assert rows == [{"prompt": "a", "answer": 1, "hint": None}, {"prompt": "b", "answer": None, "hint": "c"}]
