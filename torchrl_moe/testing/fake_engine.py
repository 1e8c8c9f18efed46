"""A fake engine behind the real service, for tests of everything but the engine.

:class:`FakeReplica` honours the replica protocol; its answers come from a :class:`FakeModel`, and delays and failures
are injected explicitly. Nothing here learns or scores.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_moe._checks import check_number
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.checkpoint import tokenizer_files
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionMetrics,
    PauseMode,
    ProbeReport,
    Replica,
    ReplicaInfo,
    ReplicaStats,
    Request,
    Tell,
)
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.replica_table import FaultPolicy, ReplicaState
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer
from torchrl_moe.testing.fake_model import FakeModel, Script, text_of, tokens_to_come

P = ParamSpec("P")
T = TypeVar("T")
Verb: TypeAlias = Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]

# Deliberate faults, as hooks of a training run: a check that notices none of them checks nothing.
# ``hooks=[torchrl_moe.testing.fake_engine:shift_routes]`` puts one into a run; its trainer is a ``MoEGRPOTrainer``.

ROUTES = ("routed_experts", "full")


def shift_routes(trainer: Any) -> None:
    """Give each token the experts of the token before it."""
    _change_routes(trainer, lambda routes: torch.cat([routes[-1:], routes[:-1]]))


def wrong_ids(trainer: Any) -> None:
    """Replace each expert by the one with the next number."""

    def other(routes: Tensor) -> Tensor:
        return torch.where(routes < 0, routes, (routes + 1) % (int(routes.max()) + 1))

    _change_routes(trainer, other)


def shuffle_advantages(trainer: Any) -> None:
    """Shuffle the advantages over the answers."""

    def shuffled(batch: TensorDictBase) -> TensorDictBase:
        order = torch.randperm(len(batch)).tolist()
        for row, advantage in zip(batch.unbind(0), [batch[i].get("advantage").clone() for i in order], strict=True):
            row.set("advantage", advantage)
        return batch

    trainer.register_op("batch_process", shuffled)


def _change_routes(trainer: Any, change: Callable[[Tensor], Tensor]) -> None:
    def changed(batch: TensorDictBase) -> TensorDictBase:
        for sample in batch.unbind(0):
            sample.set(ROUTES, change(sample.get(ROUTES)))
        return batch

    if trainer.collector is not None:  # rank 0 alone has one
        trainer.collector.postproc = changed


LAYOUT = RoutingLayout(num_layers=4, moe_layers=(1, 2, 3), top_k=2, num_experts=8)


@cache
def _loop_of(process: int) -> EventLoop:
    """Return the event loop of all fake replicas of this process; one that it forks needs its own."""
    del process
    return EventLoop("torchrl_moe-fakes")


@dataclass(slots=True, eq=False)
class _Running:
    """A request that takes time: it has an answer's first tokens, and a task that adds the others."""

    request: Request
    future: Future[Completion]
    started: float
    limit: int = 0
    tokens: int = 0  # beyond those that it resumes
    aborted: bool = False
    tell: Tell | None = None  # if it streams
    told: int = 0  # of its tokens
    nudge: asyncio.Event = field(default_factory=asyncio.Event)  # what it waits for may have changed


