"""The fields of an output are what a loss may name in its ``out_keys``."""

from __future__ import annotations

from dataclasses import fields

from support.rollouts import BigramActor
from torchrl_moe.objectives import GRPOLoss, GRPOLossOutput, MoERouterLoss


def test_fields_are_the_keys_of_a_loss_with_everything_on() -> None:
    actor = BigramActor()
    terms = {"kl_to_ref_coeff": 1.0, "kl_to_inference_coeff": 1.0, "router_loss": MoERouterLoss(actor, top_k=1)}
    loss = GRPOLoss(actor, **terms, correction="geo")
    assert {field.name for field in fields(GRPOLossOutput)} == set(loss.out_keys)
