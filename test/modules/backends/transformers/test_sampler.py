"""What is drawn from which distribution: against probabilities worked out by hand, and vLLM's order of steps."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrl_moe.modules.backends.transformers.answer import Answer, Draw, Words, read_sampling
from torchrl_moe.modules.backends.transformers.decoder import Sampler
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer

WORDS = Words(ByteTokenizer())
PROBABILITIES = [0.4, 0.3, 0.2, 0.1]
LOGITS = torch.tensor(PROBABILITIES).log()


def answers(count: int, prompt: list[int] | None = None, **params: Any) -> list[Answer]:
    sampling = read_sampling({"logprobs": 0, **params})
    return [Answer(prompt or [0], sampling, 0, WORDS, 100, None) for _ in range(count)]


def draw(count: int = 1, seed: int = 0, logits: Tensor = LOGITS, **params: Any) -> list[Draw]:
    drawn: list[Draw] = Sampler(torch.device("cpu"), seed)(logits.repeat(count, 1), answers(count, **params))
    return drawn


def kept(one: Draw) -> list[int]:
    """The words that a token was drawn from."""
    ids = one.step[1:].tolist()
    if not ids:
        return [0, 1, 2, 3]
    return ids if ids[0] >= 0 else [word for word in range(4) if ~word not in ids]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, PROBABILITIES),
        ({"temperature": 0.5}, [16 / 30, 9 / 30, 4 / 30, 1 / 30]),
        ({"top_k": 2}, [4 / 7, 3 / 7, 0, 0]),
        ({"top_p": 0.69}, [4 / 7, 3 / 7, 0, 0]),  # 0.4 + 0.3 reach it
        ({"top_p": 0.71}, [4 / 9, 3 / 9, 2 / 9, 0]),
        ({"top_p": 1e-9}, [1, 0, 0, 0]),
        ({"min_p": 0.49}, [4 / 9, 3 / 9, 2 / 9, 0]),  # 0.2 is half of 0.4
        ({"min_p": 0.51}, [4 / 7, 3 / 7, 0, 0]),
        ({"temperature": 0.5, "min_p": 0.2}, [16 / 29, 9 / 29, 4 / 29, 0]),  # of the probabilities at that temperature
        ({"top_k": 3, "top_p": 0.8}, [4 / 9, 3 / 9, 2 / 9, 0]),  # of the three that are left 0.4 + 0.3 is less
        ({"temperature": 0.5, "top_k": 3, "top_p": 0.86}, [16 / 25, 9 / 25, 0, 0]),
        ({"repetition_penalty": 2.0}, [0.4**2 / 0.76, 0.3 / 0.76, 0.2 / 0.76, 0.1 / 0.76]),  # 0 is in the prompt
    ],
)
def test_tokens_come_from_the_distribution_whose_log_probs_they_have(
    params: dict[str, Any], expected: list[float]
) -> None:
    count = 4000
    drawn = draw(count, **params)
    counts = Counter(one.token for one in drawn)
    for word, probability in enumerate(expected):
        spread = math.sqrt(probability * (1 - probability) / count)
        assert abs(counts[word] / count - probability) <= 5 * spread + 1e-12, word
    for one in drawn[:50]:
        assert one.log_prob == pytest.approx(math.log(expected[one.token]), abs=1e-5)
        assert kept(one) == [word for word, probability in enumerate(expected) if probability]


def test_a_greedy_token_is_the_likeliest_and_its_log_prob_is_of_temperature_one() -> None:
    (one,) = draw(temperature=0)
    assert (one.token, len(one.step)) == (0, 0)
    assert one.log_prob == pytest.approx(math.log(0.4), abs=1e-6)
    (penalised,) = draw(temperature=0, repetition_penalty=2.0)
    assert penalised.token == 1
    assert penalised.log_prob == pytest.approx(math.log(0.3 / 0.76), abs=1e-5)


def test_words_of_the_answer_so_far_are_penalised_by_how_often_they_came() -> None:
    (one,) = answers(1, temperature=0, frequency_penalty=0.5, presence_penalty=0.25)
    one.tokens += [0, 0, 3]
    (drawn,) = Sampler(torch.device("cpu"), 0)(LOGITS[None], [one])
    left = [0.4 * math.exp(-1.25), 0.3, 0.2, 0.1 * math.exp(-0.75)]
    assert drawn.token == 1
    assert drawn.log_prob == pytest.approx(math.log(0.3 / sum(left)), abs=1e-5)


def test_words_are_masked_until_there_are_enough_tokens() -> None:
    logits = torch.zeros(WORDS.eos + 1)  # type: ignore[operator]
    logits[WORDS.eos] = 100.0
    (one,) = draw(logits=logits, min_tokens=1, stop_token_ids=[5, 100_000])  # the model has no such word
    assert one.step.tolist() == [0, ~5, ~WORDS.eos]  # type: ignore[operator]
    assert one.log_prob == pytest.approx(-math.log(WORDS.eos - 1), abs=1e-4)  # type: ignore[operator]
    (free,) = draw(logits=logits, min_tokens=0)
    assert free.token == WORDS.eos


def test_rows_that_sample_differently_do_not_mix() -> None:
    rows = [*answers(2), *answers(2, temperature=0), *answers(2, top_k=1), *answers(1)]
    order = [rows[i] for i in (0, 2, 4, 1, 3, 5, 6)]
    drawn = Sampler(torch.device("cpu"), 0)(LOGITS.repeat(7, 1), order)
    assert [drawn[i].token for i in (1, 4, 2, 5)] == [0, 0, 0, 0]
    assert [drawn[i].log_prob for i in (2, 5)] == [0.0, 0.0]
    assert [len(drawn[i].step) for i in (0, 1, 2)] == [0, 0, 2]
    for i in (0, 3, 6):
        assert drawn[i].log_prob == pytest.approx(math.log(PROBABILITIES[drawn[i].token]), abs=1e-5)


def test_a_seed_gives_the_same_tokens_beside_any_others() -> None:
    def own(others: int, seed: int) -> list[int]:
        sampler = Sampler(torch.device("cpu"), others)
        one, *rest = answers(others + 1)
        one.generator = torch.Generator().manual_seed(seed)
        return [sampler(LOGITS.repeat(others + 1, 1), [one, *rest])[0].token for _ in range(40)]

    assert own(0, 7) == own(3, 7)
    assert own(0, 7) != own(0, 8)


def test_the_engines_seed_begins_the_noise_again() -> None:
    sampler = Sampler(torch.device("cpu"), 3)

    def tokens() -> list[int]:
        return [one.token for one in sampler(LOGITS.repeat(50, 1), answers(50))]

    first, second = tokens(), tokens()
    assert first != second
    sampler.seed(3)
    assert tokens() == first


def test_log_probs_that_nobody_asked_for_name_no_words() -> None:
    drawn = Sampler(torch.device("cpu"), 0)(LOGITS[None], answers(1, logprobs=None, top_k=2))
    assert len(drawn[0].step) == 0


def test_half_precision_logits_are_drawn_from_in_float32() -> None:
    (one,) = draw(logits=LOGITS.bfloat16())
    exact = LOGITS.bfloat16().float().log_softmax(-1)[one.token].item()
    assert one.log_prob == pytest.approx(exact, abs=1e-6)
    assert np.float32(one.log_prob) != np.float32(torch.tensor(exact).bfloat16().item())


@pytest.mark.parametrize(
    "params",
    [{"repetition_penalty": 2}, {"repetition_penalty": np.float32(2)}, {"min_p": np.float32(0.1)}, {"min_p": 1}],
)
def test_a_number_of_any_kind_is_one(params: dict[str, Any]) -> None:
    """Transformers' own processors want a float, and an error here would end the engine."""
    (ours,), (theirs,) = (
        draw(**params),
        draw(**{name: (int if name == "top_k" else float)(value) for name, value in params.items()}),
    )
    assert (ours.token, ours.log_prob) == (theirs.token, theirs.log_prob)
