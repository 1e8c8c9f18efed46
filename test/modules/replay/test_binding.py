"""Routes are checked before they are bound; a binding says which experts each row uses, and whether it was used."""

from __future__ import annotations

import copy
import pickle
import threading

import numpy as np
import pytest
import torch
from torch import Tensor

from torchrl_moe._errors import ReplayError, RouteShapeError, RouteValueError
from torchrl_moe.data import RoutedExperts
from torchrl_moe.modules.replay.binding import UNSET, Binding, Recording, ReplayState, bind_routes
from torchrl_moe.modules.replay.discovery import RouterSite

U = UNSET
SITES = [RouterSite(layer, f"layers.{layer}.gate", 8, 2, 2) for layer in (1, 2)]
ROUTES = torch.tensor([[U, U], [5, 3], [0, 1]]).repeat(2, 3, 1, 1)
"""[B=2, T=3, L=3, K=2], layer 0 dense."""
SCORES = torch.rand(6, 8, generator=torch.Generator().manual_seed(0))


def bound(
    routes: object = ROUTES,
    mask: Tensor | None = None,
    sites: list[RouterSite] = SITES,
    num_layers: int = 3,
) -> Binding:
    return bind_routes(routes, sites, num_layers, mask, False)


def own(scores: Tensor = SCORES) -> torch.return_types.topk:
    return scores.topk(2)


def changed(place: tuple[int, ...], value: object) -> Tensor:
    routes = ROUTES.clone()
    routes[place] = torch.tensor(value)
    return routes


# what is refused


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (ROUTES[0], r"routes must have shape \[B, T, 3, 2\], got \[3, 3, 2\]"),
        (ROUTES[:, :, 1:], r"got \[2, 3, 2, 2\].*L counts all decoder layers"),
        (ROUTES[..., :1], r"got \[2, 3, 3, 1\]"),
    ],
    ids=["rank", "layers", "width"],
)
def test_routes_of_another_shape_are_refused(routes: Tensor, message: str) -> None:
    with pytest.raises(RouteShapeError, match=message):
        bound(routes)


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (ROUTES.float(), "signed integer dtype, got torch.float32"),
        (ROUTES.clamp(min=0).to(torch.uint8), "signed integer dtype, got torch.uint8.*from_vllm"),
        (changed((1, 2, 1), [5, U]), r"sample 1, token 2, layer 1 holds \[5, -1\], which is partly -1"),
        (changed((1, 2, 1), [8, 3]), r"sample 1, token 2, layer 1 holds expert 8 .* allowed are 0\.\.7"),
        (changed((0, 1, 2), [-2, 3]), "sample 0, token 1, layer 2 holds expert -2"),
        (changed((0, 1, 2), [4, 4]), "sample 0, token 1, layer 2 holds expert 4 twice"),
        (changed((0, 0, 0), [4, 5]), r"layer 0 holds \[4, 5\], but that layer has no router"),
    ],
    ids=["float", "unsigned", "partly", "above", "below", "twice", "dense"],
)
def test_routes_of_wrong_values_are_refused_by_token_and_layer(routes: Tensor, message: str) -> None:
    with pytest.raises(RouteValueError, match=message):
        bound(routes)


def test_a_mask_of_another_shape_is_refused() -> None:
    with pytest.raises(RouteShapeError, match=r"attention_mask must have shape \[2, 3\], got \[2, 4\]"):
        bound(mask=torch.ones(2, 4))


def test_a_layer_of_fewer_experts_per_token_has_trailing_unset_columns() -> None:
    sites = [SITES[0], RouterSite(2, "layers.2.gate", 4, 1, 2)]
    routes = ROUTES.clone()
    routes[:, :, 2] = torch.tensor([3, U])
    binding = bound(routes, sites=sites)
    assert binding.replayed == (0, 6, 6)
    assert binding.choose(sites[1], SCORES[:, :4], own, False).tolist() == [[3]] * 6
    with pytest.raises(RouteValueError, match=r"layers \[2\] choose 1 experts, so columns 1 and up must be -1"):
        bound(ROUTES, sites=sites)
    routes[0, 0, 2, 0] = 4
    with pytest.raises(RouteValueError, match=r"layer 2 holds expert 4 .* allowed are 0\.\.3"):
        bound(routes, sites=sites)


# what is accepted


def test_arrays_and_routed_experts_are_taken() -> None:
    for routes in (RoutedExperts(full=ROUTES.to(torch.int8), batch_size=[2]), np.asarray(ROUTES, dtype=np.int16)):
        assert bound(routes).replayed == (0, 6, 6)


def test_bound_routes_do_not_change_with_the_tensor_they_came_from() -> None:
    routes = ROUTES.clone()
    binding = bound(routes)
    routes.fill_(7)
    assert binding.choose(SITES[0], SCORES, own, False).tolist() == [[5, 3]] * 6


