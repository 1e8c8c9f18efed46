"""A fake engine behind the real service: for tests whose subject is not the engine.

:class:`FakeReplica` honours the replica protocol: tokens, log-probs and routes are a pure function of seed, version and
token prefix, so a resumed or repeated request gets what the first one got; delays and failures are injected by hand.
Nothing here learns or scores: no model is behind it.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from torchrl_moe._errors import EngineError, ReplicaDiedError
from torchrl_moe.data import RoutingLayout
from torchrl_moe.modules.backends.replica import (
    Completion,
    CompletionMetrics,
    CompletionOutput,
    PauseMode,
    ProbeReport,
    ReplicaInfo,
    ReplicaStats,
    Request,
)
from torchrl_moe.modules.serving.fault_policy import FaultPolicy
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.modules.serving.states import ReplicaState
from torchrl_moe.testing.byte_tokenizer import ByteTokenizer

__all__ = ["FakeAsyncVLLM", "FakeReplica"]

LAYOUT = RoutingLayout(num_layers=4, moe_layers=(1, 2, 3), top_k=2, num_experts=8)
MAX_TOKENS = 16  # vLLM's default


@dataclass(slots=True)
class _Running:
    request: Request
    future: Future[Completion]
    started: float
    tokens: int = 0
    aborted: bool = False


class FakeReplica:
    """One fake engine; see :class:`~torchrl_moe.modules.backends.replica.Replica`.

    Args:
        index: place in the service.
        seed: changes every token, log-prob and route.
        layout: the routers it pretends to have; ``None`` for a dense model.
        token_seconds: how long a token takes, or a function of the request that says so; 0 answers within ``submit``.
        refuse: a function of the request that returns a reason to refuse it, or ``None``.
        die_under: a function of the request; the replica dies as it begins one for which that is true.
        start_seconds: how long it takes to be ready.
        fail_start: why it does not come up; ``""`` if it does.
    """

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
    ) -> None:
        self.index = index
        self.seed = seed
        self.layout = layout
        self.token_seconds = token_seconds
        self.refuse = refuse
        self.die_under = die_under
        self.start_seconds = start_seconds
        self.fail_start = fail_start
        self.probe_report = ProbeReport(core_answered=True)
        self.version = 0
        self.log_path = None
        self.was_ended = False
        self.submitted: list[Request] = []
        self._running: dict[str, _Running] = {}
        self._changed = threading.Condition()
        self._paused = False
        self._finishing: set[str] = set()  # what a pause lets finish
        self._stalled = False
        self._dead: str | None = None
        self._counts: Counter[str] = Counter()

    # -- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Do nothing: there is no process."""

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        """Serve, after ``start_seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: self._dead is not None, min(timeout, self.start_seconds))
        if self.fail_start:
            self.die(self.fail_start)
        self._check_alive()
        if timeout < self.start_seconds:
            raise EngineError(f"replica {self.index} was not ready within {timeout:g} s")
        return ReplicaInfo(model="fake", layout=self.layout, max_model_len=1 << 20, engine_version="fake")

    def is_alive(self) -> bool:
        """Whether :meth:`die` and :meth:`shutdown` were not called."""
        return self._dead is None

    def die(self, reason: str = "injected death") -> None:
        """Fail everything that runs and all that comes, as a killed engine does."""
        with self._changed:
            self._dead = self._dead or f"replica {self.index} died: {reason}"
            running = list(self._running.values())
            self._running.clear()
            self._changed.notify_all()
        for entry in running:
            entry.future.set_exception(ReplicaDiedError(self._dead))

    def stall(self) -> None:
        """Make no token and answer nothing from now on, as a process that is stopped by a signal."""
        with self._changed:
            self._stalled = True
            self._changed.notify_all()

    def shutdown(self) -> None:
        """Die of old age."""
        self.die("shut down")

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise ReplicaDiedError(self._dead)

    # -- requests ---------------------------------------------------------------------------------------------------

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Answer at once, or in a thread per request if tokens take time or the replica is paused."""
        return [self._begin(request) for request in requests]

    def _begin(self, request: Request) -> Future[Completion]:
        future: Future[Completion] = Future()
        future.set_running_or_notify_cancel()  # an engine's request is aborted; its future cannot be cancelled
        entry = _Running(request, future, time.monotonic())
        seconds = self.token_seconds(request) if callable(self.token_seconds) else self.token_seconds
        reason = self.refuse(request) if self.refuse else None
        with self._changed:
            self.submitted.append(request)
            taken = request.request_id in self._running
            at_once = not seconds and not self._paused and not self._stalled
            dies = self._dead is None and self.die_under is not None and self.die_under(request)
            dead = self._dead
            if dead is None and not dies and reason is None and not taken and not at_once:
                self._running[request.request_id] = entry
        if dies:
            self.die(f"under {request.request_id!r}")
            dead = self._dead
        if dead is not None:
            future.set_exception(ReplicaDiedError(dead))
        elif reason is not None or taken:
            future.set_exception(ValueError(reason or f"request id {request.request_id!r} is in flight already"))
        elif at_once:
            entry.tokens = _max_tokens(request)
            future.set_result(self._complete(entry))
        else:
            threading.Thread(target=self._generate, args=(entry, seconds), daemon=True).start()
        return future

    def _holds(self, entry: _Running) -> bool:
        return self._stalled or (self._paused and entry.request.request_id not in self._finishing)

    def _generate(self, entry: _Running, seconds: float) -> None:
        def is_disturbed() -> bool:
            return entry.aborted or self._holds(entry) or self._dead is not None

        limit = _max_tokens(entry.request)
        with self._changed:
            while (not entry.aborted or self._stalled) and self._dead is None and entry.tokens < limit:
                if self._holds(entry):
                    self._changed.wait()
                elif not self._changed.wait_for(is_disturbed, seconds):
                    entry.tokens += 1
            if self._running.pop(entry.request.request_id, None) is None:
                return  # died
            self._changed.notify_all()
        entry.future.set_result(self._complete(entry))

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cut requests short; what they have so far comes back with ``finish_reason="abort"``."""
        with self._changed:
            for request_id in request_ids:
                if request_id in self._running:
                    self._running[request_id].aborted = True
            self._changed.notify_all()

    # -- commands ---------------------------------------------------------------------------------------------------

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop making tokens; as in vLLM, nothing new is begun from here on, also if the wait comes to no end."""
        del clear_cache
        with self._changed:
            self._paused = True
            self._finishing = set(self._running) if mode == "wait" else set()
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: not self._finishing & self._running.keys(), timeout):
                raise EngineError(f"replica {self.index} was not idle within {timeout:g} s")
        if mode == "abort":
            self.abort(list(self._running))

    def resume(self, timeout: float) -> None:
        """Go on making tokens."""
        del timeout
        with self._changed:
            self._paused = False
            self._changed.notify_all()

    def call(self, command: str, timeout: float, **kwargs: Any) -> Any:
        """Answer the commands that an engine without weights can answer."""
        with self._changed:
            silent = not self._changed.wait_for(lambda: not self._stalled or self._dead is not None, timeout)
        self._check_alive()
        if silent:
            raise EngineError(f"replica {self.index} did not answer {command!r} within {timeout:g} s")
        if command == "probe":
            return self.probe_report
        if command == "tokenizer":
            return ByteTokenizer()
        if command in ("pause", "resume", "stats"):
            return getattr(self, command)(timeout=timeout, **kwargs)
        if command == "reset_prefix_cache":
            return not self._running
        raise EngineError(f"the fake engine has no command {command!r}")

    def stats(self, timeout: float) -> ReplicaStats:
        """Count what was done."""
        del timeout
        self._check_alive()
        return self.last_stats

    @property
    def last_stats(self) -> ReplicaStats:
        """The stats of this moment: a fake sends each change at once."""
        with self._changed:
            return ReplicaStats(running=len(self._running), **self._counts)

    # -- what it makes up -------------------------------------------------------------------------------------------

    def _complete(self, entry: _Running) -> Completion:
        request = entry.request
        if request.prompt_token_ids is not None:
            prompt = request.prompt_token_ids.astype(np.int64)
        else:
            prompt = np.array(ByteTokenizer()(request.prompt)["input_ids"], np.int64)
        outputs = [self._output(entry, prompt, index) for index in range(_field(request, "n", 1))]
        tokens = sum(len(output.token_ids) for output in outputs)
        with self._changed:
            self._counts["requests"] += 1
            self._counts["completions"] += len(outputs)
            self._counts["prompt_tokens"] += len(prompt)
            self._counts["generated_tokens"] += tokens
        return Completion(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=prompt,
            num_cached_tokens=0,
            outputs=outputs,
            metrics=CompletionMetrics(total_seconds=time.monotonic() - entry.started, replica=self.index),
        )

    def _output(self, entry: _Running, prompt: NDArray[np.int64], index: int) -> CompletionOutput:
        tokens: list[int] = []
        log_probs = []
        prefix = self._hash("token", index)
        prefix.update(prompt.tobytes())
        for _ in range(entry.tokens):
            draw = int.from_bytes(prefix.digest(), "little")
            tokens.append(32 + draw % 95)  # printable ASCII
            log_probs.append(math.log1p(-(draw >> 11) / (1 << 53)))  # of a uniform number, so never above 0
            _extend(prefix, tokens[-1])
        routed = self.layout is not None and entry.request.return_routed_experts
        return CompletionOutput(
            index=index,
            token_ids=np.array(tokens, np.int64),
            text=bytes(tokens).decode(),
            finish_reason="length" if entry.tokens >= _max_tokens(entry.request) else "abort",
            policy_versions=np.array([self.version] * len(tokens), np.int32),
            logprobs=np.array(log_probs, np.float32) if _field(entry.request, "logprobs", None) is not None else None,
            routed_experts=self._routes([*prompt.tolist(), *tokens]) if routed else None,
        )

    def _routes(self, ids: Sequence[int]) -> NDArray[np.unsignedinteger[Any]]:
        layout = self.layout
        assert layout is not None
        dtype = np.uint8 if layout.num_experts <= 256 else np.uint16  # as vLLM does
        rows = np.zeros((len(ids) - 1, layout.num_layers, layout.top_k), dtype)
        prefix = self._hash("route")
        for row, token in zip(rows, ids, strict=False):  # the last token has no row
            _extend(prefix, token)
            rng = _rng(prefix)
            for layer in layout.moe_layers:
                row[layer] = rng.permutation(layout.num_experts)[: layout.top_k]
        return rows

    def _hash(self, what: str, index: int = 0) -> hashlib.blake2b:
        return hashlib.blake2b(repr((what, self.seed, self.version, index)).encode(), digest_size=8)


