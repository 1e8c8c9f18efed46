"""The settings of a training run: plain dataclasses, read from YAML by Hydra or filled in by a notebook."""

from __future__ import annotations

import inspect
import os
import re
import sys
import tempfile
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from functools import cache, partial
from importlib.util import find_spec
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeGuard, TypeVar, cast

from torchrl_moe._checks import LONGEST, is_number, shown

if TYPE_CHECKING:
    from torchrl_moe.objectives import GRPOLoss


# Dataclasses whose values are read by type and range, once, and whose names cannot be misspelt.
T = TypeVar("T")
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
"""Texts that YAML, and so Hydra, reads as a switch."""
MOST_BITS = 1000  # Python writes no integer of some thousand digits
PLAIN = (bool, int, float, str, types.NoneType)
BOUNDS = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
"""Bound of a number, as :func:`setting` takes it -> what a message says of it."""


class ConfigError(ValueError):
    """An invalid setting."""

    @classmethod
    def of(cls, name: str, error: Exception) -> ConfigError:
        """Return another error about a setting, as one line.

        >>> ConfigError.of("data", KeyError("answer")), ConfigError.of("data", ValueError("no rows\\nat all"))
        (ConfigError("data: KeyError: 'answer'"), ConfigError('data: no rows'))
        """
        if isinstance(error, cls):
            return error
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        speaks_for_itself = first and isinstance(error, OSError | TypeError | ValueError | ImportError)
        return cls(f"{name}: " + (first if speaks_for_itself else f"{type(error).__name__}: {first}".rstrip(": ")))


class UnknownSettingError(ConfigError, AttributeError):
    """There is no setting of that name."""


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Return a hint at the most similar name, or else all names.

    >>> nearest("stepps", ["steps", "seed"]), nearest("nonsense", ["steps", "seed"])
    ('did you mean steps?', 'there are steps, seed')
    """
    names = list(known)
    similar = get_close_matches(name, names, 1)
    return f"did you mean {similar[0]}?" if similar else f"there are {', '.join(names)}"


def setting(default: T, of: tuple[str, ...] = (), **bounds: float) -> T:
    """Return a dataclass field with what it allows."""
    metadata = {"of": of, "bounds": bounds}
    if isinstance(default, list | dict):
        return field(default_factory=partial(copy, default), metadata=metadata)
    return field(default=default, metadata=metadata)


class Settings:
    """Base of a group of settings, a dataclass.

    An attribute that is no setting raises, with the nearest name; a dict given for a group becomes the group.
    """

    _group: ClassVar[str] = ""

    def __init_subclass__(cls, group: str = "") -> None:
        cls._group = group

    def __new__(cls, **given: object) -> Self:
        """Refuse unknown names before ``__init__`` does, which names no other."""
        for name in given:
            cls.type_of(name)
        return super().__new__(cls)

    def __setattr__(self, name: str, value: object) -> None:
        kind = self.type_of(name)
        if isinstance(kind, type) and issubclass(kind, Settings) and isinstance(value, Mapping):
            value = kind(**value)
        super().__setattr__(name, value)

    @classmethod
    def type_of(cls, name: str) -> object:
        """Return a setting's type.

        Raises:
            UnknownSettingError: there is no such setting; the nearest name.
        """
        known = _types(cls)  # type: ignore[arg-type]  # a class is hashable
        if name not in known:
            raise UnknownSettingError(f"there is no setting {cls._dotted(name)}: {nearest(str(name), known)}")
        return known[name]

    @classmethod
    def _dotted(cls, name: str) -> str:
        return f"{cls._group}.{name}" if cls._group else str(name)

    def read(self) -> None:
        """Read each value by its type and range, as Hydra would: numbers in texts become numbers.

        Raises:
            ConfigError: names the first that is refused, as ``group.name=value``.
        """
        for item in fields(self):  # type: ignore[arg-type]  # each subclass is a dataclass
            name, kind, value = self._dotted(item.name), self.type_of(item.name), getattr(self, item.name)
            if isinstance(kind, type) and issubclass(kind, Settings):
                if not isinstance(value, kind):
                    problem = f"must be {kind.__name__}(...), or a dict of its settings; leave it out for the defaults"
                    raise ConfigError(f"{name}={_shown(value)} {problem}")
                value.read()
                continue
            # as Hydra would, also for those who fill the dataclasses by hand
            found = _read(value, kind, item)
            if found is MISSING:
                raise ConfigError(f"{name}={_shown(value)} must be {_allowed(kind, item)}")
            super().__setattr__(item.name, found)


@cache
def _types(cls: Callable[..., object]) -> dict[str, object]:
    hints = typing.get_type_hints(cls)
    return {item.name: hints[item.name] for item in fields(cls)}  # type: ignore[arg-type]  # each is a dataclass


def _shown(value: object) -> str:
    try:
        return f"{value:.80}" if isinstance(value, str) else shown(value)
    except ValueError:  # of repr: an integer in it has more digits than Python writes
        return f"a {type(value).__name__} with a huge integer"


def _read(value: object, kind: object, item: Field[object]) -> object:
    """Return a setting's value, or ``MISSING`` if it is refused."""
    origin, parts, limits = typing.get_origin(kind), typing.get_args(kind), item.metadata.get("bounds", {})
    if isinstance(kind, types.UnionType):  # "X | None" is the only union here
        return None if value is None else _read(value, parts[0], item)
    if origin is list:
        read = [_read(one, parts[0], item) for one in value] if isinstance(value, list | tuple) else [MISSING]
        return MISSING if MISSING in read else read
    if origin is dict:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            return MISSING
        if parts[1] is Any:  # another function's arguments, which are checked where it is known
            return dict(value) if _is_plain(value) else MISSING
        values = {key: _read(one, parts[1], item) for key, one in value.items()}
        return MISSING if MISSING in values.values() else values
    if kind is bool:
        value = SWITCHES.get(value.lower()) if isinstance(value, str) else value
        return value if isinstance(value, bool) else MISSING
    if kind is str:
        text = os.fspath(value) if isinstance(value, os.PathLike) else value
        # out=20261126, say, which a command line reads as a number
        text = str(text) if _is_number(text, float, {}) else text
        text = os.path.expanduser(text) if isinstance(text, str) else text  # out=~/runs, say
        of = item.metadata.get("of", ())
        fits = isinstance(text, str) and (text in of if of else text.strip() != "" and "\0" not in text)
        return text if fits else MISSING
    number: type[int] | type[float] = int if kind is int else float
    if isinstance(value, str):
        try:
            value = number(value)
        except ValueError:
            return MISSING
    return number(value) if _is_number(value, number, limits) else MISSING


