"""The breaker of one replica, with a clock set by hand."""

from __future__ import annotations

from support.clock import Clock
from torchrl_moe.modules.serving.candidates import Breaker, BreakerState, FaultPolicy

POLICY = FaultPolicy(breaker_failures=3, breaker_window=10.0, breaker_cooldown=5.0, breaker_trials=2)


def breaker(*failures: float) -> tuple[Breaker, Clock]:
    """A breaker that failed at these times."""
    clock = Clock()
    made = Breaker(POLICY, clock)
    for clock.now in failures:
        made.failed()
    return made, clock


def half_open() -> tuple[Breaker, Clock]:
    made, clock = breaker(0.0, 0.0, 0.0)
    clock.now = 5.0
    made.cool()
    return made, clock


def test_failures_within_the_window_open_it() -> None:
    assert breaker()[0].state is BreakerState.CLOSED
    assert breaker(0.0, 1.0)[0].state is BreakerState.CLOSED
    assert breaker(0.0, 5.0, 10.0)[0].state is BreakerState.OPEN
    assert breaker(0.0, 5.0, 10.1)[0].state is BreakerState.CLOSED
    assert breaker(0.0, 5.0, 10.1, 14.9)[0].state is BreakerState.OPEN


def test_an_open_one_takes_nothing_until_it_has_cooled_down() -> None:
    made, clock = breaker(0.0, 0.0, 0.0)
    assert made.blocks
    clock.now = 4.9
    made.cool()
    assert made.blocks
    clock.now = 5.0
    made.cool()
    assert made.state is BreakerState.HALF_OPEN
    assert not made.blocks


def test_failures_of_an_open_one_do_not_lengthen_its_rest() -> None:
    made, clock = breaker(0.0, 0.0, 0.0, 4.0)
    clock.now = 5.0
    made.cool()
    assert made.state is BreakerState.HALF_OPEN


def test_a_half_open_one_takes_a_few_at_a_time() -> None:
    made, _ = half_open()
    assert (made.take(), made.blocks) == (True, False)
    assert (made.take(), made.blocks) == (True, True)
    made.tried(None)
    assert not made.blocks


def test_a_good_trial_closes_it_and_forgets_the_failures() -> None:
    made, _ = half_open()
    made.take()
    made.tried(True)
    assert made.state is BreakerState.CLOSED
    assert made.take() is False
    made.failed()
    made.failed()
    assert made.state is BreakerState.CLOSED


def test_a_failure_opens_a_half_open_one_again_for_as_long() -> None:
    made, clock = half_open()
    made.take()
    made.failed()
    made.tried(False)
    assert made.state is BreakerState.OPEN
    clock.now = 9.9
    made.cool()
    assert made.state is BreakerState.OPEN
    clock.now = 10.0
    made.cool()
    assert made.state is BreakerState.HALF_OPEN
    assert (made.take(), made.take(), made.blocks) == (True, True, True)  # the earlier trial is over


def test_a_good_end_of_a_trial_of_before_does_not_close_an_open_one() -> None:
    made, _ = half_open()
    made.take()
    made.failed()
    made.tried(True)
    assert made.state is BreakerState.OPEN


def test_it_can_be_opened_at_once() -> None:
    made, _ = breaker()
    made.failed(trip=True)
    assert made.state is BreakerState.OPEN


def test_only_an_open_one_is_tried() -> None:
    made, _ = breaker()
    made.try_now()
    assert made.state is BreakerState.CLOSED
