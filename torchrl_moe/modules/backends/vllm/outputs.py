"""From vLLM's ``RequestOutput`` to our :class:`Completion`: every decision about a vLLM output field is here.

The functions read attributes only, so they need no vLLM import and are tested with plain objects.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from torchrl_moe.modules.backends.kept_ids import KeptIds
from torchrl_moe.modules.backends.replica import Completion, CompletionMetrics, CompletionOutput, Request
from torchrl_moe.modules.backends.vllm.prompt_scores import prompt_logprobs

__all__ = ["completion_from_vllm", "sampled_logprobs"]


def sampled_logprobs(logprobs: Any) -> NDArray[np.float32] | None:
    """Return the log-probs of the sampled tokens, float32 ``[G]``.

    vLLM lists the sampled token first at each position, then the top ones that were asked for. Both of its
    containers are read: ``FlatLogprobs`` and the list of one dictionary per position.
    """
    if logprobs is None:
        return None
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        return np.array(logprobs.logprobs, np.float32)[np.array(starts, np.int64)]
    return np.array([next(iter(position.values())).logprob for position in logprobs], np.float32)


def _metrics(metrics: Any) -> CompletionMetrics:
    """Read vLLM's time stamps, all of the engine core's clock; a request that was cut before a stage has 0 there."""
    if metrics is None:
        return CompletionMetrics()
    return CompletionMetrics(
        queue_seconds=max(metrics.scheduled_ts - metrics.queued_ts, 0.0),
        first_token_seconds=max(metrics.first_token_ts - metrics.queued_ts, 0.0),
        total_seconds=max(metrics.last_token_ts - metrics.queued_ts, 0.0),
    )


def completion_from_vllm(output: Any, request: Request, version: int) -> Completion:
    """Turn vLLM's final output of ``request`` into a :class:`Completion` of weight version ``version``."""
    outputs = []
    for item in sorted(output.outputs, key=lambda item: item.index):
        token_ids = np.array(item.token_ids, np.int64)
        outputs.append(
            CompletionOutput(
                index=item.index,
                token_ids=token_ids,
                text=item.text,
                finish_reason=item.finish_reason,
                stop_reason=item.stop_reason,
                logprobs=sampled_logprobs(item.logprobs),
                routed_experts=item.routed_experts if request.return_routed_experts else None,
                policy_versions=np.full(len(token_ids), version, np.int32),
                kept=KeptIds.of_masks(item.sampling_mask.token_ids if item.sampling_mask else (), len(token_ids)),
            )
        )
    prompt_tokens = len(output.prompt_token_ids)
    return Completion(
        request_id=request.request_id,
        prompt=output.prompt,
        prompt_token_ids=np.array(output.prompt_token_ids, np.int64),
        num_cached_tokens=output.num_cached_tokens or 0,
        outputs=outputs,
        metrics=_metrics(output.metrics),
        prompt_logprobs=None if request.scoring is None else prompt_logprobs(output.prompt_token_id_logprobs, prompt_tokens),
    )
