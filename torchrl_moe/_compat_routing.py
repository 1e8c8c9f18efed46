"""The parts of vLLM that forced routing needs, private names included; all others are in ``_compat.py``.

vLLM 0.30 records experts, but cannot be told which to use. Its routers choose in ``BaseRouter._compute_routing``, and
vLLM records the result: so the recorded routes prove that a router followed. Its scheduler holds the rows of all
tokens, by their slot in the KV cache.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "SCHEDULERS",
    "drive_routers",
    "has_scheduler",
    "key_blocks_by_rows",
    "queues_of",
    "recorded_rows",
    "routers_of",
    "take_scheduler",
    "victim_for",
    "why_live",
]

SCHEDULERS = "torchrl_moe.modules.backends.vllm.schedulers"
ROWS = "torchrl_moe_rows"  # an attribute that we add to vLLM's own messages from the scheduler to the workers

Rows = NDArray[np.integer[Any]]


class Follower(Protocol):
    """What is notified of a worker's steps; see ``ForcedRouting``."""

    def take(self, rows: Mapping[str, Rows], params: Mapping[str, Any], ended: Iterable[str]) -> None:
        """Add the rows of requests that start or resume, and drop those of requests that ended."""

    @property
    def rows(self) -> Mapping[str, Rows]:
        """The rows of each request that has some to follow."""

    def begin(self, spans: Sequence[tuple[str, int, int]]) -> bool:
        """Begin a step: each request's id, first token position and token count. Return whether any follows rows."""

    def end(self, captured: Any) -> None:
        """End a step; ``[N, L, K]`` are the experts recorded in it."""

    def route(self, layer: int, live: Callable[[], Any]) -> Any:
        """Return a layer's routing: computed by its own code, on recorded experts where there are some."""


def take_scheduler(config: Any) -> None:
    """Make an engine core built from ``config`` use our scheduler.

    The configuration is left alone if it has a scheduler of the user's own, speculative decoding (drafts are accepted
    by another rule) or vLLM's Model Runner V2 (it has another sampler and prepares its inputs elsewhere).
    """
    scheduling = config.scheduler_config
    if scheduling.scheduler_cls is None and config.speculative_config is None and not config.use_v2_model_runner:
        name = "AsyncMoEScheduler" if scheduling.async_scheduling else "MoEScheduler"
        scheduling.scheduler_cls = f"{SCHEDULERS}.{name}"


def has_scheduler(config: Any) -> bool:
    """Whether an engine core built from ``config`` uses our scheduler."""
    return str(config.scheduler_config.scheduler_cls).startswith(SCHEDULERS)


def why_live(config: Any) -> str:
    """Return why an engine of this configuration cannot follow recorded experts, or ""."""
    parallel = config.parallel_config
    if not config.model_config.enable_return_routed_experts:
        return "the engine captures no routes"
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer

    if not hasattr(routed_experts_capturer, "RoutedExpertsManager"):
        return "this release of vLLM keeps recorded rows elsewhere: 0.30 is the one that can follow"
    if config.use_v2_model_runner:
        return "vLLM's Model Runner V2 prepares its inputs elsewhere: VLLM_USE_V2_MODEL_RUNNER=0 turns it off"
    if config.speculative_config is not None:
        return "speculative decoding takes several tokens a step, some of which are dropped"
    if not has_scheduler(config):
        return f"the engine has a scheduler of your own, {config.scheduler_config.scheduler_cls}"
    if parallel.data_parallel_size > 1:
        return f"data_parallel_size={parallel.data_parallel_size}: a router sees the tokens of other ranks"
    if parallel.use_ubatching:
        return "steps in micro-batches (enable_dbo): a router sees a part of the tokens"
    if not config.model_config.enforce_eager and os.environ.get("TORCH_COMPILE_DISABLE") != "1":
        return "compiled steps and CUDA graphs do not call a router: enforce_eager=True turns both off"
    return ""


