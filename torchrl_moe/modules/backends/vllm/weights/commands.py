"""The commands of an engine process that concern weights: whose they are, and what was staged for whom.

A driver's commands carry the epoch of its claim, and a swap the digest of what that driver staged. So two drivers that
update one engine never mix: one of them is refused before anything is paused.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.replica import PauseMode
from torchrl_moe.modules.backends.reports import SwapReport
from torchrl_moe.modules.backends.vllm.engine_requests import EngineRequests
from torchrl_moe.modules.backends.vllm.weights.adapter_versions import AdapterVersions
from torchrl_moe.modules.backends.vllm.weights.engine import EngineWeights
from torchrl_moe.modules.backends.weight_claim import WeightClaim, WeightOwner
from torchrl_moe.weight_update.transports.base import StageReport

__all__ = ["WeightCommands"]


class WeightCommands:
    """A part of ``EngineProcess``, whose ``command_...`` methods are called by name.

    Args:
        weights: of the engine.
        requests: of the engine.
        adapters: of a trainer that sends no weights.
        swap: replaces weights, in an engine that may sleep; default: that of ``weights``.
    """

    def __init__(
        self,
        weights: EngineWeights,
        requests: EngineRequests,
        adapters: AdapterVersions,
        swap: Callable[..., Awaitable[SwapReport]] | None = None,
    ) -> None:
        self.weights, self.requests, self.adapters = weights, requests, adapters
        self._swap_weights = swap or weights.swap
        self.owner = WeightOwner()
        self._sends_adapters = False  # the trainer, and no weights
        self._staged = ""  # the digest of what was staged last, if it is there still
        self._stagings = 0
        self._swapping = asyncio.Lock()  # what a swap may have to take back lies where the next version is staged

    async def command_claim_weights(self, driver: str, name: str, takeover: bool) -> WeightClaim:
        async with self._swapping:  # the swap of the owner before ends whole
            return self.owner.claim(driver, name, takeover)

    async def command_owns_weights(self, epoch: int) -> bool:
        return self.owner.holds(epoch)

    async def command_give_up_weights(self, epoch: int) -> None:
        self.owner.give_up(epoch)

    async def command_weights_version(self) -> int:
        return self.weights.version

    async def command_init_weights(self, epoch: int, transport: str, options: dict[str, Any]) -> None:
        self.owner.check(epoch)
        if transport == "adapter":
            self.adapters.init(options, self.weights.replaced)
        else:
            await self.weights.init(transport, options)
        self._sends_adapters = transport == "adapter"

    async def command_stage_weights(
        self, epoch: int, version: int, stage: str, verify: str, threads: int, manifest: str | None
    ) -> StageReport:
        async with self._swapping:
            self.owner.check(epoch)
            self._staged = ""
            self._stagings = mine = self._stagings + 1
        if self._sends_adapters:
            report = await self.adapters.stage(version)
        else:
            report = await self.weights.stage(version, stage, verify, threads, manifest)
        if mine != self._stagings:
            raise WeightSyncError("another version was staged meanwhile")
        self._staged = report.digest
        return report

    async def command_pass_weights_on(self, epoch: int, order: dict[str, Any]) -> None:
        self.owner.check(epoch)
        await self.weights.engine.collective_rpc("torchrl_moe_pass_on", args=(order,))

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
            if self._sends_adapters:
                return self.adapters.swap(version)
            return await self._swap(version, pause, clear_cache, canary, patience)

    async def _swap(self, version: int, *how: Any) -> SwapReport:
        # whole weights have the adapter in them, or none
        adapter, self.requests.adapter = self.requests.adapter, None
        report = await self._swap_weights(version, *how)
        if report.started:
            self.adapters.leave()
        else:
            self.requests.adapter = adapter
        return report