def test_pads_are_live_whatever_their_rows_hold() -> None:
    routes = changed((0, 0, 1), [4, 4])  # nonsense, on a pad
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    binding = bound(routes, mask)
    assert binding.replayed == (0, 5, 5)
    assert binding.choose(SITES[0], SCORES, own, False).tolist() == [own().indices[0].tolist()] + [[5, 3]] * 5


def test_live_rows_are_the_routers_own_and_need_no_topk_where_there_are_none() -> None:
    binding = bound(changed((1, 0, 1), [U, U]))
    chosen = binding.choose(SITES[0], SCORES, own, False)
    assert chosen[3].tolist() == own().indices[3].tolist()
    assert chosen[[0, 1, 2, 4, 5]].tolist() == [[5, 3]] * 5

    def never() -> torch.return_types.topk:
        raise AssertionError("every row of layer 2 is given")

    assert binding.choose(SITES[1], SCORES, never, False).tolist() == [[0, 1]] * 6


def test_groups_hold_the_experts_to_use_and_live_rows_keep_their_own() -> None:
    binding = bound(changed((0, 0, 1), [U, U]))
    scores = torch.tensor([[0.1, 0.5, 0.4, 0.3]]).repeat(6, 1)
    assert binding.groups(SITES[0], scores, lambda: scores.topk(1)).tolist() == [[1, 1]] + [[2, 1]] * 5
    assert binding.groups(SITES[1], scores, lambda: scores.topk(1)).tolist() == [[0, 0]] * 6


def test_another_number_of_rows_is_refused() -> None:
    with pytest.raises(ReplayError, match="layer 1: the forward pass has 5 rows, the routes have 6"):
        bound().choose(SITES[0], SCORES[:5], own, False)


# recording and counting


def test_a_recording_is_unset_on_dense_layers_and_in_missing_columns() -> None:
    recording = Recording(3, 2)
    with pytest.raises(ReplayError, match="nothing was recorded"):
        recording.routed_experts  # noqa: B018
    binding = Binding(layers=(1, 2), recording=recording)
    binding.choose(SITES[0], SCORES, own, False)
    binding.choose(RouterSite(2, "layers.2.gate", 8, 1, 2), SCORES, lambda: SCORES.topk(1), False)
    recording.shape = (2, 3)
    routes = recording.routed_experts
    assert routes.shape == (2, 3, 3, 2)
    assert routes.dtype == torch.int16
    assert (routes[:, :, 0] == U).all()
    assert routes[:, :, 1].flatten(0, 1).tolist() == own().indices.tolist()
    assert routes[:, :, 2].flatten(0, 1).tolist() == [[i, U] for i in SCORES.argmax(-1).tolist()]


def test_a_binding_must_be_used_once_by_every_router() -> None:
    binding = bound()
    with pytest.raises(ReplayError, match="no forward pass of this model ran"):
        binding.check_used()
    binding.choose(SITES[0], SCORES, own, False)
    with pytest.raises(ReplayError, match="layer 2 ran 0 times"):
        binding.check_used()
    binding.choose(SITES[1], SCORES, own, False)
    binding.choose(SITES[1], SCORES, own, recompute=True)
    binding.check_used()
    binding.choose(SITES[0], SCORES, own, False)
    with pytest.raises(ReplayError, match="one forward pass per context: layer 1 ran 2 times"):
        binding.check_used()


def test_agreement_is_of_sets_and_of_replayed_rows() -> None:
    binding = bound(changed((0, 0, 1), [U, U]))
    choice = torch.tensor([[5, 3], [3, 5], [5, 4], [5, 3], [3, 4], [5, 3]])
    binding.compare(SITES[0], choice)
    report = binding.report()
    assert report[1].to_dict() == {"replayed": 5, "live": 1, "agreement": 3 / 5}
    assert report[2].to_dict() == {"replayed": 6, "live": 0, "agreement": None}


# state


def test_only_its_own_thread_sees_a_binding() -> None:
    state, binding, errors = ReplayState(owned=True), bound(), []

    def other() -> None:
        for use in (lambda: state.binding, lambda: state.opened(binding).__enter__()):
            with pytest.raises(ReplayError, match="another thread") as error:
                use()
            errors.append(error)

    with state.opened(binding):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert state.binding is binding
    assert len(errors) == 2
    assert state.binding is None


def test_contexts_do_not_nest_and_close_on_errors() -> None:
    state = ReplayState(owned=True)
    with state.opened(bound()), pytest.raises(ReplayError, match="open already"), state.opened(bound()):
        pass
    with pytest.raises(KeyError), state.opened(bound()):
        raise KeyError
    with state.opened(bound()):
        pass


def test_a_copied_state_has_no_binding_and_no_owner() -> None:
    state = ReplayState(owned=True)
    with state.opened(bound()):
        for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert (other.binding, other.owned) == (None, False)
            with pytest.raises(ReplayError, match="removed"), other.opened(bound()):
                pass
