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
from torchrl_moe.modules import RouterReplay, TransformersWrapper
from torchrl_moe.modules.policies.transformers_wrapper import model_of, tokenizer_of
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return make_tiny_moe(num_hidden_layers=2)


@pytest.fixture(scope="module")
def dense() -> nn.Module:
    return make_tiny_moe("qwen3")


def wrapper(model: nn.Module, **given: Any) -> TransformersWrapper:
    return TransformersWrapper(model, tokenizer=ByteTokenizer(), **given)


def test_what_records_the_experts_of_an_answer(model: nn.Module, dense: nn.Module) -> None:
    found = wrapper(model, generate=True).router_replay
    assert found is RouterReplay.of(model)
    assert wrapper(model, generate=True, router_replay=found).router_replay is found
    assert wrapper(model, generate=True, return_routed_experts=False).router_replay is None
    assert wrapper(dense, generate=True).router_replay is None
    with pytest.raises(ValueError, match="Qwen3ForCausalLM has no experts by its config"):
        wrapper(dense, generate=True, return_routed_experts=True)
    with pytest.raises(UnsupportedRouterError, match=r"sparsemixer.* return_routed_experts=False"):
        TransformersWrapper(build("phimoe"), input_mode="tokens", generate=True)


def test_a_tokenizer() -> None:
    tokenizer = ByteTokenizer()
    assert tokenizer_of(tokenizer, None, None, "text") is tokenizer
    assert tokenizer_of(None, "no/such/folder", None, "tokens") is None
    assert tokenizer_of(None, object(), SimpleNamespace(get_tokenizer=lambda: "its own"), "text") == "its own"
    with pytest.raises(ValueError, match="input_mode='history' makes tokens of text"):
        tokenizer_of(None, object(), object(), "history")


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
def test_arguments_of_generating_are_not_lost_on_a_wrapper_that_would_score(
    dense: nn.Module, given: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match="is for generation, and tokens are scored by default"):
        wrapper(dense, **given)
    assert wrapper(dense, **given, generate=True).generate
    assert not wrapper(dense, **given, generate=False).generate
