"""Recorded experts in a worker: the routers of a step follow them, row by row; where a row has none, they choose.

vLLM records experts, but cannot be told which to use. Its routers choose in ``BaseRouter._compute_routing``, and vLLM
records the result. So the routes that it records prove that a router followed: they are compared in each step, and a
difference ends the engine before an answer leaves it.

.. code-block:: text

    add_requests    rows of new requests, and of those that are read again: in their ``SamplingParams``
    prepare_inputs  laid out as the step's tokens are, in a buffer on the device [max tokens, L, K]; -1: router chooses
    a router        reads its slice of the buffer
    prepare_output  what vLLM recorded == what was laid out

A CUDA graph replays kernels and calls no Python. So routers are wrapped before vLLM captures graphs, what the wrapper
does is tensor operations only, and the buffer never moves. Where each step calls Python (``enforce_eager``, CPUs),
routers are wrapped only in steps in which a token follows a row.

A router weighs experts that it did not choose in one of two ways, whichever is proved first:

- its own code runs, and only its ``topk`` is answered, as the trainer's replay does it
  (:mod:`torchrl_moe.modules.replay.interception`); this fits any router that is written in torch
- its choice comes from a fused kernel: weights are computed by the formula that gives its own choice its own weights

Letters: N tokens of a step, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from torchrl_moe import _compat
from torchrl_moe._compat import SCHEDULERS
from torchrl_moe.data import UNSET_EXPERT
from torchrl_moe.errors import ReplayError
from torchrl_moe.modules.backends.vllm.engine_requests import Forced, attach, forced_in, forced_of
from torchrl_moe.modules.backends.vllm.weights import is_weight_check
from torchrl_moe.modules.replay.interception import OwnChoice, TopKInterception

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.worker import PendingAuxOutput
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request as SchedulerRequest
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

P = ParamSpec("P")
PROOF_ROWS = 4
WEIGHT_TOLERANCE = 1e-5
# whatever a router's own code raises for experts that it did not choose
ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
SCORES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda logits: logits.softmax(-1),
    "sigmoid": lambda logits: logits.sigmoid(),
    "sqrtsoftplus": lambda logits: torch.nn.functional.softplus(logits).sqrt(),
}

Routing: TypeAlias = tuple[Tensor, Tensor]
"""Weights float32 ``[N, K]`` and experts ``[N, K]`` of a step's tokens."""
Compute: TypeAlias = Callable[..., Routing]
"""A router's ``_compute_routing(hidden_states, router_logits, indices_type, *, input_ids)``."""
Way: TypeAlias = "Callable[[BaseRouter, Compute, Callable[[int], Tensor]], Compute]"
"""From a router, its own code and a function that gives the rows ``[N, K]`` to a code that follows them."""


def forced_routing_unavailable_reason(config: VllmConfig) -> str:
    """Return why an engine of this configuration cannot follow recorded experts, or ""."""
    parallel = config.parallel_config
    if not config.aux_output_config.enabled:
        return "the engine captures no routes"
    if config.speculative_config is not None:
        return "speculative decoding takes several tokens a step, some of which are dropped"
    # ours keys cached blocks by rows, and keeps those of what is preempted
    scheduler = config.scheduler_config.scheduler_cls
    if not str(scheduler).startswith(SCHEDULERS):
        return f"the engine has a scheduler of your own, {scheduler}"
    if parallel.data_parallel_size > 1:
        return f"data_parallel_size={parallel.data_parallel_size}: a router sees the tokens of other ranks"
    if parallel.use_sequence_parallel_moe:
        return "expert parallelism with sequence parallel layers: a router sees a part of the tokens"
    if parallel.use_ubatching:
        return "steps in micro-batches (enable_dbo): a router sees a part of the tokens"
    if config.device_config.device_type == "cpu" and not _calls_python(config):
        return "compiled steps on a CPU do not call a router: enforce_eager=True, or TORCH_COMPILE_DISABLE=1"
    return ""


