"""Where engine and trainer part: a fault is put into one operation of the trainer, and that one must be named."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from pytest import CaptureFixture, MonkeyPatch
from transformers import AutoModelForCausalLM, PreTrainedModel

from support.engines import EngineShelf
from torchrl_moe.cli.main import main
from torchrl_moe.errors import EngineError, RequestRefusedError
from torchrl_moe.modules import AsyncVLLM, EngineTrace, RouterReplay, bisect_mismatch
from torchrl_moe.testing import FakeAsyncVLLM, make_tiny_moe

TOKENS = [72, 105, 44, 32, *range(100, 116)]
LOW = 1e-5
"""More than the rounding of four layers in float32."""
TRACES: dict[str, EngineTrace] = {}
"""What engines said, by family: each is asked once."""


@pytest.fixture
def traced(engine: AsyncVLLM, shelf: EngineShelf) -> Callable[..., Any]:
    """The trace of a family's engine, and a model with the same weights."""

    def of(family: str, **changed: Any) -> tuple[EngineTrace, PreTrainedModel]:
        if family not in TRACES:
            TRACES[family] = EngineTrace.of(engine, TOKENS)
        return TRACES[family], AutoModelForCausalLM.from_pretrained(shelf.folder(family), **changed)

    return of


QWEN = pytest.mark.engine("qwen3_moe")
DEEPSEEK = pytest.mark.engine("deepseek_v3")


@QWEN
def test_the_same_weights_agree_to_rounding(traced: Any) -> None:
    trace, model = traced("qwen3_moe")
    found = trace.against(model)
    assert found.first is None and found.dtypes == ("float32", "float32") and found.tokens == len(TOKENS)
    names = [one.name for one in found.operations]
    assert names[:3] == ["embed_tokens", "layers.0.input_layernorm", "layers.0.self_attn.q_norm"]
    assert names[-2:] == ["norm", "lm_head"] and "layers.0.experts chosen" not in names  # layer 0 is dense
    second = ["layers.2.mlp.gate", "layers.2.experts chosen", "layers.2.mlp", "layers.2"]
    assert names[names.index(second[0]) :][:4] == second
    assert all(one.relative <= LOW for one in found.operations)
    assert (found.operations[0].equal, found.operations[0].relative) == (1.0, 0.0)
    assert found.first_inexact is not None and "agree to rounding" in found.verdict
    assert RouterReplay(model).layers == (1, 2, 3)  # it left the model as it was
    logits = model(torch.tensor([TOKENS])).logits[0, -1:].detach()  # the figures are those of the tensors
    assert np.abs(trace.outputs["lm_head"] - logits.numpy()).max() < 1e-4


def scale(name: str, by: float = 1.5) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        model.get_parameter(name).data.mul_(by)

    return change


def noise(name: str) -> Callable[[PreTrainedModel], None]:
    def change(model: PreTrainedModel) -> None:
        weight = model.get_parameter(name).data
        weight.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(7)) * weight.std())

    return change


def epsilon(model: PreTrainedModel) -> None:
    model.model.layers[2].post_attention_layernorm.variance_epsilon = 1e-2


@QWEN
@pytest.mark.parametrize(
    ("fault", "first", "cause"),
    [
        (noise("model.embed_tokens.weight"), "embed_tokens", "the embedding's weights"),
        (scale("model.embed_tokens.weight"), "layers.0.post_attention_layernorm", "the scaling of the embedding"),
        (epsilon, "layers.2.post_attention_layernorm", "epsilon"),
        (scale("model.layers.1.self_attn.o_proj.weight", 1.001), "layers.1.self_attn", "attention"),
        (noise("model.layers.3.mlp.gate.weight"), "layers.3.mlp.gate", "the router's weights"),
        (scale("model.layers.2.mlp.experts.down_proj"), "layers.2.mlp", "the experts"),
        (scale("lm_head.weight"), "lm_head", "the head's weights"),
    ],
    ids=["embedding", "scaled embedding", "epsilon", "attention", "router", "experts", "head"],
)
def test_the_operation_at_fault_is_named(traced: Any, fault: Callable[[Any], None], first: str, cause: str) -> None:
    trace, model = traced("qwen3_moe")
    fault(model)
    found = trace.against(model)
    assert found.first is not None and found.first.name == first
    assert all(one.relative <= LOW for one in found.operations[: found.operations.index(found.first)])
    assert f"The first to differ is {first}: " in found.verdict and cause in found.verdict
    assert f"-> {first} " in str(found) and found.verdict in found._repr_html_()
    assert json.loads(json.dumps(found.to_dict(), allow_nan=True))["first"] == first


