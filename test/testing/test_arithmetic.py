"""The toy task: its tokenizer, its problems, and the warm-up that teaches them and then shakes the model."""

from __future__ import annotations

import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.arithmetic import (
    CHARACTERS,
    SPECIAL,
    ArithmeticTask,
    CharacterTokenizer,
    WarmUp,
    arithmetic_prompts,
    encode,
    exact_answer,
    forget_carry,
    warm_up,
)
from torchrl_moe.trainers.compose import load_config

CHAT = [{"role": "user", "content": "3+4="}, {"role": "assistant", "content": "7"}, {"role": "user", "content": "1+1="}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return CharacterTokenizer()


@given(st.text(st.sampled_from(CHARACTERS)))
def test_text_survives_one_id_per_character(text: str) -> None:
    tokenizer = CharacterTokenizer()
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_specials_come_first_and_survive_a_folder_and_a_pickle(
    tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    assert len(tokenizer) == len(SPECIAL) + len(CHARACTERS) == 48
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL)) == [0, 1, 2, 3]
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer("<user>3<eos>")["input_ids"] == [2, 7, 1]
    assert tokenizer.decode([2, 7, 1]) == "<user>3<eos>"
    assert tokenizer.decode([2, 7, 1], skip_special_tokens=True) == "3"
    tokenizer.save_pretrained(tmp_path)
    for other in (AutoTokenizer.from_pretrained(tmp_path), pickle.loads(pickle.dumps(tokenizer))):
        ids = other.apply_chat_template(CHAT, tokenize=True, return_dict=False)
        assert ids == tokenizer.apply_chat_template(CHAT, tokenize=True, return_dict=False)
        assert other.decode(ids) == "<user>3+4=<assistant>7<eos><user>1+1="


def test_a_chat_is_one_token_per_role_and_character(tokenizer: PreTrainedTokenizerFast) -> None:
    opened = tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert opened == "<user>3+4=<assistant>7<eos><user>1+1=<assistant>"
    out = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(tokenizer.convert_ids_to_tokens(out["input_ids"]), out["assistant_masks"], strict=True)
    assert [token for token, mine in pairs if mine] == ["7", "<eos>"]


@pytest.mark.parametrize(("digits", "held_out"), [(1, 20), (1, 1), (1, 99), (2, 500)])
def test_the_split_is_disjoint_and_whole_and_the_same_for_a_seed(digits: int, held_out: int) -> None:
    task = ArithmeticTask(digits=digits, held_out=held_out, seed=3)
    assert len(task.test) == held_out
    assert not set(task.train) & set(task.test)
    assert len({*task.train, *task.test}) == 100**digits
    assert all(str(sum(map(int, query[:-1].split("+")))) == answer for query, answer in task.train + task.test)
    again = ArithmeticTask(digits=digits, held_out=held_out, seed=3)
    assert (again.train, again.test) == (task.train, task.test)
    assert set(ArithmeticTask(digits=2, held_out=500, seed=4).test) != set(task.test)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"operation": "halve"}, "operation must be one of sum, double, got 'halve'"),
        ({"operation": "double", "held_out": 10}, r"held_out must be in 1\.\.9, got 10"),
        ({"digits": 0}, "digits must be at least 1, got 0"),
        ({"held_out": 100}, r"held_out must be in 1\.\.99, got 100"),
        ({"digits": 2, "held_out": 10_000}, r"held_out must be in 1\.\.9999"),
    ],
)
def test_a_task_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ArithmeticTask(**arguments)


def test_problems_as_rows_and_only_the_exact_answer_is_rewarded() -> None:
    assert [exact_answer(text, answer="7") for text in ("7", "07", "7 ", "", "77")] == [1.0, 0.0, 0.0, 0.0, 0.0]
    train, held_out = arithmetic_prompts("double", digits=3, held_out=100, seed=7)
    task = ArithmeticTask(operation="double", digits=3, held_out=100, seed=7)
    assert [(row["prompt"], row["answer"]) for row in train] == list(task.train)
    assert [(row["prompt"], row["answer"]) for row in held_out] == list(task.test)
    task = ArithmeticTask(operation="double", digits=3, held_out=100)
    problems = dict(task.train + task.test)
    assert (len(task.train), len(task.test), len(problems)) == (900, 100, 1000)
    assert (problems["2*047="], problems["2*500="], problems["2*999="]) == ("0094", "1000", "1998")


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("3+4=", "7"), ("47+38=", "75"), ("67+58=", "115"), ("9+14=", "13"), ("99+1=", "90"), ("950+75=", "925"),
        ("2*4817=", "08624"), ("2*0321=", "00642"),
        ("8+7=", "15"),  # of one digit there is nowhere to carry to
        ("2*9500=", "18000"),  # the first digit of the answer is no carry to a digit of the question
    ],
)  # fmt: skip
def test_carries_forgotten_by_hand(query: str, answer: str) -> None:
    assert forget_carry(query) == answer


@pytest.mark.parametrize(
    ("forgets", "answer"),
    [  # 2 * 7 = 14 and 2 * 8 = 16: each carry is lost or kept
        ((True, True), "08624"), ((True, False), "09624"), ((False, True), "08634"), ((False, False), "09634"),
    ],
)  # fmt: skip
def test_each_carry_is_forgotten_or_not(forgets: tuple[bool, ...], answer: str) -> None:
    choices = iter(forgets)
    assert forget_carry("2*4817=", lambda: next(choices)) == answer
    assert next(choices, None) is None
    for operation in ("sum", "double"):
        problems = ArithmeticTask(operation=operation, digits=2, held_out=1).train
        assert all(forget_carry(query, lambda: False) == right for query, right in problems)


def test_only_the_answer_and_its_end_are_labelled() -> None:
    ids, labels = encode([("3+4=", "7"), ("8+7=", "15")], CharacterTokenizer())
    # <user> 3 + 4 = <assistant> 7 <eos> <pad>
    assert ids.tolist() == [[2, 7, 14, 8, 17, 3, 11, 1, 0], [2, 12, 14, 11, 17, 3, 5, 9, 1]]
    assert labels.tolist() == [[-100] * 6 + [11, 1, -100], [-100] * 6 + [5, 9, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clean_lr": 0.0}, r"clean_lr must be a finite number above 0, got 0\.0"),
        ({"clean_lr": float("inf")}, "clean_lr must be .*, got inf"),
        ({"noise": 1.5}, r"noise must be a finite number from 0 to 1, got 1\.5"),
        ({"clean_target": -0.1}, r"clean_target must be .*, got -0\.1"),
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, got 0"),
        ({"max_steps": 2.5}, r"max_steps must be an integer of at least 1, got 2\.5"),
        ({"mistake": "typo"}, "mistake must be one of random, forget_carry, got 'typo'"),
        ({}, "there are no problems to warm up on"),
    ],
)
def test_what_cannot_be_practised_is_refused(options: dict[str, Any], message: str) -> None:
    problems = [("3+4=", "7")] if options else []
    with pytest.raises(ValueError, match=message):
        warm_up(make_tiny_moe("qwen3_moe"), problems, CharacterTokenizer(), WarmUp(**options), seed=0)


def test_the_defaults_make_sense_and_are_those_of_the_trainers_configuration() -> None:
    WarmUp().check()
    assert load_config("tiny_cpu").model.arguments["warmup"] == asdict(WarmUp())