def _calls_python(config: VllmConfig) -> bool:
    """Whether each step runs a router's Python code, and no graph or compiled code in its place."""
    return config.model_config.enforce_eager or os.environ.get("TORCH_COMPILE_DISABLE") == "1"


def follow_in_workers() -> None:
    """Have each model runner of this worker process get its :class:`ForcedRouting` before graphs are captured."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    initialize = GPUModelRunner.initialize_kv_cache
    if hasattr(initialize, "torchrl_moe"):
        return

    def initialize_and_follow(self: GPUModelRunner, *args: object, **kwargs: object) -> object:
        done = initialize(self, *args, **kwargs)
        if self.aux_output_connector is not None:
            self.torchrl_moe_forced = ForcedRouting(self)
        return done

    initialize_and_follow.torchrl_moe = True  # type: ignore[attr-defined]
    GPUModelRunner.initialize_kv_cache = initialize_and_follow


class ForcedRouting:
    """What the requests of a worker follow."""

    def __init__(self, runner: GPUModelRunner) -> None:
        config = runner.vllm_config
        capturer = runner.aux_output_connector._capturer
        self._captured: Tensor = capturer.device_buffer
        self._rows: dict[str, NDArray[np.generic]] = {}
        self._buffer = torch.full_like(self._captured, UNSET_EXPERT)
        self._filled = 0  # rows of the buffer that may hold an expert
        self._step: NDArray[np.int32] | None = None  # what the step's tokens follow [N, L, K]; None: nothing
        self._routers: dict[int, tuple[BaseRouter, Compute]] = {}
        self._always = not _calls_python(config)
        self._runner = runner
        reason = forced_routing_unavailable_reason(config)
        if not reason:
            hidden, dtype = config.model_config.get_hidden_size(), config.model_config.dtype
            try:
                for layer, router in routers_of(runner.get_model()).items():
                    way = prove(layer, router, hidden, dtype, self._buffer.device)
                    rows_of = partial(self._slice, layer, router.top_k)
                    self._routers[layer] = router, way(router, router._compute_routing, rows_of)
            except ValueError as error:
                reason = str(error)
        self.forced_routing_unavailable_reason = reason
        if not reason:
            self.drive(True)

    def _slice(self, layer: int, top_k: int, tokens: int) -> Tensor:
        return self._buffer[:tokens, layer, :top_k]

    def drive(self, on: bool) -> None:
        """Follow, or let the routers choose, to measure the cost."""
        runner, connector = self._runner, self._runner.aux_output_connector
        methods: list[tuple[Any, str, Callable[..., object]]] = [
            (runner, "add_requests", self._add_requests),
            (runner, "_remove_request", self._remove_request),
            (runner, "prepare_inputs", self._prepare_inputs),
            (connector, "prepare_output", self._prepare_output),
        ]
        for owner, name, method in methods:
            vars(owner).pop(name, None)
            if on:
                setattr(owner, name, partial(method, getattr(owner, name)))
        self._wrap(on and self._always)

    def _wrap(self, on: bool) -> None:
        for router, following in self._routers.values():
            if on:
                router._compute_routing = following
            else:
                vars(router).pop("_compute_routing", None)

    # -- the runner's methods, each around its own one ---------------------------------------------------------------

    def _add_requests(self, native: Callable[[SchedulerOutput], None], scheduler_output: SchedulerOutput) -> None:
        native(scheduler_output)  # which removes each first
        for new in scheduler_output.scheduled_new_reqs:
            if (rows := forced_in(new.sampling_params).rows) is not None:
                self._rows[new.req_id] = rows

    def _remove_request(self, native: Callable[[str], bool], req_id: str) -> bool:
        self._rows.pop(req_id, None)  # it has ended, or lost its cache and comes back as a new one
        return native(req_id)

    def _prepare_inputs(self, native: Callable[P, InputBatch], *args: P.args, **kwargs: P.kwargs) -> InputBatch:
        batch = native(*args, **kwargs)
        if self._rows or self._filled:
            self._lay_out(batch)
        return batch

    def _prepare_output(
        self, native: Callable[[InputBatch], PendingAuxOutput | None], batch: InputBatch
    ) -> PendingAuxOutput | None:
        pending, step = native(batch), self._step
        if step is None:
            return pending
        self._step = None
        if not self._always:
            self._wrap(False)
        if pending is None:  # another rank delivers the routes
            followed = self._buffer[: len(step)]
            torch._assert_async(((self._captured[: len(step)] == followed) | (followed < 0)).all())
            return None
        process = pending.process_output

        def compare_and_process() -> object:  # once the copy of the routes has arrived
            for layer, (router, _) in self._routers.items():
                followed = step[:, layer, : router.top_k]
                recorded = pending.routed_experts[: len(step), layer, : router.top_k]
                on = followed[:, 0] >= 0
                if wrong := int((recorded[on] != followed[on]).any(-1).sum()):
                    raise ReplayError(f"layer {layer} did not follow {wrong} of {int(on.sum())} recorded rows")
            return process()

        pending.process_output = compare_and_process
        return pending

    # -- a step -----------------------------------------------------------------------------------------------------

    def _lay_out(self, batch: InputBatch) -> None:
        """Fill the buffer with the rows that the step's tokens follow."""
        tokens, step = int(batch.query_start_loc_np[batch.num_reqs]), None
        spans = zip(
            batch.req_ids, batch.num_computed_tokens_np.tolist(), batch.query_start_loc_np.tolist(), strict=False
        )
        counts = batch.num_scheduled_tokens.tolist()
        for (name, start, at), count in zip(spans, counts, strict=True):
            rows = self._rows.get(name)
            if rows is None or start >= len(rows):
                continue
            if step is None:
                step = np.full((tokens, *self._buffer.shape[1:]), UNSET_EXPERT, np.int32)
            part = rows[start : start + count]
            step[at : at + len(part)] = part
        if step is not None and (step[:, list(self._routers)] < 0).all():
            step = None
        used = max(self._filled, tokens)
        if step is None:
            self._buffer[:used].fill_(UNSET_EXPERT)
            self._filled = 0
        else:
            laid_out = torch.from_numpy(step)
            if self._buffer.is_cuda:
                laid_out = laid_out.pin_memory()
            self._buffer[tokens:used].fill_(UNSET_EXPERT)
            self._buffer[:tokens].copy_(laid_out, non_blocking=True)
            self._filled = tokens
        self._step = step
        if not self._always:
            self._wrap(step is not None)


