"""The typed commands; and of those about weights: whose they are, what was staged, two drivers at the same time."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.commands import Commands, WeightCommands, compare_log_probs
from torchrl_moe.modules.backends.replica import (
    SwapReport,
    WeightClaim,
    WeightOwner,
)
from torchrl_moe.weight_update.transports.base import StageReport

STAGED = StageReport(seconds=1.0, nbytes=8, digest="d")


class Sending(Commands):
    """Keeps what was sent, and answers what it was given."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.sent: list[Any] = []

    def _command(self, name: str, timeout: float, /, **arguments: Any) -> Any:
        self.sent.append((name, timeout, arguments))
        return self.answer


STAGE = {"verify": "off", "threads": 2, "manifest": None}
SWAP_ARGUMENTS = {"pause": "wait", "clear_cache": True, "canary": {"token_ids": [1]}}


def test_commands_about_weights_carry_the_last_claim_and_what_was_staged_under_it() -> None:
    replica = Sending(WeightClaim(epoch=4, owner="me"))
    replica.claim_weights("me", False, 3)
    replica.answer = WeightClaim(epoch=0, owner="another")
    assert replica.claim_weights("me", False, 3).owner == "another"
    replica.answer = STAGED
    replica.stage_weights(7, **STAGE, timeout=3)
    replica.swap_weights(7, **SWAP_ARGUMENTS, timeout=3)
    replica.init_weights("gloo", {}, 3)
    replica.give_up_weights(3)
    assert [arguments["epoch"] for name, _, arguments in replica.sent if name != "claim_weights"] == [4, 4, 4, 4]
    assert replica.sent[3][2]["digest"] == STAGED.digest


# -- claims ------------------------------------------------------------------------------------------------------------


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


# -- the commands of an engine process ---------------------------------------------------------------------------------


HOW: dict[str, Any] = {"verify": "digest", "threads": 1, "manifest": None}
SWAP: dict[str, Any] = {"pause": "keep", "clear_cache": False, "canary": None}


class Halves(WeightCommands):
    """Weights in two halves, loaded one after the other under a pause."""

    def __init__(self) -> None:
        super().__init__()
        self.found = 0  # what the store has under any number
        self.halves = (0, 0)
        self.fetched = 0
        self.is_paused = False

    async def command_weights_version(self) -> int:
        return self.halves[0]

    async def _open_transport(self, transport: str, options: Any) -> None:
        assert transport == "memmap"

    async def _stage(self, version: int, *how: Any) -> StageReport:
        found = self.found
        await asyncio.sleep(0.001)
        self.fetched = found
        return StageReport(seconds=0.0, nbytes=0, digest=f"digest {found}")

    async def _swap(self, version: int, *how: Any) -> SwapReport:
        self.is_paused = True
        await asyncio.sleep(0.001)
        self.halves = (self.fetched, self.halves[1])
        await asyncio.sleep(0.001)
        self.halves = (self.halves[0], self.fetched)
        await asyncio.sleep(0.001)
        self.is_paused = False
        return SwapReport()


@pytest.fixture
def commands() -> Halves:
    return Halves()


async def stage(commands: Halves, epoch: int, version: int = 5) -> StageReport:
    return await commands.command_stage_weights(epoch=epoch, version=version, **HOW)


async def swap(commands: Halves, epoch: int, digest: str, version: int = 5) -> SwapReport:
    return await commands.command_swap_weights(epoch=epoch, version=version, digest=digest, **SWAP)


def test_a_version_is_known_by_its_bytes_and_not_by_its_number(commands: Halves) -> None:
    async def run() -> None:
        for digest in ("", "digest 1"):
            refused = await swap(commands, 0, digest)  # nothing was staged
            assert (refused.started, refused.error) == (False, "version 5 is not what was staged last")
        commands.found = 1
        mine = (await stage(commands, 0)).digest
        commands.found = 2
        await stage(commands, 0)  # the same number, by another driver
        assert (await swap(commands, 0, mine)).error == "version 5 is not what was staged last"
        assert commands.halves == (0, 0)

    asyncio.run(run())


def test_of_two_that_stage_at_the_same_time_the_first_hears_of_it(commands: Halves) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(stage(commands, 0), stage(commands, 0), return_exceptions=True)

    first, second = asyncio.run(run())
    assert isinstance(first, WeightSyncError) and "another version was staged meanwhile" in str(first)
    assert second.digest == "digest 0"


@pytest.mark.parametrize("offset", range(8))
def test_two_drivers_never_load_halves_of_two_versions(commands: Halves, offset: int) -> None:
    """The second takes over at some moment of the first's update; whatever serves then is one version."""

    async def driver(name: str, version: int, delay: int) -> SwapReport | str:
        for _ in range(delay):
            await asyncio.sleep(0.0005)
        claim = await commands.command_claim_weights(driver=name, name=name, takeover=True)
        try:
            await commands.command_init_weights(claim.epoch, "memmap", {})
            commands.found = version
            digest = (await stage(commands, claim.epoch)).digest
            assert digest == f"digest {version}"
            return await swap(commands, claim.epoch, digest)
        except WeightSyncError as error:
            return str(error)

    async def run() -> tuple[Any, Any]:
        mixed: list[tuple[int, int]] = []

        async def poll() -> None:
            while True:
                if not commands.is_paused and commands.halves[0] != commands.halves[1]:
                    mixed.append(commands.halves)
                await asyncio.sleep(0)

        polling = asyncio.create_task(poll())
        first, second = await asyncio.gather(driver("a", 1, 0), driver("b", 2, offset))
        polling.cancel()
        assert mixed == []
        return first, second

    first, second = asyncio.run(run())
    assert second.error is None  # who has the claim is not refused
    assert commands.halves == (2, 2)
    lost = first if isinstance(first, str) else first.error
    assert lost is None or "takes its weights from b now" in lost or "staged" in lost


# -- the comparison of log-probs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("got", "words"),
    [
        ([-1.5, -2.25], r"up to 5.0e-01 \(at token 1: -1.5 and -1\)"),
        ([-1.5, math.nan], r"up to nan \(at token 2: nan and -2\)"),
        ([-1.0], "the canary has 2 log-probs for a prompt of 2 tokens"),
        ([math.inf, -2.0], r"up to inf \(at token 1"),
    ],
)
def test_the_largest_difference_is_named(got: list[float], words: str) -> None:
    with pytest.raises(WeightSyncError, match=words):
        compare_log_probs(got, [-1.0, -2.0], 1e-3)


def test_a_difference_may_be_as_large_as_the_tolerance() -> None:
    compare_log_probs([-1.25], [-1.0], 0.25)
    compare_log_probs([], [], 0.0)
