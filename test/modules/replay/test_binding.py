"""A binding says which experts each row uses, and whether it was used."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from support.toy_moe import SCORES, SITES, U, bound, changed, own
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules.replay.binding import Binding, Recording, ReplayState
from torchrl_moe.modules.replay.discovery import RouterSite


def test_a_recorded_choice_is_made_again_in_a_recompute_though_the_kernel_may_break_ties_another_way() -> None:
    binding = Binding(layers=(1,), recording=Recording(3, 2))
    first = binding.choose(SITES[0], SCORES, own, recompute=False)
    again = binding.choose(SITES[0], SCORES, lambda _: (-SCORES).topk(2), recompute=True)
    assert torch.equal(again, first)


def test_a_recording_is_unset_on_dense_layers_and_in_missing_columns() -> None:
    recording = Recording(3, 2)
    with pytest.raises(ReplayError, match="nothing was recorded"):
        recording.routed_experts  # noqa: B018
    binding = Binding(layers=(1, 2), recording=recording)
    binding.choose(SITES[0], SCORES, own, False)
    binding.choose(RouterSite(2, "layers.2.gate", 8, 1, 2), SCORES, lambda _: SCORES.topk(1), False)
    recording.shape = (2, 3)
    routes = recording.routed_experts
    assert routes.shape == (2, 3, 3, 2)
    assert {routes.dtype, *(kept.dtype for kept in recording.by_layer.values())} == {torch.int16}
    assert (routes[:, :, 0] == U).all()
    assert routes[:, :, 1].flatten(0, 1).tolist() == own().indices.tolist()
    assert routes[:, :, 2].flatten(0, 1).tolist() == [[i, U] for i in SCORES.argmax(-1).tolist()]


def test_recomputes_in_two_threads_at_once_see_their_own_bindings() -> None:
    """As in the backward of a model on two devices; and neither is seen by a third, that opens a context."""
    state, barrier = ReplayState(owner=object()), threading.Barrier(3)
    bindings = [Binding(layers=(i,)) for i in range(3)]

    def recompute(i: int) -> tuple[Binding | None, bool]:
        with state.recomputing(bindings[i], again=True):
            barrier.wait(60)
            seen = state.binding, state.recompute
            barrier.wait(60)
        assert not state.recompute
        return seen

    with ThreadPoolExecutor(2) as pool:
        recomputing = [pool.submit(recompute, i) for i in range(2)]
        barrier.wait(60)
        assert state.binding is None
        with state.opened(bindings[2]):
            barrier.wait(60)
            assert [run.result() for run in recomputing] == [(binding, True) for binding in bindings[:2]]
            assert (state.binding, state.recompute) == (bindings[2], False)
            barrier = threading.Barrier(1)  # a thread of autograd sees its own, and gives the other one back
            assert pool.submit(recompute, 0).result() == (bindings[0], True)
            assert state.binding is bindings[2]
    assert state.binding is None


def test_no_context_opens_inside_a_checkpointed_layer() -> None:
    state = ReplayState(owner=object())
    inside = state.recomputing(None, again=False)
    with inside, pytest.raises(ReplayError, match="open already"), state.opened(Binding(layers=())):
        pass


def test_only_live_rows_are_ranked_and_another_number_of_rows_is_refused() -> None:
    binding, asked = bound(changed((1, slice(1, 3), 1), [U, U])), []

    def ranked(rows: torch.Tensor) -> torch.return_types.topk:
        asked.append(rows.tolist())
        return own(rows)

    chosen = binding.choose(SITES[0], SCORES, ranked, False)
    assert asked == [[4, 5]]
    assert chosen.tolist() == [[5, 3]] * 4 + own().indices[4:].tolist()
    assert binding.choose(SITES[1], SCORES, ranked, False).tolist() == [[0, 1]] * 6
    assert len(asked) == 1  # every row of layer 2 is given
    with pytest.raises(ReplayError, match="layer 1: its router has 5 rows, the routes have 6"):
        binding.choose(SITES[0], SCORES[:5], own, False)
