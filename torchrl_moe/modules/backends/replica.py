"""A replica as the service sees it: its interface, and the data classes that pass through it.

A replica is one engine with its own weights, wherever it runs. The service hands it :class:`Request` objects and
gets one :class:`Completion` for each. Both hold numpy arrays and small scalars only, so they travel between processes
as flat buffers. Nothing here imports an engine: vLLM's side is in ``backends/vllm``, the fake one in ``testing``.

Letters: P prompt tokens, G generated tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

import abc
import os
import socket
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import EngineError

if TYPE_CHECKING:
    from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


# The token ids that sampling kept for each token of an answer, as flat arrays, on their way from a worker to a rollout.
#
# An engine reports them token by token; a *mask* is its report on one token, empty where no id was left out. It has the
# ids that were kept or, where fewer were removed, the removed ones, as ``~id``.
#
# Letters: G tokens of an answer, M ids of all its tokens together, R answers of a batch, V vocabulary.


NOTHING = np.empty(0, np.int32)
KEEPS_ALL: Mapping[str, tuple[object, ...]] = {
    "top_k": (None, 0, -1),
    "top_p": (None, 1, 1.0),
    "min_p": (None, 0, 0.0),
    "min_tokens": (None, 0),
    "bad_words": (None, [], ()),
    "allowed_token_ids": (None,),
    "structured_outputs": (None,),
}
"""Sampling parameters that leave token ids out -> values with which they do not."""


def leaves_ids_out(value_of: Callable[[str], object]) -> str | None:
    """Return a sampling parameter that may leave ids out of what a token is drawn from; ``None`` if there is none.

    >>> leaves_ids_out({"top_p": 0.95}.get), leaves_ids_out({"top_p": 1.0, "top_k": -1}.get)
    ('top_p', None)
    """
    return next((name for name, values in KEEPS_ALL.items() if value_of(name) not in values), None)


@dataclass(frozen=True, slots=True)
class KeptIds:
    """See :class:`~torchrl_moe.data.KeptTokens`, whose fields these become.

    Shapes:
        - ids: int32 ``[M]``
        - sizes: int32 ``[G]``: n ids that were kept, or -n that were removed; 0: none was left out
    """

    ids: NDArray[np.int32]
    sizes: NDArray[np.int32]

    @classmethod
    def of_masks(cls, masks: Sequence[Sequence[int] | NDArray[np.int32]], tokens: int) -> KeptIds | None:
        """Join the masks of an answer of ``tokens`` tokens; ``None`` if no id was left out of any.

        >>> KeptIds.of_masks([[5, 7], [], [~3]], 3)
        KeptIds(ids=array([5, 7, 3], dtype=int32), sizes=array([ 2,  0, -1], dtype=int32))
        """
        if not any(len(mask) for mask in masks):
            return None
        if len(masks) != tokens:
            raise EngineError(f"the engine reported the kept tokens of {len(masks)} tokens, of an answer of {tokens}")
        ids = np.concatenate([np.asarray(mask, np.int32) for mask in masks])
        sizes = np.array([len(mask) if not len(mask) or mask[0] >= 0 else -len(mask) for mask in masks], np.int32)
        return cls(np.where(ids < 0, ~ids, ids), sizes)

    def first(self, tokens: int) -> KeptIds:
        """Return the kept ids of the first ``tokens`` tokens."""
        sizes = self.sizes[:tokens]
        return KeptIds(self.ids[: int(np.abs(sizes).sum())], sizes)

    def after(self, tokens: int) -> KeptIds:
        """Return the kept ids of all but the first ``tokens`` tokens."""
        return KeptIds(self.ids[int(np.abs(self.sizes[:tokens]).sum()) :], self.sizes[tokens:])

    @classmethod
    def join(cls, parts: Sequence[KeptIds | None], tokens: Sequence[int]) -> KeptIds | None:
        """Join the parts of an answer, each with its number of tokens; ``None`` if no id was left out of any part."""
        if not any(part is not None for part in parts):
            return None
        filled = [
            cls(np.empty(0, np.int32), np.zeros(count, np.int32)) if part is None else part
            for part, count in zip(parts, tokens, strict=True)
        ]
        return cls(np.concatenate([part.ids for part in filled]), np.concatenate([part.sizes for part in filled]))


def name_kept(log_probs: Tensor) -> list[NDArray[np.int32]]:
    """Return the mask of each token that is drawn from log-probs ``[R, V]``, -inf for ids that were left out."""
    kept = log_probs > float("-inf")
    if bool(kept.all()):
        return [NOTHING] * len(kept)
    return [
        (np.flatnonzero(row) if 2 * np.count_nonzero(row) <= len(row) else ~np.flatnonzero(~row)).astype(np.int32)
        for row in kept.cpu().numpy()
    ]


# What a replica reports: once it serves, while it does, and after a command. All are plain data classes.


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaInfo:
    """What a replica reports once it serves.

    ``layout`` is ``None`` if no routes are captured. ``dtype``: torch's name of what the model computes in, if known.
    ``forced_routing_unavailable_reason``: why the engine cannot follow recorded experts; empty if it can.
    """

    model: str
    layout: RoutingLayout | None
    max_model_len: int
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    engine_version: str = ""
    dtype: str = ""
    forced_routing_unavailable_reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStats:
    """A replica's own stats, read at one moment; counts are since its engine started.

    Attributes:
        running: answers being generated.
        waiting: requests in the engine's queue.
        cache_usage: share of KV blocks in use, 0 to 1.
        tokens_per_second: generated during the last second.
        requests: finished, aborted ones included; the next five fields count only finished requests.
        completions: answers.
        prompt_tokens: of their prompts.
        cached_tokens: those of them found in the prefix cache.
        generated_tokens: of their answers.
        generation_seconds: from arrival to end, summed.
        cache_queries: prompt tokens looked up in the prefix cache, as requests are scheduled.
        cache_hits: those found.
        preemptions: times that a request lost its KV blocks to others and must be recomputed.
        steps: of the engine.
        step_at: when the last one ended, in seconds since the epoch; 0 before the first.
        weights_version: of the weights that the engine serves, from any driver; 0 for the checkpoint's.
    """

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    tokens_per_second: float = 0.0
    requests: int = 0
    completions: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    generation_seconds: float = 0.0
    cache_queries: int = 0
    cache_hits: int = 0
    preemptions: int = 0
    steps: int = 0
    step_at: float = 0.0
    weights_version: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of prompt tokens found in the prefix cache, 0 to 1; 0 before the first."""
        return self.cache_hits / self.cache_queries if self.cache_queries else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    """A version of weights that a replica checked and may load."""

    seconds: float
    nbytes: int
    digest: str
    fetched: float = 0.0
    loaded: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapReport:
    """How far a replica got with a version: seconds pausing, loading, and paused in total; or why it failed.

    One that was not ``started`` still has its old weights. ``unproved`` says why there was no weight check.
    """

    started: bool = True
    pausing_seconds: float = 0.0
    loading_seconds: float = 0.0
    paused_seconds: float = 0.0
    unproved: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeReport:
    """The health of an engine, as the process that owns it reports: the reply to the command ``probe``.

    Attributes:
        core_answered: whether the engine core answered a ping in time; one in the middle of a long step does not.
        stopped: whether one of the engine's processes is stopped by a signal.
        cpu_seconds: CPU time of its processes, without the owner's.
    """

    core_answered: bool
    stopped: bool = False
    cpu_seconds: float = 0.0


