"""Answers of a model's own generation: which keys they have, and what they say of routes and sampling."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.modules.llm.policies import Text

from support.prompt_sources import TOKENIZER
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.testing import make_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_tiny_moe()


def generating(model: nn.Module, **generate_kwargs: Any) -> TransformersWrapper:
    settings = {"max_new_tokens": 4, **generate_kwargs}
    return TransformersWrapper(model, tokenizer=TOKENIZER, input_mode="text", inplace=False, generate_kwargs=settings)


def samples(*texts: str) -> TensorDictBase:
    return lazy_stack([TensorDict(text=Text(prompt=text)) for text in texts])


def test_many_experts_take_wider_numbers() -> None:
    model = make_tiny_moe(num_hidden_layers=2, num_experts=130)
    one = generating(model, do_sample=True)(samples("one"))[0]
    assert one["routed_experts", "full"].dtype == torch.int16


def test_a_turn_of_another_temperature_is_refused_before_it_is_generated(model: nn.Module) -> None:
    first = generating(model, temperature=0.5)(samples("one"))[0]
    first["text"] = Text(prompt=TOKENIZER.decode(first["tokens", "full"]))
    first["tokens", "full"] = torch.tensor(TOKENIZER.encode(first["text"].prompt))
    first["masks", "all_attention_mask"] = torch.ones(len(first["tokens", "full"])).bool()
    with pytest.raises(ValueError, match=r"this turn's temperature is 0.7, that of the turn before 0.5"):
        generating(model, temperature=0.7)(first)