def _allowed(kind: object, item: Field[object]) -> str:
    """Return what a setting of a type may be, in words."""
    parts, of, limits = typing.get_args(kind), item.metadata.get("of", ()), item.metadata.get("bounds", {})
    if isinstance(kind, types.UnionType):
        return f"{_allowed(parts[0], item)}, or null"
    if typing.get_origin(kind) is list:
        return f"a list, each {_allowed(parts[0], item)}"
    if typing.get_origin(kind) is dict:
        every = "a dict of plain numbers, texts, lists and dicts"
        return every if parts[1] is Any else f"a dict, each {_allowed(parts[1], item)}"
    if kind is bool:
        return "true or false"
    if kind is str:
        return f"one of {', '.join(of)}" if of else "a text that is not empty"
    bounds = " and ".join(f"{words} {limits[name]}" for name, words in BOUNDS.items() if name in limits)
    comma = ", " if bounds.startswith("at") else " " * bool(bounds)
    return f"{'a whole number' if kind is int else 'a number'}{comma}{bounds}"


def _is_plain(value: object) -> bool:
    """Whether YAML can hold a value; a subclass, such as numpy's floats, it cannot."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(one) for key, one in value.items())
    if type(value) is int and value.bit_length() > MOST_BITS:
        return False
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else type(value) in PLAIN


def _is_number(value: object, kind: type, limits: Mapping[str, float]) -> TypeGuard[float]:
    """Whether a value is a finite number of a kind within limits; a bool is none, and neither is text."""
    least, above, most, below = map(limits.get, BOUNDS)
    fits = is_number(value, least, most, above=above, below=below, whole=kind is int)
    # an integer may be larger than any float, such as 2**2000
    return fits and abs(cast(float, value)) <= sys.float_info.max


try:
    from omegaconf import OmegaConf
except ImportError as error:
    raise ImportError("configurations need OmegaConf: pip install 'torchrl_moe[train]'") from error


# The machines that a plan is made for.
LINKS = {
    "NVLink (one direction)": 450.0,
    "PCIe 5 x16": 63.0,
    "InfiniBand 400 Gb/s": 50.0,
    "Ethernet 100 Gb/s": 12.5,
    "Ethernet 10 Gb/s": 1.25,
    "NVMe disk": 5.0,
}


@dataclass(kw_only=True)
class HardwareConfig(Settings, group="hardware"):
    """What a plan is made for; a run does not read it.

    Attributes:
        gpu_gb: memory of a GPU, in 10^9 bytes.
        host_gb: memory of a host, in 10^9 bytes.
        gpus_per_host: number of GPUs of a host, for the trainer's hosts and the engine's.
        trainer_gpus: number of ranks that ``torchrun`` would start.
        expert_imbalance: tokens of the busiest rank under expert parallelism, as a multiple of the mean; the real value
            depends on the router, and is at most the number of such ranks.
        links: name -> 10^9 bytes per second, of the links that weights may be sent over.
    """

    gpu_gb: float = setting(80.0, above=0)
    host_gb: float = setting(1000.0, above=0)
    gpus_per_host: int = setting(8, least=1)
    trainer_gpus: int = setting(1, least=1)
    expert_imbalance: float = setting(2.0, above=0)
    links: dict[str, float] = setting(LINKS, above=0)


@dataclass(kw_only=True)
class PlacementConfig(Settings, group="placement"):
    """How the ranks that a launcher starts share the model. FSDP2 shards it over the remaining ranks.

    Attributes:
        tensor_parallel: number of ranks that split each layer, and see the same samples.
        expert_parallel: number of ranks that own different experts: a multiple of ``tensor_parallel`` that divides the
            number of ranks of a copy.
        replicate: number of copies of the sharded model (HSDP), for example one per node.
        cpu_offload: whether weights, gradients and optimizer are kept in host memory.
        reshard_after_forward: whether a layer's gathered weights are freed after its forward pass, and gathered again
            for its backward pass; ``False`` needs more memory and less communication.
        timeout: seconds that one rank waits for another before the run ends with an error that names it. While rank 0
            generates, syncs or writes, the others wait for it without a limit.
        collective_timeout: seconds that a collective may take, in the default process group, if it is made here, and in
            the model's groups. During a weight sync, collectives also wait for the weight store, so it must be above
            ``engine.sync.timeout_seconds``.
    """

    tensor_parallel: int = setting(1, least=1)
    expert_parallel: int = setting(1, least=1)
    replicate: int = setting(1, least=1)
    cpu_offload: bool = False
    reshard_after_forward: bool = True
    timeout: float = setting(600.0, above=0, most=LONGEST)
    collective_timeout: float = setting(600.0, above=0, most=LONGEST)


LARGEST = 2**31 - 1
"""What engines count in; vLLM's kernels take top_k as 32 bits."""


