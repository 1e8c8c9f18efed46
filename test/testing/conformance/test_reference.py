"""The model's side: plain logits, logits under given routes, and the gaps of router scores, by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from support.conformance import shared_moe
from support.conforming_engine import small_moe
from torchrl_moe.errors import RouteValueError
from torchrl_moe.modules.replay import router_replay as handles
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.conformance import NotOffered
from torchrl_moe.testing.conformance.reference import Reference

IDS = torch.tensor([7, 1, 200, 33, 5, 90])


def native(model: Any) -> Tensor:
    """Routes ``[T, L, K]`` of the model's own."""
    with RouterReplay.of(model).record() as recording, torch.no_grad():
        model(IDS[None])
    return recording.routed_experts[0].long()


@pytest.fixture
def reference() -> Reference:
    return Reference(shared_moe())


def test_a_gap_is_by_how_much_a_better_expert_was_left_out(reference: Reference) -> None:
    """Scores of qwen3_moe are the softmax of the gate's logits, which a hook reads here."""
    routes = native(shared_moe())
    seen: list[Tensor] = []
    gate = shared_moe().model.layers[1].mlp.gate
    hook = gate.register_forward_hook(lambda _module, _args, out: seen.append(out[0]))
    reference.logits(IDS)
    hook.remove()
    scores = seen[0].softmax(-1)
    best, worst = scores[3].argmax(), scores[3].argmin()
    others = [expert for expert in range(8) if expert not in (int(best), int(worst))]
    routes[3, 1] = torch.tensor([int(worst), others[0]])
    gaps = reference.follow(IDS, routes).gaps
    assert float(gaps[3, 1]) == pytest.approx(float(scores[3, best] - scores[3, worst]))
    assert (gaps[:3, 1] <= 0).all()


def test_rows_may_end_early_and_be_unknown_but_not_wrong(reference: Reference) -> None:
    routes = native(shared_moe())[:4]
    routes[1] = -1
    followed = reference.follow(IDS, routes)
    assert torch.equal(followed.logits, reference.logits(IDS))
    assert (followed.gaps[[1, 4, 5]] == -torch.inf).all()
    assert followed.gaps[[0, 2, 3], 1:].isfinite().all()
    assert (reference.follow(IDS, torch.full((5, 3, 2), -1)).gaps == -torch.inf).all()
    routes[0, 1] = torch.tensor([3, 3])
    with pytest.raises(RouteValueError):
        reference.follow(IDS, routes)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "deepseek_v3"])
def test_other_families_have_gaps_too(family: str) -> None:
    model = make_tiny_moe(family)
    reference, routes = Reference(model), native(model)
    layers = list(reference.layout.moe_layers)  # type: ignore[union-attr]
    assert (reference.follow(IDS, routes).gaps[:, layers] <= 0).all()
    shifted = reference.follow(IDS, routes.roll(1, 0)).gaps[:, layers]
    assert (shifted > 0).float().mean() > 0.5


def test_altered_weights_are_another_model(reference: Reference) -> None:
    other, again = reference.altered(1), reference.altered(1)
    assert torch.equal(other.logits(IDS), again.logits(IDS))
    assert (other.logits(IDS) - reference.logits(IDS)).abs().max() > 0.1
    assert torch.equal(reference.logits(IDS), Reference(shared_moe()).logits(IDS))
    dense = Reference(make_tiny_moe("qwen3"))
    assert dense.layout is None
    assert dense.logits(IDS).shape == (6, 259)
    with pytest.raises(NotOffered, match="routes cannot be replayed in this model"):
        dense.follow(IDS, torch.full((5, 3, 2), -1))


def test_a_model_is_left_as_it_was() -> None:
    model = small_moe().train()
    reference = Reference(model)
    assert not model.training
    reference.close()
    assert model.training
    assert handles.owner_of(model) is None
    replay = RouterReplay(model)
    Reference(model).close()
    assert handles.owner_of(model) is replay
