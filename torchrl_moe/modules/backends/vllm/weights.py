"""The engine process's side of a weight update: versions of weights and of adapters, which of them a trainer sends."""

from __future__ import annotations

import asyncio
import itertools
import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict

from torchrl_moe import _compat
from torchrl_moe.errors import EngineError, ManifestMismatch, WeightSyncError
from torchrl_moe.modules.backends.engine import compare_log_probs
from torchrl_moe.modules.backends.replica import Completion, PauseMode, StageReport, SwapReport
from torchrl_moe.modules.backends.vllm.adapters import UnusedModulesError, load_adapter, new_folder
from torchrl_moe.modules.backends.vllm.engine_requests import EngineRequests
from torchrl_moe.store import Manifest, WeightStoreReader, check_tensors, copy_adapter

if TYPE_CHECKING:
    import torch
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector


FIRST_NUMBER = 1 << 30  # of a trainer's adapters; users count their own from 1
LEAVE_SECONDS = 0.1  # between two checks whether an old adapter is still in use
WEIGHTS, REST = "weights", "kv_cache"  # vLLM's names of what sleeps
PROBE_SECONDS = 10.0
PROOF_SECONDS = 60.0
CHECK = "torchrl_moe_weight_check"  # in the ``extra_args`` of the weight check's request
SETTLE_SECONDS = 0.01  # between two polls for tokens that are still in transit
POLL_SECONDS = (0.005, 0.1)  # between two polls of workers that stage: first, and at most

Expected: TypeAlias = "Mapping[str, tuple[torch.dtype, torch.Size]]"
"""Dtype and shape of each tensor of the checkpoint."""


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """An adapter in the engine: its version, vLLM's request of it, and our copy of its files."""

    version: int
    lora: LoRARequest
    folder: Path


class AdapterVersions:
    """The versions of a trainer's adapter in one ``AsyncLLM``: one is loaded, then given to new requests.

    Nothing is paused. A request keeps the adapter that it began with, and vLLM keys cached prefixes by an adapter's
    name, which no two versions share. An adapter that vLLM evicts is read from its files again in the step that needs
    it, and one that cannot be read ends the engine. So each version is copied to files of our own, which stay until no
    request uses it.
    """

    def __init__(
        self, engine: AsyncLLM, requests: EngineRequests, check: Callable[[str], None] = lambda _: None
    ) -> None:
        self._engine, self._requests, self._check = engine, requests, check
        self._store: Path | None = None
        self._numbers = itertools.count(FIRST_NUMBER)
        self._staged: _Loaded | None = None
        self._serving: _Loaded | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def init(self, options: Mapping[str, object], replaced: bool) -> None:
        """Note the weight store's ``folder``."""
        if self._engine.vllm_config.lora_config is None:
            raise ValueError(
                "lora='adapter' needs an engine with LoRA, and this one was started without: pass enable_lora=True and "
                "max_lora_rank=, at least the adapter's; on a CPU also lora_target_modules= without the experts, for "
                "example ['qkv_proj', 'o_proj']. With max_loras=2 requests of two versions run side by side."
            )
        if replaced:
            raise ValueError(
                "lora='adapter' sends no weights, and this engine's were replaced by a sender's, so that a restarted "
                "replica would not have them: start the engine from the model that the adapter is for"
            )
        self._store = Path(str(options["folder"]))

    async def stage(self, version: int) -> StageReport:
        """Load a version, which no request uses yet."""
        self._check("the update of an adapter")
        if self._store is None:
            raise WeightSyncError("the weight transport is not initialised: call init_all_workers_group() first")
        started = time.perf_counter()
        folder, number = new_folder(), next(self._numbers)
        fields = {"lora_name": f"synced-{number}", "lora_int_id": number, "lora_path": str(folder)}
        try:
            manifest = await asyncio.to_thread(copy_adapter, self._store, version, folder)
            fetched = time.perf_counter()
            try:
                lora = await load_adapter(self._engine, fields)
            except Exception as error:  # vLLM's own is no narrower
                hint = ". Or send lora='merged'" if isinstance(error, UnusedModulesError) else ""
                raise ManifestMismatch(f"the engine cannot load adapter version {version}: {error}{hint}") from error
        except BaseException:
            shutil.rmtree(folder)
            raise
        self._retire(self._staged)
        self._staged = _Loaded(version, lora, folder)
        loaded = time.perf_counter()
        return StageReport(
            seconds=loaded - started,
            nbytes=manifest.nbytes,
            digest=manifest.digest,
            fetched=fetched - started,
            loaded=loaded - fetched,
        )

    def swap(self, version: int) -> SwapReport:
        """Give the version staged last to all new requests."""
        adapter = self._staged
        if adapter is None or adapter.version != version:
            return SwapReport(started=False, error=f"adapter version {version} is not the one staged last")
        self.leave()
        self._staged, self._serving = None, adapter
        self._requests.change_adapter(adapter.lora, version)
        return SwapReport()

    def leave(self) -> None:
        """Remove the version in use, once no request uses it: another one, or whole weights have taken its place."""
        self._retire(self._serving)
        self._serving = None

    def _retire(self, adapter: _Loaded | None) -> None:
        if adapter is not None:
            task = asyncio.get_running_loop().create_task(self._remove(adapter))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _remove(self, adapter: _Loaded) -> None:
        while self._requests.uses(adapter.lora):
            await asyncio.sleep(LEAVE_SECONDS)
        error: BaseException | None
        (error,) = await asyncio.gather(self._engine.remove_lora(adapter.lora.lora_int_id), return_exceptions=True)
        if not isinstance(error, BaseException):  # else the engine is ending
            shutil.rmtree(adapter.folder, ignore_errors=True)


