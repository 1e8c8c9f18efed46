"""Places for requests: never more than the limit, by priority, then by arrival, and none lost."""

from __future__ import annotations

import gc
import weakref

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.clock import Clock
from support.requests import waiting_request
from torchrl_moe.modules.serving.dispatch import PRIORITY_SECONDS, Admission
from torchrl_moe.modules.serving.in_flight import InFlight


def queue(limit: int | None, *priorities: int) -> tuple[Admission, list[InFlight]]:
    """An admission, and a request per priority that waits, in this order of arrival."""
    admission, requests = Admission(limit, Clock()), [waiting_request(priority) for priority in priorities]
    for request in requests:
        admission.put(request)
    return admission, requests


def test_without_a_limit_each_request_has_a_place_at_once() -> None:
    admission, requests = queue(None, *[0] * 1000)
    assert [admission.next() for _ in range(1001)] == [*requests, None]
    assert (admission.taken, admission.waiting) == (1000, 0)


def test_places_are_given_in_order_of_arrival() -> None:
    admission, (a, b, c) = queue(2, 0, 0, 0)
    assert [admission.next(), admission.next(), admission.next()] == [a, b, None]
    assert (admission.taken, admission.waiting) == (2, 1)
    admission.give_back()
    assert [admission.next(), admission.next()] == [c, None]


def test_the_lower_priority_number_goes_first() -> None:
    admission, (a, b, c) = queue(None, 0, 1, -1)
    assert [admission.next() for _ in range(3)] == [c, a, b]


def test_no_request_starves_a_priority_is_worth_so_many_seconds() -> None:
    clock = Clock()
    admission = Admission(None, clock)
    low, early, late = waiting_request(1), waiting_request(0), waiting_request(0)
    for request, now in ((low, 0.0), (early, PRIORITY_SECONDS - 1), (late, PRIORITY_SECONDS + 1)):
        clock.now = now
        admission.put(request)
    assert [admission.next() for _ in range(3)] == [early, low, late]


def test_a_request_that_comes_again_has_its_old_turn() -> None:
    admission, (a, b) = queue(1, 0, 0)
    assert admission.next() is a
    admission.give_back()
    admission.put(a)  # no replica took it
    assert admission.next() is a
    admission.give_back()
    assert admission.next() is b


def test_what_is_taken_out_leaves_nothing_behind() -> None:
    admission, requests = queue(1, *[0] * 1000)
    first = admission.next()
    assert [admission.remove(request) for request in requests[1:900]] == [True] * 899
    assert not admission.remove(requests[5])
    assert first is not None and not admission.remove(first)
    assert (admission.taken, admission.waiting) == (1, 100)
    prompts = [weakref.ref(request.request.prompt_token_ids) for request in requests[1:900]]
    last = requests[900]
    del requests
    gc.collect()  # a request and its call hold each other
    assert [prompt() for prompt in prompts] == [None] * 899
    assert len(admission._turns) <= 2 * 100 + 64
    admission.give_back()
    assert admission.next() is last


class Instant(float):
    """A time that counts how often any of its kind is compared."""

    compared = 0

    def __add__(self, other: float) -> Instant:
        return Instant(float(self) + other)

    def __lt__(self, other: float) -> bool:
        Instant.compared += 1
        return float(self) < float(other)

    def __eq__(self, other: object) -> bool:
        Instant.compared += 1
        return float(self) == other

    def __hash__(self) -> int:
        return hash(float(self))


def test_who_is_next_is_found_among_many_priorities_without_a_look_at_each() -> None:
    admission, count = Admission(None, lambda: Instant(0.0)), 1024
    requests = [waiting_request(priority) for priority in range(count)]
    for request in reversed(requests):
        admission.put(request)
    Instant.compared = 0
    assert [admission.next() for _ in requests] == requests
    assert Instant.compared <= count * 10 * 4  # a heap of so many has ten levels


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=rf"must be an integer of at least 1, or None, got {limit}"):
        Admission(limit)


class AdmissionMachine(RuleBasedStateMachine):
    """Requests that come, go, take and give back in any order, against lists kept by hand."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(self.LIMIT, lambda: 0.0)
        self.waiting: list[InFlight] = []
        self.holding: list[InFlight] = []

    @rule(priority=st.integers(-1, 1))
    def put(self, priority: int) -> None:
        self.waiting.append(waiting_request(priority))
        self.admission.put(self.waiting[-1])

    @rule()
    def take(self) -> None:
        request = self.admission.next()
        if len(self.holding) == self.LIMIT or not self.waiting:
            assert request is None
            return
        assert request is min(self.waiting, key=lambda r: r.turn)
        self.waiting.remove(request)
        self.holding.append(request)

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        request = self.waiting.pop(data.draw(st.integers(0, len(self.waiting) - 1)))
        assert self.admission.remove(request)

    @precondition(lambda self: self.holding)
    @rule(data=st.data(), again=st.booleans())
    def give_back(self, data: st.DataObject, again: bool) -> None:
        request = self.holding.pop(data.draw(st.integers(0, len(self.holding) - 1)))
        self.admission.give_back()
        if again and all(request.turn < other.turn for other in self.waiting):  # type: ignore[operator]
            self.admission.put(request)
            self.waiting.append(request)

    @invariant()
    def counts_agree(self) -> None:
        assert (self.admission.taken, self.admission.waiting) == (len(self.holding), len(self.waiting))


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=60, stateful_step_count=40)