@dataclass(kw_only=True)
class LoRAConfig(Settings, group="model.lora"):
    """An adapter (arXiv 2106.09685), trained instead of the whole model.

    Attributes:
        rank: of the two factors; 0: no adapter, all weights are trained.
        alpha: the adapter is scaled by ``alpha / rank``.
        target: ``"attention"``, ``"experts"`` or ``"all"`` (both).
    """

    rank: int = setting(0, least=0, most=1 << 16)
    alpha: float = setting(32.0, above=0, most=1e6)
    target: str = setting("attention", of=("attention", "experts", "all"))


@dataclass(kw_only=True)
class ModelConfig(Settings, group="model"):
    """The model that is trained.

    Attributes:
        source: a folder, a hub name, or ``package.module:function`` that returns a model and its tokenizer; unused if
            a model is given.
        arguments: of the function.
        pretrained: further arguments of ``from_pretrained``, such as ``attn_implementation``.
        dtype: of forward passes; ``"auto"`` is bfloat16 where there is CUDA, else float32. Trained weights, gradients
            and the optimizer are always float32.
        router_dtype: of routers, in the trainer's forward passes and in the engine that the run starts: ``"auto"`` is
            ``dtype``, and the engine's own choice. ``"float32"`` rounds them nowhere; ranks that share the model then
            gather all weights in float32.
        activation_checkpointing: recompute activations in the backward pass instead of storing them.
        lora: an adapter.
    """

    source: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    pretrained: dict[str, Any] = field(default_factory=dict)
    dtype: str = setting("auto", of=("auto", "float32", "bfloat16"))
    router_dtype: str = setting("auto", of=("auto", "float32"))
    activation_checkpointing: bool = False
    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(kw_only=True)
class DataConfig(Settings, group="data"):
    """The prompts, and how answers are rewarded.

    Attributes:
        source: a file or folder of JSON lines, a hub name, ``package.module:function``, ``reasoning_gym:TASK``, or one
            of TorchRL's tasks: ``gsm8k``, ``math``, ``countdown``, ``ifeval``; unused if a dataset or an environment is
            given.
        arguments: of the function, of ``datasets.load_dataset``, or of the task; not used for a file or folder. Those
            of all tasks of reasoning-gym are ``size``, ``held_out``, ``seed``, ``instruction``, ``chat`` and
            ``run_answers``.
        prompt: the column of prompts: texts, or lists of messages; an async function as environment needs none. The
            columns ``tools`` and ``chat_template_kwargs``, where there are any, go to the chat template.
        held_out: number of prompts held out for evaluation. If the source has a held-out split they are drawn from it,
            and 0 takes all of it.
        rewards: functions, ``package.module:function``; unused if functions are given, or the task has its own.
        weights: of the rewards; ``None``: 1 each.
    """

    source: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    prompt: str = "prompt"
    held_out: int = setting(0, least=0)
    rewards: list[str] = field(default_factory=list)
    weights: list[float] | None = None


