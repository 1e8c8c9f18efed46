"""Commands about weights in a process over vLLM: trainers of adapters and of whole weights in turn."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.modules.backends.replica import SwapReport
from torchrl_moe.modules.backends.vllm.weights import EngineWeightCommands
from torchrl_moe.weight_update.transports.base import StageReport

HOW: dict[str, Any] = {"verify": "digest", "threads": 1, "manifest": None}
SWAP: dict[str, Any] = {"pause": "keep", "clear_cache": False, "canary": None}


class Weights:
    """Whole weights of an engine."""

    replaced = False

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.error: str | None = None

    async def init(self, transport: str, options: Any) -> None:
        self.opened.append(transport)

    async def stage(self, version: int, *how: Any) -> StageReport:
        return StageReport(seconds=0.0, nbytes=0, digest="whole")

    async def swap(self, version: int, *how: Any) -> SwapReport:
        return SwapReport(started=self.error is None, error=self.error)


class Adapters:
    """Adapters that take what they are given."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def init(self, options: Any, replaced: bool) -> None:
        self.log.append(f"in {options['folder']}, {replaced=}")

    async def stage(self, version: int) -> StageReport:
        return StageReport(seconds=0.0, nbytes=0, digest=f"adapter {version}")

    def swap(self, version: int) -> SwapReport:
        self.log.append(f"swapped {version}")
        return SwapReport()

    def leave(self) -> None:
        self.log.append("left")


@pytest.fixture
def commands() -> Any:
    made: Any = EngineWeightCommands(Weights(), SimpleNamespace(adapter=None), Adapters())  # type: ignore[arg-type]
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
        assert (await swap(commands, 0, "whole")).error == "x"
        assert commands.requests.adapter is adapter  # the old weights serve on, and it with them
        commands.weights.error = None
        assert (await swap(commands, 0, "whole")).error is None
        assert commands.requests.adapter is None

    asyncio.run(run())
    assert commands.adapters.log == ["in here, replaced=False", "swapped 5", "left"]
    assert commands.weights.opened == ["memmap"]
