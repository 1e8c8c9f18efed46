"""Sets of prompts: what is held out, what is refused, and the order in which a collector reads them."""

from __future__ import annotations

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from support.data_sets import FakeDataset, FakeDatasetDict
from torchrl_moe.collectors.prompt_stream import PromptStream
from torchrl_moe.trainers.prompt_sources import PromptSet, load_prompts

ROWS = [{"prompt": f"q{i}", "answer": i} for i in range(20)]
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1="}]
MIXED: dict[str, Any] = {
    "prompt": CHAT,
    "text": "a text",
    "number": 3,
    "share": 0.5,
    "flag": True,
    "tests": ["a", "b"],
    "empty": [],
    "nested": {"x": [1, {"y": None}]},
    "nothing": None,
}


def prompts_of(rows: Any) -> list[Any]:
    return [row["prompt"] for row in rows]


# -- what is held out -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [ROWS, FakeDataset(ROWS)], ids=["rows", "data set"])
def test_rows_are_split_by_a_seed(source: Any) -> None:
    prompts = load_prompts(source, held_out=5, seed=1)
    train, held_out = prompts_of(prompts.train), prompts_of(prompts.held_out)
    assert (len(train), len(held_out)) == (15, 5)
    assert {*train, *held_out} == set(prompts_of(ROWS))
    assert train == [name for name in prompts_of(ROWS) if name in train]  # in the order of the data
    again = load_prompts(source, held_out=5, seed=1)
    assert (prompts_of(again.train), prompts_of(again.held_out)) == (train, held_out)
    assert prompts_of(load_prompts(source, held_out=5, seed=2).held_out) != held_out


def test_nothing_is_held_out_unless_it_is_asked_for() -> None:
    prompts = load_prompts(ROWS)
    assert prompts.train == ROWS
    assert len(prompts.held_out) == 0
    assert prompts.prompt == "prompt"
    assert prompts.columns == ("prompt", "answer")


@pytest.mark.parametrize("source", [(ROWS[:15], ROWS[15:]), {"train": ROWS[:15], "test": FakeDataset(ROWS[15:])}])
def test_a_held_out_part_is_kept_or_drawn_from(source: Any) -> None:
    whole, drawn = load_prompts(source), load_prompts(source, held_out=2, seed=3)
    assert prompts_of(whole.train) == prompts_of(drawn.train) == prompts_of(ROWS[:15])
    assert prompts_of(whole.held_out) == prompts_of(ROWS[15:])
    assert len(drawn.held_out) == 2
    assert set(prompts_of(drawn.held_out)) < set(prompts_of(ROWS[15:]))
    with pytest.raises(ValueError, match="held_out=6 is more than the 5 rows that the source holds out"):
        load_prompts(source, held_out=6)


def test_the_toy_task_is_such_a_source() -> None:
    arguments = {"operation": "double", "digits": 2, "held_out": 10, "seed": 4}
    prompts = load_prompts("torchrl_moe.testing.arithmetic:arithmetic_prompts", arguments=arguments)
    assert (len(prompts.train), len(prompts.held_out), prompts.columns) == (90, 10, ("prompt", "answer"))


@pytest.mark.parametrize(
    ("source", "held_out", "message"),
    [
        (ROWS, 20, "held_out=20 leaves none of 20 rows to train on"),
        (ROWS, 21, "held_out=21 leaves none of 20 rows to train on"),
        (ROWS, -1, "held_out must be an integer of at least 0, got -1"),
        ([], 0, "there are no rows to train on"),
        (FakeDataset([]), 0, "there are no rows to train on"),
        (([], ROWS), 0, "there are no rows to train on"),
        (FakeDatasetDict(train=FakeDataset([]), test=FakeDataset(ROWS)), 0, "there are no rows to train on"),
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


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (3, "got 3"),
        (None, "got None"),
        ({"role": "user", "content": "a"}, "got {'role'"),
        ("", "and not empty"),
        ([], "and not empty"),
    ],
)
def test_another_kind_is_refused(prompt: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_prompts([*ROWS[:2], {"prompt": prompt}])
    start = "train row 2: column 'prompt' must be text or a list of messages, "
    assert str(error.value).startswith(f"{start}{message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": ["1+1="]}, ", column 'prompt': a chat is a list of messages, {'role': text, "),
        ({"prompt": [1, 2, 3]}, ", column 'prompt': a chat is a list of messages, {'role': text, "),
        ({"prompt": [{"role": "user"}]}, ", column 'prompt': a message is {'role': text, "),
        ({"prompt": [{"role": "user", "content": [{"type": "image"}]}]}, ", column 'prompt': a message is "),
        ({"prompt": "a", "tools": "add"}, ": tools must be a list of JSON schemas or functions, or its JSON text"),
        ({"prompt": "a", "chat_template_kwargs": 3}, ": chat_template_kwargs must be a mapping of names to values"),
    ],
)
def test_what_a_template_could_not_read_is_refused(row: Any, message: str) -> None:
    with pytest.raises(ValueError) as error:
        load_prompts([*ROWS[:2], row])
    assert str(error.value).startswith(f"train row 2{message}")


