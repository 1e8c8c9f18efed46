"""The process that owns one model of transformers; ``process/engine_program.py`` has what any engine process does."""

from __future__ import annotations

import asyncio
import copy
import itertools
import time
from bisect import insort
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
import psutil
import torch
from torch import Tensor

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.checkpoint import checkpoint_folder, checkpoint_metadata, tokenizer_files
from torchrl_moe.modules.backends.engine import compare_log_probs
from torchrl_moe.modules.backends.process.engine_program import EngineProgram, Inbox, Load, Send, run_engine, run_script
from torchrl_moe.modules.backends.process.link import SocketStream
from torchrl_moe.modules.backends.replica import (
    Completion,
    PauseMode,
    ProbeReport,
    ReplicaStats,
    Request,
    Scoring,
    StageReport,
    SwapReport,
)
from torchrl_moe.modules.backends.transformers.answer import Answer
from torchrl_moe.modules.backends.transformers.decoder import Loaded, Running, load
from torchrl_moe.modules.backends.transformers.transformers_arguments import build_engine_args
from torchrl_moe.store import Manifest, WeightStoreReader, check_tensors
from torchrl_moe.weight_update.transports.base import Receiver
from torchrl_moe.weight_update.transports.registry import open_receiver

if TYPE_CHECKING:
    from transformers import PreTrainedModel

T = TypeVar("T")


