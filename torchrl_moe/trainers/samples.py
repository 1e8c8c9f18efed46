"""Where samples come from: prompts and rewards, or an environment; what collects them, and what evaluates."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
import math
import os
import pickle
import statistics
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self, TypeAlias, TypeVar

import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_moe.collectors.async_collector import AsyncLLMCollector, evaluate
from torchrl_moe.collectors.environments import MAX_TURNS, gather
from torchrl_moe.collectors.prompt_stream import PromptStream
from torchrl_moe.collectors.workflow import Ask, EnvLike, finite, is_episode_function, number_of, source_of
from torchrl_moe.errors import MissingEntryError
from torchrl_moe.modules.policies.prompts import (
    Chat,
    goes_on_from,
    options_of,
    plain_message,
    reads_chats,
    template_of,
    template_options,
)
from torchrl_moe.modules.policies.vllm_wrapper import ARGUMENTS, vLLMWrapper
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.function_names import import_function, is_function_name
from torchrl_moe.trainers.prompt_sources import (
    PromptSet,
    check_reasoning_task,
    import_hub,
    is_on_hub,
    is_path,
    is_reasoning_task,
    load_prompts,
    reasoning_score,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer


LOG = logging.getLogger(__name__)

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
        self.names = [function.name for function in self._functions]
        self.weights = [1.0] * len(given) if weights is None else [float(weight) for weight in weights]
        if len(self.weights) != len(given):
            raise ValueError(f"there are {len(self.weights)} weights for {len(given)} reward functions")
        for name, weight in zip(self.names, self.weights, strict=True):
            if self.names.count(name) > 1:
                raise ValueError(f"two reward functions have the name {name!r}: their values could not be told apart")
            if not math.isfinite(weight):
                raise ValueError(f"the weight of the reward function {name!r} must be finite, got {weight}")

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
        self._call = given
        named: object = given
        while isinstance(named, partial):
            named = named.func
        self.name = getattr(named, "__name__", None) or type(named).__name__
        # an object whose __call__ is async, too
        self._is_async = any(map(inspect.iscoroutinefunction, (given, getattr(given, "__call__", None))))  # noqa: B004
        # what it is called with is told by the names of its parameters
        try:
            parameters = list(inspect.signature(given).parameters.values())
        except ValueError as error:  # some functions written in C
            raise ValueError(f"{self} does not say what its parameters are: wrap it in a function") from error
        self._names: set[str] = set()
        self._needed: list[str] = []
        self._takes_all = False
        for parameter in parameters:
            is_needed = parameter.default is parameter.empty
            if parameter.kind is parameter.POSITIONAL_ONLY and is_needed:
                raise ValueError(f"{self} takes {parameter.name!r} by its place only: it is called by names")
            if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
                self._names.add(parameter.name)
                self._needed += [parameter.name] if is_needed else []
            self._takes_all |= parameter.kind is parameter.VAR_KEYWORD
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
        arguments = self._arguments(prompt, completion, completion_ids, columns)
        if not self._takes_all:
            arguments = {name: value for name, value in arguments.items() if name in self._names}
        call = partial(self._call, **arguments)
        try:
            # a plain function in a thread: it may compute for long, and the loop serves all samples; in a partial, of
            # which an error about calls that hang names what is inside
            value = await (call() if self._is_async else asyncio.to_thread(partial(_called, call)))
            if inspect.isawaitable(value):  # a plain function may return a coroutine
                value = await value
        except BaseException as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            if not isinstance(error, Exception):  # generated code may call exit()
                raise RuntimeError(f"{self} raised {error!r}") from error
            error.add_note(f"in {self} ({_place(error, self._call)})")
            raise
        if self._takes_lists:
            values = value.tolist() if hasattr(value, "tolist") else value
            if not isinstance(values, list | tuple) or len(values) != 1:
                raise TypeError(
                    f"{self} was given one completion, and must return a list of one value, got {value!r:.60}"
                )
            value = values[0]
        if value is None:
            return None
        number = number_of(value)
        if number is None:
            raise TypeError(f"{self} must return a number or None, got {value!r:.60}")
        return finite(number, str(self))

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


def _place(error: Exception, function: object) -> str:
    """Where an error was raised: the last line of the function's own file, or of all."""
    own = getattr(getattr(function, "__code__", None), "co_filename", None)
    raised = [error, *([error.__cause__] if error.__cause__ else [])]
    frames = [frame for one in raised for frame in traceback.extract_tb(one.__traceback__)]
    frame = next((one for one in reversed(frames) if one.filename == own), frames[-1])
    return f"{os.path.basename(frame.filename)}:{frame.lineno}"


