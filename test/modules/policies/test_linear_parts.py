"""The parts of a head multiply and add up to what the head itself computes, in every state that peft knows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from torchrl_moe.modules.policies.unstack import linear_parts, logit_transform, obstacle
from torchrl_moe.ops import LogitTransform

HIDDEN = torch.randn(5, 8, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.lm_head: Any = nn.Linear(8, 11, bias=bias)


def adapted(**config: Any) -> tuple[nn.Module, Any]:
    """A head with one adapter whose B is not 0, as it is at first."""
    config = {"r": 2, "lora_alpha": 6, "target_modules": ["lm_head"], **config}
    model: Any = inject_adapter_in_model(LoraConfig(**config), Model(), "mine")
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            nn.init.normal_(parameter)
    return model, model.lm_head


def assert_parts(head: nn.Module, count: int) -> None:
    assert obstacle(head) == ""
    hiddens, weights, bias = linear_parts(head, HIDDEN)
    assert len(hiddens) == len(weights) == count
    total: Tensor | int = sum(h @ w.T for h, w in zip(hiddens, weights, strict=True))
    torch.testing.assert_close(total if bias is None else total + bias, head(HIDDEN))


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_one_part(bias: bool) -> None:
    head = Model(bias).lm_head
    assert_parts(head, 1)
    assert linear_parts(head, HIDDEN)[1][0] is head.weight


def test_lora_is_a_part_of_its_own_as_long_as_it_acts() -> None:
    _, head = adapted()
    plain = head.base_layer(HIDDEN)
    assert_parts(head, 2)
    head.merge()
    assert_parts(head, 1)
    assert (head(HIDDEN) - plain).abs().max() > 0.1
    head.enable_adapters(False)  # and merged: its own forward takes the adapter out
    hiddens, weights, bias = linear_parts(head, HIDDEN)
    torch.testing.assert_close(hiddens[0] @ weights[0].T + bias, plain, atol=1e-5, rtol=0)
    assert_parts(head, 1)
    head.enable_adapters(True)
    assert_parts(head, 2)


def test_each_active_adapter_is_a_part() -> None:
    model, head = adapted()
    inject_adapter_in_model(LoraConfig(r=3, target_modules=["lm_head"]), model, "yours")
    head = model.lm_head
    nn.init.normal_(head.lora_B["yours"].weight)
    head.set_adapter(["mine", "yours"])
    assert_parts(head, 3)
    head.set_adapter("yours")
    assert_parts(head, 2)


def test_a_head_that_is_trained_whole_is_its_copy() -> None:
    from peft import get_peft_model

    class Body(Model):
        config = SimpleNamespace(model_type="x", to_dict=dict)

        def __init__(self) -> None:
            super().__init__()
            self.proj = nn.Linear(8, 8)

    model = get_peft_model(Body(), LoraConfig(target_modules=["proj"], modules_to_save=["lm_head"]))
    head = model.base_model.model.lm_head
    nn.init.normal_(head.modules_to_save["default"].weight)
    assert_parts(head, 1)
    with model.disable_adapter():
        assert_parts(head, 1)
        assert linear_parts(head, HIDDEN)[1][0] is head.original_module.weight


class Doubling(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def moved() -> nn.Module:
    head = nn.Linear(8, 11)
    head.forward = lambda x: x
    return head


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (nn.Sequential(nn.Linear(8, 11)), "it ends in Sequential, which is not a linear layer"),
        (Doubling(8, 11), "it ends in Doubling, which is not a linear layer"),
        (moved(), "its forward is replaced"),
        (adapted(use_dora=True)[1], "its adapter 'mine' is DoraLinearVariant, not plain LoRA"),
        (adapted(lora_bias=True)[1], "its adapter 'mine' has a bias"),
    ],
)
def test_what_is_more_than_products_is_named(head: nn.Module, reason: str) -> None:
    assert obstacle(head).startswith(reason)


def test_a_head_that_ranks_share_is_known_by_its_weight() -> None:
    """Tensor parallelism stands in for its forward; what it computes with it, test_ranks.py tests."""
    head: Any = moved()
    mesh = DeviceMesh("cpu", [0, 1], _init_backend=False, _rank=0)
    head.weight = nn.Parameter(DTensor.from_local(head.weight.detach(), mesh, [Shard(0)], run_check=False))
    assert obstacle(head) == ""
    assert linear_parts(head, HIDDEN)[1][0] is head.weight


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ({}, {}),
        ({"logit_scale": 0.25}, {"scale": 0.25}),
        ({"logits_scaling": 4.0}, {"scale": 0.25}),
        ({"lm_head_multiplier": 2}, {"scale": 2.0}),
        ({"final_logit_softcapping": 30.0, "logit_scale": None}, {"soft_cap": 30.0}),
        ({"final_logit_softcapping": None, "logits_scaling": 0}, {}),
    ],
)
def test_transforms_are_read_from_the_config(config: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert logit_transform(SimpleNamespace(**config)) == LogitTransform(**wanted)
    nested = SimpleNamespace(get_text_config=lambda: SimpleNamespace(**config))
    assert logit_transform(nested) == LogitTransform(**wanted)
    assert logit_transform(None) == LogitTransform()