# -- routers ----------------------------------------------------------------------------------------------------------


def routers_of(model: torch.nn.Module) -> dict[int, BaseRouter]:
    """Return the routers of a worker's model, by decoder layer."""
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    found: dict[int, BaseRouter] = {}
    for name, module in model.named_modules():
        if isinstance(module, MoERunner):
            if module._quant_method.is_monolithic:
                raise ValueError(f"{name}: {type(module._quant_method).__name__} routes inside its kernel")
            if hasattr(module, "_moe_state"):  # vLLM's backend for transformers models
                raise ValueError(f"{name}: {type(module).__name__} takes experts that transformers' code has chosen")
            if not isinstance(module.router, BaseRouter):
                raise ValueError(f"{name}: {type(module.router).__name__} is no router that vLLM records")
            found[int(module.layer_id)] = module.router
        elif isinstance(module, RoutedExpertsCaptureSource):
            raise ValueError(f"{name}: {type(module).__name__} records by itself")
    return found


def through_topk(router: BaseRouter, own: Compute, rows_of: Callable[[int], Tensor]) -> Compute:
    """Run a router's own code, with its ``topk`` answered; groups of experts that it leaves out are opened."""
    experts, top_k = router.global_num_experts, router.top_k

    def compute_routing(hidden_states: Tensor, router_logits: Tensor, *args: object, **kwargs: object) -> Routing:
        rows = rows_of(len(router_logits)).long()
        on = rows[:, :1] >= 0

        def choose(scores: Tensor, choice: OwnChoice) -> Tensor:
            return torch.where(on, rows, choice(None).indices.reshape(len(scores), top_k))

        def groups(scores: Tensor, choice: OwnChoice, count: int) -> Tensor:
            of_rows = rows.clamp(min=0) // (experts // scores.shape[-1])
            width = max(top_k, count)
            return torch.where(on, _widened(of_rows, width), _widened(choice(None).indices, width))

        with TopKInterception(experts, top_k, 2, choose, groups):
            return own(hidden_states, router_logits, *args, **kwargs)

    return compute_routing


