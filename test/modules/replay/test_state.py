"""One binding at a time, for one thread at a time, and none that outlives its context."""

from __future__ import annotations

import copy
import pickle
import threading

import pytest

from torchrl_moe._errors import ReplayError
from torchrl_moe.modules.replay.binding import Binding
from torchrl_moe.modules.replay.state import ReplayState


def bound() -> Binding:
    return Binding(layers=())


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
    state = ReplayState(owned=True)
    with state.opened(bound()):
        for other in (copy.deepcopy(state), pickle.loads(pickle.dumps(state))):
            assert (other.binding, other.owned) == (None, False)
            with pytest.raises(ReplayError, match="removed"), other.opened(bound()):
                pass


def test_threads_that_run_one_model_at_once_leave_no_binding_behind() -> None:
    """One opens a context, another recomputes; the first to leave puts back what was there before the second."""
    state = ReplayState(owned=True)
    first, second = state.opened(bound()), state.recomputing(bound(), again=True)
    first.__enter__()
    second.__enter__()  # by another thread, say
    for context in (first, second):
        with pytest.raises(ReplayError, match="another thread"):
            context.__exit__(None, None, None)
    assert not state.is_open
    with state.opened(bound()):
        pass


def test_a_recompute_in_a_thread_of_autograd_sees_its_own_binding_and_gives_the_other_back() -> None:
    state, outer, inner, seen = ReplayState(owned=True), bound(), bound(), []

    def recompute() -> None:
        with state.recomputing(inner, again=True):
            seen.append((state.binding, state.recompute))

    with state.opened(outer):
        thread = threading.Thread(target=recompute)
        thread.start()
        thread.join()
        assert state.binding is outer
    assert seen == [(inner, True)]