def _is_cancelled() -> bool:
    """Whether the running task was cancelled; else a function has raised a ``CancelledError`` of its own."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _called(call: Callable[[], T]) -> T:
    try:
        return call()
    except StopIteration as error:  # a future cannot hold one, and waiting for it would never end
        raise RuntimeError("a reward function raised StopIteration") from error


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
    >>> episode = PromptEpisode("prompt", Rewards(polite), tokenizer)  # doctest: +SKIP
    >>> collector = AsyncLLMCollector(episode, policy=policy, dataloader=prompts.loader(0))  # doctest: +SKIP
    """

    def __init__(
        self, prompt_column: str, rewards: Rewards, tokenizer: Tokenizer, skip_special_tokens: bool = True
    ) -> None:
        self.prompt_column, self.rewards, self.skip_special_tokens = prompt_column, rewards, skip_special_tokens
        self.tokenizer, self.is_chat = tokenizer, reads_chats(tokenizer)

    async def __call__(self, data: TensorDictBase, ask: Ask) -> float | None:
        """Run a sample, and return its reward; ``None`` if all functions abstained."""
        columns = {name: data[name] for name in data.keys()}  # noqa: SIM118  a TensorDict iterates over its batch
        if self.prompt_column not in columns:
            there = ", ".join(map(repr, columns))
            raise ValueError(f"the sample has no column {self.prompt_column!r}; its columns are {there or 'none'}")
        prompt = columns[self.prompt_column]
        if not self.is_chat and not isinstance(prompt, str):
            raise ValueError(f"the policy reads text, not messages: column {self.prompt_column!r} is {prompt!r:.60}")
        # the policy would read such columns as entries of an earlier turn
        for name in TAKEN & columns.keys():
            del data[name]
        answer = await ask(prompt)
        ids = answer["tokens"].response.tolist()
        # the end of the turn is no part of the answer, even where special tokens are shown
        spoken = ids[:-1] if ids and ids[-1] == getattr(self.tokenizer, "eos_token_id", None) else ids
        text: str = self.tokenizer.decode(spoken, skip_special_tokens=self.skip_special_tokens)
        reward = await self.rewards(prompt, text, ids, columns)
        for name, value in reward.values.items():
            data["rewards", name] = torch.tensor([float("nan") if value is None else value])
        return reward.total


# The prompts and rewards, for training and for held-out evaluation.
TASKS = {"gsm8k": "GSM8KEnv", "math": "MATHEnv", "countdown": "CountdownEnv", "ifeval": "IFEvalEnv"}
"""Name -> class of :mod:`torchrl.envs.llm`."""
DRAWN = ("countdown",)
"""Tasks whose prompts are generated, so another seed gives held-out ones. The others have no split argument."""
NO_TEMPLATE = "set tokenizer.chat_template, or use texts as prompts, which are then sent as they are"