def this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightClaim:
    """The reply to a claim of a replica's weights: whether it was granted, and the driver that owns them now."""

    granted: bool
    owner: str


PauseMode = Literal["keep", "wait", "abort"]
OnResume = Literal["forced", "live"]
"""How a resumed answer re-reads its first part: with the experts it was sampled with, or as the model routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How the tokens of a prompt are scored: at which temperature, and over which ids; ``None``: over all."""

    temperature: float = 1.0
    kept: KeptIds | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt on its way to a replica.

    Exactly one of ``prompt_token_ids`` (int32 ``[P]``) and ``prompt`` is set. ``sampling_params`` is a mapping of
    vLLM's ``SamplingParams`` fields, or such an object; requests of one call share it, so it is sent once. ``resume``
    holds the answers so far: those that were cut short continue from their last tokens. ``routed_experts``, integers
    ``[rows, L, K]`` with rows <= P, are followed for the first positions, -1 where the model routes. ``on_resume`` says
    how tokens that were routed once are read again; ``None``: forced if the engine can, else live. ``scoring`` asks for
    the log-probs of the prompt's own tokens. ``stream`` asks for parts of the answers as they come, see :class:`Tell`.
    """

    request_id: str
    sampling_params: Any
    prompt_token_ids: NDArray[np.int32] | None = None
    prompt: str | None = None
    priority: int = 0
    lora_request: object = None
    guided_options: object = None
    return_routed_experts: bool = True
    resume: Completion | None = None
    routed_experts: NDArray[np.integer] | None = None
    on_resume: OnResume | None = None
    scoring: Scoring | None = None
    stream: bool = False

    def param(self, name: str) -> Any:
        """Return a sampling parameter as the user gave it; ``None`` if it was not given."""
        params = self.sampling_params
        return params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)


def _restore(self: Completion | CompletionOutput, state: tuple[None, dict[str, object]]) -> None:
    """Restore a pickled instance, also one of an older release: fields that it lacks get their defaults."""
    _, kept = state
    for one in fields(self):
        if one.name in kept:
            setattr(self, one.name, kept[one.name])
        elif one.default is not MISSING:
            setattr(self, one.name, one.default)


@dataclass(slots=True, kw_only=True)
class CompletionMetrics:
    """Where a request's time went, on which replica: seconds queued, until its first token, and in all.

    All three begin when the engine has the request, so the first is at most the second, and that at most the third.
    """

    queue_seconds: float = 0.0
    first_token_seconds: float = 0.0
    total_seconds: float = 0.0
    replica: int = -1


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One of the ``n`` answers to a request.

    Shapes:
        - token_ids: int64 ``[G]``
        - logprobs: float32 ``[G]``, of the sampled tokens; ``None`` if none were asked for
        - routed_experts: unsigned int ``[P + G - 1, L, K]`` as the engine gives it, or the last of these rows (see
          :func:`without_known_rows`); ``None`` if not kept
        - policy_versions: int32 ``[G]``, version of the weights that produced each token
        - kept: the ids that each token was sampled from; ``None`` if none were left out, or no log-probs asked for

    ``resume`` says how later parts of it read the earlier ones again: ``"none"`` if there are none.
    """

    index: int
    token_ids: NDArray[np.int64]
    text: str
    finish_reason: str
    policy_versions: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.integer] | None = None
    stop_reason: int | str | None = None
    kept: KeptIds | None = None
    resume: OnResume | Literal["none"] = "none"

    __setstate__ = _restore

    def after(self, tokens: int, characters: int) -> CompletionOutput:
        """Return what it has beyond its first tokens and the characters of its text that were told, without routes."""
        return replace(
            self,
            token_ids=self.token_ids[tokens:],
            text=self.text[characters:],
            policy_versions=self.policy_versions[tokens:],
            logprobs=None if self.logprobs is None else self.logprobs[tokens:],
            routed_experts=None,
            kept=None if self.kept is None else self.kept.after(tokens),
        )

    def __repr__(self) -> str:
        routes = None if self.routed_experts is None else list(self.routed_experts.shape)
        return (
            f"CompletionOutput(index={self.index}, tokens={len(self.token_ids)}, text={self.text!r}, "
            f"finish_reason={self.finish_reason!r}, routed_experts={routes})"
        )


