"""Batching: who shares a batch with whom, what ends a wait, and where an error goes. Nothing is timed."""

from __future__ import annotations

from concurrent.futures import CancelledError, ThreadPoolExecutor
from threading import Event
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.modules.llm.policies import LLMWrapperBase

from support.waiting import PATIENCE, until
from torchrl_moe.modules.policies.batching import batched, set_batching


class Doubler(LLMWrapperBase):
    """Writes twice what it reads; waits inside of a batch until it is let go."""

    generate = True

    def __init__(self, least: int | None = None, most: int | None = None, timeout: float = PATIENCE) -> None:
        super().__init__()
        set_batching(self, None, least, most, timeout)
        self.sizes: list[int] = []
        self.entered, self.may_go = Event(), Event()
        self.may_go.set()

    @batched
    def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
        self.sizes.append(len(tensordict) if tensordict.ndim else -1)
        self.entered.set()
        assert self.may_go.wait(PATIENCE)
        values = tensordict["x"]
        if bool((values < 0).any()):
            raise ArithmeticError("negative")
        return tensordict.set("y", 2 * values + kwargs.get("more", 0))


def batch(*values: int) -> TensorDict:
    return TensorDict({"x": torch.tensor(values)}, [len(values)])


def waiting(wrapper: Doubler, count: int) -> None:
    until(lambda: len(wrapper._batch_queue) == count)


def test_without_batching_nothing_waits() -> None:
    wrapper = Doubler()
    assert wrapper.get_batching_state() == {"batching_enabled": False}
    assert wrapper(batch(1, 2), more=5)["y"].tolist() == [7, 9]
    assert wrapper(TensorDict({"x": torch.tensor(4)}))["y"] == 8
    assert wrapper.sizes == [2, -1]


def test_callers_share_a_batch_and_get_their_own_results() -> None:
    wrapper = Doubler(least=6)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(wrapper, one) for one in (batch(1), batch(2, 3), batch(4, 5, 6))]
        results = [future.result(PATIENCE) for future in futures]
    assert [out["y"].tolist() for out in results] == [[2], [4, 6], [8, 10, 12]]
    assert wrapper.sizes == [6]
    state = wrapper.get_batching_state()
    assert (state["queue_size"], state["pending_futures"], state["lock_state"]) == (0, 0, "unlocked")


def test_callers_with_and_without_gradients_get_what_each_wants() -> None:
    wrapper = Doubler(least=3)
    weight = torch.ones(1, requires_grad=True)

    def call(*values: float, mode: Any) -> bool:
        with mode:
            one = TensorDict({"x": torch.tensor(values) * weight}, [len(values)])
            return bool(wrapper(one).get("y").requires_grad)

    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(call, 1.0, mode=torch.enable_grad())
        waiting(wrapper, 1)
        second = pool.submit(call, 2.0, mode=torch.no_grad())
        waiting(wrapper, 2)
        third = call(3.0, mode=torch.inference_mode())  # fills the batch, and runs it
        assert (first.result(), second.result(), third) == (True, False, False)
    assert wrapper.sizes == [1, 1, 1]


def test_a_single_sample_comes_back_as_one() -> None:
    wrapper = Doubler(least=1)
    out = wrapper(TensorDict({"x": torch.tensor(3)}))
    assert (out.batch_size, int(out["y"])) == ((), 6)
    assert wrapper.sizes == [1]


def test_what_comes_while_a_batch_runs_is_the_next_one() -> None:
    wrapper = Doubler(least=1)
    wrapper.may_go.clear()
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(wrapper, batch(1))
        assert wrapper.entered.wait(PATIENCE)
        others = [pool.submit(wrapper, batch(value)) for value in (2, 3)]
        waiting(wrapper, 2)
        wrapper.may_go.set()
        assert [int(f.result(PATIENCE)["y"]) for f in (first, *others)] == [2, 4, 6]
    assert wrapper.sizes == [1, 2]


