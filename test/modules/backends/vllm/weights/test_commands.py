"""Commands about weights: trainers of adapters and of whole weights in turn, and two drivers at the same time."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.reports import SwapReport
from torchrl_moe.modules.backends.vllm.weights.commands import WeightCommands
from torchrl_moe.weight_update.transports.base import StageReport

HOW: dict[str, Any] = {"stage": "auto", "verify": "digest", "threads": 1, "manifest": None}
SWAP: dict[str, Any] = {"pause": "keep", "clear_cache": False, "canary": None}


class Weights:
    """Whole weights in two halves, loaded one after the other under a pause, as vLLM does it."""

    replaced = False

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.found = 0  # what the store has under any number
        self.halves = (0, 0)
        self.staged = 0
        self.is_paused = False
        self.error: str | None = None
        self.orders: list[Any] = []
        self.engine = self

    async def collective_rpc(self, method: str, args: tuple[Any]) -> None:
        assert method == "torchrl_moe_pass_on"
        self.orders += args

    async def init(self, transport: str, options: Any) -> None:
        self.opened.append(transport)

    async def stage(self, version: int, *how: Any) -> StageReport:
        staged = self.found
        await asyncio.sleep(0.001)
        self.staged = staged
        return StageReport(seconds=0.0, nbytes=0, digest=f"digest {staged}")

    async def swap(self, version: int, *how: Any) -> SwapReport:
        if self.error is not None:
            return SwapReport(started=False, error=self.error)
        self.is_paused = True
        await asyncio.sleep(0.001)
        self.halves = (self.staged, self.halves[1])
        await asyncio.sleep(0.001)
        self.halves = (self.halves[0], self.staged)
        await asyncio.sleep(0.001)
        self.is_paused = False
        return SwapReport()


class Adapters:
    """Adapters that take what they are given."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def init(self, options: Any, replaced: bool) -> None:
        self.log.append(f"in {options['folder']}, {replaced=}")

    async def stage(self, version: int) -> StageReport:
        return StageReport(seconds=0.0, nbytes=0, digest=f"adapter {version}", stage="adapter")

    def swap(self, version: int) -> SwapReport:
        self.log.append(f"swapped {version}")
        return SwapReport()

    def leave(self) -> None:
        self.log.append("left")


@pytest.fixture
def commands() -> Any:
    made: Any = WeightCommands(Weights(), SimpleNamespace(adapter=None), Adapters())  # type: ignore[arg-type]
    return made


async def stage(commands: Any, epoch: int, version: int = 5) -> StageReport:
    report: StageReport = await commands.command_stage_weights(epoch=epoch, version=version, **HOW)
    return report


async def swap(commands: Any, epoch: int, digest: str, version: int = 5) -> SwapReport:
    report: SwapReport = await commands.command_swap_weights(epoch=epoch, version=version, digest=digest, **SWAP)
    return report


def test_a_trainer_of_adapters_and_one_of_whole_weights_take_turns(commands: Any) -> None:
    async def run() -> None:
        await commands.command_init_weights(0, "adapter", {"folder": "here"})
        assert (await stage(commands, 0)).digest == "adapter 5"
        assert (await swap(commands, 0, "adapter 5")).error is None
        adapter = commands.requests.adapter = object()
        await commands.command_init_weights(0, "memmap", {})
        await stage(commands, 0)
        commands.weights.error = "x"
        assert (await swap(commands, 0, "digest 0")).error == "x"
        assert commands.requests.adapter is adapter  # the old weights serve on, and it with them
        commands.weights.error = None
        assert (await swap(commands, 0, "digest 0")).error is None
        assert commands.requests.adapter is None

    asyncio.run(run())
    assert commands.adapters.log == ["in here, replaced=False", "swapped 5", "left"]
    assert commands.weights.opened == ["memmap"]


def test_a_version_is_known_by_its_bytes_and_not_by_its_number(commands: Any) -> None:
    async def run() -> None:
        for digest in ("", "digest 1"):
            refused = await swap(commands, 0, digest)  # nothing was staged
            assert (refused.started, refused.error) == (False, "version 5 is not what was staged last")
        commands.weights.found = 1
        mine = (await stage(commands, 0)).digest
        commands.weights.found = 2
        await stage(commands, 0)  # the same number, by another driver
        assert (await swap(commands, 0, mine)).error == "version 5 is not what was staged last"
        assert commands.weights.halves == (0, 0)

    asyncio.run(run())


def test_of_two_that_stage_at_the_same_time_the_first_hears_of_it(commands: Any) -> None:
    async def run() -> list[Any]:
        return await asyncio.gather(stage(commands, 0), stage(commands, 0), return_exceptions=True)

    first, second = asyncio.run(run())
    assert isinstance(first, WeightSyncError) and "another version was staged meanwhile" in str(first)
    assert second.digest == "digest 0"


def test_a_version_is_passed_on_for_the_last_claim_only(commands: Any) -> None:
    async def run() -> None:
        old = await commands.command_claim_weights("a", "a", False)
        await commands.command_pass_weights_on(old.epoch, {"place": 1})
        new = await commands.command_claim_weights("b", "b", True)
        with pytest.raises(WeightSyncError, match="takes its weights from b now"):
            await commands.command_pass_weights_on(old.epoch, {"place": 2})
        await commands.command_pass_weights_on(new.epoch, {"place": 3})

    asyncio.run(run())
    assert commands.weights.orders == [{"place": 1}, {"place": 3}]


@pytest.mark.parametrize("offset", range(8))
def test_two_drivers_never_load_halves_of_two_versions(commands: Any, offset: int) -> None:
    """The second takes over at some moment of the first's update; whatever serves then is one version."""
    weights: Weights = commands.weights

    async def driver(name: str, version: int, delay: int) -> SwapReport | str:
        for _ in range(delay):
            await asyncio.sleep(0.0005)
        claim = await commands.command_claim_weights(driver=name, name=name, takeover=True)
        try:
            await commands.command_init_weights(claim.epoch, "memmap", {})
            weights.found = version
            digest = (await stage(commands, claim.epoch)).digest
            assert digest == f"digest {version}"
            return await swap(commands, claim.epoch, digest)
        except WeightSyncError as error:
            return str(error)

    async def run() -> tuple[Any, Any]:
        mixed: list[tuple[int, int]] = []

        async def poll() -> None:
            while True:
                if not weights.is_paused and weights.halves[0] != weights.halves[1]:
                    mixed.append(weights.halves)
                await asyncio.sleep(0)

        polling = asyncio.create_task(poll())
        first, second = await asyncio.gather(driver("a", 1, 0), driver("b", 2, offset))
        polling.cancel()
        assert mixed == []
        return first, second

    first, second = asyncio.run(run())
    assert second.error is None  # who has the claim is not refused
    assert weights.halves == (2, 2)
    lost = first if isinstance(first, str) else first.error
    assert lost is None or "takes its weights from b now" in lost or "staged" in lost
