"""Commands about weights: what was staged by whom, and two drivers at the same time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.commands import WeightCommands
from torchrl_moe.modules.backends.replica import SwapReport
from torchrl_moe.weight_update.transports.base import StageReport

HOW: dict[str, Any] = {"verify": "digest", "threads": 1, "manifest": None}
SWAP: dict[str, Any] = {"pause": "keep", "clear_cache": False, "canary": None}


class Commands(WeightCommands):
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
def commands() -> Commands:
    return Commands()


async def stage(commands: Commands, epoch: int, version: int = 5) -> StageReport:
    return await commands.command_stage_weights(epoch=epoch, version=version, **HOW)


async def swap(commands: Commands, epoch: int, digest: str, version: int = 5) -> SwapReport:
    return await commands.command_swap_weights(epoch=epoch, version=version, digest=digest, **SWAP)


def test_a_version_is_known_by_its_bytes_and_not_by_its_number(commands: Commands) -> None:
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


def test_of_two_that_stage_at_the_same_time_the_first_hears_of_it(commands: Commands) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(stage(commands, 0), stage(commands, 0), return_exceptions=True)

    first, second = asyncio.run(run())
    assert isinstance(first, WeightSyncError) and "another version was staged meanwhile" in str(first)
    assert second.digest == "digest 0"


@pytest.mark.parametrize("offset", range(8))
def test_two_drivers_never_load_halves_of_two_versions(commands: Commands, offset: int) -> None:
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
