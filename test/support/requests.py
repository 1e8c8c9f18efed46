"""Requests of calls that were made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.in_flight import Call, InFlight
from torchrl_moe.modules.serving.requests import placements


def named_requests(names: Sequence[str], max_tokens: int = 4, priority: int = 0) -> list[Request]:
    """Requests whose prompts are their names."""
    params = {"max_tokens": max_tokens, "logprobs": 0}
    return [
        Request(
            request_id=name,
            sampling_params=params,
            prompt_token_ids=np.frombuffer(name.encode(), np.uint8),
            priority=priority,
        )
        for name in names
    ]


def waiting_request(priority: int = 0, **fields: Any) -> InFlight:
    """A request of a call of its own."""
    call = Call(LoadBalancer(["a replica"]), named_requests("r", priority=priority), placements(1, **fields))
    return call.requests[0]