def test_no_batch_is_larger_than_it_may_be() -> None:
    wrapper = Doubler(least=2, most=3)
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(wrapper, (batch(1, 2, 3, 4), batch(5, 6))))
    assert [out["y"].tolist() for out in results] == [[2, 4, 6, 8], [10, 12]]
    assert max(wrapper.sizes) <= 3
    assert sum(wrapper.sizes) == 6


def test_a_caller_whose_time_is_up_runs_what_there_is() -> None:
    wrapper = Doubler(least=10, timeout=0.01)
    assert wrapper(batch(1, 2))["y"].tolist() == [2, 4]
    assert wrapper.sizes == [2]


def test_an_error_reaches_those_whose_batch_it_was_and_nobody_else() -> None:
    wrapper = Doubler(least=2)
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(wrapper, one) for one in (batch(1), batch(-1))]
        for future in futures:
            with pytest.raises(ArithmeticError, match="negative"):
                future.result(PATIENCE)
    assert wrapper(batch(3, 4))["y"].tolist() == [6, 8]  # nothing of it is left


def test_what_is_given_up_raises_where_it_was_asked_for() -> None:
    wrapper = Doubler(least=2)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wrapper, batch(1))
        waiting(wrapper, 1)
        wrapper.cleanup_batching()
        with pytest.raises(CancelledError):
            future.result(PATIENCE)
    assert wrapper.get_batching_state()["queue_size"] == 0


def test_what_waits_can_be_run_at_once() -> None:
    wrapper = Doubler(least=2)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(wrapper, batch(4))
        waiting(wrapper, 1)
        wrapper.cleanup_batching(flush=True)
        assert int(future.result(PATIENCE)["y"]) == 8


def test_a_batch_takes_no_arguments_of_one_caller() -> None:
    wrapper = Doubler(least=1)
    with pytest.raises(ValueError, match="more: of one call, and a batch has many callers"):
        wrapper(batch(1), more=1)
    with pytest.raises(ValueError, match=r"batch size \[\] or \[B\], got \[1, 1\]"):
        wrapper(lazy_stack([batch(1)]))
    assert wrapper.sizes == []


def test_a_batch_that_comes_back_shorter_is_refused() -> None:
    class Loser(Doubler):
        @batched
        def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
            return tensordict[:-1]

    with pytest.raises(RuntimeError, match="a batch of 2 samples came back as 1"):
        Loser(least=1)(batch(1, 2))


def test_an_interrupt_reaches_the_thread_that_runs() -> None:
    class Stopped(Doubler):
        @batched
        def forward(self, tensordict: TensorDictBase, **kwargs: Any) -> TensorDictBase:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Stopped(least=1)(batch(1))


@pytest.mark.parametrize(
    ("given", "sizes"),
    [
        ((None, None, None), (None, None)),
        ((True, None, None), (1, None)),
        ((None, 3, None), (3, None)),
        ((None, None, 2), (1, 2)),
        ((True, 2, 5), (2, 5)),
    ],
)
def test_sizes_that_are_left_open(given: tuple[Any, ...], sizes: tuple[Any, ...]) -> None:
    wrapper = Doubler()
    set_batching(wrapper, *given, 1.0)
    assert (wrapper._min_batch_size, wrapper._max_batch_size) == sizes
    assert (wrapper._batching_lock is None) == (sizes == (None, None))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ((False, 1, None), "batching=False: leave one out"),
        ((False, None, 1), "batching=False: leave one out"),
        ((True, 5, 2), r"min_batch_size \(5\) must be <= max_batch_size \(2\)"),
        ((None, 0, None), "got min_batch_size=0"),
        ((None, None, -1), "min_batch_size .1. must be <= max_batch_size .-1."),
    ],
)
def test_sizes_that_make_no_sense(given: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        set_batching(Doubler(), *given, 1.0)