class RolloutSource:
    """Where samples come from: an environment or a function, and the rows that it gets.

    Before :meth:`load`, and on ranks that do not load, it has nothing but the given ``env``, unread. ``None`` of an
    argument: ``config.data`` says it.
    """

    def __init__(
        self,
        config: GRPOConfig,
        *,
        dataset: object = None,
        env: EnvLike | None = None,
        rewards: Sequence[RewardFunction] | RewardFunction | None = None,
        held_out: object = None,
    ) -> None:
        self.env = env
        self.held_out_env: EnvLike | None = None
        self.held_out = 0
        self.dataloader: Iterable[TensorDictBase] | None = None
        self.held_out_loader: Callable[[], Iterable[TensorDictBase]] | None = None
        self._config, self._dataset, self._rewards, self._held_out = config, dataset, rewards, held_out
        self._source = config.data.source if dataset is None else dataset
        self._task = self._source if isinstance(self._source, str) and self._source in TASKS else None

    def check_names(self) -> None:
        """Import the functions that are named, which costs less than loading a model."""
        if self.env is None and self._task is None:
            if self._source is None:
                raise ConfigError("data.source=None: name a dataset, or give the trainer a dataset or an env")
            self._functions()
        if self.env is None and is_reasoning_task(self._source):
            try:
                check_reasoning_task(str(self._source), self._config.data.arguments)
            except (ImportError, ValueError) as error:
                raise ConfigError.of("data", error) from error
        named = {"data.source" if self._dataset is None else "dataset": self._source, "held_out": self._held_out}
        for name, value in named.items():
            # a task of TorchRL's is no dataset's name, and reads one all the same
            if self.env is None and isinstance(value, str) and is_on_hub(value) and value not in DRAWN:
                try:
                    import_hub(value)
                except ImportError as error:
                    raise ConfigError.of(f"{name}={value}", error) from error
            if isinstance(value, str) and is_function_name(value) and not (is_path(value) or is_reasoning_task(value)):
                try:
                    import_function(value)
                except ValueError as error:
                    raise ConfigError.of(f"{name}={value}", error) from error

    def load(self, tokenizer: Tokenizer) -> Self:
        """Read the prompts, or make the environment; return itself."""
        if self._config.chat_template_kwargs and not reads_chats(tokenizer):
            raise ConfigError("chat_template_kwargs: the tokenizer has no chat template: set tokenizer.chat_template")
        try:
            if self.env is not None:
                self._take_env(self.env, tokenizer)
            elif self._task is not None:
                self._make_task(self._task, tokenizer)
            else:
                self._make_episode(tokenizer)
        except ConfigError:
            raise
        except Exception as error:  # a user's function or a dataset's host may raise anything
            raise ConfigError.of("data" if self._task is None else f"data.source={self._task}", error) from error
        return self

    def _functions(self) -> Rewards:
        functions = self._config.data.rewards if self._rewards is None else self._rewards
        if is_reasoning_task(self._source) and not functions:
            functions = [reasoning_score]
        if isinstance(functions, list | tuple) and not functions:
            raise ConfigError("data.rewards=[]: name a function, package.module:function, or give the trainer rewards")
        try:
            return Rewards(functions, self._config.data.weights)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("data.rewards" if self._rewards is None else "rewards", error) from error

    def _take_env(self, env: EnvLike, tokenizer: Tokenizer) -> None:
        if self._rewards is not None:
            raise ConfigError("rewards are for a dataset: an env gives its own")
        if self._dataset is not None and not is_episode_function(env):
            raise ConfigError(
                "dataset and env: give one of them, or a dataset and an async function that plays a sample"
            )
        if not (isinstance(env, EnvBase) or callable(env) or is_episode_function(env)):
            raise ConfigError(
                "env must be an environment, a callable that makes one, or an async function that plays a sample, got "
                f"{type(env).__name__}"
            )
        if is_episode_function(env):
            self._use(env, self._prompts(None))  # it makes its own prompts, from any column
        else:
            self._use_env(env, self._held_out, tokenizer)

    def _make_task(self, name: str, tokenizer: Tokenizer) -> None:
        from torchrl.envs import llm

        if self._rewards is not None:
            raise ConfigError(f"data.source={name} has rewards of its own: leave rewards out")
        make = getattr(llm, TASKS[name], None)
        if make is None:
            raise ConfigError(f"data.source={name}: this TorchRL has no {TASKS[name]}")
        config, held_out = self._config, self._held_out
        arguments = {"tokenizer": tokenizer, "seed": config.seed, **config.data.arguments}
        env: EnvBase = make(num_envs=config.rollout.group_size, **arguments)
        if held_out is None and name in DRAWN and config.eval.every:
            held_out = make(**{**arguments, "num_envs": 1, "seed": arguments["seed"] + 1})
        elif held_out is None and config.eval.every:
            LOG.warning(
                "eval.every=%d: data.source=%s has no held-out prompts, and nothing is evaluated: give the trainer "
                "held_out=..., an environment, or set eval.every=0",
                config.eval.every,
                name,
            )
        self._use_env(env, held_out, tokenizer)

    def _use_env(self, env: EnvLike, held_out: object, tokenizer: Tokenizer) -> None:
        if not reads_chats(tokenizer) and getattr(env, "input_mode", "text") != "text":
            raise ConfigError("an environment of chats needs a chat template: set tokenizer.chat_template")
        if held_out is not None and not (isinstance(held_out, EnvBase) or callable(held_out)):
            raise ConfigError(f"held_out must be an environment, as env is, got {type(held_out).__name__}")
        count = self._config.data.held_out
        if held_out is None and count and self._config.eval.every:
            raise ConfigError(
                f"data.held_out={count}: an environment, or a TorchRL task, has no held-out prompts: set it to 0, or "
                "give the trainer another environment, held_out=..."
            )
        self.env, self.held_out_env = env, held_out
        self.held_out = 0 if held_out is None else self._config.eval.prompts
        if held_out is not None and self._config.eval.every:
            # read once: each evaluation asks the same, and draws nothing from a generator that training uses
            questions: list[TensorDictBase] = []
            with ExitStack() as ends:
                try:
                    source = source_of(held_out, None, 1)
                    if isinstance(source.env, EnvBase) and source.make is not None:  # it was made to be read
                        ends.callback(source.env.close)
                    for prompt in itertools.islice(PromptStream(source.dataloader), self.held_out):
                        questions.append(prompt.data)
                except ValueError as error:
                    if not questions:
                        raise ConfigError.of("held_out", error) from error
            self.held_out = len(questions)  # of data that can be read once there may be fewer
            self.held_out_loader = lambda: [question.clone() for question in questions]

    def _make_episode(self, tokenizer: Tokenizer) -> None:
        data = self._config.data
        prompts, rewards = self._prompts(data.prompt), self._functions()
        rewards.check(prompts.columns)
        # without a template every row must be text; with one, the first of each part shows whether it renders
        parts, column, common = (prompts.train, prompts.held_out), data.prompt, self._config.chat_template_kwargs
        if not reads_chats(tokenizer):
            for row in itertools.chain(*parts):
                if not isinstance(row[column], str) or row.get("tools") or row.get("chat_template_kwargs"):
                    raise ConfigError(f"data: a row has messages, tools or chat_template_kwargs: {NO_TEMPLATE}")
        for row in (rows[0] for rows in parts if len(rows) and reads_chats(tokenizer)):
            prompt, options = row[column], options_of(template_options(common), row)
            template = template_of(tokenizer, tools=options.get("tools"))
            chat = Chat.of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
            try:
                chat.rendered(tokenizer, template, options)
            except Exception as error:  # a template may raise anything
                raise ConfigError.of(f"the chat template, given the prompt {prompt!r:.100}", error) from error
        skips = self._config.rollout.sampling.get("skip_special_tokens", True)
        self._use(PromptEpisode(data.prompt, rewards, tokenizer, skip_special_tokens=skips), prompts)

    def _prompts(self, column: str | None) -> PromptSet:
        data, source, held_out = self._config.data, self._source, self._held_out
        if source is None:
            raise ConfigError("data.source=None: name a dataset, or give the trainer a dataset too")
        # arguments belong to the source in the configuration; where it names none, to the dataset that was passed
        is_theirs = source is data.source or (data.source is None and isinstance(source, str))
        takes_none = isinstance(source, os.PathLike) or (isinstance(source, str) and is_path(source))
        arguments = data.arguments if is_theirs and not takes_none else None
        count = data.held_out if held_out is None else 0
        found = load_prompts(source, prompt=column, held_out=count, seed=self._config.seed, arguments=arguments)
        # a checkpoint holds the rows that are under way
        for place, row in enumerate(found.train if self._config.checkpoint.every else ()):
            for name, value in row.items():
                if isinstance(value, str | int | float | None):
                    continue
                try:
                    pickle.dumps(value)
                except Exception as error:  # an object's own code may raise anything
                    raise ConfigError(
                        f"data: train row {place}, column {name!r} is a {type(value).__name__}, which a checkpoint "
                        f"cannot hold ({error!s:.100}): leave it out and look it up in the reward, or set "
                        "checkpoint.every=0"
                    ) from error
        if held_out is None:
            return found
        try:
            return PromptSet(found.train, load_prompts(held_out, prompt=column).train, found.prompt)
        except Exception as error:  # as for the data
            raise ConfigError.of("held_out", error) from error

    def _use(self, env: EnvLike, prompts: PromptSet) -> None:
        self.held_out = min(len(prompts.held_out), self._config.eval.prompts)
        self.env, self.held_out_env = env, env if self.held_out else None
        self.dataloader, self.held_out_loader = prompts.loader(self._config.seed), prompts.held_out_loader

    def evaluate(
        self, policy: vLLMWrapper | None, timeout: float | None = None, max_turns: int = MAX_TURNS
    ) -> float | None:
        """Return the mean reward of greedy answers to held-out prompts; ``None``: nothing is held out."""
        if policy is None or self.held_out_env is None or not self.held_out:
            return None
        loader = None if self.held_out_loader is None else self.held_out_loader()
        rows = evaluate(policy, self.held_out_env, self.held_out, loader, timeout, False, max_turns, temperature=0.0)
        # of several turns a row is the last one, with the sum of all rewards
        rewards = [row.get(("next", "episode_reward"), None) for row in rows.unbind(0)]
        if any(reward is None for reward in rewards):
            raise ValueError("a held-out answer has no reward in one of its turns")
        return sum(float(reward.sum()) for reward in rewards) / len(rewards)


