"""Requests to an engine, a limited number at a time."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

from torchrl_moe._errors import EngineError, StaleReplicaError
from torchrl_moe.collectors.collection_stats import CollectionStats
from torchrl_moe.modules.backends.replica import Completion

__all__ = ["GenerationSlots"]

RETRY_SECONDS = 0.1


class GenerationSlots:
    """Bounds how many answers are generated at a time.

    Args:
        engine: generates the answers.
        count: answers at a time; ``"auto"``: as many as the engine admits.
        stats: counts answers in flight.
    """

    def __init__(self, engine: Any, count: int | Literal["auto"], stats: CollectionStats) -> None:
        self._engine = engine
        self._room: contextlib.AbstractAsyncContextManager[None] = (
            contextlib.nullcontext() if count == "auto" else asyncio.Semaphore(count)
        )
        self._stats = stats

    async def answer(self, arguments: dict[str, Any]) -> Completion:
        """Generate one answer, holding a slot meanwhile.

        Args:
            arguments: of the engine's ``agenerate``.

        Raises:
            EngineError: the request was aborted, or the engine failed.
        """
        async with self._room:
            self._stats.in_flight += 1
            try:
                completion = await self._ask(arguments)
            finally:
                self._stats.in_flight -= 1
        if completion.aborted:
            raise EngineError(f"request {completion.request_id!r} was aborted", [completion])
        return completion

    async def _ask(self, arguments: dict[str, Any]) -> Completion:
        while True:
            try:
                completion: Completion = await self._engine.agenerate(**arguments)
            except StaleReplicaError:  # the replica with the newest weights died; others will get them
                await asyncio.sleep(RETRY_SECONDS)
            else:
                return completion
