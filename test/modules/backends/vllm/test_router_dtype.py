"""Routers in float32 in a real engine in bfloat16: what it holds, what it computes, and what a sync leaves of them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.engines import EngineShelf, start_engine
from torchrl_moe import _compat
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.vllm.engine_args import ROUTER_DTYPE
from torchrl_moe.modules.backends.vllm.engine_process import check_routers
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.weight_update import VLLMWeightSyncScheme

pytestmark = pytest.mark.needs_vllm

ROUTERS = [f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)]


def look_inside(engine: AsyncVLLM) -> list[Any]:
    """From the worker: dtypes of a router's weight and logits, and its logits of known hidden states."""

    def look(saved: Mapping[str, Tensor], model: nn.Module) -> list[Any]:
        del saved
        gate: Any = model.get_submodule("model.layers.1.mlp.gate")
        with torch.no_grad():
            out = gate(torch.linspace(-1, 1, 3 * 64).reshape(3, 64).bfloat16())
        logits = out[0] if isinstance(out, tuple) else out
        return [str(gate.weight.dtype), str(logits.dtype), logits.float().flatten().tolist()]

    ((found,),) = engine.validate_model_params(look)
    return list(found)


@pytest.mark.engine
@pytest.mark.parametrize("family", [pytest.param("qwen3_moe", marks=pytest.mark.parity), "deepseek_v3"])
def test_weights_and_logits_are_float32_after_a_sync_too(no_engine: EngineShelf, tmp_path: Path, family: str) -> None:
    folder = save_tiny_moe(tmp_path / "model", family, dtype=torch.bfloat16)
    master = make_tiny_moe(family, dtype=torch.bfloat16).float()
    with start_engine(folder, dtype="bfloat16", router_dtype="float32") as engine:
        held = engine.get_model_metadata()
        assert {name for name, (dtype, _) in held.items() if dtype == torch.float32} == {
            *ROUTERS,
            *(name for name in held if "correction_bias" in name),
        }
        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        sender.register_model(master)
        sender.init_all_workers_group(None, vllm_engine=engine)
        for step in range(2):
            with torch.no_grad():
                for name in ROUTERS:  # digits that bfloat16 does not have
                    master.get_parameter(name).mul_(1 + 2**-12)
            assert not sender.update_weights().failed, step
            found = look_inside(engine)
            hidden = torch.linspace(-1, 1, 3 * 64).reshape(3, 64).bfloat16().float()
            wanted = hidden @ master.get_parameter(ROUTERS[0]).detach().T
            assert found[:2] == ["torch.float32", "torch.float32"]
            torch.testing.assert_close(torch.tensor(found[2]), wanted.flatten(), atol=1e-5, rtol=0)
        sender.shutdown()
        completion = engine.generate(prompt_token_ids=[1, 2, 3], sampling_params={"max_tokens": 4, "logprobs": 0})
        assert not isinstance(completion, list)
        assert completion.outputs[0].routed_experts is not None


@pytest.mark.parity
@pytest.mark.engine(dtype="bfloat16")
def test_otherwise_a_router_is_rounded_and_the_engine_says_so(engine: AsyncVLLM) -> None:
    """The checkpoint is in float32: its dtypes would say nothing of it."""
    held = engine.get_model_metadata()
    assert {dtype for dtype, _ in held.values()} == {torch.bfloat16}
    assert look_inside(engine)[:2] == ["torch.bfloat16", "torch.bfloat16"]


class Layer(nn.Module):
    """A decoder layer with a router, as a worker's model has it."""

    def __init__(self, gate: nn.Module, experts: nn.Module | None = None) -> None:
        super().__init__()
        self.mlp = nn.ModuleDict({"gate": gate, "experts": experts or nn.Identity()})


def bare(kind: type[Any], **attributes: Any) -> Any:
    """A layer of vLLM's without an engine around it, which its constructor asks for its configuration."""
    layer = kind.__new__(kind)
    nn.Module.__init__(layer)
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


def test_routers_that_are_not_float32_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    from torchrl_moe.modules.backends.vllm import router_dtype

    def gate_of(dtype: torch.dtype) -> nn.Module:
        gate: nn.Module = bare(GateLinear, weight=nn.Parameter(torch.zeros(2, 2, dtype=dtype)))
        return gate

    def kernel_for(dtype: torch.dtype) -> nn.Module:
        config, method = SimpleNamespace(router_logits_dtype=dtype), SimpleNamespace(is_monolithic=True)
        kernel: nn.Module = bare(MoERunner, moe_config=config, of_test=method)
        return kernel

    monkeypatch.setattr(MoERunner, "_quant_method", property(lambda self: self.of_test))

    wide, narrow = torch.float32, torch.bfloat16
    layers = [
        Layer(gate_of(wide)),
        Layer(gate_of(narrow)),
        Layer(nn.Linear(2, 2, dtype=narrow)),
        Layer(nn.Linear(2, 2)),  # a family with a layer of its own
        Layer(gate_of(wide), kernel_for(narrow)),
        Layer(gate_of(wide), kernel_for(wide)),
        Layer(nn.Identity()),  # dense
    ]
    model = nn.ModuleDict({"model": nn.ModuleDict({"layers": nn.ModuleList(layers)})})
    monkeypatch.setattr(_compat, "router_layer_ids", lambda _: range(6))
    assert router_dtype.narrow_routers(model) == [f"model.layers.{layer}" for layer in (1, 2, 4)]


@pytest.mark.parametrize(
    ("narrow", "is_refused"), [([[], []], False), ([["model.layers.1"], ["model.layers.5"]], True)]
)
def test_a_family_that_makes_its_routers_otherwise_is_refused(narrow: list[list[str]], is_refused: bool) -> None:
    async def answer(method: str) -> list[list[str]]:
        assert method == "torchrl_moe_narrow_routers"
        return narrow

    engine: Any = SimpleNamespace(
        vllm_config=SimpleNamespace(additional_config={ROUTER_DTYPE: "float32"}),
        model_config=SimpleNamespace(hf_config=SimpleNamespace(architectures=["AriaForConditionalGeneration"])),
        collective_rpc=answer,
    )
    said = r"vLLM's code for AriaForConditionalGeneration makes the routers of 2 layer\(s\), such as model\.layers\.1,"
    with pytest.raises(ValueError, match=said) if is_refused else contextlib.nullcontext():
        asyncio.run(check_routers(engine))


def test_what_a_model_holds_is_told_by_checkpoint_names() -> None:
    from torchrl_moe.modules.backends.vllm.router_dtype import held_dtypes

    model: Any = nn.Module()
    model.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    model.layer = nn.ModuleDict(
        {
            "qkv_proj": nn.Linear(2, 2, dtype=torch.bfloat16),
            "gate": nn.Linear(2, 2),
            "experts": nn.ParameterDict({"w13_weight": nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))}),
        }
    )
    names = ["layer.k_proj.weight", "layer.gate.weight", "layer.experts.3.up_proj.weight", "layer.A_log"]
    assert held_dtypes(model, names) == {names[0]: "bfloat16", names[1]: "float32", names[2]: "float16"}
