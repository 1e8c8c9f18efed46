"""Reward functions: the arguments they may take, how they are called, and how their values are combined."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from tensordict import TensorDictBase

from torchrl_moe.collectors.environments import gather
from torchrl_moe.collectors.workflow import Ask, finite, number_of
from torchrl_moe.modules.policies.prompts import goes_on_from, plain_message
from torchrl_moe.modules.policies.wrapper_arguments import ARGUMENTS
from torchrl_moe.trainers.function_names import import_function

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["PromptEpisode", "Reward", "RewardFunction", "Rewards"]

T = TypeVar("T")
Prompt: TypeAlias = "str | Sequence[Mapping[str, object]]"
"""A text, or messages, as in the data."""
RewardFunction: TypeAlias = "Callable[..., object] | str"
"""A function, or its name: ``"package.module:function"``."""
OF_ONE = ("prompt", "completion", "completion_ids")
OF_LISTS = ("prompts", "completions", "completion_ids")


@dataclass(frozen=True, slots=True)
class Reward:
    """The reward of one sample."""

    total: float | None
    values: Mapping[str, float | None]


class Rewards:
    """A weighted sum of reward functions.

    A function is called for one sample. Its parameter names select what it gets: ``prompt`` (text, or messages, as in
    the data), ``completion`` (text), ``completion_ids`` (a list of ints), or any column of the data; ``**kwargs`` gets
    all the rest. A function with a parameter ``completions`` gets lists of length one, and returns such a list, as
    TRL's functions do: ``prompts``, ``completions``, ``completion_ids`` and columns. If the prompt is a list of
    messages, so is its completion: ``[{"role": "assistant", "content": text}]``; if the last of them is the
    assistant's, which the answer continues, it is a part of the completion, not of the prompt, as in TRL.

    It returns a number, or ``None`` to abstain, which adds nothing to the sum; a sample for which all functions abstain
    is left out of its group. It may be async. A plain function runs in a thread, several at a time, so it must be
    thread-safe, and cannot set signals; it must not change its arguments. A function that hangs past the collector's
    ``reward_timeout`` costs its sample and a thread; others take the thread's place.

    >>> def exact(completion, answer):
    ...     return float(completion == answer)
    >>> def short(completion_ids):
    ...     return -len(completion_ids) / 10
    >>> rewards = Rewards([exact, short], weights=[1.0, 0.5])
    >>> rewards.check(["prompt", "answer"])
    >>> asyncio.run(rewards("1+1=", "2", [6, 1], {"prompt": "1+1=", "answer": "2"}))
    Reward(total=0.9, values={'exact': 1.0, 'short': -0.2})
    """

    def __init__(
        self, functions: Sequence[RewardFunction] | RewardFunction, weights: Sequence[float] | None = None
    ) -> None:
        if not isinstance(functions, str | Iterable) and not callable(functions):
            raise TypeError(f"rewards are functions, or names such as 'package.module:function', got {functions!r:.60}")
        given = [functions] if isinstance(functions, str) or callable(functions) else list(functions)
        if not given:
            raise ValueError("there are no reward functions")
        self._functions = [_Function(function) for function in given]
        names = self.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two reward functions have the name {twice[0]!r}: their values could not be told apart")
        self.weights = [1.0] * len(given) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(given):
            raise ValueError(f"there are {len(self.weights)} weights for {len(given)} reward functions")
        for name, weight in zip(names, self.weights, strict=True):
            if not math.isfinite(weight):
                raise ValueError(f"the weight of the reward function {name!r} must be finite, got {weight}")

    def __repr__(self) -> str:
        terms = (f"{weight:g} * {name}" for name, weight in zip(self.names, self.weights, strict=True))
        return f"{type(self).__name__}({' + '.join(terms)})"

    @property
    def names(self) -> list[str]:
        """Names of the functions, in their order."""
        return [function.name for function in self._functions]

    def check(self, columns: Collection[str]) -> None:
        """Check that the data has what each function asks for.

        >>> Rewards(lambda completion, answer: 0.0).check(["prompt"])
        Traceback (most recent call last):
        ValueError: the reward function '<lambda>' asks for 'answer'; there are prompt, completion, completion_ids
        """
        for function in self._functions:
            function.check(columns)

    async def __call__(
        self, prompt: Prompt, completion: str, completion_ids: Sequence[int], columns: Mapping[str, object]
    ) -> Reward:
        """Return the reward of a sample."""
        # all at once, each with a list of ids of its own, which it may change
        calls = [asyncio.ensure_future(one(prompt, completion, [*completion_ids], columns)) for one in self._functions]
        try:
            found = await gather(calls)
        except asyncio.CancelledError as error:
            # the collector's deadline, which is passed on with the names of the slow ones, or a function's own doing
            late = ", ".join(str(one) for one, call in zip(self._functions, calls, strict=True) if call.cancelled())
            if not _is_cancelled():
                raise RuntimeError(f"{late} cancelled its own task") from error
            error.add_note(f"it waits for {late}")
            raise
        # a function that abstained adds nothing; if all did, there is no reward
        weighted = [weight * value for weight, value in zip(self.weights, found, strict=True) if value is not None]
        total = sum(weighted) if weighted else None
        return Reward(
            None if total is None else finite(total, "the weighted sum of the functions"),
            dict(zip(self.names, found, strict=True)),
        )


class _Function:
    """One reward function, and the arguments it takes."""

    def __init__(self, given: object) -> None:
        if isinstance(given, str):
            given = import_function(given)
        if not callable(given):
            raise TypeError(f"a reward function is a function or 'package.module:function', got {given!r:.60}")
        self.name = _name(given)
        self._call = given
        self._is_async = _is_async(given)
        # what it is called with is told by the names of its parameters
        try:
            parameters = list(inspect.signature(given).parameters.values())
        except ValueError as error:  # some functions written in C
            raise ValueError(f"{self} does not say what its parameters are: wrap it in a function") from error
        for parameter in parameters:
            if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is parameter.empty:
                raise ValueError(f"{self} takes {parameter.name!r} by its place only: it is called by names")
        self._takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
        named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        self._names = {parameter.name for parameter in named}
        self._needed = [parameter.name for parameter in named if parameter.default is parameter.empty]
        self._takes_lists = "completions" in self._names
        if not self._names and not self._takes_all:
            raise ValueError(f"{self} asks for nothing: give it a parameter such as 'completion'")

    def __str__(self) -> str:
        return f"the reward function {self.name!r}"

    def check(self, columns: Iterable[str]) -> None:
        ours = OF_LISTS if self._takes_lists else OF_ONE
        others = [column for column in columns if column not in ours]
        for name in self._needed:
            if name not in ours and name not in others:
                known = ", ".join(map(repr, others))
                there = f", and the column{'s' * (len(others) > 1)} {known}" if others else ""
                raise ValueError(f"{self} asks for {name!r}; there are {', '.join(ours)}{there}")

    async def __call__(
        self, prompt: Prompt, completion: str, completion_ids: list[int], columns: Mapping[str, object]
    ) -> float | None:
        self.check(columns)
        there = self._arguments(prompt, completion, completion_ids, columns)
        arguments = there if self._takes_all else {name: there[name] for name in self._names & there.keys()}
        try:
            # a plain function in a thread: it may compute for long, and the loop serves all samples
            call = partial(self._call, **arguments)
            value = await (call() if self._is_async else asyncio.to_thread(partial(_called, call)))
            if inspect.isawaitable(value):  # a plain function may return a coroutine
                value = await value
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if not isinstance(error, Exception):  # generated code may call exit()
                raise RuntimeError(f"{self} raised {error!r}") from error
            error.add_note(f"in {self}")
            raise
        return self._number(self._only(value) if self._takes_lists else value)

    def _arguments(
        self, prompt: Prompt, completion: str, completion_ids: list[int], columns: Mapping[str, object]
    ) -> dict[str, object]:
        if not self._takes_lists:
            return {**columns, "prompt": prompt, "completion": completion, "completion_ids": completion_ids}
        answer: str | list[dict[str, str]] = completion
        if not isinstance(prompt, str):
            # an assistant's last message, which the answer continues, is a part of the completion
            *before, last = prompt
            goes_on = goes_on_from(plain_message(last))
            prompt = before if goes_on else prompt
            said = plain_message(last)["content"] if goes_on else ""
            answer = [{"role": "assistant", "content": said + completion}]
        ours = {"prompts": [prompt], "completions": [answer], "completion_ids": [completion_ids]}
        return {**{name: [value] for name, value in columns.items()}, **ours}

    def _only(self, values: object) -> object:
        plain = values.tolist() if hasattr(values, "tolist") else values
        if not isinstance(plain, list | tuple) or len(plain) != 1:
            raise TypeError(f"{self} was given one completion, and must return a list of one value, got {values!r:.60}")
        return plain[0]

    def _number(self, value: object) -> float | None:
        if value is None:
            return None
        number = number_of(value)
        if number is None:
            raise TypeError(f"{self} must return a number or None, got {value!r:.60}")
        return finite(number, str(self))


def _is_cancelled() -> bool:
    """Whether the running task was cancelled; else a function has raised a ``CancelledError`` of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _called(call: Callable[[], T]) -> T:
    try:
        return call()
    except StopIteration as error:  # a future cannot hold one, and waiting for it would never end
        raise RuntimeError("a reward function raised StopIteration") from error