# The rows of a batch as plain numbers: read once, for metrics, for what is shared with other ranks, for filters.
@dataclass(frozen=True, slots=True)
class SampleRow:
    """One row of a batch. A sample of several turns has a row for each, and the last one ``ends`` it.

    Attributes:
        group: number of the group that the sample belongs to.
        reward: of this row.
        tokens: of prompt and answer.
        answered: tokens of the answer.
        is_cut: whether the answer was cut at ``max_new_tokens``.
        sampled: tokens that say by which version of the weights they were sampled; ``versions`` is the sum of these.
        named: the value of each reward function, NaN if it abstained.
    """

    group: int
    reward: float
    ends: bool
    tokens: int
    answered: int
    is_cut: bool
    sampled: int
    versions: int
    named: Mapping[str, float]


def sample_rows(rows: Iterable[TensorDictBase]) -> list[SampleRow]:
    """Read the rows of a batch.

    Raises:
        MissingEntryError: a row has no reward.
    """
    found = []
    for row in rows:
        reward = row.get(("next", "reward"), None)
        if reward is None:
            raise MissingEntryError(
                "the rows have no reward: there is nothing at ('next', 'reward'). Give the environment a transform "
                "that writes it, or the trainer a dataset and rewards"
            )
        versions, named = row.get(("policy_versions", "full")), row.get("rewards", None)
        known = versions[versions >= 0]
        found.append(
            SampleRow(
                group=int(row.get("group_id")),
                reward=float(reward.sum()),
                ends=bool(row.get(("next", "done")).any()),
                tokens=len(row.get(("tokens", "full"))),
                answered=len(row.get(("tokens", "response"))),
                is_cut="finish_reason" in row.keys() and row["finish_reason"] == "length",  # noqa: SIM118
                sampled=len(known),
                versions=int(known.sum()),
                named={} if named is None else {name: float(named[name].sum()) for name in sorted(named.keys())},
            )
        )
    return found