def key_blocks_by_rows(rows_of: Callable[[Any], Rows | None]) -> None:
    """Make an engine core's prefix cache distinguish blocks that were computed with other experts. Idempotent.

    Args:
        rows_of: returns the rows that a request follows ``[rows, L, K]``, or ``None``.
    """
    from vllm.v1.core import block_pool, kv_cache_utils

    plain = kv_cache_utils.generate_block_hash_extra_keys
    if hasattr(plain, "torchrl_moe"):
        return

    def with_rows(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
        keys, next_mm_idx = plain(request, start_token_idx, end_token_idx, start_mm_idx)
        rows = rows_of(request)
        if rows is not None and (part := rows[start_token_idx:end_token_idx]).size and part.max() >= 0:
            keys = (*(keys or ()), hashlib.blake2b(part.astype(np.int16).tobytes(), digest_size=16).hexdigest())
        return keys, next_mm_idx

    with_rows.torchrl_moe = True  # type: ignore[attr-defined]
    kv_cache_utils.generate_block_hash_extra_keys = block_pool.generate_block_hash_extra_keys = with_rows


def recorded_rows(scheduler: Any, blocks: Any, start: int, stop: int) -> Rows:
    """Return the rows ``[stop - start, L, K]`` that a scheduler holds for tokens of a request, found by its blocks."""
    manager = scheduler.routed_experts_mgr
    rows: Rows = manager.get(blocks[manager.attn_gid], stop, token_start=start).astype(np.int16)
    return rows


def queues_of(scheduler: Any) -> dict[str, Any]:
    """Return a scheduler's queues of waiting requests, by attribute name; ``waiting`` is one of them."""
    names = ("waiting", "skipped_waiting", "kv_holding_waiting")  # the second up to 0.30, the third from 0.31 on
    return {name: getattr(scheduler, name) for name in names if hasattr(scheduler, name)}


def victim_for(scheduler: Any, request: Any) -> Any:
    """Return the request that a scheduler should preempt for a waiting one; ``None`` if there is room, or none left.

    It is the one that vLLM itself would choose. The room is estimated conservatively: the whole prompt, in each group
    of the cache.
    """
    groups = scheduler.kv_cache_config.kv_cache_groups
    needed = sum(request.num_tokens // group.kv_cache_spec.block_size + 1 for group in groups)
    if not scheduler.running or scheduler.kv_cache_manager.block_pool.get_num_free_blocks() >= needed:
        return None
    if scheduler.policy.value == "priority":
        return max(scheduler.running, key=lambda one: (one.priority, one.arrival_time))
    return scheduler.running[-1]


def routers_of(model: Any) -> dict[int, Any]:
    """Return the routers of a worker's model, by decoder layer.

    Raises:
        ValueError: a router chooses its experts where it cannot be intercepted; the message names it.
    """
    from vllm.model_executor.layers.fused_moe.layer import MoERunner
    from vllm.model_executor.layers.fused_moe.routed_experts_capturer import RoutedExpertsCaptureSource
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    found: dict[int, Any] = {}
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


def drive_routers(runner: Any, routers: Mapping[int, Any], follower: Follower) -> Callable[[bool], None]:
    """Make a worker's model runner report its steps to ``follower``, and its routers consult it (0.30).

    Returns:
        A function that switches this on and off; it starts off.

    In a step in which no request follows rows, the model runs exactly as vLLM built it, without a call of ours inside
    or around it. Python 3.11 maps and unmaps memory whenever the stack of frames crosses into a new chunk; one frame
    more can move that crossing into a call that is made hundreds of times a step.
    """
    update, prepare, forward = runner._update_states, runner._prepare_inputs, runner._model_forward
    asking = [(router, _asking(router._compute_routing, layer, follower)) for layer, router in routers.items()]

    def update_and_take(scheduler_output: Any) -> Any:
        rows, new = getattr(scheduler_output, ROWS, None), scheduler_output.scheduled_new_reqs
        if rows or new or follower.rows:
            params = {one.req_id: one.sampling_params for one in new}
            follower.take(rows or {}, params, scheduler_output.finished_req_ids)
        return update(scheduler_output)

    def prepare_and_begin(scheduler_output: Any, num_scheduled_tokens: NDArray[np.int32]) -> Any:
        prepared = prepare(scheduler_output, num_scheduled_tokens)
        if follower.rows:
            batch, count = runner.input_batch, len(num_scheduled_tokens)
            starts = batch.num_computed_tokens_cpu[:count].tolist()
            if follower.begin(list(zip(batch.req_ids, starts, num_scheduled_tokens.tolist(), strict=True))):
                runner._model_forward = forward_and_end
                for router, asks in asking:
                    router._compute_routing = asks
        return prepared

    def forward_and_end(*args: Any, **kwargs: Any) -> Any:
        output = forward(*args, **kwargs)  # a step that fails ends the engine
        del runner._model_forward
        for router, _ in asking:
            del router._compute_routing
        follower.end(runner.routed_experts_capturer.get_device_buffer())
        return output

    def drive(on: bool) -> None:
        runner._update_states = update_and_take if on else update
        runner._prepare_inputs = prepare_and_begin if on else prepare

    return drive


def _asking(live: Callable[..., Any], layer: int, follower: Follower) -> Callable[..., Any]:
    def compute_routing(*args: Any, **kwargs: Any) -> Any:
        return follower.route(layer, lambda: live(*args, **kwargs))

    return compute_routing
