"""``RolloutEngine``: the engine that generates, and the weight sync that keeps it at the trainer's weights."""

from __future__ import annotations

import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from tensordict import TensorDictBase
from torchrl.envs import EnvBase

from torchrl_moe.collectors.async_collector import evaluate
from torchrl_moe.collectors.environments import MAX_TURNS
from torchrl_moe.collectors.workflow import EnvLike, is_episode_function
from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.policies.prompts import Chat, options_of, reads_chats, template_of, template_options
from torchrl_moe.modules.policies.vllm_wrapper import vLLMWrapper
from torchrl_moe.modules.policies.wrapper_arguments import sampling_params_of
from torchrl_moe.modules.serving.async_vllm import AsyncVLLM
from torchrl_moe.modules.serving.launch import devices_of_trainer, ranks_here
from torchrl_moe.trainers.checkpoints import steps_saved
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.function_names import import_function, is_function_name
from torchrl_moe.trainers.policy_model import PolicyModel, new_start
from torchrl_moe.trainers.prompt_sources import PromptSet, is_path, load_prompts
from torchrl_moe.trainers.reasoning_gym import check_reasoning_task, is_reasoning_task, reasoning_score
from torchrl_moe.trainers.rewards import PromptEpisode, RewardFunction, Rewards
from torchrl_moe.weight_update.report import SyncReport
from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase as Tokenizer

__all__ = ["Given", "RolloutEngine", "RolloutSource", "check_arguments", "check_room", "engine_arguments"]

LOG = logging.getLogger(__name__)


def check_arguments(config: GRPOConfig) -> None:
    """Refuse arguments that the run's engine does not have, which costs less than loading a model."""
    try:
        engine_kind(config.engine.kind).arguments_of({"model": "?", **engine_arguments(config)})
    except (TypeError, ValueError) as error:
        raise ConfigError.of("engine.arguments", error) from error


def engine_arguments(config: GRPOConfig) -> dict[str, Any]:
    """Return the arguments of the run's engine; its routers have the dtype of the trainer's, if one is set."""
    own = {} if config.model.router_dtype == "auto" else {"router_dtype": config.model.router_dtype}
    return {**own, **config.engine.arguments}


