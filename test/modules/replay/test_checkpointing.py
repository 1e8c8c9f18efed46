"""A checkpointed layer's second run, in ``backward``, follows the routes of its first: no gradient changes.

Without the capture this is silently wrong (reentrant) or a CheckpointError, see the module's docstring.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import cache, partial
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
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing import make_tiny_moe

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
BATCHES = (tokens(seed=1), tokens(seed=2))


def checkpoint_layers(model: nn.Module, reentrant: bool) -> None:
    checkpoint_activations(model, use_reentrant=reentrant)
    model.train()


def loss(model: nn.Module, replay: RouterReplay, ids: Tensor, routes: Tensor, measure: bool = False) -> Tensor:
    """The context is closed by the time of ``backward``."""
    with replay.replay(routes, measure=measure):
        return loss_of(model(ids).logits)


def two_losses(
    model: nn.Module, replay: RouterReplay, routes: list[Tensor], measure: bool = False
) -> dict[str, Tensor]:
    """Two forward passes with routes of their own, then one backward pass."""
    losses = [loss(model, replay, ids, given, measure) for ids, given in zip(BATCHES, routes, strict=True)]
    sum(losses).backward()
    return gradients(model)


def routes_of(replay: RouterReplay) -> list[Tensor]:
    """Random ones, of which the second has live rows."""
    first, second = random_routes(replay, seed=1), random_routes(replay, seed=2)
    second[0, :3] = U
    return [first, second]


@REENTRANT
@pytest.mark.parametrize("is_recorded", [True, False])
def test_a_recorded_or_plain_forward_is_recomputed_on_its_own_routes(reentrant: bool, is_recorded: bool) -> None:
    model, replay = pair()
    loss_of(model.train()(BATCHES[0]).logits).backward()
    wanted = gradients(model)
    checkpoint_layers(model, reentrant)
    loss(model, replay, BATCHES[1], random_routes(replay))
    with replay.record() if is_recorded else nullcontext() as recording:
        value = loss_of(model(BATCHES[0]).logits)
    before = recording.routed_experts.clone() if is_recorded else None
    with replay.replay(random_routes(replay)):  # somebody else's context is open in backward
        model(BATCHES[1])
        value.backward()
    assert_same(gradients(model), wanted)
    assert before is None or torch.equal(recording.routed_experts, before)


@REENTRANT
def test_layers_may_be_checkpointed_after_a_context_and_run_outside_of_one(reentrant: bool) -> None:
    model, replay = pair()
    loss_of(model.train()(BATCHES[0]).logits).backward()
    wanted = gradients(model)
    with torch.no_grad():
        loss(model, replay, BATCHES[1], random_routes(replay))
    checkpoint_layers(model, reentrant)
    value = loss_of(model(BATCHES[0]).logits)
    loss(model, replay, BATCHES[1], random_routes(replay))
    value.backward()
    assert_same(gradients(model), wanted)


KEPT = {torch.ops.aten.mm.default, torch.ops.aten.topk.default, torch.ops.aten.sort.default}


def keep_some(_: object, op: object, *_args: object, **_kwargs: object) -> CheckpointPolicy:
    """Of selective checkpointing: which results are kept, in the order of their making, for the second run."""
    return CheckpointPolicy.MUST_SAVE if op in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def every_other(model: nn.Module, use_reentrant: bool) -> None:
    checkpoint_activations(model, use_reentrant=use_reentrant)
    for layer in model.model.layers[::2]:
        layer.gradient_checkpointing = False


def wrapped_by_torch(model: nn.Module, kind: str) -> None:
    for i, layer in enumerate(model.model.layers):
        how = torch_wrapper.CheckpointImpl[kind]
        model.model.layers[i] = torch_wrapper.checkpoint_wrapper(layer, checkpoint_impl=how)


HOWS: dict[str, Callable[[nn.Module], None]] = {
    "reentrant": partial(checkpoint_activations, use_reentrant=True),
    "non-reentrant": partial(checkpoint_activations, use_reentrant=False),
    "every other layer, reentrant": partial(every_other, use_reentrant=True),
    "every other layer, non-reentrant": partial(every_other, use_reentrant=False),
    "torch, reentrant": partial(wrapped_by_torch, kind="REENTRANT"),
    "torch, non-reentrant": partial(wrapped_by_torch, kind="NO_REENTRANT"),
    "selective": partial(checkpoint_activations, context_fn=partial(create_selective_checkpoint_contexts, keep_some)),
}


CASES = [
    *((how, first, measure, "deepseek_v3") for how in HOWS for first, measure in (("us", False), ("them", True))),
    *((how, "us", False, family) for how in ("reentrant", "non-reentrant") for family in FAMILIES[:3]),
]
"""deepseek_v3: its groups are kept by selective checkpointing too."""


WITHOUT_CACHE: dict[str, Any] = {"use_cache": False}
"""Torch's wrapper does not switch it off: a second run would add."""


