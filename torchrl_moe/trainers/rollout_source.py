"""``RolloutSource``: the prompts and rewards, for training and for held-out evaluation."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_moe.collectors.episode import MAX_TURNS
from torchrl_moe.collectors.evaluation import evaluate
from torchrl_moe.collectors.workflow import is_episode_function
from torchrl_moe.modules.policies.prompt_reading import options_of, reads_chats, template_of, template_options
from torchrl_moe.modules.policies.prompts import Chat
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.episode import PromptEpisode
from torchrl_moe.trainers.function_names import import_function, is_function_name
from torchrl_moe.trainers.prompt_sources import is_path
from torchrl_moe.trainers.prompts import PromptSet, load_prompts
from torchrl_moe.trainers.rewards import Rewards

__all__ = ["RolloutSource"]

TASKS = {"gsm8k": "GSM8KEnv", "math": "MATHEnv", "countdown": "CountdownEnv", "ifeval": "IFEvalEnv"}
"""Name -> class of :mod:`torchrl.envs.llm`."""
DRAWN = ("countdown",)
"""Tasks whose prompts are generated, so another seed gives held-out ones. The others have no split argument."""
NO_TEMPLATE = "set tokenizer.chat_template, or use texts as prompts, which are then sent as they are"


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """Where samples come from.

    Attributes:
        env: for :class:`~torchrl_moe.collectors.AsyncLLMCollector`.
        dataloader: of prompts; ``None``: the environment has its own.
        held_out_env: for :func:`~torchrl_moe.collectors.evaluation.evaluate`; ``None``: nothing is held out.
        held_out_loader: makes a loader of held-out prompts.
        held_out: how many held-out prompts an evaluation asks.
    """

    env: Any
    dataloader: Iterable[Any] | None
    held_out_env: Any = None
    held_out_loader: Callable[[], Iterable[Any]] | None = None
    held_out: int = 0

    @classmethod
    def of(
        cls,
        config: GRPOConfig,
        tokenizer: Any,
        *,
        dataset: Any = None,
        env: Any = None,
        rewards: Sequence[Callable[..., Any]] | Callable[..., Any] | None = None,
        held_out: Any = None,
    ) -> RolloutSource:
        """Make a source from a trainer's arguments, or from ``config.data``.

        Args:
            config: of the run.
            tokenizer: of the policy; it decodes answers, and TorchRL's tasks use it.
            dataset: see :func:`~torchrl_moe.trainers.prompts.load_prompts`.
            env: in place of a dataset: an environment, a callable that makes one, or an async function that runs a
                sample.
            rewards: functions of an answer; for a dataset.
            held_out: a dataset, or an environment, of prompts to evaluate on.

        Raises:
            ConfigError: data or reward is missing, or they do not fit together.
        """
        source = config.data.source if dataset is None else dataset
        if config.chat_template_kwargs and not reads_chats(tokenizer):
            raise ConfigError("chat_template_kwargs: the tokenizer has no chat template: set tokenizer.chat_template")
        try:
            if env is not None:
                return cls._of_env(config, env, tokenizer, dataset, rewards, held_out)
            if isinstance(source, str) and source in TASKS:
                return cls._of_task(source, config, tokenizer, rewards, held_out)
            return cls._of_prompts(config, source, tokenizer, rewards, held_out)
        except ConfigError:
            raise
        except Exception as error:  # a user's function or a dataset's host may raise anything
            name = f"data.source={source}" if isinstance(source, str) and source in TASKS else "data"
            raise ConfigError.of(name, error) from error

    @classmethod
    def check_names(
        cls, config: GRPOConfig, *, dataset: Any = None, env: Any = None, rewards: Any = None, held_out: Any = None
    ) -> None:
        """Import the functions that are named, which costs less than loading a model; arguments as of :meth:`of`.

        Raises:
            ConfigError: one is not found, or a reward function cannot be called.
        """
        source = config.data.source if dataset is None else dataset
        if env is None and not (isinstance(source, str) and source in TASKS):
            _check_given(source)
            cls._rewards(config, rewards)
        for name, value in (("data.source" if dataset is None else "dataset", source), ("held_out", held_out)):
            if isinstance(value, str) and is_function_name(value) and not is_path(value):
                try:
                    import_function(value)
                except ValueError as error:
                    raise ConfigError.of(f"{name}={value}", error) from error

    @staticmethod
    def _rewards(config: GRPOConfig, rewards: Any) -> Rewards:
        functions = config.data.rewards if rewards is None else rewards
        if isinstance(functions, list | tuple) and not functions:
            raise ConfigError("data.rewards=[]: name a function, package.module:function, or give the trainer rewards")
        try:
            return Rewards(functions, config.data.weights)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("data.rewards" if rewards is None else "rewards", error) from error

    @classmethod
    def _of_env(
        cls, config: GRPOConfig, env: Any, tokenizer: Any, dataset: Any, rewards: Any, held_out: Any
    ) -> RolloutSource:
        if rewards is not None:
            raise ConfigError("rewards are for a dataset: an env gives its own")
        if dataset is not None and not is_episode_function(env):
            raise ConfigError(
                "dataset and env: give one of them, or a dataset and an async function that plays a sample"
            )
        if not (isinstance(env, EnvBase) or callable(env)):
            raise ConfigError(
                "env must be an environment, a callable that makes one, or an async function that plays a sample, got "
                f"{type(env).__name__}"
            )
        if not is_episode_function(env):
            return cls._with_env(config, env, tokenizer, held_out)
        # the function makes its own prompts, from any column
        prompts = cls._load(config, config.data.source if dataset is None else dataset, held_out, None)
        return cls._with_prompts(config, env, prompts)

    @classmethod
    def _with_env(cls, config: GRPOConfig, env: Any, tokenizer: Any, held_out: Any) -> RolloutSource:
        if not reads_chats(tokenizer) and getattr(env, "input_mode", "text") != "text":
            raise ConfigError("an environment of chats needs a chat template: set tokenizer.chat_template")
        if held_out is not None and not (isinstance(held_out, EnvBase) or callable(held_out)):
            raise ConfigError(f"held_out must be an environment, as env is, got {type(held_out).__name__}")
        count = config.data.held_out
        if held_out is None and count and config.eval.every:
            raise ConfigError(
                f"data.held_out={count}: an environment, or a TorchRL task, has no held-out prompts: set it to 0, or "
                "give the trainer another environment, held_out=..."
            )
        return cls(env, None, held_out, None, 0 if held_out is None else config.eval.prompts)

    @classmethod
    def _of_task(cls, name: str, config: GRPOConfig, tokenizer: Any, rewards: Any, held_out: Any) -> RolloutSource:
        from torchrl.envs import llm

        if rewards is not None:
            raise ConfigError(f"data.source={name} has rewards of its own: leave rewards out")
        make = getattr(llm, TASKS[name], None)
        if make is None:
            raise ConfigError(f"data.source={name}: this TorchRL has no {TASKS[name]}")
        arguments = {"tokenizer": tokenizer, "seed": config.seed, **config.data.arguments}
        env: EnvBase = make(num_envs=config.rollout.group_size, **arguments)
        if held_out is None and name in DRAWN and config.eval.every:
            held_out = make(**{**arguments, "num_envs": 1, "seed": arguments["seed"] + 1})
        return cls._with_env(config, env, tokenizer, held_out)

    @classmethod
    def _of_prompts(cls, config: GRPOConfig, source: Any, tokenizer: Any, rewards: Any, held_out: Any) -> RolloutSource:
        prompts = cls._load(config, source, held_out, config.data.prompt)
        found = cls._rewards(config, rewards)
        found.check(prompts.columns)
        _check_rendering(config, tokenizer, prompts)
        episode = PromptEpisode(
            config.data.prompt,
            found,
            is_chat=reads_chats(tokenizer),
            tokenizer=tokenizer,
            skip_special_tokens=config.rollout.sampling.get("skip_special_tokens", True),
        )
        return cls._with_prompts(config, episode, prompts)

    @staticmethod
    def _load(config: GRPOConfig, source: Any, held_out: Any, prompt: str | None) -> PromptSet:
        data = config.data
        _check_given(source)
        # arguments belong to the source in the configuration; where it names none, to the dataset that was passed
        is_theirs = source is data.source or (data.source is None and isinstance(source, str))
        takes_none = isinstance(source, os.PathLike) or (isinstance(source, str) and is_path(source))
        arguments = data.arguments if is_theirs and not takes_none else None
        count = data.held_out if held_out is None else 0
        found = load_prompts(source, prompt=prompt, held_out=count, seed=config.seed, arguments=arguments)
        if config.checkpoint.every:
            _check_storable(found)
        if held_out is None:
            return found
        try:
            return PromptSet(found.train, load_prompts(held_out, prompt=prompt).train, found.prompt)
        except Exception as error:  # as for the data
            raise ConfigError.of("held_out", error) from error

    @classmethod
    def _with_prompts(cls, config: GRPOConfig, env: Any, prompts: PromptSet) -> RolloutSource:
        count = min(len(prompts.held_out), config.eval.prompts)
        return cls(env, prompts.loader(config.seed), env if count else None, prompts.held_out_loader, count)

    def evaluate(self, policy: vLLMWrapper, timeout: float | None = None, max_turns: int = MAX_TURNS) -> float | None:
        """Return the mean reward of greedy answers to held-out prompts; ``None``: nothing is held out.

        Args:
            policy: sends requests to the engine.
            timeout: seconds that computing a reward may take.
            max_turns: of a sample.
        """
        if not self.held_out:
            return None
        loader = None if self.held_out_loader is None else self.held_out_loader()
        asked = (policy, self.held_out_env, self.held_out, loader, timeout)
        rows: TensorDictBase = evaluate(*asked, use_tqdm=False, max_turns=max_turns, temperature=0.0)
        rewards = [row.get(("next", "episode_reward"), None) for row in rows.unbind(0)]
        if any(reward is None for reward in rewards):
            raise ValueError("a held-out answer has no reward in one of its turns")
        return sum(float(reward.sum()) for reward in rewards) / len(rewards)


def _check_given(source: Any) -> None:
    if source is None:
        raise ConfigError("data.source=None: name a dataset, or give the trainer a dataset or an env")


def _check_storable(prompts: PromptSet) -> None:
    """Refuse rows that a checkpoint, which holds those that are under way, could not."""
    for place, row in enumerate(prompts.train):
        for name, value in row.items():
            if isinstance(value, str | int | float | None):
                continue
            try:
                pickle.dumps(value)
            except Exception as error:  # an object's own code may raise anything
                raise ConfigError(
                    f"data: train row {place}, column {name!r} is a {type(value).__name__}, which a checkpoint cannot "
                    f"hold ({error!s:.100}): leave it out and look it up in the reward, or set checkpoint.every=0"
                ) from error


def _check_rendering(config: GRPOConfig, tokenizer: Any, prompts: PromptSet) -> None:
    """Check that prompts fit the tokenizer's chat template, by rendering the first of each part.

    Raises:
        ConfigError: there is no template, and a row needs one; or it raises.
    """
    column = config.data.prompt
    if not reads_chats(tokenizer):
        for row in (row for rows in (prompts.train, prompts.held_out) for row in rows):
            if not isinstance(row[column], str) or row.get("tools") or row.get("chat_template_kwargs"):
                raise ConfigError(f"data: a row has messages, tools or chat_template_kwargs: {NO_TEMPLATE}")
        return
    common = template_options(config.chat_template_kwargs)
    for row in (rows[0] for rows in (prompts.train, prompts.held_out) if len(rows)):
        prompt, options = row[column], options_of(common, row)
        template = template_of(tokenizer, tools=options.get("tools"))
        chat = Chat.of([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        try:
            chat.rendered(tokenizer, template, options)
        except Exception as error:  # a template may raise anything
            raise ConfigError.of(f"the chat template, given the prompt {prompt!r:.100}", error) from error
