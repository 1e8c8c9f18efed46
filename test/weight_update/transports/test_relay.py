"""A worker that passes on what it holds: to several, each alone, and nothing that it does not hold."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from support.waiting import in_thread, until
from torchrl_moe._errors import SyncTimeout
from torchrl_moe.weight_update.transports.gloo_group import GlooGroup
from torchrl_moe.weight_update.transports.meeting import Meeting, MeetingPlace, board_of
from torchrl_moe.weight_update.transports.relay import Relay

TIMEOUT = 20.0
BYTES = torch.arange(2500).to(torch.uint8)


class Child:
    """The worker at the other side of a relay."""

    def __init__(self, place: MeetingPlace, number: int, timeout: float = TIMEOUT) -> None:
        self.order = {
            **{"place": number, "meeting": place.begin(), "world_size": 2, "digest": "v1"},
            **{"buffer_bytes": 1000, "timeout_seconds": timeout},
        }
        self.group: GlooGroup | None = None

    def meet(self) -> GlooGroup:
        if self.group is None:
            self.group = GlooGroup(Meeting(board_of(self.order["meeting"]), TIMEOUT), 1, 2, TIMEOUT, 1000)
        return self.group

    def take(self) -> Tensor:
        group, got = self.meet(), torch.zeros(len(BYTES), dtype=torch.uint8)
        group.announce()
        group.broadcast(got, time.monotonic() + TIMEOUT, lambda _: None)
        return got


@pytest.fixture
def place() -> Iterator[MeetingPlace]:
    made = MeetingPlace()
    yield made
    made.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    made = Relay()
    yield made
    made.close()


def test_what_is_held_goes_to_all_who_ask_and_the_next_version_by_the_same_groups(
    place: MeetingPlace, relay: Relay
) -> None:
    children = [Child(place, number) for number in range(3)]
    for version in ("v1", "v2"):
        relay.hold(version, BYTES)
        for child in children:
            relay.pass_on({**child.order, "digest": version})
        taking = [in_thread(child.take) for child in children]
        assert all(torch.equal(one.result(TIMEOUT), BYTES) for one in taking)
        relay.release(TIMEOUT)


def test_who_asks_before_the_version_is_here_waits_for_it(place: MeetingPlace, relay: Relay) -> None:
    child = Child(place, 0)
    relay.hold("v0", torch.zeros(9, dtype=torch.uint8))
    relay.pass_on(child.order)
    taking = in_thread(child.take)
    until(lambda: child.group is not None, TIMEOUT)
    relay.release(TIMEOUT)
    assert not taking.done()
    relay.hold("v1", BYTES)
    assert torch.equal(taking.result(TIMEOUT), BYTES)


@pytest.mark.parametrize("how", ["lost", "closed", "cancelled", "replaced"])
def test_who_waits_in_vain_hears_of_it(place: MeetingPlace, relay: Relay, how: str) -> None:
    child = Child(place, 0)
    relay.pass_on(child.order)
    taking = in_thread(child.take)
    until(lambda: child.group is not None, TIMEOUT)
    if how == "lost":
        relay.lose("v1")
    elif how == "closed":
        relay.close()
    else:  # the trainer gives it up, or another replica has its place
        relay.pass_on({**child.order, "meeting": None if how == "cancelled" else place.begin()})
    with pytest.raises(RuntimeError):
        taking.result(TIMEOUT)
    relay.release(TIMEOUT)  # nothing is sent any more


def test_one_that_breaks_off_costs_the_others_nothing(
    place: MeetingPlace, relay: Relay, caplog: pytest.LogCaptureFixture
) -> None:
    breaks, stays = Child(place, 0), Child(place, 1)
    relay.hold("v1", BYTES)
    for child in (breaks, stays):
        relay.pass_on(child.order)
    group = in_thread(breaks.meet).result(TIMEOUT)
    group.close()
    breaks_off = place.meet(breaks.order["meeting"], TIMEOUT)
    breaks_off.set("ready/0/1", b"")  # it has said that it would read
    assert torch.equal(in_thread(stays.take).result(TIMEOUT), BYTES)
    with caplog.at_level(logging.WARNING):
        until(lambda: "a version was not passed on" in caplog.text, TIMEOUT)
    relay.release(TIMEOUT)


def test_a_version_is_kept_while_it_is_sent(place: MeetingPlace, relay: Relay) -> None:
    child = Child(place, 0)
    relay.hold("v1", BYTES)
    relay.pass_on(child.order)
    child.meet()
    until(lambda: relay._sending, TIMEOUT)  # the other side has not said that it reads
    with pytest.raises(SyncTimeout, match="was still being passed on after 0 s"):
        relay.release(0.0)
    assert torch.equal(child.take(), BYTES)
    relay.release(TIMEOUT)


def test_nobody_waits_past_the_deadline(place: MeetingPlace, relay: Relay, caplog: Any) -> None:
    child = Child(place, 0, timeout=0.2)
    relay.hold("v1", BYTES)
    relay.pass_on(child.order)
    child.meet()  # and does not read
    with caplog.at_level(logging.WARNING):
        until(lambda: "the other side did not get ready to receive" in caplog.text, TIMEOUT)
    relay.release(TIMEOUT)
