"""Routers are found by what they do in one small forward pass; what cannot be replayed is refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from support.gradients import backward
from support.routes import FAMILIES, tokens
from support.toy_moe import PhimoeTopKRouter, RenumberingRouter, SortingRouter, ToyLayer, ToyMoE
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.replay.discovery import discover, dry_inputs, freeze_routers
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe


def test_the_score_of_a_single_group_is_not_taken_for_the_choice_of_experts() -> None:
    model = make_tiny_moe("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=2)
    assert {(site.top_k, site.rank) for site in discover(model)} == {(2, 2)}


def ranks_none() -> nn.Module:
    model = make_tiny_moe("qwen3")
    model.config.num_experts = 8
    return model


def looped() -> nn.Module:
    model = ToyMoE()
    model.layers.append(model.layers[1])  # weights once, and one name
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Linear(2, 2), "no experts by its config .*dense model"),
        (ToyMoE(SortingRouter), r"layers\.0\.experts .* nothing in layer 0 ranks them with topk"),
        (ToyMoE(RenumberingRouter), r"gates\.0 \(RenumberingRouter\): other ids reach .* of layer 0"),
        (ToyMoE(num_experts=8, is_encoder_decoder=True), "encoder-decoder"),
        (ToyMoE(per_layer=2), r"layer 0 has two .* layers\.0\.gates\.0 and layers\.0\.gates\.1"),
        (ToyMoE(PhimoeTopKRouter), "PhimoeTopKRouter.* cannot be replayed: sparsemixer"),
        (looped(), r"gates\.0 \(ToyRouter\) .* runs layer 1 2 times, and"),
        (ranks_none(), "no module ranks experts with topk"),
    ],
)
def test_what_cannot_be_replayed_is_refused_by_name(model: nn.Module, message: str) -> None:
    with pytest.raises(UnsupportedRouterError, match=message):
        discover(model)


def test_ids_that_a_hook_rewrites_for_expert_parallelism_are_let_pass() -> None:
    model = ToyMoE()
    model.layers[0].gates[0].register_forward_hook(lambda _, __, out: (out[0], out[1] % 4))
    assert [site.layer for site in discover(model)] == [0, 1]


@pytest.mark.parametrize("num_experts", [[7], [7, 8, 9]])
def test_the_dry_forward_has_not_as_many_tokens_as_there_are_experts(num_experts: list[int]) -> None:
    length = dry_inputs(ToyMoE(num_experts=num_experts))["input_ids"].shape[1]
    assert length >= 7 and length not in num_experts


def test_discovery_leaves_neither_hooks_nor_gradients_and_draws_no_random_numbers() -> None:
    model = make_tiny_moe()
    state = torch.get_rng_state()
    discover(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


# freezing takes the routers' weights out of training, and nothing else


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replayed", [False, True])
def test_routers_get_no_gradient_and_all_else_does(family: str, replayed: bool) -> None:
    model = make_tiny_moe(family)
    if replayed:
        RouterReplay(model)
    trainable = {name for name, _ in model.named_parameters()}
    frozen = set(freeze_routers(model))
    assert len(frozen) >= 3 and frozen == {name for name in trainable if name.endswith("mlp.gate.weight")}
    assert backward(model, tokens())[1].keys() == trainable - frozen


class BlockRouter(nn.Module):
    """Ranks the experts in the block that holds them."""

    def __init__(self) -> None:
        super().__init__()
        inside = ToyLayer([nn.Identity()])
        self.experts, self.router = inside.experts, nn.Linear(16, 8)
        self.shared_expert_gate = nn.Linear(16, 1)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        weights, chosen = self.router(hidden.flatten(0, -2)).softmax(-1).topk(2)
        return weights, chosen


def test_experts_of_a_block_that_routes_stay_trainable() -> None:
    model = ToyMoE(BlockRouter)
    frozen = freeze_routers(model)
    assert frozen == [f"layers.{i}.gates.0.router.{name}" for i in (0, 1) for name in ("weight", "bias")]
    assert {name for name, p in model.named_parameters() if p.requires_grad} >= {
        "layers.0.gates.0.experts.weight",
        "layers.0.gates.0.shared_expert_gate.weight",
        "layers.0.experts.weight",
    }