@pytest.mark.parametrize("prompt", ["a \ud800", [{"role": "user", "content": "\ud800"}]])
def test_half_of_a_surrogate_pair_is_refused_at_once(prompt: Any) -> None:
    with pytest.raises(ValueError, match=r"train row 0.*surrogates not allowed"):
        load_prompts([{"prompt": prompt}])


def test_rows_without_prompts_are_for_functions_that_make_their_own() -> None:
    prompts = load_prompts([{"a": 1, "b": 2}], prompt=None)
    assert (prompts.columns, prompts.prompt) == (("a", "b"), None)


def test_a_missing_column_is_named_with_those_there_are() -> None:
    with pytest.raises(
        ValueError,
        match=r"train row 0 has no column 'question'; its columns are 'prompt', .* config\.data\.prompt",
    ):
        load_prompts(ROWS, prompt="question")
    with pytest.raises(ValueError, match="held_out row 1 has no column 'prompt'; its columns are 'question'"):
        load_prompts((ROWS, [ROWS[0], {"question": "a"}]))
    with pytest.raises(ValueError, match="its columns are none"):
        load_prompts([{}])


def test_columns_are_named_by_text() -> None:
    with pytest.raises(ValueError, match="columns must be named by text, got 'prompt', 3"):
        PromptSet([{"prompt": "a", 3: "b"}], [], "prompt")  # type: ignore[dict-item]


def test_a_set_made_by_hand_is_checked_too() -> None:
    with pytest.raises(ValueError, match="there are no rows to train on"):
        PromptSet([], ROWS, "prompt")


# -- for a collector --------------------------------------------------------------------------------------------------


def test_a_pass_is_a_shuffle_and_the_next_another() -> None:
    stream = PromptStream(load_prompts(ROWS).loader(seed=0))
    passes = [[next(stream).data["prompt"] for _ in ROWS] for _ in range(3)]
    assert all(sorted(one) == sorted(prompts_of(ROWS)) for one in passes)
    assert passes[0] != passes[1] != passes[2] != passes[0]
    assert passes[0] != prompts_of(ROWS)


def test_the_order_is_the_seeds_and_not_torchs() -> None:
    def order(seed: int) -> list[str]:
        torch.rand(1)  # whatever else draws numbers
        return [prompt.data["prompt"] for prompt in islice(PromptStream(load_prompts(ROWS).loader(seed)), 50)]

    assert order(0) == order(0) != order(1)


@pytest.mark.parametrize("read", [1, 7, 20, 33])
def test_a_position_is_restored(read: int) -> None:
    prompts = load_prompts(ROWS)
    stream = PromptStream(prompts.loader(seed=5))
    for _ in range(read):
        next(stream)
    state = pickle.loads(pickle.dumps(stream.state_dict()))
    expected = [next(stream).data["prompt"] for _ in range(30)]
    restored = PromptStream(prompts.loader(seed=6))  # its order is the state's
    restored.load_state_dict(state)
    assert [next(restored).data["prompt"] for _ in range(30)] == expected


def test_held_out_rows_come_in_order_and_draw_no_numbers() -> None:
    prompts = load_prompts((ROWS[:5], ROWS[5:]))
    before = torch.get_rng_state()
    for _ in range(2):
        assert prompts_of(prompts.held_out_loader()) == prompts_of(ROWS[5:])
    assert torch.equal(torch.get_rng_state(), before)
    with pytest.raises(ValueError, match="no rows are held out: load them with held_out=n"):
        load_prompts(ROWS).held_out_loader()


def test_each_column_travels_as_it_is() -> None:
    prompts = load_prompts(([MIXED], [MIXED]))
    for loader in (prompts.loader(seed=0), prompts.held_out_loader()):
        row = next(PromptStream(loader)).data
        assert row.batch_size == torch.Size([])
        assert row.to_dict() == MIXED
        for name, value in MIXED.items():
            assert row[name] == value
            assert type(row[name]) is type(value)


def test_a_row_without_a_column_has_none_there() -> None:
    prompts = load_prompts([{"prompt": "a", "answer": 1}, {"prompt": "b", "hint": "c"}])
    assert prompts.columns == ("prompt", "answer", "hint")
    rows = sorted((row.to_dict() for row in prompts.loader(seed=0)), key=lambda row: row["prompt"])
    assert rows == [{"prompt": "a", "answer": 1, "hint": None}, {"prompt": "b", "answer": None, "hint": "c"}]


def test_a_loader_goes_to_another_process() -> None:
    loader = load_prompts(ROWS).loader(seed=2)
    copy = pickle.loads(pickle.dumps(loader))
    assert prompts_of(copy) == prompts_of(loader)
    assert all(isinstance(row, TensorDict) for row in copy)


def test_a_file_becomes_prompts(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"question": "1+1=", "answer": "2"}\n{"question": "2+2=", "answer": "4"}\n')
    prompts = load_prompts(file, prompt="question", held_out=1)
    assert {*prompts.train[0].values(), *prompts.held_out[0].values()} == {"1+1=", "2", "2+2=", "4"}
