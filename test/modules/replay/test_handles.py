"""What sits on a model comes off again without a trace, and copies of a model have their own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from support.gradients import assert_same, gradients
from support.routes import FAMILIES, experts_seen, pair, random_routes, recorded, tokens
from torchrl_moe._compat_transformers import checkpoint_activations
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.modules.replay.router_replay import owner_of as owner
from torchrl_moe.testing import make_tiny_moe


def traces(model: nn.Module) -> list[set[str]]:
    return [set(vars(module)) for module in model.modules()]


@pytest.mark.parametrize("family", FAMILIES)
def test_removal_restores_the_model_bit_by_bit_and_leaves_no_attribute(family: str) -> None:
    model = make_tiny_moe(family)
    model.model.layers[2].train()
    native, before, modes = model(tokens()).logits, traces(model), [module.training for module in model.modules()]
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    replay = RouterReplay(model)
    assert [module.training for module in model.modules()] == modes
    assert list(model.state_dict()) == list(weights)
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert traces(model) != before
    assert torch.equal(model(tokens()).logits, native)
    with replay.replay(random_routes(replay)):
        assert not torch.equal(model(tokens()).logits, native)
    replay.remove()
    assert traces(model) == before
    assert owner(model) is None
    assert torch.equal(model(tokens()).logits, native)
    replay.remove()  # harmless
    with pytest.raises(ReplayError, match="was removed"), replay.record():
        pass


def test_a_model_has_one_replay_at_a_time() -> None:
    model, replay = pair()
    with pytest.raises(ReplayError, match="has a RouterReplay already"):
        RouterReplay(model)
    with pytest.raises(ReplayError, match="has a RouterReplay already"):
        RouterReplay(nn.Sequential(model))
    assert RouterReplay.of(model) is RouterReplay.of(nn.Sequential(model)) is replay is owner(model)
    with replay.record(), pytest.raises(ReplayError, match="context of this model is open"):
        model(tokens())
        replay.remove()
    replay.remove()
    assert RouterReplay.of(model).layers == replay.layers
    RouterReplay.of(model).remove()
    assert RouterReplay(model).layers == replay.layers


def test_routes_recorded_in_the_backbone_or_from_embeddings_have_the_batchs_shape() -> None:
    model, replay = pair()
    routes = recorded(model, replay)
    with replay.record() as recording:
        model.model(tokens())
    assert torch.equal(recording.routed_experts, routes)
    with replay.record() as recording:
        model(inputs_embeds=model.get_input_embeddings()(tokens()))
    assert torch.equal(recording.routed_experts, routes)


def test_agreement_is_with_the_routers_own_groups() -> None:
    """A router's best experts inside the replayed groups are not its choice, if its groups are others."""
    model, replay = pair("deepseek_v3", num_hidden_layers=2)
    router, hidden = model.model.layers[1].mlp.gate, []
    hook = router.register_forward_pre_hook(lambda _, args: hidden.append(args[0].flatten(0, -2)))
    routes = recorded(model, replay).long()
    hook.remove()
    scores = (hidden[0] @ router.weight.T).sigmoid() + router.e_score_correction_bias
    groups = scores.view(-1, 4, 4).topk(2).values.sum(-1)
    worst = torch.zeros_like(groups).scatter(1, groups.topk(2, largest=False).indices, 1).bool()
    best = scores.masked_fill(~worst.repeat_interleave(4, 1), -torch.inf).topk(4).indices
    routes[:, :3, 1] = best.view(2, 6, 4)[:, :3]
    with replay.replay(routes, measure=True):
        model(tokens())
    assert replay.report()[1]["agreement"] == 0.5


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda thing: pickle.loads(pickle.dumps(thing))])
def test_a_copied_model_is_native_and_takes_a_replay_of_its_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, replay = pair()
    native = model(tokens()).logits
    routes = random_routes(replay)
    with replay.replay(routes):
        other = copied(model)  # of an open context it knows nothing
        assert torch.equal(other(tokens()).logits, native)
        replayed = model(tokens()).logits
    with torch.no_grad():
        other.model.layers[1].mlp.gate.weight.mul_(0.5)
    own = RouterReplay(other)
    with own.replay(routes), replay.replay(routes):
        assert torch.equal(model(tokens()).logits, replayed)
        assert not torch.equal(other(tokens()).logits, replayed)
    own.remove()
    assert traces(other) == traces(make_tiny_moe())
    with replay.replay(routes):
        assert torch.equal(model(tokens()).logits, replayed)


def test_a_forward_that_someone_else_put_on_a_router_is_kept() -> None:
    model, calls = make_tiny_moe(), []
    router = model.model.layers[1].mlp.gate
    native = router.forward

    def spied(*args: object) -> object:
        calls.append(args)
        return native(*args)

    router.forward = spied
    replay = RouterReplay(model)
    routes = random_routes(replay)
    calls.clear()
    with experts_seen(model) as seen, replay.replay(routes):
        model(tokens())
    assert torch.equal(seen[1][0], routes[:, :, 1].flatten(0, 1))
    assert len(calls) == 1
    replay.remove()
    assert router.forward is spied


def test_a_model_with_dropout_is_wrapped_while_it_trains() -> None:
    """The self-test compares two forward passes, in eval mode."""
    model = make_tiny_moe("qwen3_moe", attention_dropout=0.5).train()
    assert not torch.equal(model(tokens()).logits, model(tokens()).logits)
    RouterReplay(model)
    assert all(module.training for module in model.modules())


def test_router_jitter_is_off_until_removal() -> None:
    model = make_tiny_moe("mixtral", router_jitter_noise=0.1).train()
    assert not torch.equal(model(tokens()).logits, model(tokens()).logits)
    replay = RouterReplay(model)
    with replay.record() as recording:
        own = model(tokens()).logits
    with replay.replay(recording.routed_experts):
        assert torch.equal(model(tokens()).logits, own)
    other = copy.deepcopy(model)
    RouterReplay(other).remove()
    replay_noise = [layer.mlp.jitter_noise for layer in model.model.layers]
    replay.remove()
    assert replay_noise == [0.0] * 4
    for one in (model, other):
        assert [layer.mlp.jitter_noise for layer in one.model.layers] == [0.1] * 4


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_model_copied_between_forward_and_backward_is_on_its_own(reentrant: bool) -> None:
    model, replay = pair()
    checkpoint_activations(model.train(), use_reentrant=reentrant)
    routes = random_routes(replay)

    def loss(this: nn.Module, handle: RouterReplay, given: Tensor) -> Tensor:
        with handle.replay(given):
            return this(tokens()).logits.square().mean()

    loss(model, replay, routes).backward()
    wanted = gradients(model)
    value = loss(model, replay, routes)
    other, own = copy.deepcopy((model, replay))
    loss(other, own, random_routes(own, seed=1)).backward()
    value.backward()
    assert_same(gradients(model), wanted)
    other.zero_grad()
    loss(other, own, routes).backward()
    assert_same(gradients(other), wanted)