def _extend(prefix: hashlib.blake2b, token: int) -> None:
    prefix.update(token.to_bytes(8, "little", signed=True))


def _rng(prefix: hashlib.blake2b) -> np.random.Generator:
    return np.random.default_rng(int.from_bytes(prefix.digest(), "little"))


def _field(request: Request, name: str, default: Any) -> Any:
    params = request.sampling_params
    value = params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)
    return default if value is None else value


def _max_tokens(request: Request) -> int:
    return int(_field(request, "max_tokens", MAX_TOKENS))


class FakeAsyncVLLM(GenerationService):
    """An engine of fake replicas, accepted wherever an engine is; it serves on construction.

    Args:
        num_replicas: how many.
        seed: see :class:`FakeReplica`, as is every argument that is not named here.
        max_concurrent_requests: see :class:`~torchrl_moe.modules.AsyncVLLM`.
        faults: the same; but without it no supervisor runs, so what died stays dead.

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
        sampling_params: Any = None,
        metrics: bool = True,
        layout: RoutingLayout | None = LAYOUT,
        token_seconds: float | Callable[[Request], float] = 0.0,
        refuse: Callable[[Request], str | None] | None = None,
        max_concurrent_requests: int | Literal["auto"] | None = "auto",
        faults: FaultPolicy | None = None,
    ) -> None:
        settings: dict[str, Any] = {"seed": seed, "layout": layout, "token_seconds": token_seconds, "refuse": refuse}

        def make_replica(index: int) -> FakeReplica:
            self.replicas[index] = replica = FakeReplica(index, **settings)
            return replica

        self.replicas = [FakeReplica(index, **settings) for index in range(num_replicas)]
        super().__init__(
            self.replicas,
            sampling_params,
            metrics=metrics,
            max_concurrent_requests=max_concurrent_requests,
            faults=faults,
            make_replica=make_replica,
        )
        for replica in self.replicas:
            self.infos.append(replica.wait_ready(0.0))
            self.replica_table.set_state(replica.index, ReplicaState.SERVING)
        self._running = True
        if faults is not None:
            self._supervisor.start()