def _widened(choice: Tensor, width: int) -> Tensor:
    """Return ``[N, width]``: the columns of a choice, repeated from the first."""
    return choice[:, torch.arange(width, device=choice.device) % choice.shape[1]]


@dataclass(frozen=True, slots=True)
class Formula:
    """A way that weighs by scores of the logits, normalised over a token's experts or not, times the scale."""

    score: str
    normalise: bool

    def weights(self, router: BaseRouter, logits: Tensor, experts: Tensor) -> Tensor:
        """Return the weights ``[N, K]`` of experts by the formula."""
        given = SCORES[self.score](logits.float()).gather(1, experts.long().clamp(min=0))
        if self.normalise:
            given = given / given.sum(-1, keepdim=True)
        return given * _scale_of(router)

    def __call__(self, router: BaseRouter, own: Compute, rows_of: Callable[[int], Tensor]) -> Compute:
        def compute_routing(hidden_states: Tensor, router_logits: Tensor, *args: object, **kwargs: object) -> Routing:
            weights, ids = own(hidden_states, router_logits, *args, **kwargs)
            rows = rows_of(len(ids))
            if ids.is_cuda:  # one kernel; the lines below are fifteen, in each layer of each graph
                from torchrl_moe.modules.backends.vllm.formula_kernel import follow_rows

                return follow_rows(weights, ids, rows, router_logits, self.score, self.normalise, _scale_of(router))
            on = rows[:, :1] >= 0
            chosen = torch.where(on, rows.to(ids.dtype), ids)
            given = self.weights(router, router_logits, chosen)
            same = ~on | (chosen == ids).all(-1, keepdim=True)  # a token's own choice keeps its own weights, bit by bit
            return torch.where(same, weights, given.to(weights.dtype)), chosen

        return compute_routing


def _scale_of(router: BaseRouter) -> float:
    return float(getattr(router, "routed_scaling_factor", 1.0))  # the simplest kind of router has none


FORMULAS: Mapping[str, Formula] = {
    f"{score}{', normalised' if normalise else ''}": Formula(score, normalise)
    for score in SCORES
    for normalise in (True, False)
}


