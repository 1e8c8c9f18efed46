"""A batch has one owner at a time, the collector or the trainer, whatever interrupts its delivery."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from support.waiting import in_thread, until
from torchrl_moe.collectors.rollouts import Delivery


def batch(number: int) -> TensorDict:
    return TensorDict({"number": torch.tensor([number])}, batch_size=[1])


class Source:
    """Fulfils futures with numbered batches, unless it was asked with them before."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def __call__(self, future: Future[Any]) -> None:
        if future not in self.asked:
            self.asked.append(future)
            future.set_result(batch(len(self.asked) - 1))


def take(delivery: Delivery, ask: Callable[[Future[Any]], object], accept: Callable[[TensorDict], Any]) -> Any:
    return delivery.take(ask, accept, nullcontext())


def number_of(given: TensorDict) -> int:
    return int(given["number"])


def test_what_was_not_accepted_is_given_again() -> None:
    delivery, source = Delivery(), Source()

    def refuse(given: TensorDict) -> None:
        raise ArithmeticError("no")

    for _ in range(2):
        with pytest.raises(ArithmeticError):
            take(delivery, source, refuse)
    assert [take(delivery, source, number_of) for _ in range(2)] == [0, 1]


@pytest.mark.parametrize("when", ["before it is asked", "after"])
def test_a_ctrl_c_as_it_asks_loses_nothing(when: str) -> None:
    delivery, source = Delivery(), Source()

    def interrupted(future: Future[Any]) -> None:
        if when == "after":
            source(future)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        take(delivery, interrupted, number_of)
    assert [take(delivery, source, number_of) for _ in range(2)] == [0, 1]


def test_after_an_error_another_batch_is_asked_for() -> None:
    delivery, source = Delivery(), Source()
    with pytest.raises(OSError, match="disk"):
        take(delivery, lambda future: future.set_exception(OSError("disk")), number_of)
    assert take(delivery, source, number_of) == 0


def test_a_batch_that_is_not_accepted_yet_is_known() -> None:
    delivery, source, seen = Delivery(), Source(), []

    def accept(given: TensorDict) -> None:
        with delivery.hold() as awaited:
            seen.append(awaited)

    take(delivery, source, accept)
    assert seen == source.asked
    with delivery.hold() as awaited:
        assert awaited is None


def test_nothing_is_accepted_while_it_stands_still() -> None:
    delivery, source = Delivery(), Source()
    with delivery.hold():
        taking = in_thread(lambda: take(delivery, source, number_of))
        assert not source.asked
    assert taking.result(60) == 0


def test_the_wait_is_over_as_it_is_accepted() -> None:
    delivery, source, log = Delivery(), Source(), []

    @contextmanager
    def waiting() -> Iterator[None]:
        log.append("waits")
        yield
        log.append("has it")

    delivery.take(source, lambda given: log.append("accepts"), waiting())
    assert log == ["waits", "has it", "accepts"]


def test_two_threads_get_different_batches() -> None:
    delivery, futures = Delivery(), []

    def ask(future: Future[Any]) -> None:
        if future not in futures:
            futures.append(future)

    taking = [in_thread(lambda: take(delivery, ask, number_of)) for _ in range(2)]
    for number in range(2):
        until(lambda count=number: len(futures) > count)
        futures[number].set_result(batch(number))
    assert sorted(one.result(60) for one in taking) == [0, 1]
    assert len(futures) == 2
