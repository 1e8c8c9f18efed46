"""The requests that an engine process over plain transformers runs, in one loop: admit what may join, then step.

The model computes in one thread, a step at a time. Whatever else needs it, or must not see it in mid-step (an abort, a
pause, a snapshot, a weight swap), takes the turn between two steps; so nothing here is ever half done.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from torchrl_moe.modules.backends.process.stats_feed import Load
from torchrl_moe.modules.backends.replica import Completion, PauseMode, Request
from torchrl_moe.modules.backends.transformers.answer import Answer
from torchrl_moe.modules.backends.transformers.decoder import BatchDecoder
from torchrl_moe.modules.backends.transformers.running import RequestReader, Running
from torchrl_moe.modules.backends.transformers.waiting_line import WaitingLine

__all__ = ["EngineRequests"]

T = TypeVar("T")
BAD_REQUEST = (ValueError, TypeError, LookupError, AttributeError, OverflowError)
"""What reading a bad request may raise; it is refused, and the others continue."""


class EngineRequests:
    """Requests in flight, and the stats of those that are done.

    Args:
        decoder: computes.
        reader: turns requests into what runs.
        send: sends a completion to the driver.
        refuse: takes the id of a request that cannot be served, and the error.

    Attributes:
        turn: held while the model computes.
        version: of the weights.
        load: of the engine, at its last step.
        failure: the error that ended the engine.
    """

    def __init__(
        self,
        decoder: BatchDecoder,
        reader: RequestReader,
        send: Callable[[Completion], None],
        refuse: Callable[[str, BaseException], None],
    ) -> None:
        self.decoder = decoder
        self.turn = asyncio.Lock()
        self.version = 0
        self.load = Load()
        self.failure: BaseException | None = None
        self.counts = dict.fromkeys(("requests", "completions", "prompt_tokens", "generated_tokens"), 0)
        self.seconds = 0.0
        self._reader, self._send, self._refuse = reader, send, refuse
        self._open: dict[str, Running] = {}
        self._line = WaitingLine(reader.arguments, reader.token_bytes, self._may_run)
        self._again: list[Answer] = []  # to be read again, before others join
        self._aborted: set[str] = set()
        self._changed = asyncio.Event()
        self._paused_but: set[Running] | None = None  # the user's pause, and what it lets finish
        self._draining: set[Running] | None = None  # what a swap lets finish before it begins
        self._thread = ThreadPoolExecutor(1, "model")

    def __len__(self) -> int:
        return len(self._open)

    async def compute(self, work: Callable[..., T], *args: Any) -> T:
        """Run a function in the model's thread; the caller holds :attr:`turn`."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *args)

    def start(self, request: Request) -> None:
        """Take a request, or refuse it."""
        try:
            running = self._reader(request)
        except BAD_REQUEST as error:
            self._refuse(request.request_id, error)
            return
        self._open[request.request_id] = running
        self._line.add(running)
        self._changed.set()

    def abort(self, request_ids: list[str]) -> None:
        """Cut requests short."""
        self._aborted.update(name for name in request_ids if name in self._open)
        self._changed.set()

    # -- the loop ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled. An error in the model's thread ends the engine, and is kept in :attr:`failure`."""
        try:
            while True:
                await self._changed.wait()
                self._changed.clear()
                async with self.turn:
                    await self._work()
        except Exception as error:
            self.failure = error
            raise

    async def _work(self) -> None:
        self._cut()
        if not all(map(self._may_run, self._begun())):
            return
        if scored := self._line.next_scored():
            await self._score(scored)
            self._changed.set()
        joining = self._line.joining(self.decoder.answers, self._again)
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
        return [one for one in self._open.values() if any(id(answer) in inside for answer in one.answers)]

    async def _score(self, running: Running) -> None:
        request, running.joined_at = running.request, time.monotonic()
        work = self.decoder.score, running.prompt_ids, request.scoring, request.routed_experts
        running.scores = await self.compute(*work)
        running.token_at = time.monotonic()

    def _note_step(self) -> None:
        load, decoder, budget = self.load, self.decoder, self._reader.arguments.kv_cache_memory_bytes
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
        for running in [one for one in self._open.values() if one.is_done]:
            self._end(running)
        self.load.running, self.load.waiting = len(self.decoder.answers), len(self._line)

    def _cut(self) -> None:
        """End the requests that were aborted, as they are."""
        names, self._aborted = self._aborted, set()
        for name in names & self._open.keys():
            running = self._open[name]
            self.decoder.leave(running.answers)
            self._again = [answer for answer in self._again if answer not in running.answers]
            self._line.drop(running)
            self._end(running)

    def _end(self, running: Running) -> None:
        del self._open[running.request.request_id]
        self._aborted.discard(running.request.request_id)  # the id is free for another
        self.counts["requests"] += 1
        if running.request.scoring is None:
            self.counts["completions"] += len(running.answers) + len(running.done)
            self.counts["generated_tokens"] += running.generated
        self.counts["prompt_tokens"] += len(running.prompt_ids)
        self.seconds += time.monotonic() - running.started
        running.over.set()
        self._send(running.completion())

    async def snapshot(self) -> list[Completion]:
        """Return what each request has so far, without disturbing any."""
        async with self.turn:
            return [running.completion() for running in self._open.values()]

    # -- pauses -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, clear_cache: bool) -> None:
        """Pause the engine for the user.

        Args:
            mode: ``"keep"`` freezes what is in flight, ``"abort"`` cuts it, ``"wait"`` lets it finish.
            clear_cache: whether what is frozen is read again when it continues.
        """
        if mode == "abort":
            self.abort(list(self._open))
        self._paused_but = finishing = set(self._open.values()) if mode == "wait" else set()
        self._changed.set()
        for running in finishing:
            await running.over.wait()
        async with self.turn:
            self._cut()
            if clear_cache:
                self.read_again()

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._paused_but = None
        self._changed.set()

    @property
    def is_frozen(self) -> bool:
        """Whether requests in flight do not continue, since the user has paused the engine."""
        only = self._paused_but
        return only is not None and any(running not in only for running in self._open.values())

    def read_again(self) -> None:
        """Drop the keys and values of what runs, so that its tokens are read again; the caller holds :attr:`turn`."""
        self._again += self.decoder.empty()

    @asynccontextmanager
    async def between_steps(self, mode: PauseMode) -> AsyncIterator[None]:
        """Hold the turn; with ``"wait"``, requests in flight finish first, and new ones wait."""
        try:
            if mode == "wait":
                self._draining = draining = set(self._open.values())
                self._changed.set()
                for running in draining:
                    await running.over.wait()
            async with self.turn:
                yield
        finally:
            self._draining = None
            self._changed.set()

    def close(self) -> None:
        """End the model's thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
