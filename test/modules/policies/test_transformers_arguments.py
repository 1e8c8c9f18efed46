"""What TransformersWrapper makes of its arguments; what it refuses is with the wrapper's own tests."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from support.families import build
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules import RouterReplay
from torchrl_moe.modules.policies.transformers_wrapper import (
    complete,
    model_of,
    pad_of,
    recorder_of,
    replay_of,
    tokenizer_of,
)
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

OPEN: dict[str, Any] = {
    "input_mode": None,
    "generate": None,
    "chat_template": None,
    "chat_template_name": None,
    "num_samples": None,
    "generate_kwargs": None,
}


@pytest.mark.parametrize(
    ("given", "mode", "generates"),
    [
        ({}, "tokens", False),
        ({"generate": True}, "history", True),
        ({"chat_template": "{{ messages }}"}, "history", True),
        ({"input_mode": "text"}, "text", True),
        ({"input_mode": "tokens", "chat_template_name": "qwen"}, "tokens", False),
        ({"input_mode": "tokens", "generate": 1}, "tokens", True),
    ],
)
def test_what_none_means(given: dict[str, Any], mode: str, generates: bool) -> None:
    found = complete({**OPEN, **given, "other": 3})
    assert (found["input_mode"], found["generate"], found["other"]) == (mode, generates, 3)


def scoring(**given: Any) -> dict[str, Any]:
    return {"replay": None, "generate": False, "input_mode": "tokens", **given}


def test_which_experts_are_followed() -> None:
    model, dense = make_tiny_moe(num_hidden_layers=2), make_tiny_moe("qwen3")
    assert replay_of(scoring(), model) == "R3"
    assert replay_of(scoring(), dense) == "none"
    assert replay_of(scoring(), nn.Linear(1, 1)) == "none"
    assert replay_of(scoring(replay="R2"), dense) == "R2"  # refused later, by what cannot be replayed
    assert replay_of(scoring(input_mode="text"), model) == "none"
    assert replay_of(scoring(generate=True), model) == "none"


def test_what_records_the_experts_of_an_answer() -> None:
    model, dense = make_tiny_moe(num_hidden_layers=2), make_tiny_moe("qwen3")
    arguments = {"generate": True, "return_routed_experts": None, "router_replay": None}
    found = recorder_of(arguments, model)
    assert found is RouterReplay.of(model)
    assert recorder_of({**arguments, "router_replay": found}, model) is found
    assert recorder_of({**arguments, "generate": False}, model) is None
    assert recorder_of({**arguments, "return_routed_experts": False}, model) is None
    assert recorder_of(arguments, dense) is None
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no experts by its config"):
        recorder_of({**arguments, "return_routed_experts": True}, dense)
    with pytest.raises(UnsupportedRouterError, match=r"sparsemixer.* return_routed_experts=False"):
        recorder_of(arguments, build("phimoe"))


def test_a_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer_of(tokenizer, None, None, "text") is tokenizer
    assert tokenizer_of(None, "no/such/folder", None, "tokens") is None
    assert tokenizer_of(None, object(), SimpleNamespace(get_tokenizer=lambda: "its own"), "text") == "its own"
    with pytest.raises(ValueError, match="input_mode='history' makes tokens of text"):
        tokenizer_of(None, object(), object(), "history")


def test_a_pad() -> None:
    assert pad_of(ByteTokenizer()) == 256
    assert pad_of(SimpleNamespace(pad_token_id=None, eos_token_id=3)) == 3
    assert pad_of(SimpleNamespace(pad_token_id=0, eos_token_id=3)) == 0
    assert pad_of(None) is None


def test_a_model_that_cannot_generate() -> None:
    model = nn.Linear(1, 1)
    assert model_of(model) is model
    with pytest.raises(TypeError, match=r"Linear has no generate\(\)"):
        model_of(model, generate=True)


def test_a_model_is_loaded_where_it_is_wanted(tmp_path: Path) -> None:
    make_tiny_moe(num_hidden_layers=2).save_pretrained(tmp_path)
    assert next(model_of(tmp_path, "meta").parameters()).device == torch.device("meta")
    model = model_of(tmp_path)
    assert model_of(model, "cpu") is model
    with pytest.raises(ValueError, match="device='cuda:1', and the model is on 'cpu'"):
        model_of(model, "cuda:1")


@pytest.mark.parametrize("given", [{"num_samples": 4}, {"generate_kwargs": {"max_new_tokens": 3}}])
def test_arguments_of_generating_are_not_lost_on_a_wrapper_that_would_score(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is for generation, and tokens are scored by default"):
        complete({**OPEN, **given})
    assert complete({**OPEN, **given, "generate": True})["generate"]
    assert not complete({**OPEN, **given, "generate": False})["generate"]
