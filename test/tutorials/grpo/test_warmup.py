"""The warm-up: its wrong labels by hand, its encoding, and that it teaches and then shakes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.arithmetic import ArithmeticTask, CharacterTokenizer

GRPO = Path(__file__).parents[3] / "tutorials" / "grpo"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(GRPO))
    yield
    sys.modules.pop("warmup", None)


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
    from warmup import forget_carry

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
    from warmup import forget_carry

    choices = iter(forgets)
    assert forget_carry("2*4817=", lambda: next(choices)) == answer
    assert next(choices, None) is None


@pytest.mark.parametrize("operation", ["sum", "double"])
def test_who_forgets_no_carry_is_right(operation: str) -> None:
    from warmup import forget_carry

    task = ArithmeticTask(operation=operation, digits=2, held_out=1)
    assert all(forget_carry(query, lambda: False) == answer for query, answer in task.train)


def test_only_the_answer_and_its_end_are_labelled() -> None:
    from warmup import encode

    ids, labels = encode([("3+4=", "7"), ("8+7=", "15")], CharacterTokenizer())
    # <user> 3 + 4 = <assistant> 7 <eos> <pad>
    assert ids.tolist() == [[2, 7, 14, 8, 17, 3, 11, 1, 0], [2, 12, 14, 11, 17, 3, 5, 9, 1]]
    assert labels.tolist() == [[-100] * 6 + [11, 1, -100], [-100] * 6 + [5, 9, 1]]


def test_doubt_comes_after_knowledge() -> None:
    from warmup import answer_log_probs, encode, warm_up

    torch.manual_seed(0)
    tokenizer = CharacterTokenizer()
    problems = ArithmeticTask(digits=1, held_out=90).train
    special = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    sizes = {"vocab_size": 48, "hidden_size": 64, "num_hidden_layers": 2, "mlp_only_layers": []}
    model = make_tiny_moe("qwen3_moe", **special, **sizes)
    before = answer_log_probs(model, *encode(problems, tokenizer)).exp().mean().item()
    settings = SimpleNamespace(
        clean_lr=3e-3, clean_target=0.9, noisy_lr=1e-3, noise=0.7, noisy_target=0.3,
        mistake="random", batch_size=256, max_steps=400,
    )  # fmt: skip
    reached = warm_up(model, problems, tokenizer, settings, seed=0)
    assert before < 0.01 < 0.1 < reached <= 0.3
    assert not model.training
