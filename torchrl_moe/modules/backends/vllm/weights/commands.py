"""The weight commands of an engine process over vLLM, for a trainer that sends whole weights, or only an adapter."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from torchrl_moe.modules.backends.replica import PauseMode
from torchrl_moe.modules.backends.reports import SwapReport
from torchrl_moe.modules.backends.vllm.engine_requests import EngineRequests
from torchrl_moe.modules.backends.vllm.weights.adapter_versions import AdapterVersions
from torchrl_moe.modules.backends.vllm.weights.engine import EngineWeights
from torchrl_moe.modules.backends.weight_commands import WeightCommands
from torchrl_moe.weight_update.transports.base import StageReport

__all__ = ["EngineWeightCommands"]


class EngineWeightCommands(WeightCommands):
    """The part of ``EngineProcess`` that updates weights.

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
        super().__init__()
        self.weights, self.requests, self.adapters = weights, requests, adapters
        self._swap_weights = swap or weights.swap
        self._sends_adapters = False  # whether the trainer does, instead of weights

    async def command_weights_version(self) -> int:
        return self.weights.version

    async def _open_transport(self, transport: str, options: Mapping[str, Any]) -> None:
        if transport == "adapter":
            self.adapters.init(options, self.weights.replaced)
        else:
            await self.weights.init(transport, options)
        self._sends_adapters = transport == "adapter"

    async def _stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        if self._sends_adapters:
            return await self.adapters.stage(version)
        return await self.weights.stage(version, verify, threads, manifest)

    async def _swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, Any] | None, patience: float
    ) -> SwapReport:
        if self._sends_adapters:
            return self.adapters.swap(version)
        # whole weights have the adapter merged in, or none
        adapter, self.requests.adapter = self.requests.adapter, None
        report = await self._swap_weights(version, pause, clear_cache, canary, patience)
        if report.started:
            self.adapters.leave()
        else:
            self.requests.adapter = adapter
        return report
