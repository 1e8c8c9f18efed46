"""The settings of a training run: plain dataclasses, read from YAML by Hydra or filled in by a notebook."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from torchrl_moe.trainers.hardware_config import HardwareConfig
from torchrl_moe.trainers.placement_config import PlacementConfig
from torchrl_moe.trainers.yaml_text import yaml_text

__all__ = [
    "CheckpointConfig",
    "ConfigError",
    "DataConfig",
    "EngineConfig",
    "EvalConfig",
    "GRPOConfig",
    "LoRAConfig",
    "LogConfig",
    "LossConfig",
    "ModelConfig",
    "OptimConfig",
    "RolloutConfig",
    "as_dict",
    "as_yaml",
]

REPLAYS = ("R3", "R2", "none")
DTYPES = ("auto", "float32", "bfloat16")
ADVANTAGES = ("grpo", "rloo", "dr_grpo", "reinforce_plus_plus")
REFERENCES = ("auto", "adapter", "model", "engine")
SCHEDULES = ("constant", "linear", "cosine")
LORA_TARGETS = ("attention", "experts", "all")
LOGGERS = ("csv", "tensorboard", "wandb", "trackio", "mlflow")


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


@dataclass(kw_only=True)
class LoRAConfig:
    """An adapter (arXiv 2106.09685), trained instead of the whole model.

    Attributes:
        rank: of the two factors; 0: no adapter, all weights are trained.
        alpha: the adapter is scaled by ``alpha / rank``.
        target: ``"attention"``, ``"experts"`` or ``"all"`` (both).
    """

    rank: int = 0
    alpha: float = 32.0
    target: str = "attention"


@dataclass(kw_only=True)
class ModelConfig:
    """The model that is trained.

    Attributes:
        source: a folder, a hub name, or ``package.module:function`` that returns a model and its tokenizer; unused if
            a model is given.
        arguments: of the function.
        pretrained: further arguments of ``from_pretrained``, such as ``attn_implementation``.
        dtype: of forward passes; ``"auto"`` is bfloat16 where there is CUDA, else float32. Trained weights, gradients
            and the optimizer are always float32.
        activation_checkpointing: recompute activations in the backward pass instead of storing them.
        lora: an adapter.
    """

    source: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    pretrained: dict[str, Any] = field(default_factory=dict)
    dtype: str = "auto"
    activation_checkpointing: bool = False
    lora: LoRAConfig = field(default_factory=LoRAConfig)


@dataclass(kw_only=True)
class DataConfig:
    """The prompts, and how answers are rewarded.

    Attributes:
        source: a file or folder of JSON lines, a hub name, ``package.module:function``, or one of TorchRL's tasks:
            ``gsm8k``, ``math``, ``countdown``, ``ifeval``; unused if a dataset or an environment is given.
        arguments: of the function, of ``datasets.load_dataset``, or of the task.
        prompt: the column of prompts: texts, or lists of messages.
        held_out: number of prompts held out for evaluation, if the source has no held-out split.
        rewards: functions, ``package.module:function``; unused if functions are given, or the task has its own.
        weights: of the rewards; ``None``: 1 each.
    """

    source: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)
    prompt: str = "prompt"
    held_out: int = 0
    rewards: list[str] = field(default_factory=list)
    weights: list[float] | None = None


@dataclass(kw_only=True)
class EngineConfig:
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
            own.
    """

    kind: str = "vllm"
    num_replicas: int = 1
    backend: str = "local"
    arguments: dict[str, Any] = field(default_factory=dict)
    sync: dict[str, Any] = field(default_factory=dict)
    sync_every: int = 1
    sleep: bool = False
    connect: str | None = None


@dataclass(kw_only=True)
class RolloutConfig:
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

    prompts_per_step: int = 16
    group_size: int = 8
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    sampling: dict[str, Any] = field(default_factory=dict)
    max_staleness: int = 0
    order: str = "window"
    window: float = 0.3
    on_stale: str = "wait"
    over_sample: float = 1.0
    reward_timeout: float | None = 60.0
    max_failures: int | None = None
    drop_uniform_groups: bool = False
    max_dropped_groups: int | None = None
    max_turns: int = 256