@cache
def unchecked(family: str, measure: bool) -> tuple[Any, dict[str, Tensor]]:
    """Routes, and the gradients under them of a model without checkpointing."""
    plain, replay = pair(family, **WITHOUT_CACHE)
    routes = routes_of(replay)
    return routes, two_losses(plain.train(), replay, routes, measure)


@pytest.mark.parametrize(("how", "first", "measure", "family"), CASES)
def test_however_layers_are_checkpointed_gradients_stay(how: str, first: str, measure: bool, family: str) -> None:
    """Two micro batches and one backward pass, with replay put on before checkpointing and after it."""
    routes, wanted = unchecked(family, measure)
    model = make_tiny_moe(family, **WITHOUT_CACHE).train()
    if first == "them":
        HOWS[how](model)
    replay = RouterReplay(model)
    if first == "us":
        HOWS[how](model)
    got = two_losses(model, replay, routes, measure)
    assert_same({name.replace("_checkpoint_wrapped_module.", ""): grad for name, grad in got.items()}, wanted)
    done = replay.report()[3]
    assert (done["replayed"], done["live"], done["refused"], done["agreement"] is None) == (9, 3, 0, not measure)


def checkpoint_by_hand(model: nn.Module, reentrant: bool) -> None:
    for layer in model.train().model.layers:
        forward = layer.forward
        layer.forward = lambda hidden, forward=forward, **kwargs: checkpoint(
            partial(forward, **kwargs), hidden, use_reentrant=reentrant
        )


@REENTRANT
@pytest.mark.parametrize("where", ["after the context", "inside it", "gradients switched on inside it"])
def test_a_checkpoint_that_nobody_told_us_of_is_an_error(reentrant: bool, where: str) -> None:
    """Reentrant, its second run would silently choose other experts."""
    model, replay = pair(use_cache=False)
    checkpoint_by_hand(model, reentrant)
    loss_of(model(BATCHES[0]).logits).backward()  # there was no context that it could belong to

    def run() -> None:
        if where == "inside it":
            with replay.replay(random_routes(replay)):
                loss_of(model(BATCHES[0]).logits).backward()
        inside = where == "gradients switched on inside it"
        with torch.set_grad_enabled(not inside), replay.replay(random_routes(replay)), torch.enable_grad():
            value = loss_of(model(BATCHES[0]).logits)
        value.backward()

    with pytest.raises(ReplayError, match=r"inside backward\(\).*gradient_checkpointing_enable"):
        run()


@REENTRANT
def test_an_error_in_the_second_run_leaves_nothing_behind(reentrant: bool) -> None:
    model, replay = pair()
    checkpoint_layers(model, reentrant)
    native, routes = model(BATCHES[0]).logits, random_routes(replay)
    loss(model, replay, BATCHES[0], routes).backward()
    wanted = gradients(model)
    value = loss(model, replay, BATCHES[0], routes)
    hook = model.model.layers[2].mlp.experts.register_forward_pre_hook(lambda *_: {}["out of memory, say"])
    with pytest.raises(KeyError):
        value.backward()
    hook.remove()
    model.zero_grad()
    assert torch.equal(model(BATCHES[0]).logits, native)
    loss(model, replay, BATCHES[0], routes).backward()
    assert_same(gradients(model), wanted)


def test_removal_before_backward_is_an_error_and_after_it_leaves_the_layers_own_functions() -> None:
    model, replay = pair()
    checkpoint_layers(model, True)
    own = [layer._gradient_checkpointing_func for layer in model.model.layers]
    value = loss(model, replay, BATCHES[0], random_routes(replay))
    assert all(layer._gradient_checkpointing_func not in own for layer in model.model.layers)
    replay.remove()
    assert [layer._gradient_checkpointing_func for layer in model.model.layers] == own
    with pytest.raises(ReplayError, match=r"remove\(\) came before the backward"):
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
