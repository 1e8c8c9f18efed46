"""Reading and checking the configuration of a run: every mistake is one clear line, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from torchrl_moe.testing.arithmetic import OPERATIONS
from torchrl_moe.testing.warm_up import MISTAKES, WarmUp

CONFIG = Path(__file__).parent / "config"
# What a checkpoint's weights, or its split of problems, depend on.
FIXED = ("model", "task", "seed", "replay")
# A smaller run in which trainer and engine agree to rounding: one-digit sums, two layers, float32. Tests and benchmarks
# use it where a fault must show against that agreement.
ONE_DIGIT = (
    "model.num_hidden_layers=2", "model.num_experts=8", "model.num_experts_per_tok=2", "task.operation=sum",
    "task.digits=1", "task.held_out=20", "warmup.mistake=random", "warmup.noise=0.7", "warmup.noisy_lr=1e-3",
    "warmup.noisy_target=0.25", "warmup.batch_size=256", "engine.dtype=float32", "rollout.max_new_tokens=4",
    "train.dtype=float32", "train.lr=5e-4", "train.steps=60",
)  # fmt: skip
DTYPES = ("float32", "bfloat16")
CONTROLS = ("none", "shift_routes", "wrong_ids", "no_sync", "shuffle_advantages")


class InputError(ValueError):
    """A setting that cannot be meant."""


def load_settings(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with ``key=value`` overrides; a resumed run keeps its own, and they change only that.

    Raises:
        InputError: an unknown key, a value of the wrong kind, or settings that do not fit together.
    """
    try:
        with initialize_config_dir(str(CONFIG.resolve()), version_base=None):
            defaults = compose("train")
            settings = compose("train", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(str(error).splitlines()[0]) from error
    _check_kinds(settings, defaults)
    if settings.resume:
        settings = _of_the_run(settings, overrides)
    check_settings(settings)
    return settings


def _of_the_run(settings: DictConfig, overrides: Sequence[str]) -> DictConfig:
    """Return the settings that the run folder has, with what was asked for now."""
    saved = Path(settings.out) / "config.yaml"
    _check(saved.exists(), f"resume=true, but there is no run in {settings.out}")
    before = OmegaConf.load(saved)
    assert isinstance(before, DictConfig)
    changed = OmegaConf.merge(before, OmegaConf.from_dotlist([item.lstrip("+") for item in overrides]))
    assert isinstance(changed, DictConfig)
    for name in FIXED:
        was, now = OmegaConf.select(before, name), OmegaConf.select(changed, name)
        _check(was == now, f"resume=true goes on with {name}={was}; it cannot be changed to {now}")
    return changed


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def _check_kinds(settings: Any, defaults: Any, where: str = "") -> None:
    """Check that every value is of the kind of its default."""
    for key, default in defaults.items():
        name, value = f"{where}{key}", settings[key]
        if isinstance(default, DictConfig):
            _check(isinstance(value, DictConfig), f"{name}={value} must be a group of settings")
            _check_kinds(value, default, f"{name}.")
        elif isinstance(default, ListConfig):
            numbers = isinstance(value, ListConfig) and all(isinstance(item, int | float) for item in value)
            _check(numbers and len(value) == len(default), f"{name}={value} must be {len(default)} numbers, [a, b]")
        elif isinstance(default, bool):
            _check(isinstance(value, bool), f"{name}={value} must be true or false")
        elif isinstance(default, int | float):
            whole = isinstance(default, int)
            good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
            _check(good, f"{name}={value} must be a {'whole ' if whole else ''}number")
        else:
            allowed = isinstance(value, str) or (default is None and value is None)
            _check(allowed, f"{name}={value} must be text")


def check_settings(settings: DictConfig) -> None:
    """Raise :class:`InputError` for the first setting that cannot be meant."""
    _positive(settings, "engine.num_replicas", "rollout.answers", "rollout.group_size", "rollout.max_new_tokens")
    _positive(settings, "train.steps", "train.checkpoint_every", "eval.every", "task.digits", "task.held_out")
    _positive(settings, "train.sync_every", "warmup.batch_size", "warmup.max_steps")
    answers, group = settings.rollout.answers, settings.rollout.group_size
    _check(answers % group == 0, f"rollout.answers={answers} is not a multiple of rollout.group_size={group}")
    _check(group > 1, "rollout.group_size=1: an advantage needs at least two answers to compare")
    _check(settings.rollout.temperature > 0, f"rollout.temperature={settings.rollout.temperature} must be positive")
    top_p, top_k = settings.rollout.top_p, settings.rollout.top_k
    _check(0 < top_p <= 1, f"rollout.top_p={top_p} must be above 0 and at most 1")
    _check(top_k >= 0, f"rollout.top_k={top_k} must be 0, for all words, or more")
    operation, digits = settings.task.operation, settings.task.digits
    _check(operation in OPERATIONS, f"task.operation={operation} must be one of {', '.join(OPERATIONS)}")
    problems = 10 ** (2 * digits if operation == "sum" else digits)
    _check(
        settings.task.held_out < problems, f"task.held_out={settings.task.held_out} leaves none of {problems} to train"
    )
    prompt = (2 * digits + 2 if operation == "sum" else digits + 3) + 2  # the question between two markers
    room = settings.engine.max_model_len - prompt
    _check(settings.rollout.max_new_tokens <= room, f"rollout.max_new_tokens must be at most {room} here")
    _check(settings.replay in ("R3", "R2", "none"), f"replay={settings.replay} must be R3, R2 or none")
    mistake = settings.warmup.mistake
    _check(mistake in MISTAKES, f"warmup.mistake={mistake} must be one of {', '.join(MISTAKES)}")
    try:
        WarmUp(**settings.warmup).check()
    except ValueError as error:
        raise InputError(f"warmup.{error}") from error
    dtype = settings.train.dtype
    _check(dtype in DTYPES, f"train.dtype={dtype} must be one of {', '.join(DTYPES)}")
    _check(settings.control in CONTROLS, f"control={settings.control} must be one of {', '.join(CONTROLS)}")
    _check_model(settings)


def _positive(settings: DictConfig, *names: str) -> None:
    for name in names:
        value: Any = OmegaConf.select(settings, name)
        _check(isinstance(value, int) and value > 0, f"{name}={value} must be a positive whole number")


def _check_model(settings: DictConfig) -> None:
    path = settings.model.path
    if path is None:
        experts, chosen = settings.model.num_experts, settings.model.num_experts_per_tok
        _check(0 < chosen <= experts, f"model.num_experts_per_tok={chosen} must be in 1..{experts}")
    elif path.startswith((".", "/")) or Path(path).exists():
        _check((Path(path) / "config.json").is_file(), f"model.path={path}: there is no model in that folder")
