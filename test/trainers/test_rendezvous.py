"""Ranks wait for one another on a store; one that is missing is named. Ranks are threads here."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from torch.distributed import HashStore

from support.waiting import until
from torchrl_moe.errors import RankError
from torchrl_moe.trainers import ranks as rendezvous
from torchrl_moe.trainers.ranks import Rendezvous


class Party:
    """Three ranks, each of which does in its thread what it is told."""

    def __init__(self, seconds: float) -> None:
        self.store = HashStore()
        self.ranks = [Rendezvous(self.store, rank, 3, seconds) for rank in range(3)]
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]

    def let(self, rank: int, work: Callable[[Rendezvous], Any]) -> Future[Any]:
        return self._threads[rank].submit(work, self.ranks[rank])

    def meet(self, rank: int, phase: str = "training", patient: bool = False) -> Future[Any]:
        return self.let(rank, lambda one: one.meet(phase, patient))

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[[float], Party]]:
    made: list[Party] = []

    def party(seconds: float) -> Party:
        made.append(Party(seconds))
        return made[-1]

    yield party
    for one in made:
        one.close()


def message(future: Future[Any]) -> str:
    with pytest.raises(RankError) as caught:
        future.result(60)
    return str(caught.value)


def test_nobody_continues_before_the_last_has_come(make: Any) -> None:
    party = make(60.0)
    early = [party.meet(0), party.meet(2)]
    until(lambda: party.store.check(["0/0", "0/2"]))
    assert not any(future.done() for future in early)
    for future in (*early, party.meet(1)):
        future.result(60)


def test_ranks_that_begin_other_phases_end(make: Any) -> None:
    """The collectives that follow would be others, too."""
    party = make(60.0)
    waiting = [party.meet(rank, "whether to resume") for rank in (0, 2)]
    until(lambda: party.store.add("0/count", 0) == 2)
    third = party.meet(1, "rollouts")
    (told,) = {message(future) for future in waiting}
    assert re.match(r"rank [02] is at 'whether to resume' where another is at 'rollouts': start all ranks alike", told)
    third.exception(60)  # it may have gone on
    assert message(party.meet(1)) == told


def test_what_was_written_for_phases_that_are_over_is_removed(make: Any) -> None:
    party = make(60.0)
    counts = []
    for number in range(6):
        for future in [party.meet(rank, f"phase {number}") for rank in range(3)]:
            future.result(60)
        counts.append(party.store.num_keys())
    assert counts[2:] == [counts[1]] * 4


@pytest.mark.parametrize(("late", "names"), [([1], "rank 1"), ([0, 2], "ranks 0, 2")])
def test_a_deadline_names_the_ranks_that_are_missing(make: Any, late: list[int], names: str) -> None:
    party = make(0.5)
    waiting = [party.meet(rank, "weight sync") for rank in range(3) if rank not in late]
    told = {message(future) for future in waiting}
    assert told == {f"weight sync: {names} did not come within 0.5 s"}
    assert {message(party.meet(rank, "weight sync")) for rank in late} == told  # they hear of it, once they come


def test_rank_0_may_take_its_time_where_the_others_are_patient(make: Any) -> None:
    party = make(0.2)
    waiting = [party.meet(rank, "rollouts", True) for rank in (1, 2)]
    began = threading.Event()
    began.wait(0.7)  # longer than three deadlines
    assert not any(future.done() for future in waiting)
    for future in (*waiting, party.meet(0, "rollouts", True)):
        future.result(60)


def test_for_the_others_nobody_is_patient(make: Any) -> None:
    party = make(0.2)
    assert message(party.meet(0, "rollouts", True)) == "rollouts: ranks 1, 2 did not come within 0.2 s"


def test_all_hear_of_an_error_and_the_first_one_counts(make: Any) -> None:
    party = make(60.0)
    waiting = party.meet(2, "step 3")
    party.ranks[1].phase = "training"
    assert party.ranks[1].cause(ValueError("no such\nexpert")) == ""  # it is its own
    told = "rank 1 failed (last met: training): ValueError: no such"
    assert message(waiting) == told
    assert party.ranks[0].cause(KeyError("second")) == ""  # it is its own, too
    assert message(party.meet(0)) == told


def test_a_collective_that_broke_asks_who_is_still_there(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 0.5)
    party = make(60.0)
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer\nmore")
    asked = [party.let(rank, lambda one: one.cause(broken)) for rank in (0, 2)]
    for future in asked:
        assert future.result(60) == "start: rank 1 gone: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def test_an_error_behind_a_broken_collective_is_the_cause(make: Any) -> None:
    party = make(60.0)
    party.ranks[1].cause(MemoryError("of the GPU"))
    broken = RuntimeError("Application timeout caused pair closure")
    assert party.ranks[0].cause(broken) == "rank 1 failed (last met: start): MemoryError: of the GPU"


def test_rank_0_stays_until_the_others_have_left(make: Any) -> None:
    party = make(60.0)
    last = party.let(0, lambda one: one.leave())
    party.let(1, lambda one: one.leave()).result(60)
    assert not last.done()
    party.let(2, lambda one: one.leave()).result(60)
    last.result(60)
