"""What a collector's ``env`` may be, and an async function in its place: it runs one sample and returns its reward."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
from tensordict import NestedKey, NonTensorData, TensorDict, TensorDictBase, lazy_stack
from torch import Tensor
from torchrl.data.llm import History
from torchrl.envs import EnvBase

from torchrl_moe._checks import check_number
from torchrl_moe.collectors.environments import (
    MAX_TURNS,
    MOST_THREADS,
    EnvironmentPool,
    EnvironmentTimeoutError,
    Generate,
    Threads,
    take_dataloader,
    too_many_turns,
    with_batch_size,
)
from torchrl_moe.modules.backends.replica import Completion
from torchrl_moe.modules.policies.rollout import SAMPLING
from torchrl_moe.modules.policies.vllm_wrapper import SampleRequest, vLLMWrapper

# -- the requests and answers of one sample ---------------------------------------------------------------------------


PromptLike: TypeAlias = "History | Sequence[Mapping[str, Any]] | str | Sequence[int] | Tensor"
"""The whole prompt of an answer, in the form of the policy's ``input_mode``.

``"history"``: a ``History`` ``[turns]``, messages (``{"role": ..., "content": ...}``), or text, a single message of the
user. ``"text"``: text. ``"tokens"``: ids."""


class Conversation:
    """The turns of one sample: a row for each answer, laid out as an environment's."""

    def __init__(
        self,
        policy: vLLMWrapper,
        generate: Generate,
        data: TensorDictBase,
        generate_kwargs: Mapping[str, Any],
        max_turns: int = MAX_TURNS,
    ) -> None:
        self._policy, self._generate, self._data = policy, generate, data
        self._generate_kwargs = dict(generate_kwargs)
        self._asked, self._max_turns = 0, max_turns
        self._answers: dict[int, TensorDictBase] = {}  # in the order of the requests
        self.under_way: set[asyncio.Future[Completion]] = set()
        """Answers that are being generated."""
        self._is_over = False

    async def ask(
        self,
        prompt: PromptLike,
        *,
        tools: Sequence[object] | None = None,
        chat_template_kwargs: Mapping[str, object] | None = None,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Return the answer to a prompt, ``[]``, with the keys that the policy writes.

        A prompt that continues an earlier answer sends its token ids; its log-probs, routes and versions are in the new
        answer too.
        """
        if self._asked >= self._max_turns:
            raise too_many_turns(self._max_turns, "the episode asks for another answer")
        if self._is_over:
            raise RuntimeError("this episode has ended: it cannot ask for another answer")
        given = {"tools": tools, "chat_template_kwargs": chat_template_kwargs}
        entries = {name: NonTensorData(value) for name, value in given.items() if value is not None}
        if entries and self._policy.input_mode != "history":
            mode = self._policy.input_mode
            raise TypeError(f"{', '.join(entries)}: for chats, and the policy has input_mode={mode!r}")
        request = self._request(
            {**entries, self._policy.input_key: self._read(prompt)}, {**self._generate_kwargs, **generate_kwargs}
        )
        # rows are in the order of the questions, not of the answers
        place = self._asked
        self._asked += 1
        completion = asyncio.ensure_future(self._generate(request, 0))
        self.under_way.add(completion)
        try:
            answer = self._policy.answer(request, await completion)
        finally:
            self.under_way.discard(completion)
        self._answers[place] = answer
        return answer

    async def close(self) -> None:
        """Cancel the requests that nothing waits for any more."""
        self._is_over = True
        if self.under_way:
            for completion in self.under_way:
                completion.cancel()
            await asyncio.wait(self.under_way)

    def rows(self, reward: object) -> list[TensorDictBase]:
        """Return a row ``[]`` for each answer, in the order of the requests; the last row is done."""
        answers = [self._answers[place] for place in sorted(self._answers)]
        if not answers:
            raise ValueError("the episode asked for no answer: there is nothing to train on")
        policy = self._policy
        mode = {"history": policy.history_key, "text": policy.text_key, "tokens": policy.tokens_key}[policy.input_mode]
        rows = []
        for answer, following, value in zip(answers, [*answers[1:], None], _rewards(reward, len(answers)), strict=True):
            shown = answer.get(mode)
            # what an environment would show next: the next question, or the whole conversation
            then = type(shown)(prompt=shown.full if following is None else following.get(mode).prompt)
            row = row_of(self._data, answer, value, is_last=following is None)
            row["next"].set(mode, then)
            rows.append(row)
        return rows

    # -- parts ------------------------------------------------------------------------------------------------------

    def _read(self, prompt: PromptLike) -> object:
        mode = self._policy.input_mode
        if mode == "text" and isinstance(prompt, str):
            return prompt
        if mode == "history" and isinstance(prompt, str):
            return lazy_stack([History(role="user", content=prompt)])
        if mode == "history" and isinstance(prompt, History) and prompt.ndim == 1:
            return prompt
        if not isinstance(prompt, str | History) and len(prompt):
            if mode == "history" and isinstance(prompt[0], Mapping):
                return NonTensorData(list(prompt))  # with all that the template reads
            if mode == "tokens" and not isinstance(prompt[0], Mapping):
                return torch.as_tensor(prompt, dtype=torch.int64)
        kinds = {"history": "a History [turns], messages, or text", "text": "text", "tokens": "token ids"}
        raise TypeError(f"a policy of input_mode={mode!r} takes {kinds[mode]}, got {prompt!r:.200}")

    def _request(self, asked: Mapping[NestedKey, object], generate_kwargs: Mapping[str, object]) -> SampleRequest:
        """Return the request for a prompt, with the ids of the latest answer that it continues, if any."""
        keys = self._policy.keys
        written = (keys.tokens, keys.masks, keys.log_probs, keys.routed_experts, "policy_versions", "resume", SAMPLING)
        known = [key for key in written if key is not None]

        def request_after(earlier: TensorDictBase | None) -> SampleRequest:
            sample = self._data.copy()
            if earlier is not None:
                sample.update(earlier.select(*known, strict=False).copy())
            for key, value in asked.items():
                sample.set(key, value)
            (request,) = self._policy.requests(sample, **generate_kwargs)
            return request

        # ask as if the prompt continued each answer, the newest first, and see whether its ids come first
        for place in sorted(self._answers, reverse=True):
            request = request_after(self._answers[place])
            had = self._answers[place].get((keys.tokens, "full")).tolist()
            if request.prompts.ids[0][: len(had)] == had:
                return request
        return request_after(None)


def row_of(data: TensorDictBase, answer: TensorDictBase, reward: float, is_last: bool) -> TensorDictBase:
    """Return a row ``[]`` as an environment writes it: the data, the answer, and the step that it led to."""
    row = data.copy().update(answer)
    row.update({key: torch.tensor([False]) for key in ("done", "terminated", "truncated")})
    step = {
        "reward": torch.tensor([[reward]]),
        "done": torch.tensor([is_last]),
        "terminated": torch.tensor([is_last]),
        "truncated": torch.tensor([False]),
    }
    return row.set("next", TensorDict(step))


def _rewards(reward: object, turns: int) -> list[float]:
    """Return a reward for each turn; a single one is the last turn's."""
    if (last := number_of(reward)) is not None:
        found: list[float | None] = [*[0.0] * (turns - 1), last]
    else:
        plain = reward.tolist() if hasattr(reward, "tolist") else reward
        found = [number_of(one) for one in plain] if isinstance(plain, list | tuple) else [None]
    values = [value for value in found if value is not None]
    if len(values) < len(found):
        raise TypeError(f"an episode must return its reward, a number or one number per turn, got {reward!r:.200}")
    if len(values) != turns:
        raise ValueError(f"the episode returned {len(values)} rewards for {turns} turns")
    return [finite(value, "the episode") for value in values]


def number_of(value: object) -> float | None:
    """Return a number, a scalar tensor or a NumPy number as a float; ``None`` for anything else.

    >>> number_of(torch.tensor(True)), number_of(10**400), number_of("1"), number_of([1.0])
    (1.0, inf, None, None)
    """
    # a scalar of torch, numpy or any other library
    plain: Any = value.item() if getattr(value, "shape", None) == () else value  # type: ignore[attr-defined]
    if not isinstance(plain, Real | Decimal):
        return None
    try:
        return float(plain)
    except OverflowError:  # of an int
        return math.inf if plain > 0 else -math.inf  # type: ignore[operator]


def finite(reward: float, who: str) -> float:
    """Return a reward, or refuse it."""
    # NaN is no number that is at most anything
    if not abs(reward) <= torch.finfo(torch.float32).max:
        raise ValueError(f"{who} returned {reward}: a reward must be finite, in float32")
    return reward


# -- an async function in place of an environment ---------------------------------------------------------------------


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


def is_episode_function(env: object) -> bool:
    """Whether this is an async function, an object whose call is one, or what runs samples in its own way."""
    if isinstance(env, Workflow):
        return True
    is_object = callable(env) and not isinstance(env, type)
    return inspect.iscoroutinefunction(env) or (is_object and inspect.iscoroutinefunction(type(env).__call__))


class Workflow:
    """Runs samples with an async function; replaces an :class:`EnvironmentPool`."""

    group_size = 1
    """Samples that are run together."""

    def __init__(self, function: Callable[..., Awaitable[Any]]) -> None:
        self._function = function
        self._threads = self._new_threads()

    @staticmethod
    def _new_threads() -> Threads:
        return Threads(MOST_THREADS, "torchrl_moe-workflow")

    async def play(
        self,
        policy: vLLMWrapper,
        generate: Generate,
        data: TensorDictBase,
        timeout: float | None,
        max_turns: int = MAX_TURNS,
        **generate_kwargs: Any,
    ) -> list[TensorDictBase]:
        """Run a sample and return its turns, each ``[1]``; none if the function returned ``None``."""
        data = data.copy()
        asyncio.get_running_loop().set_default_executor(self._threads)  # of asyncio.to_thread
        clock = Clock(timeout)

        # the time that the engine takes is not the function's
        async def timed(request: SampleRequest, index: int) -> Completion:
            with clock.stopped():
                return await generate(request, index)

        conversation = Conversation(policy, timed, data, generate_kwargs, max_turns)
        try:
            reward = await clock.run(self._function(data, conversation.ask))
            if left := len(conversation.under_way):
                raise ValueError(f"the episode returned before {left} of its answers had come")
        finally:
            await conversation.close()
        return [] if reward is None else [lazy_stack([row]) for row in conversation.rows(reward)]

    async def call(self, function: Callable[..., T], *arguments: object) -> T:
        return await self._threads.call(function, *arguments)

    def close(self, keep: object = None) -> None:
        """End the threads; ``keep`` has no effect."""
        del keep
        self._threads.shutdown(wait=False, cancel_futures=True)


class Clock:
    """Bounds the time that an episode takes between answers. It stops while they are generated, then starts again."""

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

    async def run(self, episode: Awaitable[T]) -> T:
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
            # a cancellation from outside goes on; one of the episode's own is an error like any
            if isinstance(error, asyncio.CancelledError) and task.cancelling():
                raise
            raise RuntimeError(f"an episode raised {error!r}") from error


# -- what a collector is given ----------------------------------------------------------------------------------------


Runs: TypeAlias = "EnvBase | EpisodeFunction | Workflow"
"""An environment, the async function that runs a sample, or what runs it in its own way."""
EnvLike: TypeAlias = "Runs | Callable[[], EnvBase]"


class Source(NamedTuple):
    """Where samples come from."""

    env: Runs
    make: Callable[[], EnvBase] | None
    """Makes more environments; ``None``: the given one is the only one."""
    dataloader: Iterable[object]
    group_size: int
    """Samples of a prompt; at least 1."""

    def pool(self) -> EnvironmentPool | Workflow:
        """Return what runs samples, in environments or by an async function."""
        if isinstance(self.env, EnvBase):
            return EnvironmentPool(self.env, self.make)
        return self.env if isinstance(self.env, Workflow) else Workflow(self.env)


def source_of(env: EnvLike, dataloader: Iterable[object] | None, group_size: int | None) -> Source:
    """Return where samples come from. Data and group size are those of the environment if they are not given."""
    check_number("group_size", group_size, 1, 1 << 16, whole=True, none=True)
    make = None
    if not is_episode_function(env):
        if not isinstance(env, EnvBase) and not callable(env):
            got = type(env).__name__
            raise TypeError(f"env must be an environment, a callable that makes one, or an async function, got {got}")
        # one is made even of a factory: it says which data there are, and of what size the groups
        first, found, repeats = take_dataloader(env if isinstance(env, EnvBase) else env())
        dataloader = found if dataloader is None else dataloader
        size = group_size = group_size or repeats or 1
        if not isinstance(env, EnvBase):
            factory = env
            make = lambda: with_batch_size(take_dataloader(factory())[0], size)  # noqa: E731
        env = with_batch_size(first, size)
    if dataloader is None:
        raise ValueError("there is no data: pass dataloader=, or an environment that has a DataLoadingPrimer")
    return Source(env, make, dataloader, group_size or 1)