@DEEPSEEK
def test_another_routing_rule_is_told_from_other_router_weights(traced: Any) -> None:
    trace, model = traced("deepseek_v3")
    assert trace.against(model).first is None
    layer = trace.against(model).operations[-3].name.split(".")[1]
    model.get_buffer(f"model.layers.{layer}.mlp.gate.e_score_correction_bias").add_(torch.arange(16.0) / 4)
    found = trace.against(model)
    assert found.first is not None and found.first.name == f"layers.{layer}.experts chosen"
    assert found.first.is_choice and found.first.relative > 0.05 and math.isnan(found.first.greatest)
    # the trainer follows the engine's experts, but weighs them by its own scores: what comes after may differ, too
    assert "of rows" in found.verdict and "correction bias" in found.verdict


@QWEN
def test_another_dtype_of_the_trainer_is_rounding(traced: Any) -> None:
    trace, model = traced("qwen3_moe", dtype=torch.bfloat16)
    found = trace.against(model)
    assert found.first is None and found.dtypes == ("float32", "bfloat16")
    assert 1e-3 < max(one.relative for one in found.operations if not one.is_choice) < 0.1
    assert found.first_inexact == found.operations[0]


@QWEN
def test_the_same_in_one_call_and_a_prompt_that_is_cached(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    model = AutoModelForCausalLM.from_pretrained(shelf.folder("qwen3_moe"))
    prompt = list(range(40, 240))  # more than a block of the cache
    assert bisect_mismatch(engine, model, prompt).first is None
    with pytest.raises(EngineError, match="its prefix cache had the prompt"):
        bisect_mismatch(engine, model, prompt)
    # its hooks are gone: another prompt is read as if nobody had looked
    assert bisect_mismatch(engine, model, prompt[::-1]).tokens == 200
    with pytest.raises(ValueError, match="two tokens at least, got 1"):
        bisect_mismatch(engine, model, [5])


def test_an_engine_that_cannot_be_watched_says_so() -> None:
    with FakeAsyncVLLM() as fake, pytest.raises(EngineError, match="cannot be watched"):
        bisect_mismatch(fake, make_tiny_moe("qwen3_moe"), TOKENS)


@QWEN
def test_another_replica_and_a_request_that_fails_leave_no_hook(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    def hooks(saved: object, model: Any) -> int:
        return sum(len(module._forward_hooks) for module in model.modules())

    before = engine.validate_model_params(hooks, actor_index=0)
    assert len(before) == 1 and before == engine.validate_model_params(hooks)
    with pytest.raises(IndexError):
        EngineTrace.of(engine, TOKENS, actor_index=7)
    with pytest.raises(RequestRefusedError, match=r"max_model_len|maximum"):
        EngineTrace.of(engine, [70] * 600)  # the engine takes 512
    assert engine.validate_model_params(hooks) == before


@QWEN
def test_the_command(
    engine: AsyncVLLM, shelf: EngineShelf, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str], tmp_path: Any
) -> None:
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda *_, **__: contextlib.nullcontext(engine))
    folder = str(shelf.folder("qwen3_moe"))
    assert main(["bisect", folder, "--prompt", "where do they part?", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["first"] is None and len(found["operations"]) > 20
    model = AutoModelForCausalLM.from_pretrained(folder)
    scale("model.layers.2.mlp.experts.down_proj")(model)
    model.save_pretrained(tmp_path)
    assert main(["bisect", folder, "--prompt", "and where here?", "--trainer", str(tmp_path)]) == 1
    assert "The first to differ is layers.2.mlp: " in capsys.readouterr().out
