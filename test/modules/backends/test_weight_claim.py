"""Whose a replica's weights are, claim after claim."""

from __future__ import annotations

import os

import pytest

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.replica import WeightClaim, WeightOwner, this_process


def test_a_driver_that_lives_keeps_its_claim_and_each_claim_raises_the_epoch() -> None:
    owner = WeightOwner()
    owner.check(0)  # nobody has claimed anything
    assert owner.claim("a", "first", takeover=False) == WeightClaim(epoch=1, owner="first")
    assert owner.claim("b", "second", takeover=False) == WeightClaim(epoch=0, owner="first")
    owner.check(1)
    assert owner.claim("a", "first", takeover=False) == WeightClaim(epoch=2, owner="first")
    with pytest.raises(WeightSyncError, match="takes its weights from first now"):
        owner.check(1)


def test_a_claim_holds_until_another_comes_or_its_driver_leaves() -> None:
    owner = WeightOwner()
    assert not owner.holds(0)
    first = owner.claim("a", "first", takeover=False).epoch
    assert owner.holds(first)
    second = owner.claim("b", "second", takeover=True).epoch
    assert (owner.holds(first), owner.holds(second)) == (False, True)
    owner.left("b")
    assert not owner.holds(second)


@pytest.mark.parametrize("end", ["left", "given up", "taken over"])
def test_a_claim_ends(end: str) -> None:
    owner = WeightOwner()
    epoch = owner.claim("a", "first", takeover=False).epoch
    if end == "left":
        owner.left("a")
    elif end == "given up":
        owner.give_up(epoch)
    assert owner.claim("b", "second", takeover=end == "taken over").epoch == 2
    with pytest.raises(WeightSyncError, match="takes its weights from second now"):
        owner.check(epoch)


def test_the_end_of_another_claim_ends_none() -> None:
    owner = WeightOwner()
    old = owner.claim("a", "first", takeover=False).epoch
    owner.claim("b", "second", takeover=True)
    owner.left("a")
    owner.give_up(old)
    assert owner.claim("c", "third", takeover=False) == WeightClaim(epoch=0, owner="second")


def test_a_swap_must_be_of_the_last_claim_and_of_what_was_staged_last() -> None:
    owner = WeightOwner()
    epoch = owner.claim("a", "first", takeover=False).epoch
    assert owner.why_not_swap(epoch, 5, "digest", "digest") == ""
    for digest, staged in (("digest", "another"), ("digest", ""), ("", "")):
        assert owner.why_not_swap(epoch, 5, digest, staged) == "version 5 is not what was staged last"
    owner.claim("b", "second", takeover=True)
    assert "takes its weights from second now" in owner.why_not_swap(epoch, 5, "digest", "digest")


def test_a_driver_is_named_by_its_process() -> None:
    assert this_process().startswith(f"process {os.getpid()} on ")
