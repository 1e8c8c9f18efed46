"""Configurations from YAML, by Hydra: named ones of this package, and overrides as ``key=value``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

try:
    import yaml  # type: ignore[import-untyped]
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
except ImportError as error:
    raise ImportError("configurations need Hydra: pip install 'torchrl_moe[train]'") from error

from torchrl_moe.trainers.config import ConfigError, GRPOConfig, as_dict

__all__ = ["CONFIGS", "load_config"]

CONFIGS = Path(__file__).parent / "configs"
FIXED = ("model", "data", "seed", "loss.replay")
"""Settings that a checkpoint's weights, or its position in the data, depend on."""
OPEN = (
    "model.arguments", "model.pretrained", "data.arguments", "engine.arguments", "engine.sync", "rollout.sampling",
    "loss.arguments", "loss.router", "log.arguments", "hardware.links",
)  # fmt: skip
"""Groups whose keys are parameters of another library's functions."""

ConfigStore.instance().store(name="grpo_config", node=GRPOConfig)


def load_config(name: str | Path = "tiny_cpu", overrides: Sequence[str] = ()) -> GRPOConfig:
    """Return a configuration, checked; a resumed run keeps its own, and changes only what is overridden.

    Args:
        name: of one in ``torchrl_moe/trainers/configs``, or a file of your own.
        overrides: ``key=value``, with dotted keys.

    Raises:
        ConfigError: there is no such configuration or key, a value is of another kind, or settings do not fit together.

    >>> load_config("tiny_cpu", ["rollout.group_size=4"]).rollout.group_size
    4
    """
    path = Path(name)
    folder, stem = (path.parent, path.stem) if path.suffix in (".yaml", ".yml") else (CONFIGS, str(name))
    if not (folder / f"{stem}{path.suffix or '.yaml'}").is_file():
        known = ", ".join(sorted(item.stem for item in CONFIGS.glob("*.yaml")))
        raise ConfigError(f"there is no configuration {name}; the package has {known}; or name a file, such as my.yaml")
    try:
        with initialize_config_dir(str(folder.resolve()), version_base=None):
            composed = compose(stem, overrides=[*_search(folder), *map(_open, overrides)])
        config: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(GRPOConfig), composed))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError) as error:
        raise ConfigError(_line(error)) from error
    assert isinstance(config, GRPOConfig)
    if config.resume:
        config = _of_the_run(config, overrides)
    config.check()
    return config


def _open(override: str) -> str:
    """Let an override add keys to a group that has no fixed ones."""
    key = override.split("=")[0]
    return f"++{override}" if any(key == name or key.startswith(f"{name}.") for name in OPEN) else override


def _search(folder: Path) -> list[str]:
    """Let a user's file build on those of the package."""
    return [] if folder == CONFIGS else [f"hydra.searchpath=[file://{CONFIGS}]"]


def _of_the_run(config: GRPOConfig, overrides: Sequence[str]) -> GRPOConfig:
    """Return the settings saved in the run's folder, with the requested overrides."""
    saved = Path(config.out) / "config.yaml"
    if not saved.exists():
        raise ConfigError(f"resume=true, but there is no run in {config.out}")
    try:
        before = OmegaConf.merge(OmegaConf.structured(GRPOConfig), OmegaConf.load(saved))
        asked = OmegaConf.from_dotlist([item.lstrip("+") for item in overrides])
        changed: Any = OmegaConf.to_object(OmegaConf.merge(before, asked))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{saved}: {_line(error)}") from error
    for name in FIXED:
        was, now = as_dict(_at(OmegaConf.to_object(before), name)), as_dict(_at(changed, name))
        if was != now:
            raise ConfigError(f"resume=true continues with {name}={was}; it cannot be changed to {now}")
    assert isinstance(changed, GRPOConfig)
    changed.resume, changed.out = True, config.out  # as requested, also in a user's own file
    return changed


def _at(config: Any, name: str) -> Any:
    assert isinstance(config, GRPOConfig)
    return config.get(name)


def _line(error: Exception) -> str:
    """Return a one-line message that names the offending key."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and str(cause):
        lines = [*lines[:1], *(line.strip() for line in str(cause).splitlines())]
    keys = [line for line in lines if line.startswith("full_key:")]
    return "; ".join([*lines[:1], *keys[:1], *_near(keys)])


def _near(keys: Sequence[str]) -> Iterator[str]:
    """Yield the setting whose name is nearest to one that there is not."""
    for key in keys[:1]:
        group, _, name = key.removeprefix("full_key:").strip().rpartition(".")
        try:
            known = as_dict(GRPOConfig().get(group)) if group else as_dict(GRPOConfig())
        except (AttributeError, KeyError):
            return
        if isinstance(known, dict) and name not in known:
            yield from (f"did you mean {near}?" for near in get_close_matches(name, known, 1, 0.4))
