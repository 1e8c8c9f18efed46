"""A checkpointed layer's second run, in ``backward``, follows the routes of its first: no gradient changes.

Without the capture this is silently wrong (reentrant) or a CheckpointError, see the module's docstring.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as torch_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from support.gradients import assert_same, gradients, loss_of
from support.routes import FAMILIES, U, pair, random_routes, tokens
from torchrl_moe._compat_transformers import checkpoint_activations
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules.replay.binding import wrap_checkpoints
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
BATCHES = (tokens(seed=1), tokens(seed=2))


def checkpoint_layers(model: nn.Module, reentrant: bool) -> None:
    checkpoint_activations(model, use_reentrant=reentrant)
    model.train()


def loss(model: nn.Module, replay: RouterReplay, ids: Tensor, routes: Tensor) -> Tensor:
    """The context is closed by the time of ``backward``."""
    with replay.replay(routes):
        return loss_of(model(ids).logits)


def two_losses(model: nn.Module, replay: RouterReplay, routes: list[Tensor]) -> dict[str, Tensor]:
    """Two forward passes with routes of their own, then one backward pass."""
    losses = [loss(model, replay, ids, given) for ids, given in zip(BATCHES, routes, strict=True)]
    sum(losses).backward()
    return gradients(model)


def routes_of(replay: RouterReplay) -> list[Tensor]:
    """Random ones, of which the second has live rows."""
    first, second = random_routes(replay, seed=1), random_routes(replay, seed=2)
    second[0, :3] = U
    return [first, second]


@REENTRANT
@pytest.mark.parametrize("family", FAMILIES)
def test_two_micro_batches_and_one_backward_equal_no_checkpointing(family: str, reentrant: bool) -> None:
    model, replay = pair(family)
    model.train()
    routes = routes_of(replay)
    wanted = two_losses(model, replay, routes)
    checkpoint_layers(model, reentrant)  # after construction
    assert_same(two_losses(model, replay, routes), wanted)
    assert replay.report()[3] == {"replayed": 9, "live": 3, "refused": 0, "agreement": None}


@REENTRANT
def test_checkpointing_enabled_before_construction_equals_no_checkpointing(reentrant: bool) -> None:
    model, replay = pair()
    wanted = two_losses(model.train(), replay, routes_of(replay))
    checkpointed = make_tiny_moe()
    checkpoint_layers(checkpointed, reentrant)
    replay = RouterReplay(checkpointed)
    assert_same(two_losses(checkpointed, replay, routes_of(replay)), wanted)


@REENTRANT
def test_a_recorded_forward_is_recomputed_on_its_own_routes(reentrant: bool) -> None:
    model, replay = pair()
    loss_of(model.train()(BATCHES[0]).logits).backward()
    wanted = gradients(model)
    checkpoint_layers(model, reentrant)
    with replay.record() as recording:
        value = loss_of(model(BATCHES[0]).logits)
    before = recording.routed_experts.clone()
    with replay.replay(random_routes(replay)):  # somebody else's context is open in backward
        model(BATCHES[1])
        value.backward()
    assert_same(gradients(model), wanted)
    assert torch.equal(recording.routed_experts, before)


@REENTRANT
def test_a_plain_forward_is_recomputed_natively_inside_another_forwards_context(reentrant: bool) -> None:
    model, replay = pair()
    loss_of(model.train()(BATCHES[0]).logits).backward()
    wanted = gradients(model)
    checkpoint_layers(model, reentrant)
    loss(model, replay, BATCHES[1], random_routes(replay))
    plain = loss_of(model(BATCHES[0]).logits)
    with replay.replay(random_routes(replay)):
        model(BATCHES[1])
        plain.backward()
    assert_same(gradients(model), wanted)


@pytest.mark.parametrize("implementation", ["REENTRANT", "NO_REENTRANT"])
def test_layers_that_torch_wraps_equal_no_checkpointing(implementation: str) -> None:
    model, replay = pair(use_cache=False)  # torch's wrapper does not switch it off, and the second run would add to it
    routes = routes_of(replay)
    wanted = two_losses(model.train(), replay, routes)
    kind = torch_wrapper.CheckpointImpl[implementation]
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch_wrapper.checkpoint_wrapper(layer, checkpoint_impl=kind)
    got = two_losses(model, replay, routes)
    assert_same({name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.items()}, wanted)


KEPT = {torch.ops.aten.mm.default, torch.ops.aten.topk.default, torch.ops.aten.sort.default}


def keep_some(_: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """Of selective checkpointing: which results are kept, in the order of their making, for the second run."""
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


@pytest.mark.parametrize("measure", [False, True])
def test_selective_checkpointing_equals_no_checkpointing(measure: bool) -> None:
    model, replay = pair("deepseek_v3")
    routes = routes_of(replay)
    wanted = two_losses(model.train(), replay, routes)
    contexts = partial(create_selective_checkpoint_contexts, keep_some)
    checkpoint_activations(model, context_fn=contexts)
    losses = []
    for ids, given in zip(BATCHES, routes, strict=True):
        with replay.replay(given, measure=measure):
            losses.append(loss_of(model(ids).logits))
    sum(losses).backward()
    assert_same(gradients(model), wanted)


def checkpoint_by_hand(model: nn.Module, reentrant: bool) -> None:
    for layer in model.train().model.layers:
        forward = layer.forward
        layer.forward = lambda hidden, forward=forward, **kwargs: checkpoint(
            partial(forward, **kwargs), hidden, use_reentrant=reentrant
        )


def test_it_is_an_error_too_where_gradients_are_switched_on_inside_the_context() -> None:
    model, replay = pair(use_cache=False)
    checkpoint_by_hand(model, True)
    loss_of(model(BATCHES[0]).logits).backward()  # there was no context that it could belong to
    with torch.no_grad(), replay.replay(random_routes(replay)), torch.enable_grad():
        value = loss_of(model(BATCHES[0]).logits)
    with pytest.raises(ReplayError, match=r"inside backward\(\)"):
        value.backward()


@REENTRANT
def test_two_backward_passes_may_run_in_two_threads(reentrant: bool) -> None:
    """As autograd's own threads do, of which each device has one."""
    model, replay = pair()
    routes = routes_of(replay)
    wanted = two_losses(model.train(), replay, routes)
    checkpoint_layers(model, reentrant)
    losses = [loss(model, replay, ids, given) for ids, given in zip(BATCHES, routes, strict=True)]
    barrier = threading.Barrier(2)

    def meet(*_: object) -> None:
        if torch._C._current_graph_task_id() != -1:
            barrier.wait(60)  # both are in their second run of this layer

    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(meet)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(torch.Tensor.backward, losses))
    assert_same(gradients(model), wanted, atol=1e-6)