def prove(
    layer: int, router: BaseRouter, hidden_size: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Way:
    """Return the way in which a router follows its own choice, which must change no bit, and then another."""
    random = torch.Generator().manual_seed(layer)
    logits = torch.randn(PROOF_ROWS, router.global_num_experts, generator=random).to(device, dtype)
    hidden = torch.zeros(PROOF_ROWS, hidden_size, dtype=dtype, device=device)
    other = torch.stack([torch.randperm(router.global_num_experts, generator=random) for _ in range(PROOF_ROWS)])
    other = other[:, : router.top_k].to(device)
    ways: dict[str, Way] = {"its own code": through_topk, **FORMULAS}
    if torch.device(device).type != "cpu":  # a fused kernel, and what a graph holds, are seen best without a mode
        ways = {**FORMULAS, "its own code": through_topk}
    failures = []
    for name, way in ways.items():
        reason = _why_not(way, router, hidden, logits, other)
        if not reason:
            return way
        failures.append(f"{name}: {reason}")
    raise ValueError(f"layer {layer}: {type(router).__name__} cannot follow ({'; '.join(failures)})")


def _why_not(way: Way, router: BaseRouter, hidden: Tensor, logits: Tensor, other: Tensor) -> str:
    """Return why a router does not follow in a way, or ""."""
    own = router._compute_routing

    def following(ids: Tensor) -> Routing:
        return way(router, own, lambda _: ids)(hidden, logits.clone(), torch.int32)

    try:
        weights, ids = own(hidden, logits.clone(), torch.int32)
        same_weights, same = following(ids.long())
        other_weights, others = following(other)
        turned_weights, _ = following(other.flip(1))
        left_alone, live = following(torch.full_like(other, UNSET_EXPERT))
    except ERRORS as error:
        return f"{type(error).__name__}: {error}"
    if not torch.equal(same, ids) or not torch.equal(same_weights, weights):
        return "it does not give its own choice back"
    if not torch.equal(live, ids) or not torch.equal(left_alone, weights):
        return "it does not choose by itself where it has no row"
    if not torch.equal(others.long(), other):
        return "it does not follow other experts than its own"
    if isinstance(way, Formula):  # asked for its own choice, the way would answer with the router's own weights
        by_formula = way.weights(router, logits, ids).to(weights.dtype)
        if not torch.allclose(by_formula, weights, rtol=WEIGHT_TOLERANCE, atol=0):
            return "it weighs by another formula"
    belongs = torch.allclose(turned_weights.flip(1), other_weights, rtol=1e-2)  # in any dtype and order of addition
    if not belongs or not bool((other_weights.isfinite() & (other_weights != 0)).all()):
        return "it does not weigh the experts that it follows"
    return ""


# -- schedulers, which the engine core makes by their names -----------------------------------------------------------
#
# vLLM preempts a request where others need its blocks, or where a weight swap has its cache recomputed; later it
# reads the request's tokens again, and routes them by the weights of that time. Here they follow the experts that
# their answer was sampled with. A worker gets a request that is read again as a new one, so the rows travel in its
# ``SamplingParams``.
#
# The weight check runs in steps of its own, without the running requests. It has a slot of its own
# (``_compat.reserve_check_slot``), and no other prompt comes before it. Where no blocks of the cache are free, the
# request is preempted that vLLM itself would preempt.


QUEUES = ("waiting", "kv_holding_waiting")
_compat.zero_new_blocks()  # the workers do this too


class MoEScheduler(Scheduler):
    """The scheduler of an engine that waits for each step: it keeps experts, and lets the weight check overtake."""

    running: list[SchedulerRequest]

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._weight_check = ""  # the id of the last weight check's request
        self._follows = not forced_routing_unavailable_reason(self.vllm_config)
        if self._follows:
            self._deliver = self.aux_output_connector.take_output
            self.aux_output_connector.take_output = self._take_and_keep
            _key_blocks_by_rows()

    # -- recorded rows ----------------------------------------------------------------------------------------------

    def _take_and_keep(self, request: SchedulerRequest, output: object) -> NDArray[np.generic] | None:
        """Keep the rows that are delivered: the workers drop theirs when a request is preempted."""
        rows: NDArray[np.generic] | None = self._deliver(request, output)
        if rows is not None and len(rows) and not forced_of(request).is_live:
            if not hasattr(request, "torchrl_moe_rows"):
                request.torchrl_moe_rows = request.num_tokens - 1 - len(rows), []  # the first one's position
            request.torchrl_moe_rows[1].append(rows.copy())  # it may be a view of the whole step's
            if request.status == RequestStatus.PREEMPTED:  # tokens of a step that had begun before
                self._send_rows(request)
        return rows

    def _preempt_request(self, request: SchedulerRequest, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._send_rows(request)

    def _send_rows(self, request: SchedulerRequest) -> None:
        """Have a request follow the rows of its tokens ``[P + G - 1, L, K]``; the last token's are not known yet."""
        first, rows = getattr(request, "torchrl_moe_rows", (0, []))
        if not rows:
            return
        recorded = np.concatenate(rows).astype(np.int16)
        request.torchrl_moe_rows = first, [recorded]
        followed = np.full((first + len(recorded), *recorded.shape[1:]), UNSET_EXPERT, np.int16)
        given = forced_of(request).rows
        if given is not None:  # of what was read before its own rows begin
            followed[: len(given)] = given[: len(followed)]
        followed[first:] = recorded
        request.sampling_params = attach(request.sampling_params, Forced(rows=followed))
        request.torchrl_moe_forced = replace(forced_in(request.sampling_params), is_recorded=True)  # of the same memory

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if self._follows and reset_running_requests:  # other weights compute the blocks of all that wait now
            for request in self.requests.values():
                if forced_of(request).is_recorded:  # hashed with its rows, its blocks match no other request's
                    request.block_hashes = []
                    request.update_block_hashes()
        return bool(done)

    # -- the weight check -------------------------------------------------------------------------------------------

    def add_request(self, request: SchedulerRequest) -> None:
        super().add_request(request)
        if is_weight_check(request.sampling_params):
            self._weight_check = request.request_id

    def schedule(self, *args: object, **kwargs: object) -> SchedulerOutput:
        check = self.requests.get(self._weight_check)
        if check is None:
            return super().schedule(*args, **kwargs)
        if check.num_computed_tokens < check.num_tokens:
            return self._schedule_alone(check)
        self.max_num_active_reqs += 1  # its token is on its way, and it takes no request's place
        output = super().schedule(*args, **kwargs)
        self.max_num_active_reqs -= 1
        return output

    def _schedule_alone(self, request: SchedulerRequest) -> SchedulerOutput:
        """Schedule a step of one request; the others are left out, like requests beyond a step's token budget."""
        if request not in self.running:
            while (victim := self._victim_for(request)) is not None:
                self.running.remove(victim)
                self._preempt_request(victim, time.monotonic())
        others, queues = [one for one in self.running if one is not request], {}
        self.running = [one for one in self.running if one is request]
        for name in QUEUES:
            queues[name] = queue = getattr(self, name)
            setattr(self, name, create_request_queue(self.policy))
            if request in queue:
                queue.remove_request(request)
                getattr(self, name).add_request(request)
        output = super().schedule()
        left = [one for name in QUEUES for one in getattr(self, name)]
        self.running = others + self.running
        for name, queue in queues.items():
            setattr(self, name, queue)
        for one in left:
            self.waiting.prepend_request(one)
        return output

    def _victim_for(self, request: SchedulerRequest) -> SchedulerRequest | None:
        """Return the request to preempt for a waiting one, vLLM's own choice; ``None`` if there is room, or none left.

        The room is estimated conservatively: the whole prompt, in each group of the cache.
        """
        groups = self.kv_cache_config.kv_cache_groups
        needed = sum(request.num_tokens // group.kv_cache_spec.block_size + 1 for group in groups)
        if not self.running or self.kv_cache_manager.block_pool.get_num_free_blocks() >= needed:
            return None
        if self.policy.value == "priority":
            return max(self.running, key=lambda one: (one.priority, one.arrival_time))
        return self.running[-1]


class AsyncMoEScheduler(MoEScheduler, AsyncScheduler):
    """The scheduler of an engine that schedules a step while the one before it runs."""


def _key_blocks_by_rows() -> None:
    """Make the prefix cache distinguish blocks that were computed with other experts. Idempotent.

    Recorded routes are stored under the same keys.
    """
    plain = kv_cache_utils.generate_block_hash_extra_keys
    if hasattr(plain, "torchrl_moe"):
        return

    def with_rows(
        request: SchedulerRequest, start_token_idx: int, end_token_idx: int, start_mm_idx: int
    ) -> tuple[object, int]:
        keys, next_mm_idx = plain(request, start_token_idx, end_token_idx, start_mm_idx)
        rows = forced_of(request).rows
        if rows is not None and (part := rows[start_token_idx:end_token_idx]).size and part.max() >= 0:
            digest = hashlib.blake2b(part.astype(np.int16).tobytes(), digest_size=16).hexdigest()
            keys = (*(keys or ()), ("torchrl_moe", digest))
        return keys, next_mm_idx

    with_rows.torchrl_moe = True  # type: ignore[attr-defined]
    kv_cache_utils.generate_block_hash_extra_keys = block_pool.generate_block_hash_extra_keys = with_rows