@dataclass(slots=True, kw_only=True)
class Completion:
    """The result of one request, in the shape of vLLM's ``RequestOutput``.

    ``prompt_token_ids`` is int64 ``[P]`` however the prompt came; ``num_cached_tokens`` are its prefix-cache hits.
    ``prompt_logprobs``, float32 ``[P]``, NaN for the first, are there if the request asked for scores.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: NDArray[np.int64]
    num_cached_tokens: int
    outputs: list[CompletionOutput]
    metrics: CompletionMetrics = field(default_factory=CompletionMetrics)
    finished: bool = True
    prompt_logprobs: NDArray[np.float32] | None = None

    __setstate__ = _restore

    @property
    def aborted(self) -> bool:
        """Whether any answer was cut short by an abort."""
        return any(output.finish_reason == "abort" for output in self.outputs)

    def count_not_finite(self) -> int:
        """Return how many log-probs of its answers are NaN or infinite, and of its scores are NaN."""
        bad = sum(np.count_nonzero(~np.isfinite(o.logprobs)) for o in self.outputs if o.logprobs is not None)
        if self.prompt_logprobs is not None:  # an id that was not kept has minus infinity
            bad += np.count_nonzero(np.isnan(self.prompt_logprobs[1:]))
        return int(bad)

    def __repr__(self) -> str:
        return (
            f"Completion(request_id={self.request_id!r}, prompt_tokens={len(self.prompt_token_ids)}, "
            f"cached={self.num_cached_tokens}, outputs={self.outputs})"
        )


def without_known_rows(completion: Completion, request: Request) -> Completion:
    """Leave out the rows that the request's caller has: ``routed_experts_prompt_start``, and no more than were cached.

    So a long conversation sends the rows of its new tokens at each turn. What the engine has read again is sent again:
    it may have been routed otherwise. An answer that was cut keeps all rows, which its rest follows, and so do several
    answers to one prompt, of which each has hits of its own.
    """
    first = min(request.param("routed_experts_prompt_start") or 0, completion.num_cached_tokens)
    if not first or completion.aborted or len(completion.outputs) != 1:
        return completion
    (output,) = completion.outputs
    rows = output.routed_experts
    return completion if rows is None else replace(completion, outputs=[replace(output, routed_experts=rows[first:])])


def nothing_yet(request: Request) -> Completion:
    """Return a request's completion before its first token: what it resumes, or empty answers that count as cut."""
    if request.resume is not None:
        return replace(request.resume, request_id=request.request_id)
    ids = np.empty(0, np.int64) if request.prompt_token_ids is None else request.prompt_token_ids.astype(np.int64)
    nothing = np.empty(0, np.int64)
    versions, logprobs = nothing.astype(np.int32), nothing.astype(np.float32)
    outputs = [
        CompletionOutput(
            index=index,
            token_ids=nothing,
            text="",
            finish_reason="abort",
            policy_versions=versions,
            logprobs=None if request.param("logprobs") is None else logprobs,
        )
        for index in range(request.param("n") or 1)
    ]
    return Completion(
        request_id=request.request_id, prompt=request.prompt, prompt_token_ids=ids, num_cached_tokens=0, outputs=outputs
    )


