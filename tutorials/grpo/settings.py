"""Reading and checking the configuration of a run: every mistake is one clear line, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

CONFIG = Path(__file__).parent / "config"
CONTROLS = ("none", "shift_routes", "wrong_ids", "no_sync", "shuffle_advantages")


class InputError(ValueError):
    """A setting that cannot be meant."""


def load_settings(overrides: Sequence[str]) -> DictConfig:
    """Return the configuration with ``key=value`` overrides.

    Raises:
        InputError: an unknown key, a value of the wrong kind, or settings that do not fit together.
    """
    try:
        with initialize_config_dir(str(CONFIG.resolve()), version_base=None):
            settings = compose("train", overrides=list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise InputError(str(error).splitlines()[0]) from error
    check_settings(settings)
    return settings


def _check(holds: bool, message: str) -> None:
    if not holds:
        raise InputError(message)


def check_settings(settings: DictConfig) -> None:
    """Raise :class:`InputError` for the first setting that cannot be meant."""
    _positive(settings, "engine.num_replicas", "rollout.answers", "rollout.group_size", "rollout.max_new_tokens")
    _positive(settings, "train.steps", "train.checkpoint_every", "eval.every", "task.digits", "task.held_out")
    answers, group = settings.rollout.answers, settings.rollout.group_size
    _check(answers % group == 0, f"rollout.answers={answers} is not a multiple of rollout.group_size={group}")
    _check(group > 1, "rollout.group_size=1: an advantage needs at least two answers to compare")
    _check(settings.rollout.temperature > 0, f"rollout.temperature={settings.rollout.temperature} must be positive")
    _check(settings.replay in ("R3", "R2", "none"), f"replay={settings.replay} must be R3, R2 or none")
    _check(settings.control in CONTROLS, f"control={settings.control} must be one of {', '.join(CONTROLS)}")
    _check_model(settings)
    checkpoint = Path(settings.out) / "checkpoint.pt"
    _check(not settings.resume or checkpoint.exists(), f"resume=true, but there is no {checkpoint}")


def _positive(settings: DictConfig, *names: str) -> None:
    from omegaconf import OmegaConf

    for name in names:
        value: Any = OmegaConf.select(settings, name)
        _check(isinstance(value, int) and value > 0, f"{name}={value} must be a positive whole number")


def _check_model(settings: DictConfig) -> None:
    path = settings.model.path
    if path is None:
        experts, chosen = settings.model.num_experts, settings.model.num_experts_per_tok
        _check(0 < chosen <= experts, f"model.num_experts_per_tok={chosen} must be in 1..{experts}")
        return
    local = str(path).startswith((".", "/")) or Path(path).exists()
    _check(not local or (Path(path) / "config.json").is_file(), f"model.path={path}: there is no model in that folder")
