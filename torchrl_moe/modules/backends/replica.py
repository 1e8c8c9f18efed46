"""A replica as the service sees it: a protocol, and the data classes that pass through it.

A replica is one engine with its own weights, wherever it runs. The service hands it :class:`Request` objects and
gets one :class:`Completion` for each. Both hold numpy arrays and small scalars only, so they travel between processes
as flat buffers. Nothing here imports an engine: vLLM's side is in ``backends/vllm``, the fake one in ``testing``.

Letters: P prompt tokens, G generated tokens, L decoder layers, K experts per token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.kept_ids import KeptIds
from torchrl_moe.modules.backends.reports import ProbeReport, ReplicaInfo, ReplicaStats, SwapReport
from torchrl_moe.modules.backends.weight_claim import WeightClaim
from torchrl_moe.weight_update.transports.base import StageReport

if TYPE_CHECKING:
    import torch

__all__ = [
    "Completion",
    "CompletionMetrics",
    "CompletionOutput",
    "OnResume",
    "PauseMode",
    "Replica",
    "Request",
    "Scoring",
    "nothing_yet",
]

PauseMode = Literal["keep", "wait", "abort"]
OnResume = Literal["forced", "live"]
"""How a resumed answer re-reads its first part: with the experts it was sampled with, or as the model routes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scoring:
    """How the tokens of a prompt are scored: at which temperature, and over which words; ``None``: over all."""

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
    the log-probs of the prompt's own tokens.
    """

    request_id: str
    sampling_params: Any
    prompt_token_ids: NDArray[np.int32] | None = None
    prompt: str | None = None
    priority: int = 0
    lora_request: Any = None
    guided_options: Any = None
    return_routed_experts: bool = True
    resume: Completion | None = None
    routed_experts: NDArray[np.integer[Any]] | None = None
    on_resume: OnResume | None = None
    scoring: Scoring | None = None

    def param(self, name: str) -> Any:
        """Return a sampling parameter as the user gave it; ``None`` if it was not given."""
        params = self.sampling_params
        return params.get(name) if isinstance(params, Mapping) else getattr(params, name, None)


def _restore(self: Any, state: tuple[Any, dict[str, Any]]) -> None:
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
        - routed_experts: unsigned int ``[P + G - 1, L, K]`` as the engine gives it; ``None`` if not kept
        - policy_versions: int32 ``[G]``, version of the weights that produced each token
        - kept: the words that each token was sampled from; ``None`` if none were left out, or no log-probs asked for

    ``resume`` says how later parts of it read the earlier ones again: ``"none"`` if there are none.
    """

    index: int
    token_ids: NDArray[np.int64]
    text: str
    finish_reason: str
    policy_versions: NDArray[np.int32]
    logprobs: NDArray[np.float32] | None = None
    routed_experts: NDArray[np.integer[Any]] | None = None
    stop_reason: int | str | None = None
    kept: KeptIds | None = None
    resume: OnResume | Literal["none"] = "none"

    __setstate__ = _restore

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
        if self.prompt_logprobs is not None:  # a word that was not kept has minus infinity
            bad += np.count_nonzero(np.isnan(self.prompt_logprobs[1:]))
        return int(bad)

    def __repr__(self) -> str:
        return (
            f"Completion(request_id={self.request_id!r}, prompt_tokens={len(self.prompt_token_ids)}, "
            f"cached={self.num_cached_tokens}, outputs={self.outputs})"
        )


def nothing_yet(request: Request) -> Completion:
    """Return a request's completion before its first token: what it resumes, or empty answers that count as cut."""
    if request.resume is not None:
        return replace(request.resume, request_id=request.request_id)
    ids = np.empty(0, np.int64) if request.prompt_token_ids is None else request.prompt_token_ids.astype(np.int64)
    nothing: Any = np.empty(0, np.int64)
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


