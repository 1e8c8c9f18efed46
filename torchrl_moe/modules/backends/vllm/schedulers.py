"""vLLM's schedulers; these also keep the experts of a request that is read again, and let the weight check overtake.

vLLM preempts a request where others need its blocks, or where a weight swap has its cache recomputed; later it reads
the request's tokens again, and routes them by the weights of that time. Here they follow the experts that their answer
was sampled with. A worker gets a request that is read again as a new one, so the rows travel in its ``SamplingParams``.

The weight check overtakes all other requests: it runs in steps of its own, without the running requests. It has a slot
of its own (``_compat.reserve_check_slot``), and no other prompt comes before it. Where no blocks of the cache are free,
the request is preempted that vLLM itself would preempt.

Imported in the engine core only, which makes a scheduler by its name.

Letters: P prompt tokens, G tokens delivered, L decoder layers, K experts per token.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vllm.v1.core import block_pool, kv_cache_utils
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from torchrl_moe import _compat
from torchrl_moe.data import UNSET_EXPERT
from torchrl_moe.modules.backends.vllm.forced_routing import why_live
from torchrl_moe.modules.backends.vllm.forced_rows import Forced, attach, forced_in, forced_of
from torchrl_moe.modules.backends.vllm.weights.weight_check import is_weight_check

__all__ = ["AsyncMoEScheduler", "MoEScheduler"]

QUEUES = ("waiting", "kv_holding_waiting")
_compat.zero_new_blocks()  # the workers do this too


class MoEScheduler(Scheduler):
    """The scheduler of an engine that waits for each step."""

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._weight_check = ""  # the id of the last weight check's request
        self._follows = not why_live(self.vllm_config)
        if self._follows:
            self._deliver = self.aux_output_connector.take_output
            self.aux_output_connector.take_output = self._take_and_keep
            _key_blocks_by_rows()

    # -- recorded rows ----------------------------------------------------------------------------------------------

    def _take_and_keep(self, request: Any, output: Any) -> NDArray[Any] | None:
        """Keep the rows that are delivered: the workers drop theirs when a request is preempted."""
        rows: NDArray[Any] | None = self._deliver(request, output)
        if rows is not None and len(rows) and not forced_of(request).is_live:
            if not hasattr(request, "torchrl_moe_rows"):
                request.torchrl_moe_rows = request.num_tokens - 1 - len(rows), []  # the first one's position
            request.torchrl_moe_rows[1].append(rows.copy())  # it may be a view of the whole step's
            if request.status == RequestStatus.PREEMPTED:  # tokens of a step that had begun before
                self._send_rows(request)
        return rows

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        super()._preempt_request(request, timestamp, drop_stale_output)
        self._send_rows(request)

    def _send_rows(self, request: Any) -> None:
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

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if is_weight_check(request.sampling_params):
            self._weight_check = request.request_id

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        check = self.requests.get(self._weight_check)
        if check is None:
            return super().schedule(*args, **kwargs)
        if check.num_computed_tokens < check.num_tokens:
            return self._schedule_alone(check)
        self.max_num_active_reqs += 1  # its token is on its way, and it takes no request's place
        output = super().schedule(*args, **kwargs)
        self.max_num_active_reqs -= 1
        return output

    def _schedule_alone(self, request: Any) -> Any:
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

    def _victim_for(self, request: Any) -> Any:
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

    def with_rows(request: Any, start_token_idx: int, end_token_idx: int, start_mm_idx: int) -> Any:
        keys, next_mm_idx = plain(request, start_token_idx, end_token_idx, start_mm_idx)
        rows = forced_of(request).rows
        if rows is not None and (part := rows[start_token_idx:end_token_idx]).size and part.max() >= 0:
            digest = hashlib.blake2b(part.astype(np.int16).tobytes(), digest_size=16).hexdigest()
            keys = (*(keys or ()), ("torchrl_moe", digest))
        return keys, next_mm_idx

    with_rows.torchrl_moe = True  # type: ignore[attr-defined]
    kv_cache_utils.generate_block_hash_extra_keys = block_pool.generate_block_hash_extra_keys = with_rows