def joined(request: Request, parts: Sequence[Completion]) -> Completion:
    """Return what a request that streams has so far, as a completion to resume; tokens of parts have no routes."""
    nothing = nothing_yet(request)
    pieces: list[list[CompletionOutput]] = [[output] for output in nothing.outputs]
    for part in parts:
        for output in part.outputs:
            pieces[output.index].append(output)
    prompts = [part.prompt_token_ids for part in parts if len(part.prompt_token_ids)]
    return replace(
        nothing,
        prompt_token_ids=prompts[0] if prompts else nothing.prompt_token_ids,
        outputs=[_in_a_row(of_answer) for of_answer in pieces],
    )


def _in_a_row(outputs: Sequence[CompletionOutput]) -> CompletionOutput:
    before, *parts = outputs
    if not parts:
        return before
    logprobs = [output.logprobs for output in outputs if output.logprobs is not None]
    return replace(
        outputs[-1],
        token_ids=np.concatenate([output.token_ids for output in outputs]),
        text="".join(output.text for output in outputs),
        policy_versions=np.concatenate([output.policy_versions for output in outputs]),
        logprobs=np.concatenate(logprobs) if len(logprobs) == len(outputs) else None,
        routed_experts=before.routed_experts,
        kept=KeptIds.join([output.kept for output in outputs], [len(output.token_ids) for output in outputs]),
    )


