"""The commands of an engine process that concern weights: who owns them, and what was staged for whom.

A driver's commands carry the epoch of its claim, and a swap the digest of what that driver staged. So two drivers that
update one engine never mix: one of them is refused before anything is paused.
"""

from __future__ import annotations

import abc
import asyncio
import math
from collections.abc import Mapping
from typing import Any

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.replica import PauseMode
from torchrl_moe.modules.backends.reports import SwapReport
from torchrl_moe.modules.backends.weight_claim import WeightClaim, WeightOwner
from torchrl_moe.weight_update.transports.base import StageReport

__all__ = ["WeightCommands"]


class WeightCommands(abc.ABC):
    """A part of an engine process, whose ``command_...`` methods are called by name."""

    def __init__(self) -> None:
        self.owner = WeightOwner()
        self._staged = ""  # the digest of what was staged last, if it is there still
        self._stagings = 0
        self._swapping = asyncio.Lock()  # staging overwrites what a swap reads

    # -- what an engine does ----------------------------------------------------------------------------------------

    @abc.abstractmethod
    async def command_weights_version(self) -> int:
        """Return the version of the weights; 0 for the checkpoint's."""

    @abc.abstractmethod
    async def _open_transport(self, transport: str, options: Mapping[str, Any]) -> None:
        """Open the engine's end of a transport."""

    @abc.abstractmethod
    async def _stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        """Fetch a version and check it."""

    @abc.abstractmethod
    async def _swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, Any] | None, patience: float
    ) -> SwapReport:
        """Serve the version that was staged."""

    # -- what they have in common -----------------------------------------------------------------------------------

    async def command_claim_weights(self, driver: str, name: str, takeover: bool) -> WeightClaim:
        async with self._swapping:  # a swap of the former owner completes first
            return self.owner.claim(driver, name, takeover)

    async def command_owns_weights(self, epoch: int) -> bool:
        return self.owner.holds(epoch)

    async def command_give_up_weights(self, epoch: int) -> None:
        self.owner.give_up(epoch)

    async def command_init_weights(self, epoch: int, transport: str, options: dict[str, Any]) -> None:
        self.owner.check(epoch)
        await self._open_transport(transport, options)

    async def command_stage_weights(
        self, epoch: int, version: int, verify: str, threads: int, manifest: str | None
    ) -> StageReport:
        async with self._swapping:
            self.owner.check(epoch)
            self._staged = ""
            self._stagings = mine = self._stagings + 1
        report = await self._stage(version, verify, threads, manifest)
        if mine != self._stagings:
            raise WeightSyncError("another version was staged meanwhile")
        self._staged = report.digest
        return report

    async def command_swap_weights(
        self,
        epoch: int,
        version: int,
        digest: str,
        pause: PauseMode,
        clear_cache: bool,
        canary: dict[str, Any] | None,
        patience: float = math.inf,
    ) -> SwapReport:
        async with self._swapping:
            if reason := self.owner.why_not_swap(epoch, version, digest, self._staged):
                return SwapReport(started=False, error=reason)
            return await self._swap(version, pause, clear_cache, canary, patience)
