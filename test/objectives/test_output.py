"""The fields of an output are what a loss may name in its ``out_keys``; each loss has its class, or its subclass's."""

from __future__ import annotations

from dataclasses import fields

import pytest

from support.rollouts import BigramActor, ragged, samples
from torchrl_moe.objectives import (
    DAPO,
    CISPOLoss,
    CISPOLossOutput,
    DAPOLossOutput,
    GRPOLoss,
    GRPOLossOutput,
    GSPOLoss,
    LLMLossOutput,
    MoERouterLoss,
)


def test_fields_are_the_keys_of_a_loss_with_everything_on() -> None:
    actor = BigramActor()
    terms = {"kl_to_ref_coeff": 1.0, "kl_to_inference_coeff": 1.0, "router_loss": MoERouterLoss(actor, top_k=1)}
    loss = GRPOLoss(actor, **terms, correction="geo")
    assert {field.name for field in fields(GRPOLossOutput)} == set(loss.out_keys)


@pytest.mark.parametrize(
    ("loss", "output"),
    [(GRPOLoss, GRPOLossOutput), (GSPOLoss, GRPOLossOutput), (DAPO, DAPOLossOutput), (CISPOLoss, CISPOLossOutput)],
)
def test_each_loss_returns_its_class(loss: type[GRPOLoss], output: type[LLMLossOutput]) -> None:
    out = loss(BigramActor())(ragged(samples([(2, 3), (1, 4)])))
    assert type(out) is output
    assert isinstance(out, LLMLossOutput)
    others = {GRPOLossOutput, DAPOLossOutput, CISPOLossOutput} - {output}
    assert not isinstance(out, tuple(others))  # siblings, as TorchRL's are


def test_a_subclass_says_what_it_returns() -> None:
    class Output(GRPOLossOutput):
        pass

    class Loss(GRPOLoss):
        output_type = Output

    assert type(Loss(BigramActor())(ragged(samples([(2, 3)])))) is Output