@REENTRANT
@pytest.mark.parametrize("inside", [False, True])
def test_a_checkpoint_that_nobody_told_us_of_is_an_error(reentrant: bool, inside: bool) -> None:
    """Reentrant, its second run would silently choose other experts."""
    model, replay = pair(use_cache=False)
    checkpoint_by_hand(model, reentrant)
    message = r"inside backward\(\).*gradient_checkpointing_enable"
    if inside:
        with pytest.raises(ReplayError, match=message), replay.replay(random_routes(replay)):
            loss_of(model(BATCHES[0]).logits).backward()
    else:
        value = loss(model, replay, BATCHES[0], random_routes(replay))
        with pytest.raises(ReplayError, match=message):
            value.backward()


@REENTRANT
def test_an_error_in_the_second_run_leaves_nothing_behind(reentrant: bool) -> None:
    model, replay = pair()
    checkpoint_layers(model, reentrant)
    native, routes = model(BATCHES[0]).logits, random_routes(replay)
    loss(model, replay, BATCHES[0], routes).backward()
    wanted = gradients(model)
    value = loss(model, replay, BATCHES[0], routes)

    def fail(*_: object) -> None:
        raise KeyError("out of memory, say")

    hook = model.model.layers[2].mlp.experts.register_forward_pre_hook(fail)
    with pytest.raises(KeyError):
        value.backward()
    hook.remove()
    model.zero_grad()
    assert torch.equal(model(BATCHES[0]).logits, native)
    loss(model, replay, BATCHES[0], routes).backward()
    assert_same(gradients(model), wanted)


@REENTRANT
def test_every_other_layer_may_be_checkpointed(reentrant: bool) -> None:
    model, replay = pair()
    routes = routes_of(replay)
    wanted = two_losses(model.train(), replay, routes)
    checkpoint_layers(model, reentrant)
    for layer in model.model.layers[::2]:
        layer.gradient_checkpointing = False
    assert_same(two_losses(model, replay, routes), wanted)


def test_removal_before_backward_is_an_error_and_after_it_leaves_the_layers_own_functions() -> None:
    model, replay = pair()
    checkpoint_layers(model, True)
    own = [layer._gradient_checkpointing_func for layer in model.model.layers]
    value = loss(model, replay, *BATCHES[:1], random_routes(replay))
    assert all(layer._gradient_checkpointing_func not in own for layer in model.model.layers)
    replay.remove()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == own
    with pytest.raises(ReplayError, match=r"remove\(\) came before the backward"):
        value.backward()
    model, replay = pair()
    checkpoint_layers(model, False)
    wrap_checkpoints(model, replay._state)
    once: list[Any] = [layer._gradient_checkpointing_func for layer in model.model.layers]
    wrap_checkpoints(model, replay._state)
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == once
