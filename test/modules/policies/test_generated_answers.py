"""Answers of a model's own generation: which keys they have, and what they say of routes and sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.modules.llm.policies import Text

from support.prompt_sources import TOKENIZER, source_of
from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.policies.rollout import RolloutKeys
from torchrl_moe.modules.policies.transformers_generation import Generation, GenerationSettings
from torchrl_moe.testing import make_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCE = source_of("text")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_tiny_moe()


def generation(model: nn.Module, answers: int = 1, routes: bool = True, **generate_kwargs: Any) -> Generation:
    return Generation(
        model=model,
        source=SOURCE,
        settings=GenerationSettings.of({"max_new_tokens": 4, **generate_kwargs}),
        answers=answers,
        keys=RolloutKeys(routed_experts="routed_experts" if routes else None),
        text_key="text",
        history_key=None,
        recorder=RouterReplay.of(model) if routes else None,
    )


def samples(*texts: str) -> list[TensorDict]:
    return [TensorDict(text=Text(prompt=text)) for text in texts]


def test_the_keys_of_an_engine_are_not_there(model: nn.Module) -> None:
    found = generation(model, answers=2, do_sample=True).run(samples("one", "and two"))
    assert [one["text"].prompt for one in found] == ["one", "one", "and two", "and two"]
    for one in found:
        assert set(one.keys()) == {"tokens", "masks", "log_probs", "routed_experts", "text"}
        assert one["text"].response == TOKENIZER.decode(one["tokens", "response"])
        assert one["routed_experts", "full"].shape == (len(one["tokens", "full"]), 4, 4)
    dense = generation(model, routes=False, do_sample=True).run(samples("one"))[0]
    assert set(dense.keys()) == {"tokens", "masks", "log_probs", "text"}


@pytest.mark.parametrize(
    ("sampling", "temperature", "kept"),
    [({"do_sample": False}, 0.0, False), ({"temperature": 0.5}, 0.5, False), ({"top_k": 3}, 1.0, True)],
)
def test_an_answer_says_how_it_was_sampled(
    model: nn.Module, sampling: dict[str, Any], temperature: float, kept: bool
) -> None:
    (one,) = generation(model, **sampling).run(samples("one"))
    assert float(one["sampling", "temperature"]) == temperature
    assert ("kept" in one["sampling"]) == kept
    if kept:
        assert one["sampling", "kept"].sizes.tolist() == [0, 0, 0, *[3] * len(one["tokens", "response"])]


def test_many_experts_take_wider_numbers() -> None:
    model = make_tiny_moe(num_hidden_layers=2, num_experts=130)
    (one,) = generation(model, do_sample=True).run(samples("one"))
    assert one["routed_experts", "full"].dtype == torch.int16


def test_a_turn_of_another_temperature_is_refused_before_it_is_generated(model: nn.Module) -> None:
    (first,) = generation(model, temperature=0.5).run(samples("one"))
    first["text"] = Text(prompt=TOKENIZER.decode(first["tokens", "full"]))
    first["tokens", "full"] = torch.tensor(TOKENIZER.encode(first["text"].prompt))
    first["masks", "all_attention_mask"] = torch.ones(len(first["tokens", "full"])).bool()
    with pytest.raises(ValueError, match=r"this turn's temperature is 0.7, that of the turn before 0.5"):
        generation(model, temperature=0.7).run([first])


def test_another_number_of_answers_is_refused(model: nn.Module) -> None:
    with pytest.raises(ValueError, match="num_return_sequences=3 differs from num_samples=2"):
        generation(model, answers=2, n=3, do_sample=True).run(samples("one"))
