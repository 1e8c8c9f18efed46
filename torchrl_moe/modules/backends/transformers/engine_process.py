"""The process that owns one model of transformers; ``process/engine_program.py`` has what any engine process does.

The module's top level imports nothing heavy: a fork server imports it first, and transformers in ``preload``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from multiprocessing.connection import Connection
from typing import Any

import psutil

from torchrl_moe.modules.backends.checkpoint import checkpoint_folder, checkpoint_metadata
from torchrl_moe.modules.backends.process import packing
from torchrl_moe.modules.backends.process.engine_program import EngineProgram, Send, run_engine, run_script
from torchrl_moe.modules.backends.process.parent_watch import Inbox
from torchrl_moe.modules.backends.process.plain import Packed
from torchrl_moe.modules.backends.replica import PauseMode, Request
from torchrl_moe.modules.backends.reports import ProbeReport, ReplicaStats, SwapReport
from torchrl_moe.modules.backends.tokenizer_files import tokenizer_files
from torchrl_moe.modules.backends.transformers.engine_args import build_engine_args
from torchrl_moe.modules.backends.weight_commands import WeightCommands
from torchrl_moe.weight_update.transports.base import StageReport


class EngineProcess(EngineProgram, WeightCommands):
    """One engine process over plain transformers.

    Args:
        loaded: the model, and what belongs to it.
        inbox: what the driver sends.
        send: sends a message to the driver.
    """

    def __init__(self, loaded: Any, inbox: Inbox, send: Send) -> None:
        from torchrl_moe.modules.backends.transformers.engine_requests import EngineRequests
        from torchrl_moe.modules.backends.transformers.weights import EngineWeights

        self.requests = EngineRequests(
            loaded.decoder, loaded.reader, lambda completion: send(("completion", completion)), self._refuse
        )
        EngineProgram.__init__(self, loaded.info, self.requests.load, inbox, send)
        WeightCommands.__init__(self)
        self.weights = EngineWeights(loaded.decoder.model, loaded.info.model, self.requests, loaded.report)
        self._loaded = loaded
        self._self = psutil.Process()

    # -- requests ---------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Start a request."""
        self.requests.start(request)

    def abort(self, request_ids: list[str]) -> None:
        """Cut requests short."""
        self.requests.abort(request_ids)

    def left(self, driver: str) -> None:
        """End the claim of a driver that is gone."""
        self.owner.left(driver)

    def _background(self) -> list[Coroutine[Any, Any, None]]:
        return [self._work()]

    async def _work(self) -> None:
        """Run the requests; if that fails, tell the driver at once."""
        await asyncio.gather(self.requests.run(), return_exceptions=True)
        self._report_death()

    def _death(self) -> str:
        failure = self.requests.failure
        return "" if failure is None else f"the model failed: {type(failure).__name__}: {failure}"

    def close(self) -> None:
        """End the engine."""
        self.requests.close()
        self.weights.close()

    # -- commands ---------------------------------------------------------------------------------------------------

    async def command_pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self.requests.pause(mode, clear_cache)

    async def command_resume(self) -> None:
        self.requests.resume()

    async def command_sleep(self, level: int, mode: PauseMode) -> None:
        del level, mode
        raise ValueError("sleep: engine='transformers' keeps its model in memory; shut it down, or use vLLM")

    async def command_wake_up(self, tags: list[str] | None) -> None:
        del tags  # it never sleeps

    async def command_collective_rpc(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        del args, kwargs
        raise ValueError(f"{method}: engine='transformers' has no workers to call; collective_rpc is vLLM's")

    async def command_reset_prefix_cache(self) -> bool:
        return not self.requests  # nothing is cached beyond a request

    async def command_set_seed(self, seed: int) -> None:
        async with self.requests.turn:
            self.requests.decoder.sampler.seed(seed)

    async def command_tokenizer(self) -> Any:
        return tokenizer_files(self._loaded.reader.words.tokenizer, self._loaded.arguments.trust_remote_code)

    async def command_metadata(self) -> Any:
        return checkpoint_metadata(checkpoint_folder(self.info.model))

    async def command_snapshot(self) -> Packed:
        return packing.pack_completions(await self.requests.snapshot())

    async def command_probe(self, seconds: float) -> ProbeReport:
        """Report whether a step ended in time, and this process's CPU time: its model thread is the engine core."""
        waiting = asyncio.ensure_future(self.requests.turn.acquire())
        await asyncio.wait({waiting}, timeout=seconds)
        answered = waiting.done()
        if answered:
            self.requests.turn.release()
        else:
            waiting.cancel()
        times = self._self.cpu_times()
        return ProbeReport(core_answered=answered, cpu_seconds=times.user + times.system)

    def _stats(self) -> ReplicaStats:
        load = self.load
        return ReplicaStats(
            running=load.running,
            waiting=load.waiting,
            cache_usage=load.cache_usage if self.requests else 0.0,
            generation_seconds=self.requests.seconds,
            steps=load.steps,
            step_at=load.step_at,
            weights_version=self.requests.version,
            **self.requests.counts,
        )

    # -- weights ----------------------------------------------------------------------------------------------------

    async def command_weights_version(self) -> int:
        return self.requests.version

    async def _open_transport(self, transport: str, options: Mapping[str, Any]) -> None:
        await self.weights.init(transport, options)

    async def _stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        return await self.weights.stage(version, verify, threads, manifest)

    async def _swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, Any] | None, patience: float
    ) -> SwapReport:
        return await self.weights.swap(version, pause, clear_cache, canary, patience)


async def _open(arguments: dict[str, Any], inbox: Inbox, send: Send) -> EngineProcess:
    from torchrl_moe.modules.backends.transformers.loading import load

    return EngineProcess(load(build_engine_args(arguments)), inbox, send)


def run(connection: Connection, driver_is_gone: Callable[[], bool]) -> None:
    """Run the engine, then end the process."""
    run_engine(connection, driver_is_gone, _open)


def preload() -> str:
    """Import what an engine process imports; none of it keeps a process from being forked."""
    from torchrl_moe.modules.backends.transformers import engine_requests, loading, weights

    del engine_requests, loading, weights
    return ""


def main() -> None:
    """Run as a child of the driver."""
    run_script(run)


if __name__ == "__main__":
    main()
