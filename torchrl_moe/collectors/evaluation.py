"""Held-out prompts, each answered once, while a collection runs and ahead of it in the engine's queue."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from tqdm.auto import tqdm

from torchrl_moe._errors import RequestRefusedError
from torchrl_moe.collectors.arguments import EnvLike, pool_of, source_of
from torchrl_moe.collectors.environments import EnvironmentPool
from torchrl_moe.collectors.episode import MAX_TURNS, gather
from torchrl_moe.collectors.prompt_stream import Prompt, PromptStream
from torchrl_moe.collectors.workflow import Workflow
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.sample_request import SampleRequest
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper

__all__ = ["evaluate"]

LOG = logging.getLogger(__name__)
FIRST = -1 << 30
"""A priority ahead of any collection's."""


def evaluate(
    policy: vLLMWrapper,
    env: EnvLike,
    count: int,
    dataloader: Iterable[Any] | None = None,
    reward_timeout: float | None = None,
    use_tqdm: bool = True,
    max_turns: int = MAX_TURNS,
    **generate_kwargs: Any,
) -> TensorDictBase:
    """Answer prompts, and return the last turn of each, ``[count]``, in the order of the data; without routes.

    A prompt for which an async function returned ``None`` is left out; so is, with a warning, one that the engine
    refuses, such as one that is too long.

    ``("next", "episode_reward")`` is the sum of the rewards of all its turns, of the shape of the last one's reward;
    it is present if each turn has a reward.

    Args:
        policy: asks its engine.
        env: an environment, a callable that makes one, or an async function that runs a sample.
        count: how many prompts, from the start of the data.
        dataloader: default: that of the environment.
        reward_timeout: seconds that a call of an environment may take.
        use_tqdm: whether to show a progress bar, on a terminal or in a notebook; in a log file there is none.
        max_turns: of a sample; one that is not done by then is an error.
        generate_kwargs: change the policy's, such as ``temperature=0.0``.

    Raises:
        ValueError: ``count`` is below 1, there is no data, or no prompt is left.
        EnvironmentTimeoutError: a call took longer.
        RequestRefusedError: the engine refused every prompt.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    first, make, data, _ = source_of(env, dataloader, 1)
    prompts = list(islice(PromptStream(data), count))
    # in a thread: a notebook has a running event loop in this one
    with ThreadPoolExecutor(1, "torchrl_moe-evaluation") as thread:
        environments = pool_of(first, make)
        bar = tqdm(total=len(prompts), desc="evaluate", unit="answer", disable=None if use_tqdm else True)
        try:
            with bar:
                loop = asyncio.new_event_loop()
                limits = reward_timeout, max_turns
                task = loop.create_task(_play(policy, environments, prompts, limits, generate_kwargs, bar))
                played = thread.submit(_run, loop, task)
                try:
                    return lazy_stack(played.result())
                except KeyboardInterrupt:  # answers are not waited for, and their requests are aborted
                    with suppress(RuntimeError):  # the loop has just come to its end
                        loop.call_soon_threadsafe(task.cancel)
                    raise
        finally:
            environments.close(keep=first if make is None else None)  # the caller may use the given one again


def _run(loop: asyncio.AbstractEventLoop, played: asyncio.Task[list[TensorDictBase]]) -> list[TensorDictBase]:
    """Run a task to its end; ``asyncio.run`` would also wait for threads, such as those of rewards that hang."""
    try:
        while not played.done():
            with suppress(SystemExit, KeyboardInterrupt):  # asyncio raises those of other tasks here, too
                loop.run_until_complete(played)
        return played.result()
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


async def _play(
    policy: vLLMWrapper,
    environments: EnvironmentPool | Workflow,
    prompts: list[Prompt],
    limits: tuple[float | None, int],
    generate_kwargs: dict[str, Any],
    bar: tqdm[Any],
) -> list[TensorDictBase]:
    async def generate(request: SampleRequest, _: int) -> Completion:
        return await policy.model.agenerate(**{**request.arguments, "priority": FIRST})

    async def answer(prompt: Prompt) -> TensorDictBase | None:
        try:
            turns = await environments.play(
                policy, generate, prompt.data, *limits, return_routed_experts=False, **generate_kwargs
            )
        except RequestRefusedError as error:
            bar.update()
            refused.append(error)
            LOG.warning("prompt %d is left out of the evaluation (%s): %s", prompt.position, prompt.excerpt, error)
            return None
        bar.update()
        if not turns:
            return None
        last: TensorDictBase = turns[-1][0]
        rewards = [turn[0].get(("next", "reward"), None) for turn in turns]
        if any(reward is None for reward in rewards):
            return last
        total = sum(float(reward.sum()) for reward in rewards)
        return last.set(("next", "episode_reward"), torch.full_like(rewards[-1], total, dtype=torch.float32))

    refused: list[RequestRefusedError] = []
    answers = [one for one in await gather([answer(prompt) for prompt in prompts]) if one is not None]
    if len(refused) == len(prompts):
        raise refused[0]
    if not answers:
        raise ValueError(f"none of {len(prompts)} answers has a reward: None was returned for each")
    return answers
