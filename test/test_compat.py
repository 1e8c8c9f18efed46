"""The private names that we reach for are there, and what is made of them needs none of them.

What differs between releases of transformers is called by the installed one's names, so that nothing warns.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache

from torchrl_moe import _compat, _compat_transformers
from torchrl_moe._compat_memory import peak_bytes, without_memory
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.testing.tiny_moe import make_tiny_moe


def model_of(*modules: Any) -> Any:
    return SimpleNamespace(modules=lambda: iter(modules))


def runner(layer_id: int) -> Any:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner

    bare = MoERunner.__new__(MoERunner)
    object.__setattr__(bare, "layer_name", f"model.layers.{layer_id}.mlp.experts")
    return bare


@pytest.mark.needs_vllm
def test_router_layers_are_sorted_once_each_and_nothing_else_counts() -> None:
    dense, captures = SimpleNamespace(layer_id=0), SimpleNamespace(layer_id=2, capture_fn=None)
    assert _compat.router_layer_ids(model_of(runner(11), captures, dense, runner(2), runner(5))) == [2, 5, 11]
    assert _compat.router_layer_ids(model_of(dense)) == []


@pytest.mark.needs_vllm
def test_vllms_refusals_are_client_errors_and_its_deaths_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.exceptions import GenerationError, VLLMValidationError
    from vllm.v1.engine.exceptions import EngineDeadError

    errors = _compat.vllm_client_errors()
    assert isinstance(VLLMValidationError("too long"), errors)
    assert isinstance(ValueError(), errors)
    assert not isinstance(EngineDeadError(), errors)
    assert not isinstance(GenerationError(), errors)
    # a release without its own client error
    monkeypatch.delattr("vllm.exceptions.VLLMClientError")
    assert _compat.vllm_client_errors() == (ValueError, TypeError)


def cached(tokenizer: Any) -> Any:
    from vllm.tokenizers.hf import get_cached_tokenizer

    return get_cached_tokenizer(tokenizer)


def pooled(tokenizer: Any) -> Any:
    from vllm.tokenizers.hf import maybe_make_thread_pool

    return maybe_make_thread_pool(tokenizer, 2)


@pytest.mark.needs_vllm
@pytest.mark.parametrize("proxies", [[], [cached], [pooled], [cached, pooled], [pooled, cached]])
def test_the_tokenizer_comes_out_of_vllms_proxies(proxies: list[Any]) -> None:
    original, tokenizer = ByteTokenizer(), ByteTokenizer()
    for proxy in proxies:
        tokenizer = proxy(tokenizer)
    kind = type(tokenizer)
    plain = _compat.plain_tokenizer(tokenizer)
    assert type(plain) is type(original)
    assert plain.encode("é <|im_end|>") == original.encode("é <|im_end|>") == [195, 169, 32, 258]
    if proxies:  # and the proxy stays as it was
        plain.padding_side = "right"
        assert (type(tokenizer), tokenizer.padding_side) == (kind, "left")


@pytest.mark.needs_vllm
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


@pytest.mark.needs_vllm
def test_a_tokenizer_of_vllms_own_is_returned_as_it_is() -> None:
    from vllm.tokenizers.mistral import MistralTokenizer

    own = MistralTokenizer.__new__(MistralTokenizer)
    assert _compat.plain_tokenizer(own) is own


def packed(weight: nn.Parameter, handle: Any) -> Any:
    layer = nn.Module()
    layer.weight, layer.cpu_linear = weight, handle
    return layer


def test_only_layers_whose_weight_is_an_earlier_ones_are_packed_again() -> None:
    asked: list[str] = []
    shared, own = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    model = nn.ModuleDict({"embed": packed(shared, 1), "between": packed(own, 1), "head": packed(shared, 1)})
    model["norm"] = nn.Module()
    model["norm"].weight = own  # holds nothing packed
    for name, layer in model.items():
        layer.quant_method = SimpleNamespace(process_weights_after_loading=lambda _, name=name: asked.append(name))
    _compat.pack_tied(model)
    assert asked == ["head"]
    assert _compat.has_packed(model["embed"]) and not _compat.has_packed(model["norm"])


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


def test_torchrls_names_and_checks() -> None:
    given = {"max_tokens": 3, "max_new_tokens": 4, "n": 2}
    assert _compat_transformers.standard_names(given) == {"max_new_tokens": 3, "num_return_sequences": 2}
    assert given["max_tokens"] == 3
    with pytest.raises(ValueError, match="top_k must be positive"):
        _compat_transformers.standard_names({"top_k": 0})


def test_the_cache_and_checkpoints_have_the_names_that_do_not_warn() -> None:
    model, cache, given = make_tiny_moe("qwen3_moe"), DynamicCache(), []
    name = _compat_transformers.cache_argument(inspect.signature(model.forward).parameters)
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **{name: cache})
        _compat_transformers.checkpoint_activations(model)
    assert cache.get_seq_length() == 3 and model.is_gradient_checkpointing
    old: Any = SimpleNamespace(gradient_checkpointing_enable=lambda **options: given.append(options))
    _compat_transformers.checkpoint_activations(old)
    _compat_transformers.checkpoint_activations(old, use_reentrant=True, preserve_rng_state=False)
    assert given == [
        {"gradient_checkpointing_kwargs": {"use_reentrant": False}},
        {"gradient_checkpointing_kwargs": {"use_reentrant": True, "preserve_rng_state": False}},
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("family", ["deepseek_v3", "mixtral", "qwen3_moe", "qwen3"])
def test_a_lowered_model_is_what_transformers_loads(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_tiny_moe(family)
    model.save_pretrained(tmp_path)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    assert _compat_transformers.lowered(model, dtype) is model
    mine = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, tensor in [*wanted.named_parameters(), *wanted.named_buffers()]:
        torch.testing.assert_close(mine[name], tensor, atol=0, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
    kept = {name for name, tensor in model.state_dict().items() if tensor.dtype != dtype}
    assert bool(kept) == (family == "deepseek_v3" and dtype != torch.float32)  # its correction bias, at the least


def test_a_model_that_is_not_of_transformers_is_lowered_as_a_whole() -> None:
    model = _compat_transformers.lowered(nn.BatchNorm1d(2), torch.bfloat16)
    assert {tensor.dtype for tensor in model.state_dict().values() if tensor.is_floating_point()} == {torch.bfloat16}


def test_peaks_count_what_lives_together_without_views_and_what_was_there_before() -> None:
    def run() -> None:
        first = torch.ones(100)  # 400 B
        second = first + 1  # 800 B
        del first
        third = second + 1  # 800 B again
        del second, third

    assert peak_bytes(run) == 800
    assert peak_bytes(lambda: torch.ones(10, 10).T.reshape(-1)[::2].add_(1)) == 400 + 400  # the reshape copies
    weight = torch.ones(100, requires_grad=True)
    # its square, the sum, and the gradients of the three; the last is kept by the weight
    assert peak_bytes(lambda: (weight * 1).sum().backward()) <= 400 + 4 + 4 + 400 + 400
    assert weight.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_and_casts_take_no_memory(dtype: torch.dtype) -> None:
    with without_memory():
        rows = torch.zeros(10**6, 64, dtype=dtype, requires_grad=True)
        weight = torch.zeros(128, 64, 32, dtype=dtype, requires_grad=True)
        offsets = torch.zeros(128, dtype=torch.int32)
        out = nn.functional.grouped_mm(rows, weight, offs=offsets)
        assert out.shape == (10**6, 32)
        out.sum().backward()
        assert rows.grad is not None and weight.grad is not None
        assert (rows.grad.shape, weight.grad.shape) == (rows.shape, weight.shape)
        layer = nn.Linear(10**6, 10**6)
        names = dict(layer.named_parameters())  # something that refers to them
        layer.to(torch.bfloat16)
        assert all(weight.dtype == torch.bfloat16 for weight in names.values())