def _name(function: object) -> str:
    while isinstance(function, partial):
        function = function.func
    return getattr(function, "__name__", None) or type(function).__name__


def _is_async(function: object) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


# One prompt, one answer, one reward: the episode that a collector runs for a set of prompts.
WRITTEN = {
    *("history", "text", "tokens", "masks", "log_probs", "routed_experts", "sampling", "routing"),
    *("advantage", "current_version", "num_valid_tokens", "num_sequences", "sum_weights", "prox", "ref_log_probs"),
    *("expert_counts", "num_router_sequences"),
    *("policy_version", "policy_versions", "finish_reason", "num_cached_tokens", "num_segments", "resume"),
    *("next", "done", "terminated", "truncated", "rewards"),
}
"""Entries of a row that rollouts write, and that a policy reads as those of an earlier turn."""
TAKEN = WRITTEN | set(ARGUMENTS)


class PromptEpisode:
    """Sends a prompt, and rewards the answer; an async function for ``AsyncLLMCollector``, in place of an environment.

    Each row carries the sample's columns and, at ``("rewards", name)``, what each reward function returned, float32
    ``[1]``, NaN if it abstained. A column with the name of an entry that rollouts write or requests read (``"text"``,
    ``"tokens"``, ``"priority"``, ...) is passed to the rewards, but is not in the rows.

    The time that rewards may take is the collector's ``reward_timeout``; after that the sample's group is dropped.

    >>> def polite(completion):
    ...     return float("please" in completion)
    >>> prompts = load_prompts([{"prompt": "Ask for tea."}])  # doctest: +SKIP
    >>> episode = PromptEpisode("prompt", Rewards(polite))
    >>> collector = AsyncLLMCollector(episode, policy=policy, dataloader=prompts.loader(0))  # doctest: +SKIP
    """

    def __init__(
        self,
        prompt_column: str,
        rewards: Rewards,
        *,
        is_chat: bool = True,
        tokenizer: Tokenizer | None = None,
        skip_special_tokens: bool = True,
    ) -> None:
        self.prompt_column = prompt_column
        self.rewards = rewards
        self.is_chat = is_chat
        self.tokenizer = tokenizer
        self.skip_special_tokens = skip_special_tokens

    async def __call__(self, data: TensorDictBase, ask: Ask) -> float | None:
        """Run a sample, and return its reward; ``None`` if all functions abstained."""
        columns = {name: data[name] for name in data.keys()}  # noqa: SIM118  a TensorDict iterates over its batch
        prompt = self._prompt(columns)
        # the policy would read such columns as entries of an earlier turn
        for name in TAKEN & columns.keys():
            del data[name]
        answer = await ask(prompt)
        ids = answer["tokens"].response.tolist()
        reward = await self.rewards(prompt, self._completion(answer, ids), ids, columns)
        for name, value in reward.values.items():
            data["rewards", name] = torch.tensor([float("nan") if value is None else value])
        return reward.total

    def _prompt(self, columns: Mapping[str, Any]) -> Prompt:
        if self.prompt_column not in columns:
            there = ", ".join(map(repr, columns))
            raise ValueError(f"the sample has no column {self.prompt_column!r}; its columns are {there or 'none'}")
        prompt = columns[self.prompt_column]
        if not self.is_chat and not isinstance(prompt, str):
            raise ValueError(f"the policy reads text, not messages: column {self.prompt_column!r} is {prompt!r:.60}")
        return prompt

    def _completion(self, answer: TensorDictBase, ids: list[int]) -> str:
        if self.tokenizer is not None:
            # the end of the turn is no part of the answer, even where special tokens are shown
            end = getattr(self.tokenizer, "eos_token_id", None)
            spoken = ids[:-1] if ids and ids[-1] == end else ids
            text: str = self.tokenizer.decode(spoken, skip_special_tokens=self.skip_special_tokens)
        elif self.is_chat:
            text = answer["history"].response.content[0]
        else:
            text = answer["text"].response
        return text
