"""float32_routers: what routers compute in under autocast and in a bfloat16 model, replayed or not; what is refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.families import build
from support.routes import random_routes
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules import RouterReplay, float32_routers
from torchrl_moe.testing import make_tiny_moe

IDS = torch.arange(3, 40)[None]
GATE = "model.layers.1.mlp.gate"


def model_of(family: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    return make_tiny_moe(family, num_hidden_layers=2, dtype=dtype)


def run(model: nn.Module, autocast: bool) -> tuple[Tensor, Tensor]:
    """What arrives at the router of layer 1, and the router's logits: the first tensor with a number per expert."""
    seen: list[tuple[Tensor, Tensor]] = []

    def note(module: nn.Module, args: tuple[Tensor, ...], out: Any) -> None:
        seen.append((args[0].detach().reshape(-1, args[0].shape[-1]), out[0].detach()))

    hook = model.get_submodule(GATE).register_forward_hook(note)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        model(input_ids=IDS)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_those_of_float32(family: str, dtype: torch.dtype) -> None:
    """Under autocast over float32 weights, and in a model in bfloat16."""
    model, autocast = model_of(family, dtype), dtype == torch.float32
    hidden, before = run(model, autocast)
    if family != "deepseek_v3" or autocast:  # its own code widens what is not autocast
        assert before.dtype == torch.bfloat16
    assert f"{GATE}.weight" in float32_routers(model)
    weight: Any = model.get_parameter(f"{GATE}.weight")
    assert weight.dtype == torch.float32
    with torch.no_grad():
        weight.mul_(1 + 2**-12)  # bfloat16 would round this away
    hidden, logits = run(model, autocast)
    assert hidden.dtype == dtype and logits.dtype == torch.float32
    torch.testing.assert_close(logits, hidden.float() @ weight.T, atol=1e-5, rtol=0)
    others = [value.dtype for name, value in model.named_parameters() if "gate.weight" not in name]
    assert set(others) <= {dtype, torch.float32} and dtype in others


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_replay_goes_on(family: str, first: bool) -> None:
    """Before or after a RouterReplay is made; and its removal leaves the routers in float32."""
    model = model_of(family, torch.bfloat16)
    if first:
        float32_routers(model)
    replay = RouterReplay(model)
    float32_routers(model)
    with torch.no_grad():
        with replay.record() as recording:
            own = model(input_ids=IDS).logits
        with replay.replay(recording.routed_experts):
            assert torch.equal(model(input_ids=IDS).logits, own)
        with replay.replay(random_routes(replay, *IDS.shape)):
            assert not torch.equal(model(input_ids=IDS).logits, own)
    replay.remove()
    assert run(model, autocast=False)[1].dtype == torch.float32


def test_gradients_reach_the_router_in_float32() -> None:
    model = model_of("qwen3_moe")
    float32_routers(model)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=IDS, labels=IDS).loss
    loss.backward()
    gradient = model.get_parameter(f"{GATE}.weight").grad
    assert gradient is not None and gradient.dtype == torch.float32 and bool(gradient.abs().sum() > 0)


def test_a_copy_has_routers_of_its_own_and_a_second_call_changes_nothing() -> None:
    model = model_of("qwen3_moe")
    names, gate = float32_routers(model), model.get_submodule(GATE)
    stand_in = gate.__dict__["forward"]
    assert float32_routers(model) == names
    assert gate.__dict__["forward"] is stand_in
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.get_parameter(f"{GATE}.weight").zero_()
    assert not run(other, autocast=True)[1].any() and bool(run(model, autocast=True)[1].any())


def test_what_takes_no_wider_routers_is_refused_and_left_as_it_was() -> None:
    with pytest.raises(UnsupportedRouterError, match="no experts by its config"):
        float32_routers(make_tiny_moe("qwen3"))
    model = build("dbrx", dtype=torch.bfloat16)
    before = {name: value.dtype for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedRouterError, match=r"DbrxForCausalLM cannot have .* run it under torch\.autocast"):
        float32_routers(model)
    assert {name: value.dtype for name, value in model.state_dict().items()} == before
    assert bool(model(input_ids=IDS).logits.isfinite().all())
    assert not any("forward" in module.__dict__ for module in model.modules())