@dataclass(kw_only=True)
class EngineConfig(Settings, group="engine"):
    """The engine that generates.

    Attributes:
        kind: ``"vllm"``, or ``"transformers"``, which is slow but works where vLLM is not available.
        num_replicas: number of engines, each in its own process.
        backend: ``"local"`` processes or ``"ray"`` actors.
        arguments: of the engine, such as ``max_model_len``.
        sync: of :class:`~torchrl_moe.weight_update.VLLMWeightSyncScheme`, such as ``transport`` and ``mode``.
        sync_every: steps between weight updates.
        sleep: whether the engine sleeps while the trainer trains, for one GPU that both share; needs
            ``max_staleness=0``.
        connect: name of a service in the Ray cluster that another job starts and stops; default: the run starts its
            own. ``num_replicas`` and ``backend`` are then not used, ``arguments`` and ``sleep`` refused.
    """

    kind: str = setting("vllm", of=("vllm", "transformers"))
    num_replicas: int = setting(1, least=1, most=1 << 16)
    backend: str = setting("local", of=("local", "ray"))
    arguments: dict[str, Any] = field(default_factory=dict)
    sync: dict[str, Any] = field(default_factory=dict)
    sync_every: int = setting(1, least=1)
    sleep: bool = False
    connect: str | None = None


@dataclass(kw_only=True)
class RolloutConfig(Settings, group="rollout"):
    """How answers are collected.

    Attributes:
        prompts_per_step: groups of a batch.
        group_size: answers to each prompt.
        max_new_tokens, temperature, top_p, top_k: of sampling; ``top_k=0`` switches it off.
        sampling: more of vLLM's sampling parameters.
        max_staleness: bounds the age of a token, in weight updates; with 0, generation and training alternate.
        order, on_stale, over_sample, window: as for :class:`~torchrl_moe.collectors.AsyncLLMCollector`.
        reward_timeout: seconds that computing a reward may take.
        max_failures: groups that may fail because a reward or an environment raises; ``None``: a tenth of the run's
            groups, and at least one step's.
        drop_uniform_groups: replace groups whose answers all have the same reward (DAPO's dynamic sampling, arXiv
            2503.14476).
        max_dropped_groups: groups that may be replaced without a batch in between, because their rewards are the same
            or they are too old; ``None``: 100 batches' worth. Then the run ends.
        max_turns: of a sample; one that is not done by then counts as a failure.
    """

    prompts_per_step: int = setting(16, least=1, most=1 << 20)
    group_size: int = setting(8, least=2, most=1 << 16)
    max_new_tokens: int = setting(256, least=1, most=LARGEST)
    temperature: float = setting(1.0, above=0)
    top_p: float = setting(1.0, above=0, most=1)
    top_k: int = setting(0, least=0, most=LARGEST)
    sampling: dict[str, Any] = field(default_factory=dict)
    max_staleness: int = setting(0, least=0, most=1 << 16)
    order: str = setting("window", of=("fifo", "window", "ready"))
    window: float = setting(0.3, above=0, most=1)
    on_stale: str = setting("wait", of=("wait", "drop"))
    over_sample: float = setting(1.0, least=1, most=100)
    reward_timeout: float | None = setting(60.0, above=0, most=LONGEST)
    max_failures: int | None = setting(None, least=0)
    drop_uniform_groups: bool = False
    max_dropped_groups: int | None = setting(None, least=0)
    max_turns: int = setting(32, least=1)

    def generate_kwargs(self) -> dict[str, Any]:
        """Return all that answers are sampled with, under TorchRL's names."""
        named = ("max_new_tokens", "temperature", "top_p")
        top_k = {"top_k": self.top_k} if self.top_k else {}  # 0 means all tokens; TorchRL has no value for that
        return {**{name: getattr(self, name) for name in named}, **top_k, **self.sampling}


