"""The generation service: prompts in, completions out, over any set of replicas.

It knows replicas only by the :class:`~torchrl_moe.modules.backends.replica.Replica` protocol. What vLLM adds (engine
arguments, devices, start-up) is in :class:`AsyncVLLM`; the fake engine of ``testing`` is this class over fake replicas.
Replicas send their stats by themselves; only ``stats`` and ``get_cache_usage`` query them.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import socket
import sys
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from torchrl_moe._checks import check_bool, check_number, shown
from torchrl_moe.data import RoutingLayout
from torchrl_moe.errors import EngineError, NoReplicaError
from torchrl_moe.modules.backends.checkpoint import checkpoint_kinds, load_tokenizer
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Completion, OnResume, PauseMode, Replica, ReplicaStats
from torchrl_moe.modules.serving.balancer import WEIGHTS, ActorHandle, LoadBalancer
from torchrl_moe.modules.serving.dispatch import Admission, Dispatcher
from torchrl_moe.modules.serving.event_loop import EventLoop
from torchrl_moe.modules.serving.fleet import CALL_SECONDS, SILENT, Fleet
from torchrl_moe.modules.serving.in_flight import Call
from torchrl_moe.modules.serving.replica_table import FaultPolicy, ReplicaState, TableEntry
from torchrl_moe.modules.serving.requests import (
    ONE_TOKEN,
    GuidedOptions,
    LoRA,
    PromptBatch,
    SamplingParams,
    check_service,
    check_timeout,
    make_requests,
    normalise_prompts,
    placements,
    scores_of,
    scorings,
)
from torchrl_moe.modules.serving.stats import (
    SHOWN_REPLICAS,
    Metrics,
    ServiceCollector,
    Totals,
    describe,
    prometheus_text,
    replica_row,
    service_html,
)
from torchrl_moe.modules.serving.strategies import Strategy
from torchrl_moe.render.tables import data_frame

if TYPE_CHECKING:
    import pandas as pd
    from prometheus_client import CollectorRegistry
    from transformers import PreTrainedTokenizerBase


class Progress:
    """A bar with tokens per second."""

    def __init__(self, total: int, shown: bool, what: str) -> None:
        self.bar = tqdm(total=total, desc=what, unit="req", disable=None if shown else True)
        self._tokens = 0

    def add(self, completion: Completion) -> None:
        """Count a finished request; from any thread, one at a time."""
        if self.bar.disable:
            return
        self._tokens += sum(len(output.token_ids) for output in completion.outputs)
        seconds = max(self.bar.format_dict["elapsed"], 1e-9)
        self.bar.set_postfix_str(f"{self._tokens / seconds:.0f} tok/s", refresh=False)
        self.bar.update()


DEFAULT_SAMPLING_PARAMS = {"logprobs": 0}  # the sampled token's own log-prob, which RL always needs
# Four times vLLM's usual batch: no engine runs empty, and all further requests wait here, as small records.
REQUESTS_PER_REPLICA = 1024
STATS_SECONDS = 5.0
START_SECONDS = 600.0
DRAIN_SECONDS = 600.0
MOST_THREADS = 32
MOST_SECONDS = 10_000_000  # a third of a year; clocks and locks take little more
MOST_ADDED = 1024  # at a time
BASE = "torchrl.modules.llm.backends.vllm.base"
WEIGHT_CALLS = frozenset({"init_weight_update_group", "load_weights_from_storage", "update_weight_broadcast"})
"""Methods of the workers that TorchRL's weight updates call."""

Weights: TypeAlias = "nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]"


