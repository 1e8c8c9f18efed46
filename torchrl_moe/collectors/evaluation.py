"""Held-out prompts, each answered once, beside a collection and before it in the engine's queue."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

from tensordict import TensorDictBase, lazy_stack

from torchrl_moe.collectors.arguments import EnvLike, pool_of, source_of
from torchrl_moe.collectors.environments import EnvironmentPool
from torchrl_moe.collectors.episode import gather
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream
from torchrl_moe.collectors.workflow import Workflow
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.sample_request import SampleRequest
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper

__all__ = ["evaluate"]

FIRST = -1 << 30
"""A priority before that of any collection."""


def evaluate(
    policy: vLLMWrapper, env: EnvLike, count: int, dataloader: Iterable[Any] | None = None, **generate_kwargs: Any
) -> TensorDictBase:
    """Answer prompts, and return the last turn of each, ``[count]``, in the order of the data; without routes.

    Args:
        policy: asks its engine.
        env: an environment, a callable that makes one, or an async function that plays a sample.
        count: how many prompts, from the start of the data.
        dataloader: default: that of the environment.
        generate_kwargs: change the policy's, such as ``temperature=0.0``.

    Raises:
        ValueError: ``count`` is below 1, or there is no data.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    first, make, data, _ = source_of(env, dataloader, 1)
    prompts = list(islice(PromptStream(data), count))
    # in a thread: a notebook has a running event loop in this one
    with ThreadPoolExecutor(1, "torchrl_moe-evaluation") as thread:
        environments = pool_of(first, make)
        try:
            played = thread.submit(asyncio.run, _play(policy, environments, prompts, generate_kwargs))
            return lazy_stack(played.result())
        finally:
            environments.close(keep=first if make is None else None)  # a given one may be used again


async def _play(
    policy: vLLMWrapper,
    environments: EnvironmentPool | Workflow,
    prompts: list[Prompt],
    generate_kwargs: dict[str, Any],
) -> list[TensorDictBase]:
    async def generate(request: SampleRequest, _: int) -> Completion:
        return await policy.model.agenerate(**{**request.arguments, "priority": FIRST})

    async def answer(prompt: Prompt) -> TensorDictBase:
        turns = await environments.play(
            policy, generate, prompt.data, None, return_routed_experts=False, **generate_kwargs
        )
        return turns[-1][0]

    return await gather([answer(prompt) for prompt in prompts])