class EngineProcess(EngineProgram):
    """One engine process over plain transformers. Its requests run in one loop: admit what may join, then step.

    The model computes in one thread, a step at a time. Whatever else needs it, or must not see it in mid-step (an
    abort, a pause, a snapshot, a weight swap), takes the step lock between two steps; so nothing here is ever half
    done.
    """

    def __init__(self, loaded: Loaded, inbox: Inbox, send: Send) -> None:
        super().__init__(loaded.info, Load(), inbox, send)
        self.loaded, self.decoder = loaded, loaded.decoder
        self.step_lock = asyncio.Lock()
        self.version = 0
        self.weights = self.updates = EngineWeights(self)
        self._running: dict[str, Running] = {}
        # what waits, in order: priority, serial number, request, and its answer; none if its prompt is to be scored
        self._waiting: list[tuple[int, int, Running, Answer | None]] = []
        self._serial = itertools.count()
        self._again: list[Answer] = []  # to be read again, before others join
        self._aborted: set[str] = set()
        self._changed = asyncio.Event()
        self._paused_but: set[Running] | None = None  # the user's pause, and what it lets finish
        self._draining: set[Running] | None = None  # what a swap lets finish before it begins
        self._thread = ThreadPoolExecutor(1, "model")
        self._self = psutil.Process()

    def compute(self, work: Callable[..., T], *args: object) -> Awaitable[T]:
        """Run a function in the model's thread; the caller holds :attr:`step_lock`."""
        return asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def start(self, request: Request) -> None:
        self._running[request.request_id] = running = self.loaded.read(request)
        priority = request.priority if self.loaded.arguments.scheduling_policy == "priority" else 0
        waiting: Sequence[Answer | None] = running.answers if request.scoring is None else [None]
        for answer in waiting:
            insort(self._waiting, (priority, next(self._serial), running, answer))
        self._changed.set()

    def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(name for name in request_ids if name in self._running)
        self._changed.set()

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        self.weights.close()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def _background(self) -> list[Coroutine[object, None, None]]:
        return [self._run()]

    async def _run(self) -> None:
        """Work until cancelled. An error in the model's thread ends the engine."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            async with self.step_lock:
                await self._work()

    async def _work(self) -> None:
        # aborts first: what they free may join
        self._cut()
        if not all(map(self._may_run, self._begun())):
            return
        # a prompt to score, if one may run
        for entry in self._waiting:
            _, _, running, answer = entry
            if answer is None and self._may_run(running):
                self._waiting.remove(entry)
                await self._score(running)
                self._changed.set()
                break
        # then the answers that have room, and one step of all
        joining = self._joining()
        self._again = self._again[len(joining) :]  # they come first
        if joining or self.decoder.answers:
            await self.compute(self.decoder.step, joining, self.version)
            self._note_step()
            self._changed.set()
        self._finish()

    def _may_run(self, running: Running) -> bool:
        return all(only is None or running in only for only in (self._paused_but, self._draining))

    def _begun(self) -> list[Running]:
        """Return the requests that have an answer in the batch."""
        inside = {id(answer) for answer in (*self.decoder.answers, *self._again)}
        return [one for one in self._running.values() if any(id(answer) in inside for answer in one.answers)]

    async def _score(self, running: Running) -> None:
        request, running.joined_at = running.request, time.monotonic()
        work = self.decoder.score, running.prompt_ids, request.scoring, request.routed_experts
        running.scores = await self.compute(*work)
        running.token_at = time.monotonic()

    def _joining(self) -> list[Answer]:
        """Return the answers that join the batch: those to be read again, then those that wait, as far as they fit."""
        joining: list[Answer] = []
        now, widest = time.monotonic(), 0
        for answer in self._again:
            widest = max(widest, len(answer.ids))
            if self._is_too_much(len(joining), widest):
                return joining
            joining.append(answer)
        for entry in list(self._waiting):
            _, _, running, waiting = entry
            if waiting is None or not self._may_run(running):
                continue
            widest = max(widest, len(waiting.ids))
            if self._is_too_much(len(joining), widest) or not self._has_room([*joining, waiting]):
                break
            self._waiting.remove(entry)
            running.joined_at = running.joined_at or now
            joining.append(waiting)
        return joining

    def _is_too_much(self, others: int, widest: int) -> bool:
        """Whether one more is too much for a step: all are padded to the widest."""
        return others > 0 and (others + 1) * widest > self.loaded.arguments.max_num_batched_tokens

    def _has_room(self, joining: Sequence[Answer]) -> bool:
        arguments, batch = self.loaded.arguments, [*self.decoder.answers, *joining]
        budget = arguments.kv_cache_memory_bytes
        needed = len(batch) * max(answer.longest for answer in batch) * self.decoder.token_bytes
        return len(batch) <= arguments.max_num_seqs and (budget is None or needed <= budget)

    def _note_step(self) -> None:
        load, decoder, budget = self.load, self.decoder, self.loaded.arguments.kv_cache_memory_bytes
        load.steps += 1
        load.step_at = time.time()
        load.tokens += len(decoder.answers)
        held = len(decoder.answers) * decoder.columns * decoder.token_bytes
        load.cache_usage = min(held / budget, 1.0) if budget else 0.0
        now = time.monotonic()
        for running in self._begun():
            running.token_at = running.token_at or now

    # -- requests that are over -------------------------------------------------------------------------------------

    def _finish(self) -> None:
        self.decoder.leave([answer for answer in self.decoder.answers if answer.finish_reason is not None])
        for running in [one for one in self._running.values() if one.is_done]:
            self._end(running)
        self.load.running, self.load.waiting = len(self.decoder.answers), len(self._waiting)

    def _cut(self) -> None:
        """End the requests that were aborted, as they are."""
        names, self._aborted = self._aborted, set()
        for name in names & self._running.keys():
            running = self._running[name]
            self.decoder.leave(running.answers)
            self._again = [answer for answer in self._again if answer not in running.answers]
            self._waiting = [entry for entry in self._waiting if entry[2] is not running]
            self._end(running)

    def _end(self, running: Running) -> None:
        del self._running[running.request.request_id]
        self._aborted.discard(running.request.request_id)  # the id is free for another
        done = running.completion()
        before = sum(len(output.token_ids) for output in running.done.values()) + running.kept
        self.load.count(running.request, done, time.monotonic() - running.started, before)
        running.over.set()
        self.deliver(done)

    async def _snapshot(self) -> list[Completion]:
        async with self.step_lock:
            return [running.completion() for running in self._running.values()]

    # -- pauses -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        if mode == "abort":
            self.abort(list(self._running))
        self._paused_but = finishing = set(self._running.values()) if mode == "wait" else set()
        self._changed.set()
        for running in finishing:
            await running.over.wait()
        async with self.step_lock:
            self._cut()
            if clear_cache:
                self.read_again()

    async def resume(self) -> None:
        self._paused_but = None
        self._changed.set()

    @property
    def is_frozen(self) -> bool:
        """Whether requests in flight do not continue, since the user has paused the engine."""
        only = self._paused_but
        return only is not None and any(running not in only for running in self._running.values())

    def read_again(self) -> None:
        """Drop the keys and values of what runs, so that it is read again; the caller holds :attr:`step_lock`."""
        self._again += self.decoder.empty()

    @asynccontextmanager
    async def between_steps(self, mode: PauseMode) -> AsyncIterator[None]:
        """Hold the step lock; with ``"wait"``, requests in flight finish first, and new ones wait."""
        try:
            if mode == "wait":
                self._draining = draining = set(self._running.values())
                self._changed.set()
                for running in draining:
                    await running.over.wait()
            async with self.step_lock:
                yield
        finally:
            self._draining = None
            self._changed.set()

    # -- other verbs, which ``Engine`` describes ---------------------------------------------------------------------

    async def weights_version(self) -> int:
        return self.version

    async def sleep(self, level: int, mode: PauseMode) -> None:
        del level, mode
        raise ValueError("sleep: engine='transformers' keeps its model in memory; shut it down, or use vLLM")

    async def wake_up(self, tags: Sequence[str] | None) -> None:
        del tags  # it never sleeps

    async def collective_rpc(
        self, method: str, args: Sequence[object], kwargs: Mapping[str, object] | None
    ) -> NoReturn:
        del args, kwargs
        raise ValueError(f"{method}: engine='transformers' has no workers to call; collective_rpc is vLLM's")

    async def reset_prefix_cache(self) -> bool:
        return not self._running  # nothing is cached beyond a request

    async def set_seed(self, seed: int) -> None:
        async with self.step_lock:
            self.decoder.sampler.seed(seed)

    async def tokenizer(self) -> dict[str, object]:
        return tokenizer_files(self.loaded.tokenizer.tokenizer, self.loaded.arguments.trust_remote_code)

    async def metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        found = checkpoint_metadata(checkpoint_folder(self.info.model))
        # what the model was loaded in; stacked experts, which have other names here, are never kept in float32
        model = self.decoder.model
        held = {name: tensor.dtype for name, tensor in model.state_dict().items()}
        return {
            name: (held.get(name, model.dtype) if dtype.is_floating_point and dtype.itemsize > 1 else dtype, shape)
            for name, (dtype, shape) in found.items()
        }

    async def probe(self, seconds: float) -> ProbeReport:
        """Report whether a step ended in time, and this process's CPU time: its model thread is the engine core."""
        waiting = asyncio.ensure_future(self.step_lock.acquire())
        await asyncio.wait({waiting}, timeout=seconds)
        answered = waiting.done()
        if answered:
            self.step_lock.release()
        else:
            waiting.cancel()
        times = self._self.cpu_times()
        return ProbeReport(core_answered=answered, cpu_seconds=times.user + times.system)

    def _stats(self) -> ReplicaStats:
        return self.load.stats(self.version, busy=bool(self._running))


