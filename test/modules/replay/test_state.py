"""One binding at a time, for one thread at a time, and none that outlives its context."""

from __future__ import annotations

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from torchrl_moe.errors import ReplayError
from torchrl_moe.modules.replay.binding import Binding, ReplayState


def bound() -> Binding:
    return Binding(layers=())


def test_only_its_own_thread_sees_a_binding() -> None:
    state, binding, errors = ReplayState(owner=object()), bound(), []

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
    state = ReplayState(owner=object())
    with (
        state.opened(bound()),
        pytest.raises(ReplayError, match="open already"),
        state.opened(bound()),
    ):
        pass
    with pytest.raises(KeyError), state.opened(bound()):
        raise KeyError
    with state.opened(bound()):
        pass


def test_a_copied_state_has_no_binding_and_no_owner() -> None:
    state = ReplayState(owner=object())
    with state.opened(bound()):
        for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert (other.binding, other.owned) == (None, False)
            with pytest.raises(ReplayError, match="removed"), other.opened(bound()):
                pass


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
            seen = [run.result() for run in recomputing]
            assert (state.binding, state.recompute) == (bindings[2], False)
    for got, wanted in zip(seen, bindings, strict=False):
        assert got[0] is wanted
        assert got[1]
    assert state.binding is None


def test_no_context_opens_inside_a_checkpointed_layer() -> None:
    state = ReplayState(owner=object())
    inside = state.recomputing(None, again=False)
    with inside, pytest.raises(ReplayError, match="open already"), state.opened(bound()):
        pass


def test_a_recompute_in_a_thread_of_autograd_sees_its_own_binding_and_gives_the_other_back() -> None:
    state, outer, inner, seen = ReplayState(owner=object()), bound(), bound(), []

    def recompute() -> None:
        with state.recomputing(inner, again=True):
            seen.append((state.binding, state.recompute))

    with state.opened(outer):
        thread = threading.Thread(target=recompute)
        thread.start()
        thread.join()
        assert state.binding is outer
    assert seen == [(inner, True)]
