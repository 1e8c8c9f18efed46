"""The engine process's side of a weight update: check a version, then swap it in, or say how far it came.

One transaction: staging looks at names, shapes and digests while the engine serves; applying pauses, starts, loads,
finishes, resumes, and asks for one token, whose log-prob must be a number. A failure before the start leaves the old
version serving; after it, the engine stays paused, since its layers may be half old and half new. A paused engine makes
no token, so the probe comes after the resume, before the driver gives it new requests.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable
from typing import Any

from torchrl_moe import _compat
from torchrl_moe._errors import WeightSyncError
from torchrl_moe.data.weight_store import WeightStoreReader, check_tensors
from torchrl_moe.modules.backends.replica import Completion, PauseMode, StageReport, SwapReport

__all__ = ["EngineWeights"]

PROBE_SECONDS = 10.0
SETTLE_SECONDS = 0.01  # between two looks at tokens that are still on their way


class EngineWeights:
    """The weights of one ``AsyncLLM``.

    Args:
        engine: the ``AsyncLLM``.
        expected: returns checkpoint name -> (dtype, shape) of what the engine was started from.
    """

    def __init__(self, engine: Any, expected: Callable[[], dict[str, Any]]) -> None:
        self.engine = engine
        self._read_expected = expected
        self._expected: dict[str, Any] = {}
        self.version = 0
        self._swaps = 0
        self._left_paused = False  # by a swap that failed, not by the user
        self._open_gate = asyncio.Event()
        self._open_gate.set()
        self._reader: WeightStoreReader | None = None
        self._marks: dict[str, list[tuple[int, dict[int, int]]]] = {}  # request -> version, tokens of each answer

    async def init(self, transport: str, folder: str) -> None:
        """Open the transport in the workers, and here."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"transport": transport, "folder": folder}
        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        self._expected = await asyncio.to_thread(self._read_expected)
        self._reader = WeightStoreReader(folder)

    async def salt(self) -> dict[str, str]:
        """Return the part of a prompt that keeps cached prefixes of different weights apart, once no swap is on."""
        await self._open_gate.wait()
        # by swap, not by version: another trainer may begin to count anew
        return {"cache_salt": f"swap-{self._swaps}"} if self._swaps else {}

    def stamp(self, completion: Completion) -> Completion:
        """Give tokens that a request had before a swap the version that made them; the rest has the version now."""
        for version, counts in reversed(self._marks.pop(completion.request_id, [])):
            for output in completion.outputs:
                output.policy_versions[: counts.get(output.index, 0)] = version
        return completion

    async def stage(self, version: int) -> StageReport:
        """Check a version while the engine serves; reading it also brings its pages into memory.

        Raises:
            WeightSyncError: the transport was not initialised, or the version is not what the engine expects.
        """
        if self._reader is None:
            raise WeightSyncError("the weight transport is not initialised: call init_all_workers_group() first")
        reader, started = self._reader, time.perf_counter()
        manifest = reader.manifest(version)
        check_tensors(manifest.tensors, self._expected)
        await asyncio.to_thread(reader.verify, manifest)
        return StageReport(seconds=time.perf_counter() - started, nbytes=manifest.nbytes, digest=manifest.digest)

    async def swap(self, version: int, pause: PauseMode, clear_cache: bool) -> SwapReport:
        """Replace the weights. Never raises for a failed update: the report says how far it came.

        Requests that arrive meanwhile wait here, so that none reads cached prefixes of the old weights afterwards. An
        engine that was paused before stays so.
        """
        started = time.perf_counter()
        self._open_gate.clear()
        try:
            return await self._swap(started, version, pause, clear_cache)
        finally:
            self._open_gate.set()

    async def _swap(self, started: float, version: int, pause: PauseMode, clear_cache: bool) -> SwapReport:
        was_paused = await self.engine.is_paused() and not self._left_paused
        (error,) = await asyncio.gather(self._hold(pause, clear_cache), return_exceptions=True)
        paused = time.perf_counter()
        if isinstance(error, BaseException):
            if not was_paused:
                await self.engine.resume_generation()
            return SwapReport(started=False, error=f"{type(error).__name__}: {error}")
        self._swaps += 1  # whatever comes of it, nothing cached before is good for what comes after
        (error,) = await asyncio.gather(self._load(version), return_exceptions=True)
        loaded = resumed = time.perf_counter()
        if error is None:
            self.version = version
            if not was_paused:
                await self.engine.resume_generation()
                resumed = time.perf_counter()
                (error,) = await asyncio.gather(self._probe(), return_exceptions=True)
        self._left_paused = error is not None
        if isinstance(error, BaseException):
            await self.engine.pause_generation(mode=pause, clear_cache=False)
        return SwapReport(
            pausing_seconds=paused - started,
            loading_seconds=loaded - paused,
            paused_seconds=resumed - started,
            error=None if error is None else f"{type(error).__name__}: {error}",
        )

    async def _hold(self, pause: PauseMode, clear_cache: bool) -> None:
        await self.engine.pause_generation(mode=pause, clear_cache=clear_cache)
        await self._mark()

    async def _mark(self) -> None:
        """Note how many tokens each running request has under the version so far."""
        seen, counts = None, _compat.delivered_tokens(self.engine)
        while counts != seen:  # the last step's tokens may still be on their way
            seen = counts
            await asyncio.sleep(SETTLE_SECONDS)
            counts = _compat.delivered_tokens(self.engine)
        self._marks = {name: [*self._marks.get(name, []), (self.version, had)] for name, had in counts.items()}

    async def _load(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.engine.start_weight_update()
        await self.engine.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await self.engine.finish_weight_update(str(version))

    async def _probe(self) -> None:
        """Ask the new weights for one token; a tensor that did not arrive shows as NaN."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=1, temperature=0.0, logprobs=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        prompt = {"prompt_token_ids": [0], "cache_salt": f"probe-{self._swaps}"}
        answer = asyncio.ensure_future(self._first_logprobs(prompt, params))
        done, _ = await asyncio.wait([answer], timeout=PROBE_SECONDS)
        if not done:  # it stands behind a long queue, whose answers will show what it would have
            answer.cancel()
            return
        if not all(math.isfinite(entry.logprob) for entry in answer.result().values()):
            raise WeightSyncError("the new weights give a log-prob that is not a number")

    async def _first_logprobs(self, prompt: dict[str, Any], params: Any) -> Any:
        final: Any = None
        async for output in self.engine.generate(prompt, params, f"weight-probe-{self._swaps}"):
            final = output
        return final.outputs[0].logprobs[0]