class RolloutEngine:
    """An engine that serves the policy's weights."""

    policy: vLLMWrapper | None  # ``None``: another rank has the engine

    def __init__(
        self, policy_model: PolicyModel, config: GRPOConfig, folder: Path, engine: AsyncVLLM | None = None
    ) -> None:
        self.config, self.policy_model = config, policy_model
        self.start = policy_model.start
        # three kinds of engines: given (left alone), joined (left at the end), its own (started and shut down)
        self._joins_engine = engine is None and config.engine.connect is not None
        self._owns_engine = engine is None and not self._joins_engine
        # all that the configuration may have wrong, before an engine is started
        setting = "engine.sync"
        try:
            scheme = VLLMWeightSyncScheme(**config.engine.sync)
            setting = "rollout.sampling"
            sampling_params_of(config.rollout.generate_kwargs())
            setting = "chat_template_kwargs"
            options = template_options(config.chat_template_kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError.of(setting, error) from error
        is_chat = reads_chats(policy_model.tokenizer)
        if not is_chat:
            LOG.warning("the tokenizer has no chat template: prompts are sent as they are, without roles or markers")
        self.sender = scheme.create_sender()
        done = steps_saved(folder / "checkpoints") if config.resume else 0
        try:
            self.engine = self._start(folder, done) if engine is None else engine
        except BaseException:
            self.sender.shutdown()
            self.forget_start()
            raise
        # the engine runs: from here on a mistake ends it again
        try:
            if done and not self._owns_engine:  # it may be as fresh as a new one
                self.engine.set_seed(seed_after(config.seed, done))
            self.sender.register_model(policy_model.model)
            self.sender.init_all_workers_group(None, vllm_engine=self.engine)
            self.policy = vLLMWrapper(
                self.engine,
                tokenizer=policy_model.tokenizer,
                input_mode="history" if is_chat else "text",
                chat_template_kwargs=options,
                generate_kwargs=config.rollout.generate_kwargs(),
                return_routed_experts=None if config.loss.replay == "R3" else False,  # nothing else reads them
            )
        except BaseException:
            self.shutdown()
            self.forget_start()
            raise

    def _start(self, folder: Path, done: int) -> AsyncVLLM:
        engine = self.config.engine
        if engine.connect is not None:
            return AsyncVLLM.connect(engine.connect)
        arguments = {"seed": self.config.seed, **engine_arguments(self.config)}
        arguments["seed"] = seed_after(int(arguments["seed"] or 0), done)
        if engine.backend == "local":
            check_room(self.policy_model, engine.num_replicas, arguments, engine.kind)
            per_replica = engine_kind(engine.kind).devices_per_replica(arguments)
            if "devices" not in arguments and (shared := shared_devices(engine.num_replicas, per_replica)):
                arguments["devices"] = shared
                LOG.info("replicas compute on the trainer's GPU too: %s; engine.sleep=true takes turns", shared)
        if engine.sleep and not torch.cuda.is_available():
            raise ConfigError("engine.sleep=True needs a GPU, whose memory the trainer uses meanwhile")
        if engine.sleep:
            arguments.setdefault("enable_sleep_mode", True)
        # a model that is in no folder is written into the run's: replicas are processes, and read it from there
        if self.policy_model.source is None:
            self.start = self.policy_model.save(new_start(folder))
        path = self.policy_model.source or str(self.start)
        LOG.info("starting %d replica(s) of %s on %s", engine.num_replicas, path, engine.kind)
        return AsyncVLLM.from_pretrained(
            path,
            num_replicas=engine.num_replicas,
            engine="vllm" if engine.kind == "vllm" else "transformers",
            backend="ray" if engine.backend == "ray" else "local",
            **arguments,
        )

    def forget_start(self) -> None:
        """Remove the model that replicas started from, because this run does not begin."""
        if self.start is not None:
            shutil.rmtree(self.start, ignore_errors=True)

    @property
    def has_the_models_weights(self) -> bool:
        """Whether the engine was started from this model, as it was at that time."""
        return self._owns_engine

    @property
    def dtype(self) -> str:
        """Torch's name of what the engine computes in; empty if it does not say."""
        return next((str(info.dtype) for info in self.engine.infos if info is not None), "")

    @property
    def version(self) -> int:
        """Version of the trainer's weights that the engine has."""
        return int(self.sender.version)

    def restore(self, version: int) -> None:
        """Sync the trainer's weights to the engine, under their old version or, if the engine is past it, its next.

        An engine's version never decreases: otherwise a request for a version would wait forever.
        """
        self.sender.version = max(self.sender.version, version - 1)
        self.sync()

    def sync(self) -> SyncReport:
        """Sync the trainer's weights to the engine."""
        report = self.sender.update_weights()
        for replica, reason in report.failed.items():
            LOG.warning("replica %s does not hold version %s: %s", replica, report.version, reason)
        return report

    def sleep(self) -> None:
        """Give the GPU's memory to the trainer, if the run is configured so."""
        if self.config.engine.sleep:
            self.engine.sleep()

    def wake_up(self) -> None:
        """Take the GPU's memory back for the engine."""
        if self.config.engine.sleep:
            self.engine.wake_up()

    def shutdown(self) -> None:
        """End the weight sync, and the engine if this object started it. Idempotent."""
        self.sender.shutdown()
        if self._owns_engine:
            self.engine.shutdown()
        elif self._joins_engine:
            self.engine.disconnect()


def seed_after(seed: int, steps: int) -> int:
    """Return an engine's seed for a run that continues after so many steps: it would else draw what step 0 drew.

    Hashed, because replicas, and those that are restarted, count their own seeds on from it.

    >>> seed_after(7, 0), seed_after(7, 2) == seed_after(9, 0)
    (7, False)
    """
    return int(np.random.SeedSequence([abs(seed), steps]).generate_state(1)[0] >> 1) if steps else seed


def shared_devices(num_replicas: int, per_replica: int) -> list[list[int]] | None:
    """Return the GPUs of each replica where the one process that trains leaves too few of its own; else ``None``.

    A machine with one GPU is the usual case. Those that nothing computes on come first.
    """
    count, of_trainer = torch.cuda.device_count(), devices_of_trainer()
    if not count or ranks_here() or count - len(of_trainer) >= num_replicas * per_replica:
        return None
    order = [*(index for index in range(count) if index not in of_trainer), *of_trainer]
    return [order[first : first + per_replica] for first in range(0, num_replicas * per_replica, per_replica)]


def check_room(policy_model: PolicyModel, num_replicas: int, arguments: Mapping[str, Any], kind: str = "vllm") -> None:
    """Refuse more replicas than this machine holds."""
    if torch.cuda.is_available():
        needed = num_replicas * engine_kind(kind).devices_per_replica(arguments)
        found = torch.cuda.device_count() - ranks_here()  # a single process may share its GPU with the engine
        if needed > found and "devices" not in arguments:
            raise ConfigError(f"engine.num_replicas={num_replicas} needs {needed} GPUs, and there are {found}")
        return
    # on a CPU each replica has the weights and its cache in the host's memory
    width = getattr(torch, str(arguments.get("dtype", "float32")), torch.float32).itemsize
    weights = sum(weight.numel() for weight in policy_model.model.parameters()) * width
    each = weights + int(arguments.get("kv_cache_memory_bytes") or 0)
    free = psutil.virtual_memory().available
    if num_replicas * each > free:
        raise ConfigError(
            f"engine.num_replicas={num_replicas} needs {num_replicas * each / 1e9:.1f} GB of memory, and "
            f"{free / 1e9:.1f} GB are free"
        )


# The prompts and rewards, for training and for held-out evaluation.
TASKS = {"gsm8k": "GSM8KEnv", "math": "MATHEnv", "countdown": "CountdownEnv", "ifeval": "IFEvalEnv"}
"""Name -> class of :mod:`torchrl.envs.llm`."""
DRAWN = ("countdown",)
"""Tasks whose prompts are generated, so another seed gives held-out ones. The others have no split argument."""
NO_TEMPLATE = "set tokenizer.chat_template, or use texts as prompts, which are then sent as they are"


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a trainer was given to train on; ``None``: ``config.data`` says it."""

    dataset: object = None
    env: EnvLike | None = None
    rewards: Sequence[RewardFunction] | RewardFunction | None = None
    held_out: object = None


@dataclass(frozen=True, slots=True)
class RolloutSource:
    """Where samples come from: an environment or a function, and the rows that it gets."""

    env: EnvLike | None
    dataloader: Iterable[TensorDictBase] | None
    held_out_env: EnvLike | None = None
    held_out_loader: Callable[[], Iterable[TensorDictBase]] | None = None
    held_out: int = 0

    @classmethod
    def of(cls, config: GRPOConfig, tokenizer: Tokenizer, given: Given) -> RolloutSource:
        """Make a source from a trainer's arguments, or from ``config.data``."""
        source = config.data.source if given.dataset is None else given.dataset
        if config.chat_template_kwargs and not reads_chats(tokenizer):
            raise ConfigError("chat_template_kwargs: the tokenizer has no chat template: set tokenizer.chat_template")
        is_task = isinstance(source, str) and source in TASKS
        try:
            if given.env is not None:
                return cls._of_env(config, tokenizer, given, given.env, source)
            if is_task:
                return cls._of_task(str(source), config, tokenizer, given)
            return cls._of_prompts(config, tokenizer, given, source)
        except ConfigError:
            raise
        except Exception as error:  # a user's function or a dataset's host may raise anything
            raise ConfigError.of(f"data.source={source}" if is_task else "data", error) from error

    @classmethod
    def check_names(cls, config: GRPOConfig, given: Given) -> None:
        """Import the functions that are named, which costs less than loading a model."""
        source = config.data.source if given.dataset is None else given.dataset
        if given.env is None and not (isinstance(source, str) and source in TASKS):
            _check_given(source)
            cls._rewards(config, given)
        if given.env is None and is_reasoning_task(source):
            try:
                check_reasoning_task(str(source), config.data.arguments)
            except (ImportError, ValueError) as error:
                raise ConfigError.of("data", error) from error
        named = {"data.source" if given.dataset is None else "dataset": source, "held_out": given.held_out}
        for name, value in named.items():
            if isinstance(value, str) and is_function_name(value) and not (is_path(value) or is_reasoning_task(value)):
                try:
                    import_function(value)
                except ValueError as error:
                    raise ConfigError.of(f"{name}={value}", error) from error

    @staticmethod
    def _rewards(config: GRPOConfig, given: Given) -> Rewards:
        source = config.data.source if given.dataset is None else given.dataset
        functions = config.data.rewards if given.rewards is None else given.rewards
        if is_reasoning_task(source) and not functions:
            functions = [reasoning_score]
        if isinstance(functions, list | tuple) and not functions:
            raise ConfigError("data.rewards=[]: name a function, package.module:function, or give the trainer rewards")
        try:
            return Rewards(functions, config.data.weights)
        except (TypeError, ValueError) as error:
            raise ConfigError.of("data.rewards" if given.rewards is None else "rewards", error) from error

    @classmethod
    def _of_env(
        cls, config: GRPOConfig, tokenizer: Tokenizer, given: Given, env: EnvLike, source: object
    ) -> RolloutSource:
        if given.rewards is not None:
            raise ConfigError("rewards are for a dataset: an env gives its own")
        if given.dataset is not None and not is_episode_function(env):
            raise ConfigError(
                "dataset and env: give one of them, or a dataset and an async function that plays a sample"
            )
        if not (isinstance(env, EnvBase) or callable(env) or is_episode_function(env)):
            raise ConfigError(
                "env must be an environment, a callable that makes one, or an async function that plays a sample, got "
                f"{type(env).__name__}"
            )
        if not is_episode_function(env):
            return cls._with_env(config, env, tokenizer, given.held_out)
        # the function makes its own prompts, from any column
        return cls._with_prompts(config, env, cls._load(config, source, given.held_out, None))

    @classmethod
    def _with_env(cls, config: GRPOConfig, env: EnvLike, tokenizer: Tokenizer, held_out: object) -> RolloutSource:
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
    def _of_task(cls, name: str, config: GRPOConfig, tokenizer: Tokenizer, given: Given) -> RolloutSource:
        from torchrl.envs import llm

        if given.rewards is not None:
            raise ConfigError(f"data.source={name} has rewards of its own: leave rewards out")
        make = getattr(llm, TASKS[name], None)
        if make is None:
            raise ConfigError(f"data.source={name}: this TorchRL has no {TASKS[name]}")
        arguments = {"tokenizer": tokenizer, "seed": config.seed, **config.data.arguments}
        env: EnvBase = make(num_envs=config.rollout.group_size, **arguments)
        held_out = given.held_out
        if held_out is None and name in DRAWN and config.eval.every:
            held_out = make(**{**arguments, "num_envs": 1, "seed": arguments["seed"] + 1})
        return cls._with_env(config, env, tokenizer, held_out)

    @classmethod
    def _of_prompts(cls, config: GRPOConfig, tokenizer: Tokenizer, given: Given, source: object) -> RolloutSource:
        prompts = cls._load(config, source, given.held_out, config.data.prompt)
        rewards = cls._rewards(config, given)
        rewards.check(prompts.columns)
        _check_rendering(config, tokenizer, prompts)
        episode = PromptEpisode(
            config.data.prompt,
            rewards,
            is_chat=reads_chats(tokenizer),
            tokenizer=tokenizer,
            skip_special_tokens=config.rollout.sampling.get("skip_special_tokens", True),
        )
        return cls._with_prompts(config, episode, prompts)

    @staticmethod
    def _load(config: GRPOConfig, source: object, held_out: object, prompt: str | None) -> PromptSet:
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
    def _with_prompts(cls, config: GRPOConfig, env: EnvLike, prompts: PromptSet) -> RolloutSource:
        count = min(len(prompts.held_out), config.eval.prompts)
        return cls(env, prompts.loader(config.seed), env if count else None, prompts.held_out_loader, count)

    def evaluate(
        self, policy: vLLMWrapper | None, timeout: float | None = None, max_turns: int = MAX_TURNS
    ) -> float | None:
        """Return the mean reward of greedy answers to held-out prompts; ``None``: nothing is held out."""
        if policy is None or self.held_out_env is None or not self.held_out:
            return None
        loader = None if self.held_out_loader is None else self.held_out_loader()
        rows = evaluate(
            policy,
            self.held_out_env,
            self.held_out,
            loader,
            timeout,
            use_tqdm=False,
            max_turns=max_turns,
            temperature=0.0,
        )
        # of several turns a row is the last one, with the sum of all rewards
        rewards = [row.get(("next", "episode_reward"), None) for row in rows.unbind(0)]
        if any(reward is None for reward in rewards):
            raise ValueError("a held-out answer has no reward in one of its turns")
        return sum(float(reward.sum()) for reward in rewards) / len(rewards)


def _check_given(source: object) -> None:
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


def _check_rendering(config: GRPOConfig, tokenizer: Tokenizer, prompts: PromptSet) -> None:
    """Check that prompts fit the tokenizer's chat template, by rendering the first of each part."""
    column = config.data.prompt
    # without a template every row must be text; with one, the first of each part shows whether it renders
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