@dataclass(kw_only=True)
class LossConfig(Settings, group="loss"):
    """The loss that is minimised.

    Attributes:
        name: a loss of :mod:`torchrl_moe.objectives`.
        arguments: of the loss; ``entropy_bonus`` is off unless it is given.
        advantage: ``"grpo"``, ``"rloo"``, ``"dr_grpo"`` or ``"reinforce_plus_plus"``.
        replay: ``"R3"``: the engine's experts; ``"R2"``: the trainer's own, from its first forward pass; ``"none"``.
        reference: source of the reference's log-probs, if the loss needs them: ``"adapter"`` switches the adapter off,
            ``"model"`` is a second model, ``"engine"`` a second engine; ``"auto"`` is the first of these that is
            possible. The reference follows the same experts as the policy.
        router: arguments of :class:`~torchrl_moe.objectives.MoERouterLoss`; without any, that loss is not used.
    """

    name: str = "GRPOLoss"
    arguments: dict[str, Any] = field(default_factory=dict)
    advantage: str = setting("grpo", of=("grpo", "rloo", "dr_grpo", "reinforce_plus_plus"))
    replay: str = setting("R3", of=("R3", "R2", "none"))
    reference: str = setting("auto", of=("auto", "adapter", "model", "engine"))
    router: dict[str, Any] = field(default_factory=dict)

    def build(self, actor: object, top_k: int | None = None, **more: object) -> GRPOLoss:
        """Return the loss of an actor.

        Args:
            actor: of the policy; the loss is the same for any that can score.
            top_k: of the model's routers; ``None``: ``router`` has it.
            **more: arguments that win over ``arguments``.

        Raises:
            ConfigError: there is no such loss, or it does not accept an argument.
        """
        from torchrl_moe import objectives

        kind = getattr(objectives, self.name, None)
        if not _is_loss(kind):
            known = [key for key in dir(objectives) if _is_loss(getattr(objectives, key))]
            raise ConfigError(f"loss.name={self.name} must be one of {', '.join(known)}")
        arguments: dict[str, Any] = {"entropy_bonus": False, **self.arguments, **more}
        _check_names("loss.arguments", arguments, *(base for base in kind.__mro__ if _is_loss(base)))
        _check_names("loss.router", self.router, objectives.MoERouterLoss)
        part = "loss.router"
        try:
            if self.router:
                given = {**({} if top_k is None else {"top_k": top_k}), **self.router}
                arguments["router_loss"] = objectives.MoERouterLoss(actor, **given)
            part = "loss.arguments"
            # YAML has neither tuples nor dataclasses
            if isinstance(arguments.get("clip_epsilon"), list):
                arguments["clip_epsilon"] = tuple(arguments["clip_epsilon"])
            if isinstance(arguments.get("thresholds"), dict):
                _check_names("loss.arguments.thresholds", arguments["thresholds"], objectives.Thresholds)
                arguments["thresholds"] = objectives.Thresholds(**arguments["thresholds"])
            loss = kind(actor, **arguments)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ConfigError.of(part, error) from error
        if loss.aggregation == "none":
            raise ConfigError("loss.arguments: a loss per token (aggregation or reduction none) cannot be minimised")
        return loss


@dataclass(kw_only=True)
class OptimConfig(Settings, group="optim"):
    """The optimizer.

    Attributes:
        lr, betas, weight_decay: of AdamW.
        schedule: ``"constant"``, ``"linear"`` or ``"cosine"`` to 0 over the run.
        warmup_steps: optimizer steps over which the learning rate rises to ``lr``.
        max_grad_norm: gradients are clipped to this norm; ``None``: they are not.
        epochs: passes over a batch.
        minibatches: optimizer steps per pass.
        max_tokens: of a micro-batch, padding included; ``None``: a minibatch is one micro-batch. Affects memory, not
            gradients.
        max_bad_steps: optimizer steps in a row, skipped because their gradient is not finite, that end the run.
    """

    lr: float = setting(1e-6, above=0, most=1e3)
    betas: list[float] = setting([0.9, 0.999], least=0, below=1)
    weight_decay: float = setting(0.0, least=0)
    schedule: str = setting("constant", of=("constant", "linear", "cosine"))
    warmup_steps: int = setting(0, least=0)
    max_grad_norm: float | None = setting(1.0, above=0)
    epochs: int = setting(1, least=1)
    minibatches: int = setting(1, least=1)
    max_tokens: int | None = setting(None, least=1)
    max_bad_steps: int = setting(10, least=1)


@dataclass(kw_only=True)
class EvalConfig(Settings, group="eval"):
    """Evaluation: greedy answers to held-out prompts, generated while the next step runs.

    Attributes:
        every: steps between evaluations; the first is before any update, the last at the end; 0: no evaluation.
        prompts: the greatest number of prompts.
        mismatch_every: steps between measurements of the mismatch, which cost a forward pass with replay and one
            without; 0: none.
        max_mismatch: the greatest ``mismatch_kl`` of answers by the newest weights, where engine and trainer compute in
            float32: more is a fault, and ends the run. ``None``: it is only warned of. It is looked at where the
            mismatch is measured: never with ``mismatch_every=0``.
    """

    every: int = setting(10, least=0)
    prompts: int = setting(200, least=1)
    mismatch_every: int = setting(10, least=0)
    max_mismatch: float | None = setting(0.01, above=0)


@dataclass(kw_only=True)
class CheckpointConfig(Settings, group="checkpoint"):
    """Checkpoints.

    Attributes:
        every: steps between checkpoints; 0 for none.
        keep: how many of the newest to keep, besides the best one: by held-out reward, or where nothing is held out, by
            the mean reward of the last five steps.
        grace: seconds after a Ctrl-C, SIGTERM (a batch scheduler's) or SIGHUP (a terminal's end) in which the running
            step is finished and saved; 0, or without checkpoints: the run ends at once.
    """

    every: int = setting(10, least=0)
    keep: int = setting(2, least=1)
    grace: float = setting(60.0, least=0, most=LONGEST)