# -- new weights -------------------------------------------------------------------------------------------------------

TRANSPORTS = ("memmap", "gloo")
PROBE_IDS = (0, 0)
REPORTED = ("missing_keys", "unexpected_keys", "mismatched_keys")  # of transformers' loader


class OnlyWorker:
    """What a transport needs to know of a worker: this one is rank 0 of 1."""

    data_parallel_index, world_size, rank = 0, 1, 0

    @property
    def parallel_config(self) -> OnlyWorker:
        return self


class EngineWeights:
    """The weights of one engine: new ones are fetched and checked while it serves, and loaded between two steps.

    The model object stays, its tensors are exchanged. A version is loaded by transformers' own loader, which stacks a
    checkpoint's experts, into a second model; that lasts for a moment, and so does the memory of both. New weights must
    pass the weight check before a token is made with them: if they fail, the old ones are put back, and no request has
    noticed.
    """

    def __init__(self, engine: EngineProcess) -> None:
        self._engine, self._model = engine, engine.decoder.model
        self._receiver: Receiver | None = None
        self._reader: WeightStoreReader | None = None
        self._expected: dict[str, tuple[torch.dtype, torch.Size]] = {}
        self._staged: Manifest | None = None

    async def open(self, transport: str, options: Mapping[str, object]) -> None:
        """Open a transport, and close the one before."""
        if transport not in TRANSPORTS:
            hint = "lora='merged'" if transport == "adapter" else "transport='memmap' or 'gloo'"
            raise ValueError(f"engine='transformers' takes no weights by {transport!r}: use {hint}")
        self.close()
        self._receiver = open_receiver(transport, options, OnlyWorker())
        self._reader = WeightStoreReader(str(options["folder"])) if transport == "memmap" else None
        self._expected = await asyncio.to_thread(
            lambda: checkpoint_metadata(checkpoint_folder(self._engine.info.model))
        )

    def _open(self) -> Receiver:
        if self._receiver is None:
            raise WeightSyncError("the weight transport is not initialised: call init_all_workers_group() first")
        return self._receiver

    async def stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        receiver, started = self._open(), time.perf_counter()
        found = await asyncio.to_thread(self._fetch, receiver, version, verify == "digest", threads, manifest)
        self._staged, seconds = found, time.perf_counter() - started
        return StageReport(seconds=seconds, nbytes=found.nbytes, digest=found.digest, fetched=seconds)

    def _fetch(self, receiver: Receiver, version: int, verify: bool, threads: int, manifest: str | None) -> Manifest:
        found = receiver.manifest(version) if manifest is None else Manifest.from_json(manifest)
        check_tensors(found.tensors, self._expected)
        receiver.fetch(found, verify=verify, threads=threads)
        if verify and self._reader is not None:
            self._reader.verify(found, threads)
        return found

    async def swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, Any] | None, patience: float
    ) -> SwapReport:
        """Serve a version that was staged. Never raises for a failed update: the old weights serve on."""
        del patience
        started = time.perf_counter()
        if pause == "wait" and self._engine.is_frozen:
            error = "the engine is paused with requests in flight, which cannot finish: resume() it first"
            return SwapReport(started=False, error=error)
        async with self._engine.between_steps(pause):
            paused = time.perf_counter()
            failure = None
            try:
                await self._engine.compute(self._load, version, canary)
            except Exception as error:  # noqa: BLE001  whatever it is: it is reported, and the old weights serve on
                failure = f"{type(error).__name__}: {error}"
            else:
                self._engine.version = version
                if clear_cache or pause == "abort":
                    self._engine.read_again()
            done = time.perf_counter()
        return SwapReport(
            started=failure is None,
            pausing_seconds=paused - started,
            loading_seconds=done - paused,
            paused_seconds=done - started,
            error=failure,
        )

    def _load(self, version: int, canary: Mapping[str, Any] | None) -> None:
        """Exchange the weights and check the new ones; if they fail, put the old ones back."""
        staged = self._staged
        if staged is None or staged.version != version:
            raise WeightSyncError(f"version {version} is not what was staged last")
        with self._open().reading(staged) as tensors:
            before = exchange(self._model, tensors, self._engine.loaded.report)
        try:
            self._prove(canary)
        except BaseException:
            _put(self._model, before)
            raise

    def _prove(self, canary: Mapping[str, Any] | None) -> None:
        ids = PROBE_IDS if canary is None else canary["token_ids"]
        scores = self._engine.decoder.score(ids, Scoring())[1:]
        if not np.isfinite(scores).all():
            raise WeightSyncError("the new weights give a log-prob that is not a number")
        if canary is not None:
            compare_log_probs(scores.tolist(), canary["log_probs"], canary["tolerance"])

    def close(self) -> None:
        for one in (self._receiver, self._reader):
            if one is not None:
                one.close()
        self._receiver = self._reader = self._staged = None


