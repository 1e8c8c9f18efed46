"""vLLM's schedulers; these also pass on the words that sampling kept, and the experts of a request that is read again.

vLLM preempts a request where others need its blocks, or where a weight swap has its cache recomputed; later it reads
the request's tokens again, and routes them by the weights of that time. Here they follow the experts that their answer
was sampled with.

The weight check overtakes all other requests: it runs in steps of its own, without the running requests. So it needs no
free place among them, and no other prompt comes before it. Where no blocks of the cache are free, the request is
preempted that vLLM itself would preempt.

Imported in the engine core only, which makes a scheduler by its name.

Letters: P prompt tokens, G tokens delivered, L decoder layers, K experts per token.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler

from torchrl_moe import _compat_routing, _compat_sampling
from torchrl_moe.modules.backends.vllm.forced_rows import Forced, forced_of
from torchrl_moe.modules.backends.vllm.weights.weight_check import is_weight_check

__all__ = ["AsyncMoEScheduler", "MoEScheduler"]


class MoEScheduler(Scheduler):
    """The scheduler of an engine that waits for each step."""

    running: list[Any]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.return_sampling_mask = _compat_sampling.carries_masks(self.vllm_config)
        self._follows = not _compat_routing.why_live(self.vllm_config)
        self._leaving: dict[str, Any] = {}  # preempted with tokens on their way -> the blocks that it had
        self._weight_check = ""  # the id of the last weight check's request
        if self._follows:
            _compat_routing.key_blocks_by_rows(lambda request: forced_of(request).rows)

    def _preempt_request(self, request: Any, timestamp: float, drop_stale_output: bool = False) -> None:
        if self._follows and not forced_of(request).is_live:
            blocks = self.kv_cache_manager.get_block_ids(request.request_id)
            self._keep_rows(request, blocks)
            if not drop_stale_output and request.num_in_flight_tokens:
                self._leaving[request.request_id] = blocks
        super()._preempt_request(request, timestamp, drop_stale_output)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        done = super().reset_prefix_cache(reset_running_requests, reset_connector)
        if self._follows and reset_running_requests:  # other weights compute the blocks of all that wait now
            for request in self.requests.values():
                if forced_of(request).is_recorded:  # hashed with its rows, its blocks match no other request's
                    request.block_hashes = []
                    request.update_block_hashes()
        return bool(done)

    def _keep_rows(self, request: Any, blocks: Any) -> None:
        """Keep the rows of the tokens delivered: ``[P + G - 1, L, K]``; the last token's comes with the next token."""
        forced, total = forced_of(request), request.num_tokens - 1
        had = forced.rows if forced.is_recorded else None
        known = 0 if had is None else len(had)
        if request.num_output_tokens and total > known:
            more = _compat_routing.recorded_rows(self, blocks, known, total)
            rows = more if had is None else np.concatenate([had, more])
            request.torchrl_moe_forced = Forced(rows=rows, is_recorded=True)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for name, blocks in list(self._leaving.items()):  # tokens of a step that had begun when it was preempted
            request = self.requests.get(name)
            if request is not None:
                self._keep_rows(request, blocks)
            if request is None or not request.num_stale_output_tokens:
                del self._leaving[name]
        return outputs

    def add_request(self, request: Any) -> None:
        super().add_request(request)
        if is_weight_check(request.sampling_params):
            self._weight_check = request.request_id

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        check = self.requests.get(self._weight_check)
        if check is None:
            output = super().schedule(*args, **kwargs)
        elif check.num_computed_tokens < check.num_tokens:
            output = self._schedule_alone(check)
        else:  # its token is on its way, and it takes no request's place
            self.max_num_running_reqs += 1
            output = super().schedule(*args, **kwargs)
            self.max_num_running_reqs -= 1
        if self._follows and (resumed := output.scheduled_cached_reqs.resumed_req_ids):
            rows = {name: forced_of(self.requests[name]).rows for name in resumed}
            setattr(output, _compat_routing.ROWS, {name: one for name, one in rows.items() if one is not None})
        return output

    def _schedule_alone(self, request: Any) -> Any:
        """Schedule a step of one request; the others are left out, like requests beyond a step's token budget."""
        if request not in self.running:
            while (victim := _compat_routing.victim_for(self, request)) is not None:
                self.running.remove(victim)
                self._preempt_request(victim, time.monotonic())
        others, queues = [one for one in self.running if one is not request], _compat_routing.queues_of(self)
        self.running = [one for one in self.running if one is request]
        for name, queue in queues.items():
            setattr(self, name, create_request_queue(self.policy))
            if request in queue:
                queue.remove_request(request)
                getattr(self, name).add_request(request)
        output = super().schedule()
        left = [one for queue in _compat_routing.queues_of(self).values() for one in queue]
        self.running = others + self.running
        for name, queue in queues.items():
            setattr(self, name, queue)
        for one in left:
            queues["waiting"].prepend_request(one)
        return output


class AsyncMoEScheduler(MoEScheduler, AsyncScheduler):
    """The scheduler of an engine that schedules a step while the one before it runs."""