@dataclass(kw_only=True)
class SaveConfig(Settings, group="save"):
    """The model that the command writes at the end, and ``trainer.save_pretrained()`` at any time.

    Attributes:
        dtype: of its weights; ``"auto"`` is the dtype that the model was loaded in.
    """

    dtype: str = setting("auto", of=("auto", "float32", "bfloat16", "float16"))


@dataclass(kw_only=True)
class LogConfig(Settings, group="log"):
    """Where metrics go, besides ``metrics.csv``.

    Attributes:
        loggers: TorchRL's: ``csv``, ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``.
        arguments: of each, by its name.
        samples: answers written to ``samples.jsonl`` at each step.
        progress: whether to show progress: a bar on a terminal or in a notebook, lines elsewhere.
        print_every: steps between those lines.
        plot_every: steps between two versions of the figure ``run.png``, which the command draws at the end, too; 0:
            none before that.
    """

    loggers: list[str] = setting(["tensorboard"], of=("csv", "tensorboard", "wandb", "trackio", "mlflow"))
    arguments: dict[str, Any] = field(default_factory=dict)
    samples: int = setting(4, least=0)
    progress: bool = True
    print_every: int = setting(1, least=1)
    plot_every: int = setting(25, least=0)


@dataclass(kw_only=True)
class GRPOConfig(Settings):
    """The configuration of a run.

    Attributes:
        out: the run's folder.
        seed: of all random draws, of Python, NumPy, torch and an engine that the run starts: from 0 to 2^31 - 1.
        steps: number of training steps.
        resume: continue from the newest checkpoint in ``out``.
        overwrite: replace the run that ``out`` holds, once the first step of this one is done; otherwise such a folder
            is refused.
        hooks: functions, ``package.module:function``, called with the trainer before it starts, to register hooks.
        chat_template_kwargs: arguments of the chat template, such as ``enable_thinking``; a column of this name changes
            them for a row.
        plan: of the command line: print what the run would need, and start nothing. A trainer refuses it.
        parity: ``"exact"``: engine and trainer run the same kernels on the same shapes, and a sampled token whose
            log-prob here is not the engine's, bit by bit, ends the run. Slow: for experiments that need a baseline
            without mismatch. It needs ``engine.kind=transformers``.
        placement: how the ranks of a launcher share the model; a single process takes the defaults only.

    >>> GRPOConfig(steps=5, optim=OptimConfig(lr=1e-5)).optim.lr
    1e-05
    """

    out: str = "runs/grpo"
    seed: int = setting(0, least=0, most=LARGEST)
    steps: int = setting(100, least=1)
    resume: bool = False
    overwrite: bool = False
    hooks: list[str] = field(default_factory=list)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    plan: bool = False
    parity: str = setting("off", of=("off", "exact"))
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def check(self, passed_on: bool = True) -> None:
        """Refuse invalid values, and values that YAML cannot hold.

        Args:
            passed_on: also what is passed on to the loss, to sampling, to the weight sync and to loggers, which are
                imported for it: seconds, the first time.

        Raises:
            ConfigError: names the first one, as ``group.name=value``.
        """
        # each by itself, then together, then what others read
        self.read()
        _check_together(self)
        if not passed_on:
            return
        _check_sync(self)
        _check_sampling(self)
        _check_loggers(self)
        # an actor's model is not there yet; it has the top_k of its routers
        self.loss.build(_AnyActor(), top_k=1)

    def get(self, name: str) -> object:
        """Return a setting by its dotted name."""
        return attrgetter(name)(self)


def _check(holds: bool, name: str, value: object, problem: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} {problem}")


def _check_together(config: GRPOConfig) -> None:
    """Refuse settings that are fine by themselves and not together."""
    rollout, optim, engine = config.rollout, config.optim, config.engine
    answers, parts, betas = rollout.prompts_per_step * rollout.group_size, optim.minibatches, optim.betas
    _check(answers % parts == 0, "optim.minibatches", parts, f"does not divide the {answers} answers of a step")
    _check(len(betas) == 2, "optim.betas", betas, "must be two numbers, at least 0 and below 1")
    decay = "times optim.lr must be below 1: a step multiplies weights by 1 - lr * weight_decay"
    _check(optim.lr * optim.weight_decay < 1, "optim.weight_decay", optim.weight_decay, decay)
    surplus = "begins more groups than can be used in time: it needs rollout.on_stale=drop"
    fits = rollout.over_sample == 1 or rollout.on_stale == "drop"
    _check(fits, "rollout.over_sample", rollout.over_sample, surplus)
    _check(not (config.resume and config.overwrite), "overwrite", True, "contradicts resume=True: set one of them")
    _check(not engine.sleep or engine.kind == "vllm", "engine.sleep", True, "needs engine.kind=vllm")
    asleep = engine.sleep and rollout.max_staleness > 0
    _check(not asleep, "engine.sleep", True, "needs rollout.max_staleness=0: a sleeping engine generates nothing")
    lent = engine.connect is not None and (engine.sleep or bool(engine.arguments))
    _check(not lent, "engine.connect", engine.connect, "is started elsewhere: leave sleep and arguments out")
    if config.parity == "exact":
        _check_parity(config)
    longest = engine.arguments.get("max_model_len")
    if isinstance(longest, int) and not isinstance(longest, bool):
        limit = f"must be below engine.arguments.max_model_len={longest}, which has room for the prompt too"
        _check(rollout.max_new_tokens < longest, "rollout.max_new_tokens", rollout.max_new_tokens, limit)