def sample_rewards(rows: Iterable[SampleRow]) -> list[list[float]]:
    """Return the rewards of samples, by group: of a sample of several turns, their sum."""
    groups: dict[int, list[float]] = {}
    total = 0.0
    for row in rows:
        total += row.reward
        if row.ends:
            groups.setdefault(row.group, []).append(total)
            total = 0.0
    return list(groups.values())


def batch_metrics(rows: Sequence[SampleRow], version: int) -> dict[str, float]:
    """Return metrics of a batch as it was collected; ``version``: the newest of the weights."""
    # rewards are of samples, lengths and ages of rows: a sample may have several turns, a row each
    groups = sample_rewards(rows)
    rewards = [reward for group in groups for reward in group]
    tokens, sampled = sum(row.answered for row in rows), sum(row.sampled for row in rows)
    metrics = {
        "reward": statistics.mean(rewards),
        "reward_std": statistics.pstdev(rewards),
        "uniform_groups": sum(len(set(group)) == 1 for group in groups) / len(groups),
        "length": tokens / len(rows),
        "truncated": sum(row.is_cut for row in rows) / len(rows),
        "staleness": (version * sampled - sum(row.versions for row in rows)) / max(sampled, 1),
        "tokens": float(tokens),
    }
    for name in rows[0].named:
        values = [row.named.get(name, math.nan) for row in rows]
        known = [value for value in values if not math.isnan(value)]  # NaN: the function abstained
        metrics |= {f"reward/{name}": statistics.mean(known)} if known else {}
    return metrics


# What collects samples for a run, and what evaluates beside it.
BATCHES = 10
"""Batches' worth of groups that are dropped in a row before a warning is logged."""


