"""The warm-up: its wrong labels by hand, its encoding, and that it teaches and then shakes."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pytest
import torch

from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.arithmetic import (
    ArithmeticTask,
    CharacterTokenizer,
    WarmUp,
    answer_log_probs,
    encode,
    forget_carry,
    warm_up,
)
from torchrl_moe.trainers.compose import load_config


@pytest.mark.parametrize(
    ("query", "answer"),
    [
        ("3+4=", "7"),
        ("8+7=", "15"),  # of one digit there is nowhere to carry to
        ("47+38=", "75"),
        ("67+58=", "115"),
        ("9+14=", "13"),
        ("99+1=", "90"),
        ("950+75=", "925"),
        ("2*4817=", "08624"),
        ("2*9500=", "18000"),  # the first digit of the answer is no carry to a digit of the question
        ("2*0321=", "00642"),
    ],
)
def test_carries_forgotten_by_hand(query: str, answer: str) -> None:
    assert forget_carry(query) == answer


@pytest.mark.parametrize(
    ("forgets", "answer"),
    [
        ((True, True), "08624"),
        ((True, False), "09624"),  # 2 * 7 = 14: its carry is lost; 2 * 8 = 16: its carry is kept
        ((False, True), "08634"),
        ((False, False), "09634"),
    ],
)
def test_each_carry_is_forgotten_or_not(forgets: tuple[bool, ...], answer: str) -> None:
    choices = iter(forgets)
    assert forget_carry("2*4817=", lambda: next(choices)) == answer
    assert next(choices, None) is None


@pytest.mark.parametrize("operation", ["sum", "double"])
def test_who_forgets_no_carry_is_right(operation: str) -> None:
    task = ArithmeticTask(operation=operation, digits=2, held_out=1)
    assert all(forget_carry(query, lambda: False) == answer for query, answer in task.train)


def test_only_the_answer_and_its_end_are_labelled() -> None:
    ids, labels = encode([("3+4=", "7"), ("8+7=", "15")], CharacterTokenizer())
    # <user> 3 + 4 = <assistant> 7 <eos> <pad>
    assert ids.tolist() == [[2, 7, 14, 8, 17, 3, 11, 1, 0], [2, 12, 14, 11, 17, 3, 5, 9, 1]]
    assert labels.tolist() == [[-100] * 6 + [11, 1, -100], [-100] * 6 + [5, 9, 1]]


def test_doubt_comes_after_knowledge() -> None:
    torch.manual_seed(0)
    tokenizer = CharacterTokenizer()
    problems = ArithmeticTask(digits=1, held_out=90).train
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    sizes = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 2, "mlp_only_layers": []}
    model = make_tiny_moe("qwen3_moe", **special, **sizes)
    before = answer_log_probs(model, *encode(problems, tokenizer)).exp().mean().item()
    options = WarmUp(noisy_lr=1e-3, noise=0.7, noisy_target=0.3, mistake="random", batch_size=256)
    reached = warm_up(model, problems, tokenizer, options, seed=0)
    assert before < 0.01 < 0.1 < reached <= 0.3
    assert not model.training


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clean_lr": 0.0}, r"clean_lr must be positive, got 0\.0"),
        ({"noisy_lr": float("nan")}, "noisy_lr must be positive, got nan"),
        ({"clean_lr": float("inf")}, "clean_lr must be positive, got inf"),
        ({"noise": 1.5}, r"noise must be in 0\.\.1, got 1\.5"),
        ({"clean_target": -0.1}, r"clean_target must be in 0\.\.1, got -0\.1"),
        ({"noisy_target": float("nan")}, r"noisy_target must be in 0\.\.1, got nan"),
        ({"batch_size": 0}, "batch_size must be a positive whole number, got 0"),
        ({"max_steps": 2.5}, r"max_steps must be a positive whole number, got 2\.5"),
        ({"mistake": "typo"}, "mistake must be one of random, forget_carry, got 'typo'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WarmUp(**options).check()
    with pytest.raises(ValueError, match=message):
        warm_up(make_tiny_moe("qwen3_moe"), [("3+4=", "7")], CharacterTokenizer(), WarmUp(**options), seed=0)


def test_without_problems_there_is_nothing_to_practise() -> None:
    with pytest.raises(ValueError, match="there are no problems to warm up on"):
        warm_up(make_tiny_moe("qwen3_moe"), [], CharacterTokenizer(), WarmUp(), seed=0)


def test_the_defaults_make_sense_and_are_those_of_the_trainers_configuration() -> None:
    WarmUp().check()
    assert load_config("tiny_cpu").model.arguments["warmup"] == asdict(WarmUp())