def _check_parity(config: GRPOConfig) -> None:
    """Refuse settings under which log-probs of engine and trainer cannot be equal bit by bit."""
    engine, rollout, model = config.engine, config.rollout, config.model
    width = engine.arguments.get("max_model_len")
    needs = {
        "engine.kind=transformers: vLLM's kernels are others, and round otherwise": engine.kind == "transformers",
        "engine.connect=null, since it starts an engine of its own": engine.connect is None,
        "engine.arguments.max_model_len, the width of the rows that both read": type(width) is int,
        "engine.arguments.dtype=float32": str(engine.arguments.get("dtype")) in ("float32", "torch.float32"),
        "model.dtype=auto or float32": model.dtype != "bfloat16",
        "model.lora.rank=0: merged weights are not the sum that an adapter computes": not model.lora.rank,
        "rollout.max_staleness=0: older weights give other log-probs": rollout.max_staleness == 0,
        "engine.sync_every=1: older weights give other log-probs": engine.sync_every == 1,
        "one attention: engine.arguments.attn_implementation as in model.pretrained, or in neither": (
            engine.arguments.get("attn_implementation") == model.pretrained.get("attn_implementation")
        ),
    }
    for need, holds in needs.items():
        _check(holds, "parity", "exact", f"needs {need}")


# What is passed on is checked by what it is passed to; nothing is loaded or written.
class _AnyActor:
    """Stands for the policy, which a loss does not look at before its first batch."""

    score = None


def _check_sync(config: GRPOConfig) -> None:
    from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme

    given = config.engine.sync
    _check_names("engine.sync", given, VLLMWeightSyncScheme)
    try:  # with a folder, a scheme makes none
        VLLMWeightSyncScheme(**{"folder": tempfile.gettempdir(), **given})
    except (RuntimeError, TypeError, ValueError) as error:
        raise ConfigError.of("engine.sync", error) from error


def _check_sampling(config: GRPOConfig) -> None:
    from torchrl_moe.modules.backends.sampling_fields import FIELDS, check_fields
    from torchrl_moe.modules.backends.transformers.answer import read_sampling
    from torchrl_moe.modules.policies.prompts import template_options
    from torchrl_moe.modules.policies.rollout import refuse_changed_values
    from torchrl_moe.modules.policies.vllm_wrapper import engine_arguments_of, sampling_params_of

    try:
        template_options(config.chat_template_kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError.of("chat_template_kwargs", error) from error
    # by TorchRL's names, then by vLLM's, then what a run itself depends on
    engine, given = engine_arguments_of(config.rollout.generate_kwargs())
    elsewhere = [name for name in engine if name != "on_resume"]
    _check(not elsewhere, "rollout.sampling", elsewhere, "is no sampling parameter: leave it out")
    try:
        # before TorchRL compares numbers; it reads None as its default
        check_fields({name: value for name, value in given.items() if value is not None})
        params = sampling_params_of(given)
        for name in params:
            if name not in FIELDS:
                raise ConfigError(f"rollout.sampling: there is no {name}: {nearest(name, FIELDS)}")
        refuse_changed_values(params)
        check_fields(params)
        if config.engine.kind == "transformers":
            read_sampling(params)
    except (TypeError, ValueError) as error:
        raise ConfigError.of("rollout.sampling", error) from error
    for name, (good, problem) in FIXED_SAMPLING.items():
        _check(params.get(name, good[0]) in good, f"rollout.sampling.{name}", params.get(name), problem)
    greedy = params.get("temperature") == 0 or not isinstance(given.get("do_sample", True), bool)
    _check(
        not greedy, "rollout.sampling", config.rollout.sampling, "gives a group one answer: sample, at a temperature"
    )


_DROPPED = "is what no completion carries: leave it out"
FIXED_SAMPLING: dict[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "is for one prompt: set rollout.group_size"),
    "logprobs": ((0,), "must be 0, or left out: losses read the log-probs of sampled tokens"),
    "prompt_logprobs": ((None,), _DROPPED),
    "logprob_token_ids": ((None, []), _DROPPED),
    "prompt_logprob_token_ids": ((None, []), _DROPPED),
    "routed_experts_prompt_start": ((None, 0), _DROPPED),
}
"""Fields that a run depends on -> what they may be."""


