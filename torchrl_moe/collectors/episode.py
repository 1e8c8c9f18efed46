"""One episode: an environment's samples from reset to done, with one request to the engine per sample and turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from tensordict import NonTensorData, TensorDictBase, lazy_stack
from torchrl.envs import EnvBase

from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.prompt_reading import NOT_THE_TEMPLATES, OPTIONS
from torchrl_moe.modules.policies.sample_request import SampleRequest
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper

__all__ = ["MAX_TURNS", "Episode", "Generate", "InThread", "gather", "too_many_turns"]

Generate = Callable[[SampleRequest, int], Awaitable[Completion]]
"""Answers one request of a sample, given by its index in the environment."""
InThread = Callable[..., Awaitable[Any]]
"""Calls a function with an environment and further arguments."""
T = TypeVar("T")
MAX_TURNS = 256
SHOWN = ("history", "text", "tokens")
"""The part of an answer that an environment sees, beside its own keys. The rest is added afterwards, because an
environment copies each leaf several times and routes are the largest."""


class Episode:
    """Runs one environment's samples.

    Args:
        policy: reads prompts and lays out answers.
        generate: asks the engine.
        in_thread: calls a function with the environment, of batch size ``[k]``, and further arguments.
        max_turns: of a sample.
        generate_kwargs: change the policy's.
    """

    def __init__(
        self,
        policy: vLLMWrapper,
        generate: Generate,
        in_thread: InThread,
        max_turns: int = MAX_TURNS,
        **generate_kwargs: Any,
    ) -> None:
        self._policy, self._max_turns = policy, max_turns
        self._generate = generate
        self._in_thread = in_thread
        self._generate_kwargs = generate_kwargs
        self.turns: list[TensorDictBase] = []
        """Each turn's data, ``[k]``."""

    async def run(self, data: TensorDictBase) -> list[TensorDictBase]:
        """Run it and return each turn's data.

        Args:
            data: batch size ``[k]``, what the environment is reset with.

        Raises:
            ValueError: some samples are done after a turn and others are not, or a sample is not done after
                ``max_turns``.
        """
        root, requests = await self._in_thread(self._reset, data)
        while requests:
            asked = [self._generate(request, i) for i, request in enumerate(requests)]
            root, requests = await self._in_thread(self._step, root, requests, await gather(asked))
        return self.turns

    # -- in a thread of the environment -----------------------------------------------------------------------------

    def _reset(self, env: EnvBase, data: TensorDictBase) -> tuple[TensorDictBase, list[SampleRequest]]:
        root = env.reset(data)
        return root, self._requests(env, root)

    def _requests(self, env: EnvBase, root: TensorDictBase) -> list[SampleRequest]:
        """Return the requests for a turn's prompts; what a ``ChatEnv`` has for the chat template counts here too."""
        given = getattr(env, "template_kwargs", None) or {}
        options = {name: value for name, value in given.items() if name not in NOT_THE_TEMPLATES}
        if options and root.get(OPTIONS, None) is None:
            root = root.copy().set(OPTIONS, NonTensorData(options, batch_size=root.batch_size))
        return self._policy.requests(root, **self._generate_kwargs)

    def _step(
        self, env: EnvBase, root: TensorDictBase, requests: list[SampleRequest], completions: Sequence[Completion]
    ) -> tuple[TensorDictBase, list[SampleRequest]]:
        """Take a turn, and return the next one's prompts; none if it was the last."""
        answers = lazy_stack([self._policy.answer(*pair) for pair in zip(requests, completions, strict=True)])
        keys = set(answers.keys())
        root = root.exclude(*keys).update(answers.select(*(keys & set(SHOWN))))
        turn = env.step(root).update(answers.select(*(keys - set(SHOWN))))
        self.turns.append(turn)
        done = turn["next", "done"].reshape(len(requests), -1).any(-1)
        if done.all():
            return root, []
        if done.any() or len(requests) > 1:
            raise ValueError(
                f"after turn {len(self.turns)} {int(done.sum())} of {len(done)} samples of a group are done. An "
                "environment that continues needs batch size (1,), one for each sample; one of a single turn needs a "
                "transform that says so, such as StepCounter(max_steps=1)"
            )
        if len(self.turns) >= self._max_turns:
            raise too_many_turns(self._max_turns, "the environment is not done")
        # earlier turns' tokens, log-probs and routes go to the root, where the policy reads them
        root = env.step_mdp(turn)
        return root, self._requests(env, root)


def too_many_turns(max_turns: int, what: str) -> ValueError:
    """Return the error of a sample that does not end."""
    return ValueError(
        f"{what} after max_turns={max_turns}: end it, such as by StepCounter(max_steps=...), or raise max_turns"
    )


async def gather(asked: Sequence[Awaitable[T]]) -> list[T]:
    """Wait for all; the first failure cancels the others, so that no request runs on unused."""
    tasks = [asyncio.ensure_future(one) for one in asked]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            if not task.cancelling():  # a second cancel would end its wait for an environment's call
                task.cancel()
        await asyncio.wait(tasks)  # asyncio.wait: cancelling this does not cancel them
        raise