Tell: TypeAlias = "Callable[[Sequence[Completion]], object]"
"""Takes parts of the answers of requests that stream: what each has gained since its last part, in order.

A part is a completion that is not ``finished``. Its answers hold new tokens only, with their text, log-probs, versions
and kept ids, and count as cut. Routes, and the end of an answer, come with the whole completion, which does not build
on the parts. Text may hold the beginning of a stop string. Only the first part of a request has its prompt's ids.
"""


class Replica(abc.ABC):
    """One engine as the service sees it, wherever it runs. Its lifecycle, in order::

    replica.start()                       # returns at once
    info = replica.wait_ready(timeout)    # raises ReplicaDiedError with the end of its log
    futures = replica.submit(requests)    # one future each, never waits
    replica.abort(request_ids)            # their futures resolve with finish_reason "abort"
    replica.call(Engine.pause, 5.0, "keep", False)    # any verb of the engine, with a deadline
    replica.shutdown()                    # idempotent; open futures fail with ReplicaDiedError
    """

    index: int
    was_ended = False
    """Whether another driver has shut it down, for all: then none restarts it."""

    @property
    def log_path(self) -> Path | None:
        """The file of the engine's log, if it is on the driver's machine; else ``None``."""
        return None

    def log_tail(self) -> str:
        """Return the last errors of that log, or its last lines; ``""`` if it is not on the driver's machine."""
        return ""

    @property
    @abc.abstractmethod
    def last_stats(self) -> ReplicaStats | None:
        """The stats that the replica last sent by itself, as it does whenever they change; ``None`` before."""

    @property
    @abc.abstractmethod
    def death(self) -> str | None:
        """Why it died, once that is known; ``None`` before."""

    @abc.abstractmethod
    def start(self) -> None:
        """Start the engine, without waiting for it."""

    @abc.abstractmethod
    def wait_ready(self, timeout: float) -> ReplicaInfo:
        """Wait until the engine serves; raises an ``EngineError`` past ``timeout`` seconds."""

    @abc.abstractmethod
    def submit(self, requests: Sequence[Request], tell: Tell | None = None) -> list[Future[Completion]]:
        """Send requests; a future fails with ``ValueError`` if the engine refuses its request.

        ``tell`` is given the parts of those that stream, from any thread; an engine need not have any.
        """

    @abc.abstractmethod
    def abort(self, request_ids: Sequence[str]) -> None:
        """Cut requests short; unknown ids are ignored, since a request may just have finished."""

    @abc.abstractmethod
    def ask(
        self, verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[T]:
        """Send a verb of :class:`~torchrl_moe.modules.backends.engine.Engine`, without waiting for its result.

        The future fails with a ``ReplicaDiedError`` if the engine is gone, with the engine's error otherwise.
        """

    def call(
        self,
        verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        timeout: float,
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Run a verb of the engine, and wait for its result; raises an ``EngineError`` past ``timeout`` seconds."""
        answer = self.ask(verb, *args, **kwargs)
        try:
            return answer.result(timeout)
        except FutureTimeout:
            answer.cancel()  # a late answer is dropped
            name = verb.__name__
            raise EngineError(f"replica {self.index} did not answer {name!r} within {timeout:g} s") from None

    @abc.abstractmethod
    def is_alive(self) -> bool:
        """Whether the engine can still answer, as far as is known without asking it: this is read twice a second."""

    @abc.abstractmethod
    def shutdown(self) -> None:
        """End the engine and everything it started."""