@runtime_checkable
class Replica(Protocol):
    """One engine. Every call that waits takes a deadline in seconds and raises an ``EngineError`` past it.

    Its lifecycle, in order::

        replica.start()                       # returns at once
        info = replica.wait_ready(timeout)    # raises ReplicaDiedError with the end of its log
        futures = replica.submit(requests)    # one future each, never waits
        replica.abort(request_ids)            # their futures resolve with finish_reason "abort"
        replica.shutdown()                    # idempotent; open futures fail with ReplicaDiedError
    """

    index: int
    was_ended: bool
    """Whether another driver has shut it down, for all: then none restarts it."""

    @property
    def log_path(self) -> Path | None:
        """The file of the engine's log, if it is on the driver's machine; else ``None``."""

    def log_tail(self) -> str:
        """Return the last errors of that log, or its last lines; ``""`` if it is not on the driver's machine."""

    @property
    def last_stats(self) -> ReplicaStats | None:
        """The stats that the replica last sent by itself, as it does whenever they change; ``None`` before."""

    def start(self) -> None:
        """Start the engine, without waiting for it."""

    def wait_ready(self, timeout: float) -> ReplicaInfo:
        """Wait until the engine serves."""

    def submit(self, requests: Sequence[Request]) -> list[Future[Completion]]:
        """Hand over requests; a future fails with ``ValueError`` if the engine refuses its request."""

    def snapshot(self, timeout: float) -> list[Completion]:
        """Return what each request in flight has so far: tokens, log-probs, routes and versions. The requests continue.

        An answer that is not finished counts as cut, so ``generate(resume=...)`` can continue from a copy after a
        crash.
        """

    def abort(self, request_ids: Sequence[str]) -> None:
        """Cut requests short; unknown ids are ignored, since a request may just have finished."""

    @property
    def death(self) -> str | None:
        """Why it died, once that is known; ``None`` before."""

    def probe(self, core_seconds: float) -> Future[ProbeReport]:
        """Ask the process that owns the engine for its health, without waiting for it.

        That process gives the engine core ``core_seconds`` to answer a ping. If it is stuck itself, it never answers.
        """

    # -- commands: each waits for the engine's reply --------------------------------------------------------------

    def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop scheduling; ``mode`` says what happens to requests in flight."""

    def resume(self, timeout: float) -> None:
        """Undo :meth:`pause`."""

    def sleep(self, level: int, mode: PauseMode, timeout: float) -> None:
        """Free the memory of the cache, and of the weights: level 1 keeps them in host memory, 2 drops them.

        New requests wait. ``mode`` says what happens to those in flight; a weight update wakes the weights.
        """

    def wake_up(self, tags: Sequence[str] | None, timeout: float) -> None:
        """Undo :meth:`sleep`, or part of it: ``tags`` holds ``"weights"``, ``"kv_cache"`` or both; ``None``: both."""

    def stats(self, timeout: float) -> ReplicaStats:
        """Ask for the engine's current stats."""

    def reset_prefix_cache(self, timeout: float) -> bool:
        """Drop cached prefixes; false if requests are running."""

    def set_seed(self, seed: int, timeout: float) -> None:
        """Seed the sampler, for requests without their own seed."""

    def collective_rpc(
        self, method: str, args: Sequence[Any], kwargs: Mapping[str, Any] | None, timeout: float
    ) -> list[Any]:
        """Call a method of every worker; one result for each. Plain data only."""

    def tokenizer(self, timeout: float) -> Any:
        """Return the model's tokenizer."""

    def metadata(self, timeout: float) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return what the checkpoint holds: name -> dtype and shape."""

    def weights_version(self, timeout: float) -> int:
        """Return the version of the engine's weights; 0 for the checkpoint's."""

    def claim_weights(self, name: str, takeover: bool, timeout: float) -> WeightClaim:
        """Make the engine's weights this driver's: commands about weights of any other are refused from now on.

        Args:
            name: of this driver, for messages.
            takeover: whether to take them from another driver that is alive; otherwise the claim is refused, and names
                the owner.
            timeout: in seconds.
        """

    def owns_weights(self, timeout: float) -> bool:
        """Whether the weights are still this driver's."""

    def give_up_weights(self, timeout: float) -> None:
        """Undo :meth:`claim_weights`, so that another driver may claim them."""

    def init_weights(self, transport: str, options: Mapping[str, Any], timeout: float) -> None:
        """Open the engine's end of a weight transport."""

    def stage_weights(
        self, version: int, *, verify: str, threads: int, manifest: str | None, timeout: float
    ) -> StageReport:
        """Fetch a version and check it, while requests run; ``threads`` read and hash.

        ``verify``: ``"digest"``, ``"canary"`` or ``"off"``. ``manifest``: the version's, for a transport that cannot
        look it up.
        """

    def swap_weights(
        self,
        version: int,
        *,
        pause: PauseMode,
        clear_cache: bool,
        canary: Mapping[str, Any] | None,
        digest: str | None = None,
        patience: float = math.inf,
        timeout: float,
    ) -> SwapReport:
        """Pause, load a version that was staged, check it, and continue.

        Args:
            version: its number.
            digest: what must have been staged last, by whichever sender; ``None``: what this driver staged.
            pause: what happens to requests in flight.
            clear_cache: whether frozen requests are recomputed under the new weights.
            canary: the trainer's log-probs, for the weight check; ``None``: any finite log-prob passes.
            patience: seconds after which the driver gives the replica up; the weight check stays well within them.
            timeout: in seconds.
        """

    def is_alive(self) -> bool:
        """Whether the engine can still answer, as far as is known without asking it: this is read twice a second."""

    def shutdown(self) -> None:
        """End the engine and everything it started."""