class GenerationService:
    """Generation over N replicas, which are not started yet; safe to call from any thread.

    ``make_replica`` makes one for an index, to replace one that died or to add one; without it neither is possible.
    :class:`AsyncVLLM` describes the other arguments. TorchRL's code accepts it as its own engine: ``isinstance(service,
    RLvLLMEngine)`` holds.

    Attributes:
        replica_table: what is known of each replica.
        infos: the infos of the replicas that it started with.
        metrics: outcomes and durations of requests; ``metrics.summary()`` is ready for a logger.
    """

    _master_port: int | None = None

    def __init__(
        self,
        replicas: Sequence[Replica],
        sampling_params: SamplingParams | None = None,
        *,
        metrics: bool = True,
        max_concurrent_requests: int | Literal["auto"] | None = "auto",
        faults: FaultPolicy | None = None,
        make_replica: Callable[[int], Replica] | None = None,
    ) -> None:
        check_service(sampling_params, metrics, max_concurrent_requests, faults)
        self.faults = faults or FaultPolicy()
        self._loop = EventLoop("torchrl_moe-service")
        self._fleet = Fleet(replicas, self.faults, self._loop, make_replica)
        self.replica_table = self._fleet.table
        self.infos = self._fleet.infos
        self.metrics = Metrics(metrics)
        self._totals = Totals(self.replica_table)
        self._running = False
        self._update: Callable[[Weights], Any] | None = None
        self._limit_follows = max_concurrent_requests == "auto"
        if max_concurrent_requests == "auto":
            max_concurrent_requests = REQUESTS_PER_REPLICA * len(replicas)
        self.admission = Admission(max_concurrent_requests)
        self.sampling_params = DEFAULT_SAMPLING_PARAMS if sampling_params is None else sampling_params
        self.load_balancer = LoadBalancer(self)
        self._dispatcher = Dispatcher(
            self.replica_table,
            self.admission,
            self.faults.attempts,
            partial(self.metrics.count, "retried"),
            self._loop,
        )
        self._tokenizer: PreTrainedTokenizerBase | None = None
        self._ids = map(f"{uuid.uuid4().hex[:8]}-{{}}".format, itertools.count())

    # -- life -------------------------------------------------------------------------------------------------------

    @property
    def num_replicas(self) -> int:
        """How many replicas the service has, serving or not."""
        return len(self.replica_table)

    @property
    def is_running(self) -> bool:
        """Whether the service was started and not shut down."""
        return self._running

    @property
    def is_frozen(self) -> bool:
        """Whether :meth:`pause` or :meth:`sleep` holds requests in flight back."""
        return self._fleet.is_frozen

    @property
    def routing_layout(self) -> RoutingLayout | None:
        """The layout of the model's routers; ``None`` if routes are not captured, as for a dense model."""
        self._check_running("routing_layout")
        return self.infos[0].layout

    def _check_running(self, what: str) -> None:
        if not self._running:
            raise RuntimeError(f"{what}: the service is not running. Start it first; after shutdown() make a new one.")

    def shutdown(self) -> None:
        """End every replica, at the same time. Idempotent; calls that wait end with an ``EngineError``."""
        self._dispatcher.close("the service was shut down")
        self._running = False
        try:
            self._fleet.end()
        finally:
            self._dispatcher.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def add_replicas(self, count: int = 1, *, timeout_seconds: float | None = None) -> list[int]:
        """Start more replicas, wait until they serve, and return their indices, none of which is used twice.

        They have the current weights, and are paused if the service is. One that needs weights which no sender can load
        stays STARTING until the next update.

        Args:
            count: how many.
            timeout_seconds: for all of them; default: 600.

        Raises:
            ValueError: less than one, or there are no devices left for them.
            EngineError: one did not start, or not in time; then none is added.
        """
        self._check_running("add_replicas")
        check_number("count", count, 1, MOST_ADDED, whole=True)
        _check_seconds(timeout_seconds, none=True)
        indices = self._fleet.add(count, START_SECONDS if timeout_seconds is None else timeout_seconds)
        self._resized()
        return indices

    def remove_replica(self, index: int, *, drain: bool = True, timeout_seconds: float = DRAIN_SECONDS) -> None:
        """End a replica for good; the others keep their indices.

        Args:
            index: of the replica.
            drain: whether its requests may finish first; otherwise they start again on the others.
            timeout_seconds: for that, and for a running update of its weights.

        Raises:
            IndexError: there is no such replica.
            ValueError: it is the only one, or was removed before.
            EngineError: its requests were not finished in time; then it keeps serving.
        """
        self._check_running("remove_replica")
        check_number("index", index, whole=True)
        check_bool("drain", drain)
        _check_seconds(timeout_seconds)
        self._fleet.remove(index, drain, timeout_seconds)
        self._resized()

    def _resized(self) -> None:
        if self._limit_follows:
            self._dispatcher.set_limit(REQUESTS_PER_REPLICA * self.num_replicas)

    # -- generation -------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: object = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: object = None,
        resume: Completion | Sequence[Completion] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRA | None = None,
        prompt_adapter_request: None = None,
        guided_options_request: GuidedOptions | None = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        session_ids: str | int | Sequence[str | int | None] | None = None,
        request_ids: str | Sequence[str] | None = None,
        priority: int | Sequence[int] = 0,
        min_version: int | Sequence[int | None] | None = None,
        group_ids: str | int | Sequence[str | int | None] | None = None,
        request_context: Mapping[str, object] | Sequence[Mapping[str, object] | None] | None = None,
        return_routed_experts: bool = True,
        routed_experts: object = None,
        on_resume: OnResume | None = None,
    ) -> Completion | list[Completion]:
        """Generate for one prompt or many, and wait.

        Args:
            prompts: text, token ids (a list of ints is one prompt), ``TextPrompt``, ``TokensPrompt``, or a list.
            sampling_params: vLLM's ``SamplingParams``, or a mapping of its fields, used as it is; default: the
                service's.
            prompt_token_ids: the same as ``prompts``, for token ids.
            resume: instead of prompts: completions to finish, such as an error's ``.partial``. Complete ones are
                returned unchanged. The others continue after their last tokens, under new request ids, and look as if
                never cut; answers without tokens, or with parameters that depend on where they started (a grammar,
                penalties), start again. Pass the other arguments of the original call: ``max_tokens`` includes the
                existing tokens.
            use_tqdm: whether to show a progress bar, on a terminal or in a notebook; a log file gets none.
            lora_request: vLLM's ``LoRARequest``, or a mapping of its fields.
            prompt_adapter_request: must be ``None``; vLLM has dropped prompt adapters.
            guided_options_request: fields of vLLM's ``StructuredOutputsParams`` (``regex``, ``json``, ``choice``, ...).
            timeout_seconds: per request, from this call on; late requests are aborted.
            actor_index: the replica to use, instead of the balancer's choice.
            session_ids: one per prompt, text or a number, the same for all turns of a rollout; ``None``: no session.
            request_ids: one per prompt, for :meth:`abort`, not in use already; generated by default.
            priority: lower is earlier, for a place in the service, and in an engine with
                ``scheduling_policy="priority"``. This and the next two: one for all, or one per prompt.
            min_version: the oldest weight version that is acceptable.
            request_context: input for your own balancing strategies.
            group_ids: one per prompt, like ``session_ids``; 3 and ``"3"`` are one group. All requests of a group go to
                one weight version.
            return_routed_experts: whether to return the routes; evaluation does not need them.
            routed_experts: the experts ``[rows, L, K]`` that the first tokens of a prompt of token ids follow, -1 in
                rows that the model routes; for several prompts a list, with ``None`` for those without. With ``resume``
                they apply to answers without tokens; the others follow their recorded experts.
            on_resume: how an answer that is resumed, after a weight swap, a preemption or by ``resume``, re-reads its
                first part: ``"forced"``, with the experts that it was sampled with, or ``"live"``, as the model then
                routes it. Default: forced where the engine can; ``infos[i].forced_routing_unavailable_reason`` says why
                it cannot.

        Returns:
            One :class:`~torchrl_moe.modules.backends.replica.Completion` for one prompt, else a list in input order.

        Raises:
            RuntimeError: the service is not running.
            ValueError: bad prompts, a list with another number of entries, or request ids that are in flight.
            TypeError: a prompt, or an entry of a list, of a wrong type.
            IndexError: there is no replica ``actor_index``.
            RequestRefusedError: the engine refused a request; raised once the others have finished.
            GenerationTimeout: some requests did not finish in time and were aborted. Here, in the errors below and in a
                Ctrl-C's ``KeyboardInterrupt``, ``.partial`` holds one completion per request, in input order: complete
                if it had finished, else with its tokens so far.
            NoReplicaError: no replica serves, and none will in time.
            StaleReplicaError: no replica holds the version asked for, and none will in time.
            ReplicaDiedError: too many replicas died under a request, or the one of ``actor_index`` did.
        """
        self._check_running("generate")
        batch = normalise_prompts(prompts, prompt_token_ids, resume)
        if prompt_adapter_request is not None:
            raise ValueError(
                "prompt_adapter_request must be None: vLLM has dropped prompt adapters. Use a LoRA request."
            )
        call = self._call(
            batch,
            sampling_params,
            timeout_seconds,
            actor_index=actor_index,
            session_ids=session_ids,
            min_version=min_version,
            group_ids=group_ids,
            request_context=request_context,
            request_ids=request_ids,
            priority=priority,
            routed_experts=routed_experts,
            lora_request=lora_request,
            guided_options=guided_options_request,
            return_routed_experts=return_routed_experts,
            on_resume=on_resume,
        )
        completions = self._run(call, use_tqdm)
        return completions[0] if batch.single else completions

    def _call(
        self,
        batch: PromptBatch,
        sampling_params: SamplingParams | None,
        timeout_seconds: float | None,
        *,
        actor_index: int | None,
        session_ids: object = None,
        min_version: object = None,
        group_ids: object = None,
        request_context: object = None,
        **of_requests: Any,
    ) -> Call:
        """Return the requests of a call, and where they may go; ``of_requests`` go to :func:`make_requests`."""
        requests = make_requests(
            batch,
            self.sampling_params if sampling_params is None else sampling_params,
            new_ids=self._ids,
            longest=min(map(attrgetter("max_model_len"), self.infos)),
            layout=self.infos[0].layout,
            **of_requests,
        )
        where = placements(
            len(requests),
            actor_index=actor_index,
            session_ids=session_ids,
            min_version=min_version,
            group_ids=group_ids,
            request_context=request_context,
        )
        return Call(self.load_balancer, requests, where, check_timeout(timeout_seconds))

    def _run(self, call: Call, use_tqdm: bool, what: str = "generate") -> list[Completion]:
        check_bool("use_tqdm", use_tqdm)
        progress = Progress(call.unfinished, use_tqdm, what)
        with self.metrics.call(call.unfinished, call.whole) as finished, progress.bar:
            call.finished = progress.add
            completions = self._dispatcher.run(call)
            finished(completions)
        return completions

    def score(
        self,
        tokens: object,
        routed_experts: object = None,
        *,
        temperature: float | Sequence[float] = 1.0,
        kept: object = None,
        min_version: int | Sequence[int | None] | None = None,
        lora_request: LoRA | None = None,
        actor_index: int | None = None,
        timeout_seconds: float | None = None,
        use_tqdm: bool = False,
    ) -> Tensor | list[Tensor]:
        """Return the log-probs of given tokens under the engine's current weights, without gradients.

        Args:
            tokens: ids of one sequence, or a list of sequences, each shorter than the engine's ``max_model_len``.
            routed_experts: the experts that tokens follow, as in :meth:`generate`; else the model routes.
            temperature: at which they were sampled, for all sequences or for each.
            kept: the ids that each token was sampled from, ``KeptTokens``; for several sequences a list, with ``None``
                where no id was cut off.
            min_version: the oldest weight version that is acceptable, for all or for each.
            lora_request: vLLM's ``LoRARequest``, or a mapping of its fields.
            actor_index: the replica to use, instead of the balancer's choice.
            timeout_seconds: per sequence.
            use_tqdm: whether to show a progress bar, as in :meth:`generate`.

        Returns:
            float32 ``[T]``, of token t given those before it, NaN for the first; for several sequences a list.

        Raises:
            ValueError: text, a temperature that is not positive, or another number of entries than of sequences.
            RequestRefusedError: bad routes, or a sequence that is too long.
            GenerationTimeout: some sequences did not finish in time.
            EngineError: ``abort()`` ended one.
        """
        self._check_running("score")
        batch = normalise_prompts(prompt_token_ids=tokens)
        call = self._call(
            batch,
            ONE_TOKEN,
            timeout_seconds,
            actor_index=actor_index,
            min_version=min_version,
            routed_experts=routed_experts,
            scoring=scorings(batch, temperature, kept),
            lora_request=lora_request,
            return_routed_experts=False,
        )
        scores = scores_of(self._run(call, use_tqdm, what="score"))
        return scores[0] if batch.single else scores

    async def agenerate(
        self,
        prompt: object = None,
        sampling_params: SamplingParams | None = None,
        *,
        prompt_token_ids: object = None,
        resume: Completion | None = None,
        lora_request: LoRA | None = None,
        guided_options_request: GuidedOptions | None = None,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
        session_id: str | int | None = None,
        request_id: str | None = None,
        priority: int = 0,
        min_version: int | None = None,
        group_id: str | int | None = None,
        request_context: Mapping[str, object] | None = None,
        return_routed_experts: bool = True,
        routed_experts: object = None,
        on_resume: OnResume | None = None,
        on_part: Callable[[Completion], object] | None = None,
    ) -> Completion:
        """Generate for one prompt without blocking the event loop; arguments as in :meth:`generate`.

        Cancelling the task aborts the request. A request aborted by :meth:`abort` returns its tokens so far, with
        ``finish_reason="abort"``.

        ``on_part`` is called in this event loop with what the answers gain, at most 20 times a second: a completion
        that is not ``finished``, with new tokens, their text, log-probs and versions. No token comes twice, and the
        completion that is returned begins with them, whatever happens to replicas and weights meanwhile. Text may hold
        the beginning of a stop string, which the whole answer then lacks. What would start again if a weight update cut
        it (a grammar, penalties, bad words) comes with the whole answer only, as does each answer's end, and everything
        from an engine that has no parts.
        """
        self._check_running("agenerate")
        batch = normalise_prompts(prompt, prompt_token_ids, resume)
        if not batch.single:
            raise ValueError(f"agenerate takes one prompt, got a list of {len(batch.prompts)}: await one call for each")
        call = self._call(
            batch,
            sampling_params,
            timeout_seconds,
            actor_index=actor_index,
            session_ids=session_id,
            min_version=min_version,
            group_ids=group_id,
            request_context=request_context,
            request_ids=request_id,
            priority=priority,
            routed_experts=routed_experts,
            lora_request=lora_request,
            guided_options=guided_options_request,
            return_routed_experts=return_routed_experts,
            on_resume=on_resume,
            stream=on_part is not None,
        )
        with self.metrics.call(call.unfinished, call.whole) as finished:
            completions = await self._dispatcher.run_async(call, on_part)
            finished(completions)
        return completions[0]

    def abort(self, request_ids: str | Sequence[str]) -> None:
        """Abort requests wherever they run; unknown ids are ignored, since a request may just have finished."""
        self._check_running("abort")
        if isinstance(request_ids, bytes) or not isinstance(request_ids, Iterable):
            raise TypeError(f"request_ids must be text or a list of it, got {shown(request_ids)}")
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._dispatcher.abort(ids)

    # -- commands to all replicas -----------------------------------------------------------------------------------

    def pause(
        self, mode: PauseMode = "keep", *, clear_cache: bool = False, timeout_seconds: float = CALL_SECONDS
    ) -> None:
        """Stop scheduling on all replicas; one that is restarted meanwhile comes back paused.

        Args:
            mode: for requests in flight: ``keep`` freezes them until :meth:`resume`, ``wait`` lets them finish first,
                ``abort`` cuts them short.
            clear_cache: whether to drop the KV cache too; frozen requests are then recomputed.
            timeout_seconds: deadline per replica.

        Raises:
            EngineError: a replica failed, or was not paused in time. Unless the service was paused before, all resume.
            RuntimeError: the engines sleep.
        """
        self._check_running("pause")
        check_bool("clear_cache", clear_cache)
        _check_seconds(timeout_seconds)
        _check_mode(mode)
        self._fleet.pause(mode, clear_cache, timeout_seconds)

    def resume(self, *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Resume scheduling on all replicas. ``RuntimeError`` while they sleep: :meth:`wake_up` resumes, too."""
        self._check_running("resume")
        _check_seconds(timeout_seconds)
        self._fleet.resume(timeout_seconds)

    def sleep(self, level: int = 1, mode: PauseMode = "wait", *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Release the GPU memory of all replicas, for example for the trainer on the same GPU.

        New requests wait for :meth:`wake_up`. A weight update wakes only the weights. The engines need
        ``enable_sleep_mode=True`` and GPUs. No effect if they already sleep at this level; another level needs
        :meth:`wake_up` first.

        Args:
            level: 1 drops the KV cache and keeps the weights in host memory, 2 drops both: then the weights must be
                updated before :meth:`wake_up`.
            mode: for requests in flight, as in :meth:`pause`; by default they finish first.
            timeout_seconds: deadline per replica.

        Raises:
            ValueError: another level, or an engine without sleep mode.
            EngineError: a replica failed, or did not sleep in time. Unless all slept before, all are woken.
        """
        self._check_running("sleep")
        check_number("level", level, 1, 2, whole=True)
        _check_seconds(timeout_seconds)
        _check_mode(mode)
        self._fleet.sleep(level, mode, timeout_seconds)

    def wake_up(self, tags: Sequence[str] | None = None, *, timeout_seconds: float = CALL_SECONDS) -> None:
        """Allocate the memory again, and resume once all of it is there. Idempotent.

        Args:
            tags: ``["weights"]``, or ``["kv_cache"]`` for all that still sleeps; by default both.
            timeout_seconds: deadline per replica.

        Raises:
            ValueError: another tag.
            EngineError: a replica failed, or its weights were dropped and not updated since.
        """
        self._check_running("wake_up")
        if tags is not None and (not isinstance(tags, list | tuple | set) or not tags):
            raise ValueError(f"tags must be a list with 'weights', 'kv_cache' or both, or None, got {shown(tags)}.")
        _check_seconds(timeout_seconds)
        self._fleet.wake_up(tags, timeout_seconds)

    def reset_prefix_cache(self) -> bool:
        """Drop cached prefixes; return False if a replica could not, because requests are running."""
        self._check_running("reset_prefix_cache")
        return self._fleet.reset_prefix_cache()

    def set_seed(self, seed: int) -> int:
        """Seed the sampling of all replicas, each differently, and return the next seed to use.

        What they draw also depends on batching. A request with ``SamplingParams.seed`` uses only that seed. A restarted
        replica has its initial seed.
        """
        self._check_running("set_seed")
        seeds = 1 + max(entry.index for entry in self.replica_table)  # indices have gaps where replicas were removed
        check_number("seed", seed, 0, 2**32 - 1 - seeds, whole=True)  # NumPy has no larger ones
        self._fleet.on_all(lambda replica: replica.call(Engine.set_seed, CALL_SECONDS, seed + replica.index))
        return seed + seeds

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> list[list[Any]]:
        """Call a method of every vLLM worker of every replica, and wait; one list of results per replica.

        Plain data only. TorchRL returns Ray references in their place.

        Raises:
            RuntimeError: the service is not running.
            ValueError: a method by which TorchRL sends weights; the message says what to do instead.
            EngineError: there is no such method, or it failed.
        """
        if method in WEIGHT_CALLS:
            raise ValueError(f"collective_rpc({method!r}): {WEIGHTS}")
        self._check_running("collective_rpc")
        seconds = CALL_SECONDS if timeout is None else timeout
        return self._fleet.on_all(lambda replica: replica.call(Engine.collective_rpc, seconds, method, args, kwargs))

    def save_model_params(self) -> None:
        """Make every worker keep a copy of its parameters in host memory, for :meth:`validate_model_params`."""
        self.collective_rpc("torchrl_moe_save_params")

    def validate_model_params(
        self,
        function: Callable[[Mapping[str, torch.Tensor], torch.nn.Module], object],
        *,
        actor_index: int | None = None,
    ) -> list[list[Any]]:
        """Return what ``function(saved_params, model)`` returns, in a list per replica with a value per worker.

        The function is pickled by value where it cannot be imported, and unpickled in the engine's own processes, which
        trust this process. Names and layouts are vLLM's: fused projections, packed experts.

        Args:
            function: a check of yours; it returns plain data.
            actor_index: the one replica to run it in; default: all.

        Raises:
            EngineError: the function raised; the message ends with its error.
        """
        import cloudpickle

        from torchrl_moe.modules.backends.process import link

        method, args = "torchrl_moe_validate", (cloudpickle.dumps(function),)
        if actor_index is None:
            answers = self.collective_rpc(method, args=args)
        else:
            self._check_running("validate_model_params")
            replica = self.replica_table[actor_index].replica
            answers = [replica.call(Engine.collective_rpc, CALL_SECONDS, method, args, None)]
        return [[link.decode(answer) for answer in workers] for workers in answers]

    # -- weights ----------------------------------------------------------------------------------------------------

    def register_weight_sync(
        self, bring: Callable[[int], None] | None, update: Callable[[Weights], Any] | None = None
    ) -> None:
        """Register the functions that load weights here, replacing earlier ones.

        Args:
            bring: brings a STARTING replica, which holds its checkpoint's weights, to the newest and to SERVING;
                ``None``: nothing does.
            update: updates all replicas to new weights, for :meth:`update_weights`.
        """
        self._fleet.bring, self._update = bring, update

    @property
    def weight_sync(self) -> Callable[[int], None] | None:
        """The ``bring`` that was registered last."""
        return self._fleet.bring

    def update_weights(self, weights: Weights) -> Any:
        """Update all replicas to these weights, with the sender that has this engine, and return its report.

        Args:
            weights: checkpoint names, or those of the sender's registered model, and tensors; the whole model. Without
                any, a warning is shown, nothing is done, and ``None`` returned.

        Raises:
            RuntimeError: the service is not running, or no sender has it.
            TypeError: ``weights`` is none of these.
            WeightSyncError: see the sender's ``update_weights``.
        """
        self._check_running("update_weights")
        is_named = isinstance(weights, Mapping | Iterable) and not isinstance(weights, str | bytes)
        if not (is_named or hasattr(weights, "state_dict")):
            kind = type(weights).__name__
            raise TypeError(f"weights must be a model, a TensorDict, or names and tensors, got {kind}")
        given = list(weights) if isinstance(weights, Iterator) else weights
        if given == [] or (isinstance(given, Mapping) and not list(given.keys())):
            warnings.warn("update_weights: no weights were given; nothing was done", stacklevel=2)
            return None
        return self._check_sender("update_weights")(given)

    def _check_sender(self, what: str) -> Callable[[Weights], Any]:
        """Return the function that a sender registered to load weights."""
        if self._update is None:
            raise RuntimeError(
                f"{what}: no sender has this engine. Make one: VLLMWeightSyncScheme(...).create_sender(), then "
                "sender.init_all_workers_group(None, vllm_engine=engine)"
            )
        return self._update

    # -- stats ------------------------------------------------------------------------------------------------------

    def ready(self) -> bool:
        """Whether a request would be taken now: the service runs, and a replica serves. TorchRL's name."""
        return self.is_running and any(entry.may_take for entry in self.replica_table)

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Requests in flight as the service counts them, of one replica or a list of all."""
        self._check_running("get_num_unfinished_requests")
        check_number("actor_index", actor_index, whole=True, none=True)
        if actor_index is not None:
            return self.replica_table[actor_index].inflight
        return [entry.inflight for entry in self.replica_table]

    def get_cache_usage(self, actor_index: int | None = None) -> float | list[float]:
        """Share of KV-cache blocks in use, 0 to 1, of one replica or of all; NaN if it is dead or starting."""
        self._check_running("get_cache_usage")
        check_number("actor_index", actor_index, whole=True, none=True)
        self._fleet.note_deaths()
        if actor_index is not None:
            return _cache_usage(self.replica_table[actor_index])
        return [_cache_usage(entry) for entry in self.replica_table]

    def stats(self, timeout_seconds: float = STATS_SECONDS) -> list[dict[str, object]]:
        """Return one flat dictionary per replica: state, version, and its engine's stats, counted since its start.

        All are queried at the same time. One that does not answer shows the stats that it sent last; a dead one shows
        no engine stats. ``supervisor_error`` is ``None`` while deaths and stalls are being detected. The fields are
        those of :class:`~torchrl_moe.modules.backends.replica.ReplicaStats`.
        """
        self._check_running("stats")
        _check_seconds(timeout_seconds)
        self._fleet.note_deaths()
        entries = list(self.replica_table)

        def row(entry: TableEntry) -> dict[str, object]:
            stats: ReplicaStats | None = None if entry.state is ReplicaState.DEAD else entry.replica.last_stats
            if entry.state not in SILENT:
                with contextlib.suppress(EngineError):  # busy, or dying: others find that out
                    stats = entry.replica.call(Engine.stats, timeout_seconds)
            return replica_row(entry, stats)

        with ThreadPoolExecutor(min(len(entries), MOST_THREADS)) as pool:
            rows = list(pool.map(row, entries))
        return [{**row, "supervisor_error": self._fleet.supervisor_error} for row in rows]

    def to_pandas(self) -> pd.DataFrame:
        """Return :meth:`stats` as a pandas ``DataFrame``."""
        return data_frame(self.stats())

    def prometheus(self) -> str:
        """Return all stats in Prometheus' format, without asking the engines; ``ImportError`` names the extra."""
        self._check_running("prometheus")
        return prometheus_text(ServiceCollector(self.replica_table, self._totals, self.metrics))

    def register_prometheus(self, registry: CollectorRegistry) -> ServiceCollector:
        """Add this service to a ``prometheus_client`` registry; return the collector, to unregister it.

        Raises:
            ImportError: ``prometheus_client`` is not installed; the message names the extra.
            ValueError: the registry has a service already; give each one its own.
        """
        self._check_running("register_prometheus")
        collector = ServiceCollector(self.replica_table, self._totals, self.metrics)
        registry.register(collector)
        return collector

    def log_paths(self) -> list[Path | None]:
        """Return each replica's log file on this machine; ``None`` if it is not started, or runs elsewhere."""
        return [entry.replica.log_path for entry in self.replica_table]

    # -- tools ------------------------------------------------------------------------------------------------------

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        """Return the model's tokenizer, loaded by the first replica and kept."""
        self._check_running("get_tokenizer")
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self._fleet.alive()[0].replica.call(Engine.tokenizer, CALL_SECONDS))
        return self._tokenizer

    def get_random_actor_index(self) -> int:
        """Return the index of a serving replica, for ``actor_index``; ``NoReplicaError`` if none serves."""
        self._check_running("get_random_actor_index")
        with self.replica_table.lock:
            serving = self.replica_table.serving()
            if not serving:
                raise NoReplicaError(f"no replica is serving: {self.replica_table!r}")
            return serving[random.randrange(len(serving))].index

    def create_load_balancer(
        self, strategy: str | Strategy | Sequence[str | Strategy] | None = None, **kwargs: Any
    ) -> LoadBalancer:
        """Make a balancer for this service, and use it from now on; arguments as in :class:`LoadBalancer`."""
        self._check_running("create_load_balancer")
        self.load_balancer = LoadBalancer(self, strategy, **kwargs)
        return self.load_balancer

    def _title(self) -> str:
        model = self.infos[0].model if self.infos else "not started"
        return f"{type(self).__name__}({model!r}, {self.num_replicas} replica{'s' * (self.num_replicas != 1)})"

    def __repr__(self) -> str:
        entries = list(self.replica_table)
        lines = [self._title(), *(f"  {describe(entry)}" for entry in entries[:SHOWN_REPLICAS])]
        if len(entries) > SHOWN_REPLICAS:
            lines.append(f"  and {len(entries) - SHOWN_REPLICAS} more")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return service_html(self._title(), list(self.replica_table), self._totals)

    def __reduce__(self) -> tuple[object, ...]:
        """Refuse: no other process could reach the replicas."""
        raise TypeError(
            f"{type(self).__name__} cannot be pickled: its replicas are children of this process. With backend='ray' "
            "an engine pickles as a handle that joins it; or have policy_factory make the policy where it is used: "
            "lambda: vLLMWrapper(AsyncVLLM.connect('name'))"
        )

    # -- what TorchRL's code uses of its RLvLLMEngine besides -----------------------------------------------------

    @property  # type: ignore[misc]
    def __class__(self) -> type[GenerationService]:
        """The class. ``isinstance`` asks for it: only then is it known that TorchRL is loaded, which takes seconds."""
        base = getattr(sys.modules.get(BASE), "RLvLLMEngine", None)
        if base is not None:
            base.register(GenerationService)
        return type(self)

    @property
    def actors(self) -> list[ActorHandle]:
        """Handles of the replicas, in place of TorchRL's actors; their methods can be called directly."""
        return [ActorHandle(self, entry.index) for entry in self.replica_table]

    def get_tp_size(self) -> int:
        """Return the number of devices that one replica spreads its tensors over."""
        self._check_running("get_tp_size")
        return self.infos[0].tensor_parallel_size

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return checkpoint name -> (dtype, shape) of every tensor, experts one by one.

        The dtype is that in which the engine holds the tensor, and a weight sync sends it; the checkpoint's if unknown
        or quantised.
        """
        self._check_running("get_model_metadata")
        return checkpoint_kinds(self._fleet.alive()[0].replica, CALL_SECONDS)

    def get_master_address(self) -> str:
        """Return the address for your own process group. Our senders do not need it."""
        return "127.0.0.1"

    def get_master_port(self) -> int:
        """Return a port for it, free at the first call, and the same each time."""
        if self._master_port is None:
            with socket.socket() as probe:
                probe.bind(("", 0))
                self._master_port = int(probe.getsockname()[1])
        return self._master_port

    def init_weight_update_group(self) -> None:
        """Do nothing if a sender has this engine: it has opened what weights come by; else raise ``RuntimeError``."""
        self._check_running("init_weight_update_group")
        self._check_sender("init_weight_update_group")


def _cache_usage(entry: TableEntry) -> float:
    return math.nan if entry.state in SILENT else float(entry.replica.call(Engine.stats, CALL_SECONDS).cache_usage)


def _check_mode(mode: str) -> None:
    if mode not in ("keep", "wait", "abort"):
        raise ValueError(f"mode must be 'keep', 'wait' or 'abort', got {mode!r}")


def _check_seconds(seconds: object, none: bool = False) -> None:
    check_number("timeout_seconds", seconds, 0, MOST_SECONDS, none=none)