class FakeReplica(Replica):
    """One fake engine; see :class:`~torchrl_moe.modules.backends.replica.Replica`."""

    def __init__(
        self,
        index: int = 0,
        *,
        seed: int = 0,
        layout: RoutingLayout | None = LAYOUT,
        token_seconds: float | Callable[[Request], float] = 0.0,
        refuse: Callable[[Request], str | None] | None = None,
        die_under: Callable[[Request], bool] | None = None,
        start_seconds: float = 0.0,
        fail_start: str = "",
        script: Script | None = None,
        forced_routing_unavailable_reason: str = "",
    ) -> None:
        self.index, self.seed, self.layout, self.answer_script = index, seed, layout, script
        self.token_seconds, self.start_seconds = token_seconds, start_seconds
        self.refuse, self.die_under, self.fail_start = refuse, die_under, fail_start
        self.forced_routing_unavailable_reason = forced_routing_unavailable_reason or (
            "" if layout else "the engine captures no routes"
        )
        self.probe_report = ProbeReport(core_answered=True)
        self.version = 0
        self.submitted: list[Request] = []
        self.overrides: dict[str, Callable[..., Any]] = {}
        """Verb -> ``function(timeout, **arguments)`` that answers in its place."""
        self._running: dict[str, _Running] = {}
        self._changed = threading.Condition()
        self._paused = False
        self._asleep: set[str] = set()  # vLLM's tags of what is asleep
        self._weights_lost = False
        self._finishing: set[str] = set()  # requests that a pause lets finish
        self._stalled = False
        self._dead: str | None = None
        self._counts: Counter[str] = Counter()

    def start(self) -> None:
        """There is no process to start."""

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        """Serve, after ``start_seconds``."""
        with self._changed:  # not time.sleep: a replica may be shut down while it starts
            self._changed.wait_for(lambda: self._dead is not None, min(timeout, self.start_seconds))
        if self.fail_start:
            self.die(self.fail_start)
        self._check_alive()
        if timeout < self.start_seconds:
            raise EngineError(f"replica {self.index} was not ready within {timeout:g} s")
        return ReplicaInfo(
            model="fake",
            layout=self.layout,
            max_model_len=1 << 20,
            engine_version="fake",
            forced_routing_unavailable_reason=self.forced_routing_unavailable_reason,
        )

    @property
    def death(self) -> str | None:
        """Why it died; ``None`` while it lives."""
        return self._dead

    def is_alive(self) -> bool:
        return self._dead is None

    def die(self, reason: str = "injected death") -> None:
        """Fail all running and all future requests, as a killed engine does."""
        with self._changed:
            self._dead = self._dead or f"replica {self.index} died: {reason}"
            running = list(self._running.values())
            self._running.clear()
            self._notify(running)
        # outside the lock: who waits for a future may call this replica at once
        for entry in running:
            entry.future.set_exception(ReplicaDiedError(self._dead))

    def stall(self) -> None:
        """Generate no token and answer nothing from now on, like a process that is stopped by a signal."""
        with self._changed:
            self._stalled = True
            self._notify(self._running.values())

    def shutdown(self) -> None:
        """Die, as at the end of its life."""
        self.die("shut down")

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise ReplicaDiedError(self._dead)

    def submit(self, requests: Sequence[Request], tell: Tell | None = None) -> list[Future[Completion]]:
        """Answer at once, or in a task per request if tokens take time or the replica is paused."""
        return [self._begin(request, tell if request.stream else None) for request in requests]

    def _begin(self, request: Request, tell: Tell | None) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # an engine's request is aborted; its future cannot be cancelled
        # The options first: they are functions of the test, which may take locks of their own.
        entry = _Running(request, future, time.monotonic(), tell=tell)
        seconds = self.token_seconds(request) if callable(self.token_seconds) else self.token_seconds
        reason = self.refuse(request) if self.refuse else None
        try:
            entry.request = self._model().checked(request)
            entry.limit = tokens_to_come(request)
        except ValueError as error:
            reason = str(error)
        # What becomes of the request is decided in one go: a death or a pause comes before or after it.
        with self._changed:
            self.submitted.append(request)
            taken = request.request_id in self._running
            at_once = not (seconds or self._paused or self._asleep or self._stalled)
            dies = self._dead is None and self.die_under is not None and self.die_under(request)
            dead = self._dead
            if dead is None and not dies and reason is None and not taken and not at_once:
                self._running[request.request_id] = entry
        # Death wins over a refusal, as an engine that is gone checks nothing.
        if dies:
            self.die(f"under {request.request_id!r}")
            dead = self._dead
        if dead is not None:
            future.set_exception(ReplicaDiedError(dead))
        elif reason is not None or taken:
            future.set_exception(ValueError(reason or f"request id {request.request_id!r} is in flight already"))
        elif at_once:
            entry.tokens = entry.limit
            future.set_result(self._complete(entry))
        else:
            _loop_of(os.getpid()).spawn(self._generate(entry, seconds))
        return future

    def _notify(self, entries: Iterable[_Running]) -> None:
        """Have requests look at their replica again, and those who wait for its state; the caller holds the lock."""
        self._changed.notify_all()
        nudges = [entry.nudge for entry in entries]

        def nudge_all() -> None:
            for nudge in nudges:
                nudge.set()

        if nudges:
            _loop_of(os.getpid()).call(nudge_all)

    def _holds(self, entry: _Running) -> bool:
        waits = self._paused or bool(self._asleep)
        return self._stalled or (waits and entry.request.request_id not in self._finishing)

    async def _generate(self, entry: _Running, seconds: float) -> None:
        # One token after each undisturbed wait; a pause, a stall, an abort and a death end the wait early.
        while (not entry.aborted or self._stalled) and self._dead is None and entry.tokens < entry.limit:
            entry.nudge.clear()
            held = self._holds(entry)
            try:
                await asyncio.wait_for(entry.nudge.wait(), None if held else seconds)
            except TimeoutError:
                with self._changed:  # so that a pause that has begun is not overtaken
                    entry.tokens += not self._holds(entry)
                    self._tell_part(entry)
        with self._changed:
            if self._running.pop(entry.request.request_id, None) is None:
                return  # it died, which has failed the future
            self._changed.notify_all()
        entry.future.set_result(self._complete(entry))

    def _tell_part(self, entry: _Running) -> None:
        """Tell the new tokens of a request that streams, but for its last; its death comes before or after."""
        if entry.tell is None or self._dead is not None or not entry.told < entry.tokens < entry.limit:
            return
        so_far, had = self._so_far(entry), entry.request.resume
        outputs = []
        for output in so_far.outputs:
            first = entry.told + (0 if had is None else len(had.outputs[output.index].token_ids))
            if output.finish_reason == "abort":
                outputs.append(output.after(first, len(text_of(output.token_ids[:first].tolist()))))
        prompt = so_far.prompt_token_ids if not entry.told and had is None else so_far.prompt_token_ids[:0]
        entry.told = entry.tokens
        entry.tell([replace(so_far, prompt_token_ids=prompt, outputs=outputs, finished=False)])

    def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests; their tokens so far are returned with ``finish_reason="abort"``."""
        with self._changed:
            entries = [self._running[name] for name in request_ids if name in self._running]
            for entry in entries:
                entry.aborted = True
            self._notify(entries)

    def ask(self, verb: Verb[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Answer at once, or never if stalled."""
        answer: Future[T] = Future()
        try:
            if self._dead is not None or not self._stalled:
                answer.set_result(self.call(verb, 0.0, *args, **kwargs))
        except Exception as error:  # noqa: BLE001  the caller's, as from any engine
            answer.set_exception(error)
        return answer

    def call(self, verb: Verb[P, T], timeout: float, /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a verb by its name, with its arguments by name."""
        given = inspect.signature(verb).bind(self, *args, **kwargs)
        given.apply_defaults()
        _, *arguments = given.arguments.items()
        answer: T = self._command(verb.__name__, timeout, **dict(arguments))
        return answer

    def _command(self, name: str, timeout: float, /, **arguments: Any) -> Any:
        """Answer the verbs that an engine without weights can answer."""
        if (instead := self.overrides.get(name)) is not None:
            return instead(timeout, **arguments)
        # A stalled engine answers nothing until its caller gives up, or it is killed.
        with self._changed:
            silent = not self._changed.wait_for(lambda: not self._stalled or self._dead is not None, timeout)
        self._check_alive()
        if silent:
            raise EngineError(f"replica {self.index} did not answer {name!r} within {timeout:g} s")
        answers: dict[str, Callable[[], object]] = {
            "pause": lambda: self._pause(**arguments, timeout=timeout),
            "resume": self._resume,
            "sleep": lambda: self._sleep(**arguments, timeout=timeout),
            "wake_up": lambda: self._wake_up(**arguments),
            "set_seed": lambda: setattr(self, "seed", arguments["seed"]),
            "reset_prefix_cache": lambda: not self._running,
            "stats": lambda: self.last_stats,
            "tokenizer": lambda: tokenizer_files(ByteTokenizer(), False),
            "weights_version": lambda: self.version,
            "snapshot": self._snapshot,
            "probe": lambda: self.probe_report,
        }
        if name not in answers:
            raise EngineError(f"the fake engine has no verb {name!r}")
        return answers[name]()

    def _pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop generating; as in vLLM, no request starts from here on, even if the wait times out."""
        del clear_cache
        with self._changed:
            self._paused = True
            self._finishing = set(self._running) if mode == "wait" else set()
            self._notify(self._running.values())
            if not self._changed.wait_for(lambda: not self._finishing & self._running.keys(), timeout):
                raise EngineError(f"replica {self.index} was not idle within {timeout:g} s")
        if mode == "abort":
            self.abort(list(self._running))

    def _resume(self) -> None:
        with self._changed:
            self._paused = False
            self._notify(self._running.values())

    def _sleep(self, level: int, mode: PauseMode, timeout: float) -> None:
        """Hold incoming requests, as a pause does; an earlier pause continues afterwards."""
        # As vLLM does: pause, free the memory, and hold what comes by being asleep rather than by the pause.
        was_paused = self._paused
        try:
            self._pause(mode, True, timeout)
            self._asleep, self._weights_lost = {"weights", "kv_cache"}, level == 2
        finally:
            if not was_paused:
                self._resume()

    def _wake_up(self, tags: Sequence[str] | None) -> None:
        wanted = {"weights", "kv_cache"} if tags is None else set(tags)
        # without weights, a cache would be filled by whatever the memory holds
        if self._weights_lost and "kv_cache" in wanted:
            raise EngineError("wake_up: sleep of level 2 has dropped the weights; update them first")
        with self._changed:
            self._asleep -= wanted
            self._notify(self._running.values())

    @property
    def last_stats(self) -> ReplicaStats:
        """The current stats: a fake reports each change at once."""
        with self._changed:
            return ReplicaStats(running=len(self._running), weights_version=self.version, **self._counts)

    def _snapshot(self) -> list[Completion]:
        with self._changed:
            return [self._so_far(entry) for entry in self._running.values()]

    def _model(self) -> FakeModel:
        return FakeModel(
            self.seed, self.version, self.layout, self.answer_script, self.forced_routing_unavailable_reason
        )

    def _complete(self, entry: _Running) -> Completion:
        completion, given = self._so_far(entry), entry.request.resume
        had = [] if given is None else given.outputs  # counted when their first part was
        tokens = [sum(len(output.token_ids) for output in outputs) for outputs in (completion.outputs, had)]
        with self._changed:
            self._counts.update(
                requests=1,
                completions=len(completion.outputs),
                prompt_tokens=len(completion.prompt_token_ids),
                generated_tokens=tokens[0] - tokens[1],
            )
        return completion

    def _so_far(self, entry: _Running) -> Completion:
        request, given = entry.request, entry.request.resume
        if request.prompt_token_ids is not None:
            prompt = request.prompt_token_ids.astype(np.int64)
        else:
            prompt = np.array(ByteTokenizer()(request.prompt)["input_ids"], np.int64)
        model = self._model()
        outputs = [model.answer(request, prompt, index, entry.tokens) for index in range(request.param("n") or 1)]
        return Completion(
            request_id=request.request_id,
            prompt=request.prompt if given is None else given.prompt,
            prompt_token_ids=prompt,
            num_cached_tokens=0,
            outputs=outputs,
            metrics=CompletionMetrics(total_seconds=time.monotonic() - entry.started, replica=self.index),
            prompt_logprobs=model.scores(request, prompt),
        )


class FakeAsyncVLLM(GenerationService):
    """An engine of fake replicas, accepted wherever an engine is; it serves on construction.

    Args:
        num_replicas: number of replicas.
        seed: of the tokens, log-probs and routes that are made up.
        layout: the routers of the model; ``None``: a dense one.
        token_seconds: seconds that a token takes, or a function of the request that returns them.
        refuse: a function of a request that returns why it is refused, or ``None``.
        script: a function of a prompt's text that returns the answer's, or ``None`` for one that is made up.
        forced_routing_unavailable_reason: why recorded experts cannot be followed; default: they can, with a layout.
        sampling_params, metrics, max_concurrent_requests: see :class:`~torchrl_moe.modules.AsyncVLLM`.
        faults: see there, too; without it no supervisor runs, so a dead replica stays dead.

    >>> with FakeAsyncVLLM(num_replicas=2, seed=1) as engine:
    ...     completion = engine.generate("1+1=", {"max_tokens": 4, "logprobs": 0}, use_tqdm=False)
    >>> completion.outputs[0].routed_experts.shape
    (7, 4, 2)
    """

    def __init__(
        self,
        num_replicas: int = 1,
        seed: int = 0,
        *,
        sampling_params: object = None,
        metrics: bool = True,
        layout: RoutingLayout | None = LAYOUT,
        token_seconds: float | Callable[[Request], float] = 0.0,
        refuse: Callable[[Request], str | None] | None = None,
        max_concurrent_requests: int | Literal["auto"] | None = "auto",
        faults: FaultPolicy | None = None,
        script: Script | None = None,
        forced_routing_unavailable_reason: str = "",
    ) -> None:
        check_number("num_replicas", num_replicas, 1, 1 << 16, whole=True)
        new = partial(
            FakeReplica,
            seed=seed,
            layout=layout,
            token_seconds=token_seconds,
            refuse=refuse,
            script=script,
            forced_routing_unavailable_reason=forced_routing_unavailable_reason,
        )

        def make_replica(index: int) -> FakeReplica:
            replica = new(index)
            self.replicas[index : index + 1] = [replica]  # in its place, or as one more
            return replica

        self.replicas = [new(index) for index in range(num_replicas)]
        super().__init__(
            self.replicas,
            sampling_params,
            metrics=metrics,
            max_concurrent_requests=max_concurrent_requests,
            faults=faults,
            make_replica=make_replica,
        )
        # What AsyncVLLM does while its processes start, at once.
        for replica in self.replicas:
            self.infos.append(replica.wait_ready(0.0))
            self.replica_table.set_state(replica.index, ReplicaState.SERVING)
        self._running = True
        if faults is not None:
            self._fleet.supervise()