def _check_loggers(config: GRPOConfig) -> None:
    from torchrl.record import loggers

    for name, given in config.log.arguments.items():
        _check(name in config.log.loggers, "log.arguments", name, f"is no logger of log.loggers={config.log.loggers}")
        _check(isinstance(given, dict), f"log.arguments.{name}", given, "must be a dict of the logger's arguments")
        _check(name in LOGGERS and LOGGERS[name] is not None, "log.arguments", name, "is a logger without arguments")
    for name in config.log.loggers:
        missing = "is not installed: pip install " + name
        _check(name == "csv" or find_spec(name) is not None, "log.loggers", name, missing)
        if kind := LOGGERS[name]:
            _check_names(f"log.arguments.{name}", config.log.arguments.get(name, {}), getattr(loggers, kind))


LOGGERS = {
    "csv": None,
    "tensorboard": None,
    "wandb": "WandbLogger",
    "trackio": "TrackioLogger",
    "mlflow": "MLFlowLogger",
}
"""Name -> TorchRL's class that is given arguments; ``None``: it takes none."""


def _check_names(setting: str, given: Mapping[str, object], *kinds: type) -> None:
    """Refuse arguments that no constructor of a class, or of its bases, names."""
    # a loss passes what it does not name on to its base; a class that takes any name checks them itself
    found = [inspect.signature(vars(kind).get("__init__", kind)).parameters for kind in kinds]
    if len(kinds) == 1 and any(parameter.kind is parameter.VAR_KEYWORD for parameter in found[0].values()):
        return
    known = [name for parameters in found for name in parameters if name not in ("self", "actor_network", "arguments")]
    for name in given:
        if name not in known:
            raise ConfigError(f"{setting}: {kinds[0].__name__} has no {name}: {nearest(name, dict.fromkeys(known))}")


def _is_loss(kind: object) -> TypeGuard[type[GRPOLoss]]:
    from torchrl_moe.objectives import GRPOLoss

    return isinstance(kind, type) and issubclass(kind, GRPOLoss)


def as_dict(config: Settings) -> dict[str, object]:
    """Return a group of settings, and those in it, as nested dicts, for YAML."""
    values = {name: getattr(config, name) for name in _types(type(config))}  # type: ignore[arg-type]
    return {name: as_dict(value) if isinstance(value, Settings) else value for name, value in values.items()}


def _dumped(values: dict[str, object]) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(_escaped(values)))


def _escaped(value: Any) -> Any:
    """Return values in which ``${`` is no reference to OmegaConf; in keys it never is."""
    if isinstance(value, dict):
        return {key: _escaped(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(one) for one in value]
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", value) if isinstance(value, str) else value


def as_yaml(config: Settings, explained: bool = False) -> str:
    """Return a configuration as YAML, which :func:`~torchrl_moe.trainers.compose.load_config` reads again.

    Args:
        config: a run's configuration, or a group of it.
        explained: whether a comment above each setting says what it is, from the classes of this module.

    >>> print(as_yaml(LoRAConfig(rank=8), explained=True))
    # of the two factors; 0: no adapter, all weights are trained.
    rank: 8
    # the adapter is scaled by alpha / rank.
    alpha: 32.0
    # "attention", "experts" or "all" (both).
    target: attention
    <BLANKLINE>
    """
    if not explained:
        return _dumped(as_dict(config))
    text = ""
    for name, about in _explanations(type(config)).items():
        text += (
            textwrap.fill(about, width=100, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) + "\n"
        )
        value = getattr(config, name)
        if isinstance(value, Settings):
            text += f"{name}:\n" + textwrap.indent(as_yaml(value, explained=True), "  ")
        else:
            text += _dumped({name: value})
    return text


def _explanations(group: type[Settings]) -> dict[str, str]:
    """Return name -> sentence, of all settings of a group, from the docstrings of it and of the groups in it."""
    entries = inspect.cleandoc(group.__doc__ or "").partition("Attributes:\n")[2].partition("\n\n")[0]
    found = re.findall(r"^ {4}([\w, ]+): (.*?)(?=^ {4}\w|\Z)", entries, re.DOTALL | re.MULTILINE)
    about = {name: " ".join(words.split()) for names, words in found for name in names.split(", ")}
    for name, kind in _types(group).items():  # type: ignore[arg-type]  # a class is hashable
        if isinstance(kind, type) and issubclass(kind, Settings):
            about[name] = inspect.cleandoc(kind.__doc__ or "").partition("\n\n")[0].replace("\n", " ")
    # without the marks of documentation, and in the words of YAML
    names = list(_types(group))  # type: ignore[arg-type]
    return {name: re.sub(r":\w+:`~?|`", "", about[name]).replace("None", "null") for name in names}
