"""An async function in place of an environment: it runs one sample and returns its reward."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeAlias, TypeVar

from tensordict import TensorDictBase, lazy_stack

from torchrl_moe.collectors.conversation import Conversation, PromptLike
from torchrl_moe.collectors.environments import MOST_THREADS, EnvironmentTimeoutError, Threads, call_in
from torchrl_moe.collectors.episode import MAX_TURNS, Generate
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.sample_request import SampleRequest
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper

__all__ = ["Ask", "EpisodeFunction", "Workflow", "is_episode_function"]

T = TypeVar("T")


class Ask(Protocol):
    """Returns the answer to a prompt; see :meth:`Conversation.ask`."""

    async def __call__(self, prompt: PromptLike, **generate_kwargs: Any) -> TensorDictBase:
        """Ask for one answer, ``[]``."""


EpisodeFunction: TypeAlias = "Callable[[TensorDictBase, Ask], Awaitable[float | Sequence[float] | None]]"
"""Runs one sample: ``await episode(data, ask)`` returns the reward of its last turn, or one reward per turn.

``None`` leaves the sample out; its group stays if two samples remain.

It runs in the collector's event loop, beside hundreds of others, so run blocking code in ``asyncio.to_thread``. What it
writes into ``data``, ``[]``, is copied to each of its rows."""


def is_episode_function(env: Any) -> bool:
    """Whether this is an async function, or an object whose call is one."""
    is_object = callable(env) and not isinstance(env, type)
    return inspect.iscoroutinefunction(env) or (is_object and inspect.iscoroutinefunction(type(env).__call__))


class Workflow:
    """Runs samples with an async function; replaces an :class:`EnvironmentPool`.

    Args:
        function: see :data:`EpisodeFunction`.
    """

    group_size = 1
    """Samples that are run together."""

    def __init__(self, function: EpisodeFunction) -> None:
        self._function = function
        self._threads = Threads(MOST_THREADS, "torchrl_moe-workflow")

    async def play(
        self,
        policy: vLLMWrapper,
        generate: Generate,
        data: TensorDictBase,
        timeout: float | None,
        max_turns: int = MAX_TURNS,
        **generate_kwargs: Any,
    ) -> list[TensorDictBase]:
        """Run a sample and return its turns, each ``[1]``; none if the function returned ``None``.

        Args:
            policy: reads prompts and lays out answers.
            generate: asks the engine.
            data: ``[]``, from the data loader.
            timeout: seconds that the function may take from one answer to the next request, or to its end.
            max_turns: answers that it may ask for.
            **generate_kwargs: change the policy's.

        Raises:
            EnvironmentTimeoutError: it took longer, and was cancelled.
            ValueError: it asked for no answer, returned too many or too few rewards, or returned before an answer had
                come.
            TypeError: it returned no reward.
            RuntimeError: it raised something other than an ``Exception``.
        """
        data = data.copy()
        asyncio.get_running_loop().set_default_executor(self._threads)  # of asyncio.to_thread
        clock = _Clock(timeout)

        async def timed(request: SampleRequest, index: int) -> Completion:
            with clock.stopped():
                return await generate(request, index)

        conversation = Conversation(policy, timed, data, generate_kwargs, max_turns)
        try:
            reward = await clock.run(self._function(data, conversation.ask))
            if conversation.under_way:
                raise ValueError(f"the episode returned before {conversation.under_way} of its answers had come")
        finally:
            await conversation.close()
        return [] if reward is None else [lazy_stack([row]) for row in conversation.rows(reward)]

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a function in a thread."""
        return await call_in(self._threads, function, *arguments)

    def close(self, keep: Any = None) -> None:
        """End the threads; ``keep`` has no effect."""
        del keep
        self._threads.shutdown(wait=False, cancel_futures=True)


class _Clock:
    """Bounds the time that an episode takes between answers. It stops while answers are generated and then restarts.

    Args:
        seconds: from one answer to the next request; ``None`` for no limit.
    """

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timeout = asyncio.timeout(seconds)
        self._is_running = False
        self._stops = 0

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop it for the context."""
        self._stops += 1
        self._set(None)
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops and self._seconds is not None:
                self._set(asyncio.get_running_loop().time() + self._seconds)

    def _set(self, when: float | None) -> None:
        if self._is_running and not self._timeout.expired():
            self._timeout.reschedule(when)

    async def run(self, episode: Awaitable[Any]) -> Any:
        """Await an episode and return its result."""
        task = asyncio.current_task()
        assert task is not None
        try:
            async with self._timeout:
                self._is_running = True
                try:
                    return await episode
                finally:
                    self._is_running = False
        except Exception as error:
            if not self._timeout.expired():
                raise
            late = "".join(f": {note}" for note in getattr(error.__cause__, "__notes__", ()))
            raise EnvironmentTimeoutError(f"the episode did not continue within {self._seconds:g} s{late}") from error
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            raise RuntimeError(f"an episode raised {error!r}") from error