class SignalFilter:
    """Drops groups whose answers all have the same reward, as DAPO's dynamic sampling does (arXiv 2503.14476)."""

    def __init__(self, groups: int) -> None:
        self._limit = BATCHES * groups
        self._left_out = 0

    def __call__(self, group: TensorDictBase) -> bool:
        """Whether the samples of a group, ``[rows]``, have different rewards, each the sum of its turns'."""
        # one warning for each so many in a row: a run that waits for groups looks as if it hung
        rewards = {reward for one in sample_rewards(sample_rows(group.unbind(0))) for reward in one}
        self._left_out = 0 if len(rewards) > 1 else self._left_out + 1
        if self._left_out and self._left_out % self._limit == 0:
            LOG.warning(
                "the last %d groups were left out, each with the same reward throughout: the prompts are too easy or "
                "too hard, or the reward is always the same; drop_uniform_groups waits for others",
                self._left_out,
            )
        return len(rewards) > 1


def make_collector(config: GRPOConfig, source: RolloutSource, policy: vLLMWrapper) -> AsyncLLMCollector:
    """Return what collects samples, as the configuration says."""
    rollout = config.rollout
    groups = config.steps * rollout.prompts_per_step
    # by default a tenth of the run's groups may fail
    failures = max(rollout.prompts_per_step, groups // 10) if rollout.max_failures is None else rollout.max_failures
    try:
        return AsyncLLMCollector(
            source.env,
            policy=policy,
            dataloader=source.dataloader,
            group_size=rollout.group_size,
            groups_per_batch=rollout.prompts_per_step,
            max_staleness=rollout.max_staleness,
            order=rollout.order,  # type: ignore[arg-type]
            window=rollout.window,
            on_stale=rollout.on_stale,  # type: ignore[arg-type]
            over_sample=rollout.over_sample,
            group_filter=SignalFilter(rollout.prompts_per_step) if rollout.drop_uniform_groups else None,
            max_failures=failures,
            max_dropped_groups=rollout.max_dropped_groups,
            max_turns=rollout.max_turns,
            reward_timeout=rollout.reward_timeout,
        )
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError.of("rollout", error) from error


LOOK_SECONDS = 0.1


class Evaluation:
    """Evaluates in a thread while a step runs, on the weights that the engine has until the next sync."""

    def __init__(self, evaluate: Callable[[], float | None], every: int) -> None:
        self.every, self.scores = every, dict[int, float]()
        self._evaluate = evaluate
        self._thread = ThreadPoolExecutor(1, "torchrl_moe-evaluation")
        self._running: Future[float | None] | None = None
        self._is_stopped = False
        self._step, self._is_of_newest = -1, False
        self._found: dict[str, float] = {}

    def begin(self, step: int, is_of_the_newest: bool, *, is_last: bool = False) -> None:
        """Begin an evaluation, if one is due at that step and was not begun yet; :meth:`wait` waits for it.

        Args:
            step: number of steps done.
            is_of_the_newest: whether the engine has the weights after that step: a score of older ones must not choose
                the best checkpoint.
            is_last: whether it is due because the run ends.
        """
        is_due = self.every and step != self._step and (is_last or step % self.every == 0)
        if is_due and not self._is_stopped:
            self._step, self._is_of_newest = step, is_of_the_newest
            self._running = self._thread.submit(self._evaluate)

    def wait(self) -> None:
        """Wait for the running evaluation, if there is one; a reward that raises costs only that evaluation."""
        running, self._running = self._running, None
        # looked at again and again, since a signal may come meanwhile
        while running is not None and not self._is_stopped and not wait([running], LOOK_SECONDS).done:
            pass
        if running is None or not running.done():
            return
        if (error := running.exception()) is not None:
            LOG.warning("no evaluation at step %d: %r", self._step, error)
        elif (score := running.result()) is not None:
            self._found = {"held_out_reward": score}
            self.scores |= {self._step: score} if self._is_of_newest else {}

    def take(self) -> dict[str, float]:
        """Wait, and return the metrics of the last evaluation, once."""
        self.wait()
        found, self._found = self._found, {}
        return found

    def stop(self) -> None:
        """Begin no further evaluation, and wait for none. It takes no lock: a signal's handler may call it."""
        self._is_stopped = True

    def close(self) -> None:
        """Stop, and let the thread end. Idempotent."""
        self.stop()
        self._thread.shutdown(wait=False, cancel_futures=True)
