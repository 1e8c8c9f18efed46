"""Freezing takes the routers' weights out of training, and nothing else."""

from __future__ import annotations

import pytest
from torch import Tensor, nn

from support.gradients import backward
from support.routes import FAMILIES, tokens
from support.toy_moe import ToyLayer, ToyMoE
from torchrl_moe.modules.replay.discovery import freeze_routers
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("replayed", [False, True])
def test_routers_get_no_gradient_and_all_else_does(family: str, replayed: bool) -> None:
    model = make_tiny_moe(family)
    if replayed:
        RouterReplay(model)
    trainable = {name for name, _ in model.named_parameters()}
    frozen = set(freeze_routers(model))
    assert frozen == {name for name in trainable if name.endswith("mlp.gate.weight")}
    assert len(frozen) >= 3
    _, grads = backward(model, tokens())
    assert grads.keys() == trainable - frozen


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
