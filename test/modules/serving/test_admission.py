"""Places for requests: never more than the limit, by priority, then by arrival, and none lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.clock import Clock
from torchrl_moe.modules.serving.admission import PRIORITY_SECONDS, Admission, Ticket


def queue(limit: int | None, *priorities: int) -> tuple[Admission, list[Ticket], list[int]]:
    """An admission, a ticket per priority, and a list of those that rang."""
    rung: list[int] = []
    tickets = [Ticket(p, lambda i=i: rung.append(i)) for i, p in enumerate(priorities)]  # type: ignore[misc]
    return Admission(limit, Clock()), tickets, rung


def test_without_a_limit_everybody_has_a_place_at_once() -> None:
    admission, (ticket,), rung = queue(None, 0)
    assert admission.ask(ticket, 10**6) == 10**6
    assert (admission.taken, admission.waiting, rung) == (10**6, 0, [])


def test_places_are_granted_in_order_of_arrival() -> None:
    admission, (a, b, c), rung = queue(2, 0, 0, 0)
    assert [admission.ask(a, 3), admission.ask(b, 1), admission.ask(c, 1)] == [2, 0, 0]
    assert (admission.taken, admission.waiting) == (2, 3)
    admission.give_back(2)
    assert rung == [0, 1]
    assert [admission.ask(ticket, 1) for ticket in (a, b)] == [1, 1]
    admission.give_back()
    assert rung == [0, 1, 2]


def test_the_lower_priority_number_goes_first() -> None:
    admission, (a, b, c), rung = queue(1, 0, 1, -1)
    assert [admission.ask(ticket, 1) for ticket in (a, b, c)] == [1, 0, 0]
    admission.give_back()
    admission.give_back()
    assert rung == [2, 1]


def test_nobody_starves_a_priority_is_worth_so_many_seconds() -> None:
    admission, (holder, low, early, late), rung = queue(1, 0, 1, 0, 0)
    clock: Any = admission._clock
    admission.ask(holder, 1)
    admission.ask(low, 1)
    clock.now = PRIORITY_SECONDS - 1
    admission.ask(early, 1)
    clock.now = PRIORITY_SECONDS + 1
    admission.ask(late, 1)
    for _ in range(3):
        admission.give_back()
    assert rung == [2, 1, 3]


def test_a_ticket_keeps_its_turn_whenever_it_asks_again() -> None:
    admission, (a, b), rung = queue(1, 0, 0)
    clock: Any = admission._clock
    assert admission.ask(a, 1) == 1
    clock.now = 1.0
    assert admission.ask(b, 1) == 0
    clock.now = 2.0
    assert admission.ask(a, 1) == 0  # its replica died
    admission.give_back()
    assert rung == [0]


def test_wanting_less_gives_what_was_granted_to_the_next() -> None:
    admission, (a, b, c), rung = queue(2, 0, 0, 0)
    admission.ask(a, 2)
    admission.ask(b, 2)
    admission.ask(c, 2)
    admission.give_back(2)
    assert rung == [1]
    assert admission.ask(b, 0) == 0  # both places that it had been granted go on
    assert rung == [1, 2]
    assert admission.ask(c, 2) == 2
    assert (admission.taken, admission.waiting) == (2, 0)


@pytest.mark.parametrize("limit", [0, -1])
def test_a_limit_of_nothing_is_refused(limit: int) -> None:
    with pytest.raises(ValueError, match=rf"max_concurrent_requests must be at least 1, or None .*, got {limit}"):
        Admission(limit)


class AdmissionMachine(RuleBasedStateMachine):
    """Calls that ask, take, give back and go away in any order, against a count kept by hand."""

    LIMIT = 3

    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(self.LIMIT, lambda: 0.0)
        self.tickets = [Ticket(priority, lambda: None) for priority in (0, 0, 1, -1)]
        self.wants = [0] * 4
        self.holds = [0] * 4

    @rule(i=st.integers(0, 3), total=st.integers(0, 5))
    def ask(self, i: int, total: int) -> None:
        taken = self.admission.ask(self.tickets[i], total)
        assert 0 <= taken <= total
        self.holds[i] += taken
        self.wants[i] = total - taken

    @precondition(lambda self: any(self.holds))
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from([i for i in range(4) if self.holds[i]]))
        self.holds[i] -= 1
        self.admission.give_back()

    @invariant()
    def counts_agree(self) -> None:
        granted = sum(ticket.granted for ticket in self.tickets)
        assert self.admission.taken == sum(self.holds) + granted <= self.LIMIT
        assert [t.wanted + t.granted for t in self.tickets] == self.wants
        if self.admission.waiting:  # nobody waits beside a free place
            assert self.admission.taken == self.LIMIT


TestAdmissionMachine = AdmissionMachine.TestCase
TestAdmissionMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
