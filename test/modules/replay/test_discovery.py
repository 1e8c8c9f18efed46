"""Routers are found by what they do in one small forward pass; what cannot be replayed is refused by name."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from support.routes import FAMILIES
from support.toy_moe import PhimoeTopKRouter, RenumberingRouter, SortingRouter, ToyMoE
from torchrl_moe.errors import UnsupportedRouterError
from torchrl_moe.modules.replay.discovery import RouterSite, discover, dry_inputs, number_of_layers
from torchrl_moe.testing import make_tiny_moe

FOUND = {"qwen3_moe": ((1, 2, 3), 16, 4), "mixtral": ((0, 1, 2, 3), 8, 2), "olmoe": ((0, 1, 2, 3), 16, 4)}
FOUND["deepseek_v3"] = FOUND["qwen3_moe"]
SCORING = {"qwen3_moe": "softmax, normalised", "mixtral": "softmax, normalised", "olmoe": "softmax"}
SCORING["deepseek_v3"] = "sigmoid + bias, normalised"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_of_a_family_are_found(family: str) -> None:
    model = make_tiny_moe(family)
    layers, num_experts, top_k = FOUND[family]
    sites = [RouterSite(i, f"model.layers.{i}.mlp.gate", num_experts, top_k, 2, SCORING[family]) for i in layers]
    assert discover(model) == sites
    assert [site.layer_name for site in sites] == [f"model.layers.{layer}" for layer in layers]
    assert number_of_layers(model) == 4


def test_the_score_of_a_single_group_is_not_taken_for_the_choice_of_experts() -> None:
    model = make_tiny_moe("deepseek_v3", n_group=1, topk_group=1, num_experts_per_tok=2)
    assert {(site.top_k, site.rank) for site in discover(model)} == {(2, 2)}


@pytest.mark.parametrize(
    "config",
    [
        {"num_local_experts": 8},
        {"num_experts": [8, 8]},
        {"text_config": SimpleNamespace(n_routed_experts=8)},
        {"ffn_config": SimpleNamespace(moe_num_experts=8)},
    ],
)
def test_the_number_of_experts_may_stand_anywhere_in_the_config(config: dict[str, object]) -> None:
    sites = discover(ToyMoE(**config))
    assert [(site.layer, site.name, site.num_experts, site.top_k) for site in sites] == [
        (0, "layers.0.gates.0", 8, 2),
        (1, "layers.1.gates.0", 8, 2),
    ]


@pytest.mark.parametrize("model", [make_tiny_moe("qwen3"), nn.Linear(2, 2)], ids=["config", "no config"])
def test_a_dense_model_is_refused(model: nn.Module) -> None:
    with pytest.raises(UnsupportedRouterError, match=r"no experts by its config .*dense model"):
        discover(model)


def test_experts_that_topk_does_not_choose_are_refused() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"layers\.0\.experts .* nothing in layer 0 ranks them with topk"):
        discover(ToyMoE(SortingRouter))


def test_experts_that_get_other_ids_than_topk_chose_are_refused() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"gates\.0 \(RenumberingRouter\): other ids reach .* of layer 0"):
        discover(ToyMoE(RenumberingRouter))


def test_ids_that_a_hook_rewrites_for_expert_parallelism_are_let_pass() -> None:
    model = ToyMoE()
    model.layers[0].gates[0].register_forward_hook(lambda _, __, out: (out[0], out[1] % 4))
    assert [site.layer for site in discover(model)] == [0, 1]


@pytest.mark.parametrize("num_experts", [[7], [7, 8, 9]])
def test_the_dry_forward_has_not_as_many_tokens_as_there_are_experts(num_experts: list[int]) -> None:
    length = dry_inputs(ToyMoE(num_experts=num_experts))["input_ids"].shape[1]
    assert length >= 7
    assert length not in num_experts


def test_an_encoder_decoder_is_refused() -> None:
    with pytest.raises(UnsupportedRouterError, match="encoder-decoder"):
        discover(ToyMoE(num_experts=8, is_encoder_decoder=True))


def test_two_routers_in_one_layer_are_refused() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"layer 0 has two .* layers\.0\.gates\.0 and layers\.0\.gates\.1"):
        discover(ToyMoE(per_layer=2))


def test_a_layer_that_runs_several_times_in_a_forward_pass_is_refused() -> None:
    model = ToyMoE()
    model.layers.append(model.layers[1])  # weights once, and one name
    with pytest.raises(UnsupportedRouterError, match=r"gates\.0 \(ToyRouter\) .* runs layer 1 2 times, and"):
        discover(model)


def test_a_router_known_to_hide_its_choice_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedRouterError, match=r"PhimoeTopKRouter.* cannot be replayed: sparsemixer"):
        discover(ToyMoE(PhimoeTopKRouter))


def test_a_model_that_ranks_no_experts_is_refused() -> None:
    model = make_tiny_moe("qwen3")
    model.config.num_experts = 8
    with pytest.raises(UnsupportedRouterError, match="no module ranks experts with topk"):
        discover(model)


def test_discovery_leaves_neither_hooks_nor_gradients_and_draws_no_random_numbers() -> None:
    model = make_tiny_moe()
    state = torch.get_rng_state()
    discover(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(p.grad is None for p in model.parameters())
