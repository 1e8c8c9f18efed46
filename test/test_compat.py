"""The private names we reach for are there, and what is made of them needs none of them."""

from __future__ import annotations

import asyncio
import dataclasses
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchrl_moe import _compat
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer


def test_importing_compat_imports_neither_library() -> None:
    code = "import sys, torchrl_moe._compat; print([name for name in ('vllm', 'torchrl') if name in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# -- routers ----------------------------------------------------------------------------------------------------------


class Source:
    """Vouches for layers as vLLM's capture protocol asks."""

    def __init__(self, layer_id: int) -> None:
        self.layer_id = layer_id
        self.capture_fn = None


def model_of(*modules: Any) -> Any:
    return SimpleNamespace(modules=lambda: iter(modules))


def runner(layer_id: int) -> Any:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    bare = MoERunner.__new__(MoERunner)
    object.__setattr__(bare, "layer_name", f"model.layers.{layer_id}.mlp.experts")
    return bare


def test_router_layers_are_sorted_once_each_and_nothing_else_counts() -> None:
    dense = SimpleNamespace(layer_id=0)
    assert _compat.router_layer_ids(model_of(runner(11), Source(2), dense, runner(2), runner(5))) == [2, 5, 11]


def test_a_dense_model_has_no_router_layers() -> None:
    assert _compat.router_layer_ids(model_of(SimpleNamespace(layer_id=0))) == []


# -- errors -----------------------------------------------------------------------------------------------------------


def test_vllms_refusals_are_client_errors_and_its_deaths_are_not() -> None:
    from vllm.exceptions import GenerationError, VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError

    errors = _compat.vllm_client_errors()
    assert isinstance(VLLMValidationError("too long"), errors)
    assert isinstance(ValueError(), errors)
    assert not isinstance(EngineDeadError(), errors)
    assert not isinstance(GenerationError(), errors)


def test_a_vllm_without_its_own_client_error_is_taken_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("vllm.exceptions.VLLMClientError")
    assert _compat.vllm_client_errors() == (ValueError, TypeError)


# -- tokenizers -------------------------------------------------------------------------------------------------------


def cached(tokenizer: Any) -> Any:
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def pooled(tokenizer: Any) -> Any:
    from vllm.tokenizers.hf import maybe_make_thread_pool

    return maybe_make_thread_pool(tokenizer, 2)


@pytest.mark.parametrize("proxies", [[], [cached], [pooled], [cached, pooled], [pooled, cached]])
def test_the_tokenizer_comes_out_of_vllms_proxies(proxies: list[Any]) -> None:
    original, tokenizer = ByteTokenizer(), ByteTokenizer()
    for proxy in proxies:
        tokenizer = proxy(tokenizer)
    plain = _compat.plain_tokenizer(tokenizer)
    assert type(plain) is type(original)
    assert plain.encode("é <|im_end|>") == original.encode("é <|im_end|>") == [195, 169, 32, 258]


def test_cpu_experts_keep_their_kernel_when_lora_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
    from vllm.platforms import current_platform

    @dataclasses.dataclass(frozen=True)
    class Config:
        is_lora_enabled: bool
        name: str = "moe"

    def theirs(moe_config: Config) -> Config:
        return moe_config

    monkeypatch.setattr(method, "select_unquantized_moe_backend", theirs)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    _compat.keep_cpu_experts_with_lora()
    assert method.select_unquantized_moe_backend is theirs  # a GPU has a kernel for it
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    _compat.keep_cpu_experts_with_lora()
    assert method.select_unquantized_moe_backend(Config(True)) == Config(False)


def test_the_proxy_stays_as_it_was() -> None:
    proxy = cached(ByteTokenizer())
    kind = type(proxy)
    _compat.plain_tokenizer(proxy).padding_side = "right"
    assert type(proxy) is kind
    assert proxy.padding_side == "left"


def test_a_tokenizer_that_is_vllms_own_is_returned_as_it_is() -> None:
    from vllm.tokenizers.mistral import MistralTokenizer

    own = MistralTokenizer.__new__(MistralTokenizer)
    assert _compat.plain_tokenizer(own) is own


# -- packed layers ----------------------------------------------------------------------------------------------------


def packed(weight: torch.nn.Parameter, handle: Any) -> Any:
    layer = torch.nn.Module()
    layer.weight = weight
    layer.cpu_linear = handle
    return layer


def test_a_packed_layer_is_known_by_its_handle() -> None:
    assert _compat.has_packed(packed(torch.nn.Parameter(torch.ones(1)), "handle"))
    assert not _compat.has_packed(torch.nn.Linear(1, 1))


def test_only_layers_whose_weight_is_an_earlier_ones_are_packed_again() -> None:
    asked: list[str] = []
    shared, own = torch.nn.Parameter(torch.ones(1)), torch.nn.Parameter(torch.ones(1))
    model = torch.nn.ModuleDict({"embed": packed(shared, 1), "between": packed(own, 1), "head": packed(shared, 1)})
    model["norm"] = torch.nn.Module()
    model["norm"].weight = own  # holds nothing packed
    for name, layer in model.items():
        layer.quant_method = SimpleNamespace(process_weights_after_loading=lambda _, name=name: asked.append(name))
    _compat.pack_tied(model)
    assert asked == ["head"]


# -- requests ---------------------------------------------------------------------------------------------------------


class Processor:
    """An ``AsyncLLM`` that runs answers of two requests, and notes what it is to abort."""

    def __init__(self) -> None:
        answers = {"0_a-x": ("a", 0), "1_a-x": ("a", 1), "2_a-x": ("a", 2), "b-y": ("b", 0)}
        states = {key: SimpleNamespace(external_req_id=n, request_index=i) for key, (n, i) in answers.items()}
        self.output_processor = SimpleNamespace(request_states=states)
        self.aborted: list[Any] = []

    async def abort(self, ids: list[str], internal: bool = False) -> None:
        self.aborted.append((ids, internal))


def test_answers_are_aborted_by_request_and_index_and_those_that_are_known_are_reported() -> None:
    engine = Processor()
    wanted = {"a": {0, 2, 5}, "b": {1}, "gone": {0}}
    assert asyncio.run(_compat.abort_answers(engine, wanted)) == {"a": {0, 2}}
    assert engine.aborted == [(["0_a-x", "2_a-x"], True)]
    assert asyncio.run(_compat.abort_answers(engine, {"gone": {0}})) == {}
    assert len(engine.aborted) == 1