@dataclass(kw_only=True)
class LossConfig:
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
    advantage: str = "grpo"
    replay: str = "R3"
    reference: str = "auto"
    router: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class OptimConfig:
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
    """

    lr: float = 1e-6
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    weight_decay: float = 0.0
    schedule: str = "constant"
    warmup_steps: int = 0
    max_grad_norm: float | None = 1.0
    epochs: int = 1
    minibatches: int = 1
    max_tokens: int | None = None


@dataclass(kw_only=True)
class EvalConfig:
    """Evaluation: greedy answers to held-out prompts, generated while the next step runs.

    Attributes:
        every: steps between evaluations; the first is before any update, the last at the end; 0: no evaluation.
        prompts: the greatest number of prompts.
        mismatch_every: steps between measurements of the mismatch, which cost a forward pass with replay and one
            without; 0: none.
        max_mismatch: the greatest ``kl`` of answers by the newest weights, where engine and trainer compute in float32:
            more is a fault, and ends the run. ``None``: it is only warned of.
    """

    every: int = 10
    prompts: int = 200
    mismatch_every: int = 10
    max_mismatch: float | None = 0.01


@dataclass(kw_only=True)
class CheckpointConfig:
    """Checkpoints.

    Attributes:
        every: steps between checkpoints; 0 for none.
        keep: how many of the newest to keep, besides the one with the best held-out reward.
    """

    every: int = 10
    keep: int = 2


@dataclass(kw_only=True)
class LogConfig:
    """Where metrics go, besides ``metrics.csv``.

    Attributes:
        loggers: TorchRL's: ``csv``, ``tensorboard``, ``wandb``, ``trackio``, ``mlflow``.
        arguments: of each, by its name.
        samples: answers written to ``samples.jsonl`` at each step.
        progress: whether to show a progress bar, on a terminal or in a notebook.
    """

    loggers: list[str] = field(default_factory=lambda: ["tensorboard"])
    arguments: dict[str, Any] = field(default_factory=dict)
    samples: int = 4
    progress: bool = True


@dataclass(kw_only=True)
class GRPOConfig:
    """The configuration of a run.

    Attributes:
        out: the run's folder.
        seed: of all random draws.
        steps: number of training steps.
        resume: continue from the newest checkpoint in ``out``.
        hooks: functions, ``package.module:function``, called with the trainer before it starts, to register hooks.
        plan: print what the run would need, and do not start it.
        placement: how the ranks of a launcher share the model; no effect with a single process.

    >>> GRPOConfig(steps=5, optim=OptimConfig(lr=1e-5)).optim.lr
    1e-05
    """

    out: str = "runs/grpo"
    seed: int = 0
    steps: int = 100
    resume: bool = False
    hooks: list[str] = field(default_factory=list)
    plan: bool = False
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    log: LogConfig = field(default_factory=LogConfig)
    hardware: HardwareConfig = field(default_factory=HardwareConfig)

    def check(self) -> None:
        """Refuse invalid values, and values that YAML cannot hold.

        Raises:
            ConfigError: names the first one, as ``group.name=value``.
        """
        self.out = os.fspath(self.out)
        try:
            as_yaml(self)
        except ValueError as error:
            raise ConfigError(f"a value is not a plain number, text, list or dict: {error}") from error
        for name in POSITIVE:
            value = self.get(name)
            _check(0 < value < math.inf, name, value, "must be positive and finite")
        for name in POSITIVE_OR_NONE:
            value = self.get(name)
            _check(value is None or 0 < value < math.inf, name, value, "must be positive and finite, or null for none")
        for name in COUNTS:
            value = self.get(name)
            _check(value is None or value >= 0, name, value, "must be 0 or more")
        for name, allowed in CHOICES.items():
            value = self.get(name)
            _check(value in allowed, name, value, f"must be one of {', '.join(allowed)}")
        for name in self.log.loggers:
            _check(name in LOGGERS, "log.loggers", name, f"must be of {', '.join(LOGGERS)}")
        rollout = self.rollout
        _check(rollout.group_size > 1, "rollout.group_size", 1, "is too few: an advantage compares two answers")
        _check(0 < rollout.top_p <= 1, "rollout.top_p", rollout.top_p, "must be above 0 and at most 1")
        answers, parts = rollout.prompts_per_step * rollout.group_size, self.optim.minibatches
        _check(answers % parts == 0, "optim.minibatches", parts, f"does not divide the {answers} answers of a step")
        betas = self.optim.betas
        proper = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
        _check(proper, "optim.betas", betas, "must be two numbers, at least 0 and below 1")
        asleep = self.engine.sleep and rollout.max_staleness > 0
        _check(not self.engine.sleep or self.engine.kind == "vllm", "engine.sleep", True, "needs engine.kind=vllm")
        _check(not asleep, "engine.sleep", True, "needs rollout.max_staleness=0: a sleeping engine generates nothing")
        lent = self.engine.connect is not None and (self.engine.sleep or bool(self.engine.arguments))
        _check(not lent, "engine.connect", self.engine.connect, "is started elsewhere: leave sleep and arguments out")
        _check_lora(self)

    def get(self, name: str) -> Any:
        """Return a setting by its dotted name."""
        value: Any = self
        for part in name.split("."):
            value = getattr(value, part)
        return value


POSITIVE = (
    "steps", "engine.num_replicas", "engine.sync_every", "rollout.prompts_per_step", "rollout.group_size",
    "rollout.max_new_tokens", "rollout.max_turns", "rollout.temperature", "optim.lr", "optim.epochs",
    "optim.minibatches", "eval.prompts",
    "checkpoint.keep", "hardware.gpu_gb", "hardware.host_gb", "hardware.gpus_per_host", "hardware.trainer_gpus",
    "hardware.expert_imbalance", "placement.tensor_parallel", "placement.expert_parallel", "placement.replicate",
    "placement.timeout", "placement.collective_timeout",
)  # fmt: skip
POSITIVE_OR_NONE = ("optim.max_grad_norm", "optim.max_tokens", "rollout.reward_timeout", "eval.max_mismatch")
COUNTS = (
    "optim.weight_decay",
    "data.held_out", "rollout.max_staleness", "rollout.max_failures", "rollout.max_dropped_groups", "rollout.top_k",
    "optim.warmup_steps",
    "model.lora.rank", "eval.every", "eval.mismatch_every", "checkpoint.every", "log.samples",
)  # fmt: skip
CHOICES = {
    "model.dtype": DTYPES,
    "engine.kind": ("vllm", "transformers"),
    "engine.backend": ("local", "ray"),
    "loss.advantage": ADVANTAGES,
    "loss.replay": REPLAYS,
    "loss.reference": REFERENCES,
    "optim.schedule": SCHEDULES,
}


def _check(holds: bool, name: str, value: Any, problem: str) -> None:
    if not holds:
        raise ConfigError(f"{name}={value} {problem}")


def _check_lora(config: GRPOConfig) -> None:
    lora = config.model.lora
    _check(lora.target in LORA_TARGETS, "model.lora.target", lora.target, f"must be one of {', '.join(LORA_TARGETS)}")


def as_dict(config: Any) -> Any:
    """Return nested dataclasses as nested dicts, for YAML."""
    if is_dataclass(config) and not isinstance(config, type):
        return {item.name: as_dict(getattr(config, item.name)) for item in fields(config)}
    return config


def as_yaml(config: GRPOConfig) -> str:
    """Return a configuration as YAML, which :func:`~torchrl_moe.trainers.compose.load_config` reads again."""
    return yaml_text(as_dict(config))