def exchange(
    model: PreTrainedModel, tensors: Mapping[str, Tensor], known: Mapping[str, Iterable[str]]
) -> dict[str, Tensor]:
    """Give a model other weights, and return those that it had, by its own names."""
    # a second model, by transformers' own loader, which stacks a checkpoint's experts
    fresh, info = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=dict(tensors),
        dtype=model.dtype,
        output_loading_info=True,
    )
    wrong = {name: sorted(map(str, set(info[name]) - set(known.get(name, ())))) for name in REPORTED}
    if found := [f"{name} {', '.join(keys[:4])}" for name, keys in wrong.items() if keys]:
        raise WeightSyncError(f"{type(model).__name__} cannot take these weights: {'; '.join(found)}")
    # what shares memory with the store is copied: the store is written again
    theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    new = {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in theirs else tensor
        for name, tensor in fresh.state_dict().items()
    }
    before = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    _put(model, new)
    return before


def _put(model: PreTrainedModel, state: Mapping[str, Tensor]) -> None:
    """Replace a model's tensors, by its own names; the new ones are not copied if they are on its device."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.data = state[name].to(tensor.device)


# -- the program -------------------------------------------------------------------------------------------------------


async def _open(arguments: dict[str, object], inbox: Inbox, send: Send) -> EngineProcess:
    return EngineProcess(load(build_engine_args(arguments)), inbox, send)


def run(stream: SocketStream, driver_is_gone: Callable[[], bool]) -> None:
    """Run the engine, then end the process."""
    run_engine(stream, driver_is_gone, _open)


def preload() -> str:
    """Return why a process that has imported this may not be forked: nothing is against it."""
    return ""


if __name__ == "__main__":
    run_script(run)
