"""An engine that gives its GPU's memory to the trainer, and takes it back: vLLM's sleep mode.

Requests that arrive while it sleeps wait here, before vLLM has seen them. A weight update wakes the weights, and
nothing else. Weights that level 2 has dropped must be updated before the rest may wake.

vLLM has sleep mode on GPUs only, and this has never run on one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe._errors import EngineError, WeightSyncError
from torchrl_moe.modules.backends.replica import PauseMode
from torchrl_moe.modules.backends.reports import SwapReport
from torchrl_moe.modules.backends.vllm.weights.engine import EngineWeights

__all__ = ["EngineSleep"]

WEIGHTS, REST = "weights", "kv_cache"  # vLLM's names of what sleeps


class EngineSleep:
    """Which parts of an ``AsyncLLM`` sleep, and which commands it takes meanwhile.

    Args:
        engine: the ``AsyncLLM``.
        weights: its weights, which hold the gate that requests come through.
    """

    def __init__(self, engine: Any, weights: EngineWeights) -> None:
        self._engine, self._weights = engine, weights
        self._asleep: set[str] = set()
        self._level = 0
        self._weights_lost = False
        self._was_paused = False
        self._asked = 0  # counts calls of sleep and wake_up: the last one holds
        self._turn = asyncio.Lock()  # no sleep during a swap

    def check_awake(self, what: str) -> None:
        """Raise an ``EngineError`` if it sleeps, or a part of it does."""
        if self._asleep:
            raise EngineError(f"{what}: the engine sleeps; wake_up() first")

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause the engine for the user; ``EngineError`` if it sleeps."""
        self.check_awake("pause")
        await self._weights.pause(mode, clear_cache)

    async def resume(self) -> None:
        """Resume the engine for the user; ``EngineError`` if it sleeps."""
        self.check_awake("resume")
        await self._weights.resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Free the memory of weights and cache. Does nothing if it sleeps at that level already.

        Args:
            level: 1 keeps the weights in host memory, 2 drops them.
            mode: of requests in flight, as for a pause; those that are kept are computed again.

        Raises:
            ValueError: another level, or an engine without sleep mode.
            EngineError: it sleeps at another level, is half awake, or was woken before its requests had finished.
        """
        if level not in (1, 2):
            raise ValueError(f"sleep: level must be 1 (weights go to host memory) or 2 (they are dropped), got {level}")
        if not self._engine.model_config.enable_sleep_mode:
            raise ValueError("sleep: start the engine with enable_sleep_mode=True; vLLM has it on GPUs only")
        if self._asleep == {WEIGHTS, REST} and level == self._level:
            return
        self.check_awake("sleep")
        self._asked = mine = self._asked + 1
        await self._weights.no_swap()  # whose pause is not the user's
        self._was_paused = self._weights.user_paused
        self._weights.awake.clear()
        try:
            await self._weights.pause(mode, True)
            async with self._turn:
                if mine != self._asked:
                    raise EngineError("sleep: the engine was woken before its requests had finished")
                await self._engine.sleep(level, "keep")
                self._asleep, self._level, self._weights_lost = {WEIGHTS, REST}, level, level == 2
        except BaseException:
            if mine == self._asked:
                await self._go_on()
            raise

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back; once all of it is back, continue as before. Idempotent.

        Args:
            tags: ``"weights"`` or ``"kv_cache"``, which is all but the weights; ``None``: both.

        Raises:
            ValueError: another tag.
            WeightSyncError: level 2 has dropped the weights, and they were not updated since.
        """
        wanted = {WEIGHTS, REST} if tags is None else set(tags)
        if not wanted <= {WEIGHTS, REST}:
            raise ValueError(f"wake_up: tags must be of 'weights' and 'kv_cache', got {list(tags or ())!r}")
        if REST in wanted and self._weights_lost:
            raise WeightSyncError("wake_up: sleep of level 2 has dropped the weights; update them first")
        self._asked += 1
        async with self._turn:
            await self._wake(wanted)
            if not self._asleep and not self._weights.awake.is_set():
                await self._go_on()

    async def _wake(self, wanted: set[str]) -> None:
        if tags := sorted(wanted & self._asleep):
            await self._engine.wake_up(tags)
            self._asleep -= wanted

    async def _go_on(self) -> None:
        """Serve, or stay paused if the engine was paused before it slept."""
        if self._was_paused:  # vLLM resumes by itself once nothing sleeps
            await self._engine.pause_generation(mode="keep", clear_cache=False)
        else:
            await self._weights.resume()
        self._weights.awake.set()

    async def swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, Any] | None, patience: float
    ) -> SwapReport:
        """Replace the weights, as :meth:`EngineWeights.swap` does; if they sleep they are woken, and stay awake."""
        async with self._turn:
            await self._wake({WEIGHTS})
            report = await self._weights.swap(version, pause, clear_cache, canary, patience)
            self._weights_lost = self._weights_lost and report.error is not None
            return report