class WeightCheck:
    """A request that new weights must pass before any of their tokens leaves the engine process.

    With a canary (the trainer's own log-probs of a fixed prompt), the engine's log-probs must equal it. Without one,
    the engine generates one token, whose log-prob must be a number: a tensor that did not arrive shows as NaN.

    Our scheduler lets it overtake all other requests. Under another scheduler it waits its turn; then no result in time
    means that the engine is full, and says nothing about its weights.
    """

    def __init__(self, engine: AsyncLLM, proof: Mapping[str, Any] | None, name: str) -> None:
        self._engine, self._proof, self._name = engine, proof, name
        self._sent: RequestOutputCollector | None = None

    async def send(self) -> None:
        """Send the request; a paused engine answers it in its first steps after the pause. Idempotent."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if self._sent is not None:
            return
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            logprobs=0,
            prompt_logprobs=None if self._proof is None else 0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            extra_args={CHECK: True},
        )
        ids = [0] if self._proof is None else list(self._proof["token_ids"])
        prompt = {"prompt_token_ids": ids, "cache_salt": self._name}
        self._sent = await self._engine.add_request(self._name, prompt, params)

    async def ask(self, seconds: float) -> str:
        """Return why the weights were not checked; an empty string if they passed."""
        await self.send()
        seconds = min(seconds, PROBE_SECONDS if self._proof is None else PROOF_SECONDS)
        assert self._sent is not None
        answer = asyncio.ensure_future(self._sent.get())
        # a check without an answer says nothing about the weights
        done, _ = await asyncio.wait([answer], timeout=seconds)
        if not done:
            answer.cancel()
            await self._engine.abort([self._name])
            return f"the check of the new weights had no turn within {seconds:g} s"
        final = answer.result()
        first = final.outputs[0].logprobs[0]
        if not all(math.isfinite(entry.logprob) for entry in first.values()):
            raise WeightSyncError("the new weights give a log-prob that is not a number")
        # the trainer's log-probs of the same prompt
        if self._proof is not None:
            tokens = self._proof["token_ids"][1:]
            got = [entry[token].logprob for token, entry in zip(tokens, final.prompt_logprobs[1:], strict=True)]
            compare_log_probs(got, self._proof["log_probs"], self._proof["tolerance"])
        return ""


def is_weight_check(params: SamplingParams | None) -> bool:
    """Whether ``SamplingParams`` are those of a weight check."""
    return bool(params and params.max_tokens == 1 and (params.extra_args or {}).get(CHECK))


class StagingReport(TypedDict):
    """How far a worker is with staging a version: plain data, sent from its process."""

    running: bool
    fetched: float
    error: str | None


class EngineWeights:
    """The weights of one ``AsyncLLM``, and their update: one transaction.

    Staging checks names, shapes and digests, and has the workers fetch the version, while the engine serves. Swapping
    pauses, loads, resumes and sends the weight check, which holds output back:

    .. code-block:: text

        stage (serving) --> pause --> load --> resume + weight check --> release held output
                                       +-- failed ---+--> drop it; back to the old weights if intact, else stay paused

    Old weights are intact before the first tensor is loaded.
    """

    def __init__(self, engine: AsyncLLM, expected: Callable[[], Expected]) -> None:
        self.engine = engine
        self._read_expected = expected
        self._expected: Expected | None = None  # until a transport is open
        self.version = 0
        self.proved_version = 0  # of the last weights that passed the check
        self.in_flight: EngineRequests | None = None  # what a swap may cut short
        self._swaps = 0
        self._left_paused = False  # by a failed swap, not by the user
        self.user_paused = False
        self._awake = asyncio.Event()  # otherwise new requests wait
        self._awake.set()
        self._asleep: set[str] = set()
        self._level = 0
        self._dropped = False  # by sleep of level 2, and not updated since
        self._slept_paused = False  # the user had paused it before it slept
        self._asked = 0  # counts calls of sleep and wake_up: the last one holds
        self._turn = asyncio.Lock()  # no sleep during a swap
        self.accepting = asyncio.Event()  # otherwise vLLM refuses new requests: it is paused, and not to keep them
        self.accepting.set()
        self._open_gate = asyncio.Event()  # for new requests
        self._open_gate.set()
        self._proved = asyncio.Event()  # for outgoing completions
        self._proved.set()
        self._held: set[str] = set()  # requests whose completion waits for ``_proved``
        self._spoiled: set[str] = set()  # requests that may have tokens of failed weights
        self.reader: WeightStoreReader | None = None
        self._stagings = 0
        self._marks: dict[str, list[tuple[int, dict[int, int]]]] = {}  # request -> version, tokens of each answer

    async def init(self, transport: str, options: Mapping[str, object]) -> None:
        """Open the transport in the workers, and here."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"transport": transport, "options": dict(options)}
        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        self.reader = WeightStoreReader(str(options["folder"])) if transport == "memmap" else None
        self._expected = await asyncio.to_thread(self._read_expected)

    @property
    def replaced(self) -> bool:
        """Whether the weights may differ from those that the engine was started from."""
        return self._swaps > 0

    # -- requests ---------------------------------------------------------------------------------------------------

    async def salt(self) -> dict[str, str]:
        """Return the salt that separates cached prefixes of different weights; waits for a running swap."""
        while not (self._awake.is_set() and self._open_gate.is_set()):
            await self._awake.wait()
            await self._open_gate.wait()
        # by swap, not by version: another trainer may count from zero
        return {"cache_salt": f"swap-{self._swaps}"} if self._swaps else {}

    async def deliver(self, completion: Completion) -> Completion | None:
        """Return a completion with the versions of its tokens, once their weights have passed the check."""
        self._held.add(completion.request_id)
        try:
            await self._proved.wait()
        finally:
            self._held.discard(completion.request_id)
        if completion.request_id in self._spoiled:
            self._spoiled.discard(completion.request_id)
            return None
        return self.stamp(completion)

    def stamp(self, completion: Completion, keep: bool = False) -> Completion:
        """Set the versions of tokens from before a swap; the others have the current version."""
        marks = self._marks.get(completion.request_id, []) if keep else self._marks.pop(completion.request_id, [])
        for version, counts in reversed(marks):
            for output in completion.outputs:
                output.policy_versions[: counts.get(output.index, 0)] = version
        return completion

    # -- pause and sleep --------------------------------------------------------------------------------------------
    #
    # vLLM's sleep mode gives a GPU's memory to the trainer, and takes it back. Requests that come meanwhile wait here,
    # before vLLM has seen them. A weight update wakes the weights, and nothing else. Weights that level 2 has dropped
    # must be updated before the rest may wake. vLLM has sleep mode on GPUs only, and this has never run on one.

    def check_awake(self, what: str) -> None:
        """Raise an ``EngineError`` if the engine sleeps, or a part of it does."""
        if self._asleep:
            raise EngineError(f"{what}: the engine sleeps; wake_up() first")

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause the engine for the user, after a running swap, which would resume what the user paused."""
        self.check_awake("pause")
        await self._pause(mode, clear_cache)

    async def resume(self) -> None:
        """Resume the engine for the user, after a running swap, since half-loaded weights would generate."""
        self.check_awake("resume")
        await self._resume()

    async def sleep(self, level: int, mode: PauseMode) -> None:
        """Free the memory of weights and cache. Does nothing if it sleeps at that level already."""
        if level not in (1, 2):
            raise ValueError(f"sleep: level must be 1 (weights go to host memory) or 2 (they are dropped), got {level}")
        if not self.engine.model_config.enable_sleep_mode:
            raise ValueError("sleep: start the engine with enable_sleep_mode=True; vLLM has it on GPUs only")
        if self._asleep == {WEIGHTS, REST} and level == self._level:
            return
        self.check_awake("sleep")
        self._asked = mine = self._asked + 1
        await self._no_swap()  # whose pause is not the user's
        self._slept_paused = self.user_paused
        self._awake.clear()
        try:
            await self._pause(mode, True)
            async with self._turn:
                if mine != self._asked:
                    raise EngineError("sleep: the engine was woken before its requests had finished")
                await self.engine.sleep(level, "keep")
                self._asleep, self._level, self._dropped = {WEIGHTS, REST}, level, level == 2
        except BaseException:
            if mine == self._asked:
                await self._go_on()
            raise

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        """Take memory back; once all of it is back, continue as before. Idempotent."""
        wanted = {WEIGHTS, REST} if tags is None else set(tags)
        if not wanted <= {WEIGHTS, REST}:
            raise ValueError(f"wake_up: tags must be of 'weights' and 'kv_cache', got {list(tags or ())!r}")
        if REST in wanted and self._dropped:
            raise WeightSyncError("wake_up: sleep of level 2 has dropped the weights; update them first")
        self._asked += 1
        async with self._turn:
            await self._wake(wanted)
            if not self._asleep and not self._awake.is_set():
                await self._go_on()

    async def _wake(self, wanted: set[str]) -> None:
        if tags := sorted(wanted & self._asleep):
            await self.engine.wake_up(tags)
            self._asleep -= wanted

    async def _go_on(self) -> None:
        """Serve, or stay paused if the engine was paused before it slept."""
        if self._slept_paused:  # vLLM resumes by itself once nothing sleeps
            await self.engine.pause_generation(mode="keep", clear_cache=False)
        else:
            await self._resume()
        self._awake.set()

    async def _no_swap(self) -> None:
        while not self._open_gate.is_set():  # the next swap may start before a waiter wakes
            await self._open_gate.wait()

    async def _pause(self, mode: PauseMode, clear_cache: bool) -> None:
        await self._no_swap()
        self.user_paused = True
        if mode != "keep":
            self.accepting.clear()
        await self.engine.pause_generation(mode=mode, clear_cache=clear_cache)

    async def _resume(self) -> None:
        await self._no_swap()
        if self._left_paused:
            raise WeightSyncError("a weight update failed in this engine: it must be updated, or restarted, first")
        self.user_paused = False
        await self.engine.resume_generation()
        self.accepting.set()

    # -- staging ----------------------------------------------------------------------------------------------------

    async def stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        """Check a version, and have the workers fetch it, while the engine serves."""
        if self._expected is None:
            raise WeightSyncError("the weight transport is not initialised: call init_all_workers_group() first")
        started = time.perf_counter()
        # names and shapes first, before a worker is asked
        found, nbytes, digest = await asyncio.to_thread(self._find, version, manifest, self._expected)
        # then all workers, each in a thread of its own; again while one of them is still at an earlier version
        self._stagings = mine = self._stagings + 1
        waiting, longest = POLL_SECONDS
        asked = found.to_json(), verify == "digest", threads
        while not all(await self.engine.collective_rpc("torchrl_moe_stage", args=asked)):
            await self._wait(longest, mine)
        while True:
            reports: list[StagingReport] = await self.engine.collective_rpc("torchrl_moe_staged")
            if not any(report["running"] for report in reports):
                break
            await self._wait(waiting, mine)
            waiting = min(waiting * 1.5, longest)
        for report in reports:
            if report["error"] is not None:
                raise WeightSyncError(f"version {found.version} could not be staged: {report['error']}")
        verifying = time.perf_counter()
        if self.reader is not None and verify == "digest":  # the workers only map the store
            await asyncio.to_thread(self.reader.verify, found, threads)
        ended = time.perf_counter()
        return StageReport(
            seconds=ended - started,
            nbytes=nbytes,
            digest=digest,
            fetched=ended - verifying + max(report["fetched"] for report in reports),
        )

    def _find(self, version: int, manifest: str | None, expected: Expected) -> tuple[Manifest, int, str]:
        """Return the manifest of a version that fits, its bytes and digest; slow with many tensors."""
        if manifest is not None:
            found = Manifest.from_json(manifest)
        elif self.reader is not None:
            found = self.reader.manifest(version)
        else:
            raise WeightSyncError(f"the transport cannot look version {version} up: give its manifest")
        check_tensors(found.tensors, expected)
        return found, found.nbytes, found.digest

    async def _wait(self, seconds: float, staging: int) -> None:
        await asyncio.sleep(seconds)
        if staging != self._stagings:  # the driver has started another one
            raise WeightSyncError("another version was staged meanwhile")

    # -- swapping ---------------------------------------------------------------------------------------------------

    async def swap(
        self,
        version: int,
        pause: PauseMode,
        clear_cache: bool,
        canary: Mapping[str, object] | None = None,
        patience: float = math.inf,
    ) -> SwapReport:
        """Replace the weights. Does not raise for a failed update: the report says how far it got.

        New requests wait, so that none reads old prefixes. A paused engine stays paused and gets no weight check.
        Weights that sleep are woken, and stay awake.
        """
        async with self._turn:
            await self._wake({WEIGHTS})
            self._open_gate.clear()
            try:
                return await self._swap(version, pause, clear_cache, canary, patience)
            finally:
                self._open_gate.set()

    async def _swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, object] | None, patience: float
    ) -> SwapReport:
        started = time.perf_counter()
        # hold: pause, and note which tokens the old weights made
        was_paused = self.user_paused
        (error,) = await asyncio.gather(self._hold(pause, clear_cache), return_exceptions=True)
        if error is not None:
            touched = self._left_paused
            await self._settle(error, restored=not touched, resume=not touched and not was_paused)
            return SwapReport(started=touched, error=_message(error))
        paused = time.perf_counter()
        self._swaps += 1  # whatever the outcome, earlier cache entries must not be used afterwards
        # load: every layer is taken apart, and put together from the new tensors
        (error,) = await asyncio.gather(self._load(version), return_exceptions=True)
        loaded = resumed = time.perf_counter()
        restored = error is not None and not self._left_paused and await self._whole()
        unproved = "the engine is paused" if error is None and was_paused else ""
        if error is None:
            self.version = version
            # prove: no answer leaves before the weight check is passed
            if not was_paused:
                self._proved.clear()
                proving = self._prove(canary, before=pause == "keep", deadline=started + patience)
                (proof,) = await asyncio.gather(proving, return_exceptions=True)
                if isinstance(proof, BaseException):
                    error = proof
                    await self._withdraw()
                else:
                    resumed, unproved = proof
        # settle: old weights serve on, new ones serve, or the engine stays paused
        await self._settle(error, restored, resume=restored and not was_paused)
        return SwapReport(
            started=not restored,
            pausing_seconds=paused - started,
            loading_seconds=loaded - paused,
            paused_seconds=resumed - started,
            unproved=unproved,
            error=_message(error),
        )

    async def _hold(self, pause: PauseMode, clear_cache: bool) -> None:
        if self.in_flight is not None:
            self.in_flight.pausing(pause)
        if pause != "keep":  # an engine that the user has paused stays so afterwards, and takes no requests any more
            self.accepting.clear()
        await self.engine.pause_generation(mode=pause, clear_cache=clear_cache)
        counts = await self._delivered()
        made_by = {} if self.in_flight is None else self.in_flight.take_versions(counts)
        self._marks = {
            name: [*self._marks.get(name, []), (made_by.get(name, self.version), had)] for name, had in counts.items()
        }
        if self.in_flight is not None:
            await self.in_flight.paused(counts, clear_cache)

    async def _delivered(self) -> dict[str, dict[int, int]]:
        """Return how many tokens each request of a paused engine has, by answer."""
        seen, counts = None, _compat.delivered_tokens(self.engine)
        while counts != seen:  # the last step's tokens may still be in transit
            seen = counts
            await asyncio.sleep(SETTLE_SECONDS)
            counts = _compat.delivered_tokens(self.engine)
        return counts

    async def _load(self, version: int) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.engine.start_weight_update()
        await self.engine.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        await self.engine.finish_weight_update(str(version))

    async def _whole(self) -> bool:
        """Whether the model of every worker can run: then a failed load has not touched it."""
        whole: list[bool] | BaseException
        (whole,) = await asyncio.gather(self.engine.collective_rpc("torchrl_moe_whole"), return_exceptions=True)
        return not isinstance(whole, BaseException) and all(whole)

    async def _prove(self, canary: Mapping[str, object] | None, before: bool, deadline: float) -> tuple[float, str]:
        """Resume; return the time of that, and why the weights were not checked, if they were not."""
        question = WeightCheck(self.engine, canary, f"weight-probe-{self._swaps}")
        if before:
            await question.send()
        await self.engine.resume_generation()
        resumed = time.perf_counter()
        return resumed, await question.ask(max(deadline - resumed, 0.0) / 2)

    async def _withdraw(self) -> None:
        """Pause weights that failed their check, and drop what they generated. The old ones are gone.

        Requests that ran meanwhile start again: even their cached prefixes may come from the failed weights.
        """
        await self.engine.pause_generation(mode="keep", clear_cache=False)
        running = set(await self._delivered())
        self._spoiled |= running | self._held
        self._marks.clear()
        await self.engine.abort(list(running))

    async def _settle(self, error: BaseException | None, restored: bool, resume: bool) -> None:
        """Resume the engine, or leave it paused if it has neither its old weights nor good new ones."""
        self._left_paused = error is not None and not restored
        self._dropped = self._dropped and error is not None
        if resume:
            await self.engine.resume_generation()
        if self._left_paused:
            self.accepting.clear()
        else:
            if not self.user_paused:
                self.accepting.set()
            self.proved_version = self.version
            self._proved.set()


def _message(error: BaseException | None) -> str | None:
    return None if error is None else f"{type(error).__name__}: {error}"


class Updates:
    """The updates of one engine by a trainer that sends whole weights, or only an adapter."""

    def __init__(self, weights: EngineWeights, requests: EngineRequests, adapters: AdapterVersions) -> None:
        self.weights, self.requests, self.adapters = weights, requests, adapters
        self.sends_adapters = False

    async def open(self, transport: str, options: Mapping[str, object]) -> None:
        if transport == "adapter":
            self.adapters.init(options, self.weights.replaced)
        else:
            await self.weights.init(transport, options)
        self.sends_adapters = transport == "adapter"

    async def stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        if self.sends_adapters:
            return await self.adapters.stage(version)
        return await self.weights.stage(version, verify, threads, manifest)

    async def swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, object] | None, patience: float
    ) -> SwapReport:
        if self.sends_adapters:
            return self.adapters.swap(version)
        # whole weights have the adapter merged in, or none
        adapter, self.requests.adapter = self.requests.adapter, None
        report = await self.weights.swap(version, pause, clear_cache, canary, patience)
        if report.started:
            self.adapters.leave()
        else:
            self.requests.adapter = adapter
        return report
