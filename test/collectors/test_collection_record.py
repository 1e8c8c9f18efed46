"""Notes over time, by a clock that the tests set; sums worked out by hand."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from tensordict import TensorDict

from support.clock import Clock
from torchrl_moe.collectors.collection_record import OTHERS, CollectionRecord


@pytest.fixture
def clock() -> Clock:
    clock = Clock()
    clock.now = 100.0
    return clock


def batch(number: int = 0) -> TensorDict:
    return TensorDict({"number": torch.tensor([number])}, [1])


def phases(record: CollectionRecord) -> list[tuple[str, float, float]]:
    return [(row["phase"].split()[0], row["start"], row["seconds"]) for row in record.phases()]


def test_between_two_waits_the_trainer_trains(clock: Clock) -> None:
    record = CollectionRecord(clock=clock)
    assert phases(record) == []
    clock.now = 101
    for seconds, training in ((2, 3), (1, 0)):
        with record.wait():
            clock.now += seconds
        clock.now += training
    assert phases(record) == [("waiting", 1, 2), ("training", 3, 3), ("waiting", 6, 1)]
    clock.now = 109.5
    record.updated(1)  # so it was still there
    assert phases(record)[-1] == ("training", 7, 2.5)
    assert record.updates() == [(9.5, 1)]
    assert record.waited == 3
    clock.now = 110
    assert record.scalars() == {"training/idle": 0.3, "collector/wait_for_batch": 3}


def test_a_wait_that_continues_lasts_until_now(clock: Clock) -> None:
    record = CollectionRecord(clock=clock)
    with record.wait():
        clock.now += 4
        assert phases(record) == [("waiting", 0, 4)]
        assert record.end == 4


def test_a_wait_that_is_interrupted_counts_for_the_batch_that_comes_later(clock: Clock) -> None:
    record = CollectionRecord(clock=clock)
    with pytest.raises(KeyboardInterrupt), record.wait():
        clock.now += 2
        raise KeyboardInterrupt
    clock.now += 10
    with record.wait():
        clock.now += 1
    record.add(batch(), {"rows": 1})
    with record.wait():
        clock.now += 5
    record.add(batch(), {"rows": 1})
    assert [row["waited"] for row in record.rows()] == [3, 5]
    assert [row["batch"] for row in record.rows()] == [0, 1]
    assert record.last == record.rows()[1]


def test_the_last_batch_is_kept_itself_and_no_other() -> None:
    record = CollectionRecord()
    assert record.batch is None and record.last == {}
    first, second = batch(1), batch(2)
    record.add(first, {})
    assert record.batch is first
    record.add(second, {})
    gone = weakref.ref(first["number"])
    del first
    gc.collect()
    assert record.batch is second and gone() is None


def test_it_forgets_the_oldest_of_each_kind(clock: Clock) -> None:
    record = CollectionRecord(limit=3, clock=clock)
    for number in range(5):
        with record.wait():
            clock.now += 1
        record.add(batch(), {"number": number})
        record.updated(number)
        clock.now *= 2  # long enough for the next sample
        record.in_flight([(0, number)])
    assert [row["number"] for row in record.rows()] == [2, 3, 4]
    assert [version for _, version in record.updates()] == [2, 3, 4]
    assert [count for _, count in record.flights()[0]] == [2, 3, 4]
    assert sum(row["phase"] != "training" for row in record.phases()) == 3
    assert (record.batches, record.waited) == (5, 5)


def test_answers_in_flight_are_noted_when_they_change_and_not_too_often(clock: Clock) -> None:
    record = CollectionRecord(clock=clock)

    def untouched() -> Iterator[tuple[int, int]]:
        raise AssertionError("it was too early")
        yield

    record.in_flight([(0, 3), (2, 0)])
    clock.now += 0.05
    record.in_flight(untouched())
    clock.now += 0.5
    record.in_flight([(0, 3), (2, 0)])
    clock.now += 0.5
    record.in_flight([(0, 1), (2, 4), (5, 1)])  # one was added
    clock.now += 0.5
    record.in_flight([(2, 4), (5, 1)])  # one was removed
    assert {index: [count for _, count in samples] for index, samples in record.flights().items()} == {
        0: [3, 1, 0],
        2: [0, 4, 4],
        5: [0, 1, 1],
    }
    assert [at for at, _ in record.flights()[0]] == pytest.approx([0, 1.05, 1.55])


def test_notes_reach_back_over_more_than_half_of_the_past(clock: Clock) -> None:
    record = CollectionRecord(limit=100, clock=clock)
    for number in range(20_000):  # 2000 s, each tenth of a second another count
        record.in_flight([(0, number)])
        clock.now += 0.1
    first = record.flights()[0][0][0]
    assert len(record.flights()[0]) == 100
    assert 0 < first < 1000


def test_of_many_replicas_sixteen_are_kept_and_the_sum_of_the_others() -> None:
    record = CollectionRecord()
    record.in_flight((index, 2) for index in range(40))
    flights = record.flights()
    assert list(flights) == [*range(16), OTHERS]
    assert [samples[0][1] for samples in flights.values()] == [2] * 16 + [48]


def test_it_can_be_read_while_others_write() -> None:
    record = CollectionRecord(limit=50)
    over = threading.Event()

    def write() -> None:
        while not over.is_set():
            with record.wait():
                pass
            record.add(batch(), {"rows": 1})
            record.updated(1)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(300):
            numbers = [row["batch"] for row in record.rows()]
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))) if numbers else True
            assert all(row["seconds"] >= 0 for row in record.phases())
            assert len(record.updates()) <= 50
    finally:
        over.set()
        writer.join()


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="limit must be at least 1, got 0"):
        CollectionRecord(limit=0)
