"""Configurations from YAML, by Hydra: named ones of this package, and overrides as ``key=value``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

try:
    import yaml  # type: ignore[import-untyped]
    from hydra import compose, initialize_config_dir
    from hydra.core.config_store import ConfigStore
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException, MissingConfigException
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import ConfigTypeError, OmegaConfBaseException
except ImportError as error:
    raise ImportError("configurations need Hydra: pip install 'torchrl_moe[train]'") from error

from torchrl_moe.trainers.config import ConfigError, GRPOConfig, Settings, as_dict
from torchrl_moe.trainers.function_names import look_in

CONFIGS = Path(__file__).parent / "configs"
FIXED = ("model", "data", "seed", "loss.replay")
"""Settings that a checkpoint's weights, or its position in the data, depend on."""

ConfigStore.instance().store(name="grpo_config", node={})  # which files for earlier versions begin with


def load_config(name: str | Path = "tiny_cpu", overrides: Sequence[str] = ()) -> GRPOConfig:
    """Return a configuration, checked but for what is passed on.

    A resumed run keeps its own, and changes only what is overridden.

    Args:
        name: of one in ``torchrl_moe/trainers/configs``, or a file of your own; modules of functions that it names may
            lie beside it.
        overrides: ``key=value``, with dotted keys.

    Raises:
        ConfigError: there is no such configuration or key, a value is of another kind, or settings do not fit together.

    >>> load_config("tiny_cpu", ["rollout.group_size=4"]).rollout.group_size
    4
    """
    path = Path(name).expanduser()
    is_own = path.suffix == ".yaml"
    if path.is_file() and not is_own:
        raise ConfigError(f"{name} is no .yaml file: rename it (JSON is YAML too)")
    if is_own:
        look_in(path.parent)  # functions that it names may lie beside it
    folder, stem = (path.parent, path.stem) if is_own else (CONFIGS, str(name))
    if not (folder / f"{stem}.yaml").is_file():
        known = f"the package has {_names()}; or name a file, such as my.yaml"
        raise ConfigError(f"there is no configuration {name}; {known}")
    changes = [_known(item) for item in overrides]
    config = _composed(folder, stem, changes)
    # a resumed run reads the settings saved in its folder instead, with the same changes
    if config.resume:
        saved = Path(config.out) / "config.yaml"
        if not saved.exists():
            raise ConfigError(f"resume=true, but there is no run in {config.out}")
        before, changed = saved_config(saved), _composed(saved.parent, saved.stem, changes)
        changed.read()
        # another model, seed or data would not fit the weights, or the position in the data
        for fixed in FIXED:
            values = (before.get(fixed), changed.get(fixed))
            was, now = (as_dict(value) if isinstance(value, Settings) else value for value in values)
            if was != now:
                raise ConfigError(f"resume=true continues with {fixed}={was}; it cannot be changed to {now}")
        config = replace(changed, resume=True, out=config.out)  # as requested, also in a user's own file
    config.check(passed_on=False)  # a trainer checks that too, before it loads anything
    return config


def _known(override: str) -> str:
    """Return an override as Hydra needs it; it may add a key where any is allowed, and only there."""
    name, is_one, value = (part.strip() for part in override.lstrip("+").partition("="))
    if name.startswith(("hydra", "~")):
        return override
    if not is_one:
        raise ConfigError(f"{override!r} is no setting: write key=value, such as optim.lr=1e-5")
    # the setting's type, by its dotted name
    kind: object = GRPOConfig
    for part in name.split("."):
        if not (isinstance(kind, type) and issubclass(kind, Settings)):
            break  # the keys of a dict are another function's arguments
        try:
            kind = kind.type_of(part)
        except ConfigError as error:
            raise ConfigError(f"{error}; --cfg prints all settings") from None
    is_text = kind in (str, str | None)
    with suppress(HydraException):
        parsed = OverridesParser.create().parse_override(f"{name}={value}")
        # a number is no text, or 1_000 would become 1000
        if not parsed.is_sweep_override() and not (is_text and type(parsed.value()) in (int, float)):
            return f"++{name}={value}"
    if not is_text:
        raise ConfigError(
            f"{override!r} is not one value: write numbers as 1e-5, lists as [a,b], dicts as {{a: 1}}, and quote text "
            f"with special characters inside the shell's quotes: \"{name}='it is, so'\""
        )
    # text as it was typed: quoted for Hydra, with its backslashes
    ends = re.sub(r"(\\+)$", r"\1\1", re.sub(r"(\\*)'", r"\1\1\\'", value))
    return f"++{name}='{ends}'"


def _composed(folder: Path, stem: str, changes: Sequence[str]) -> GRPOConfig:
    """Return a file's configuration, with changes."""
    # a user's file may build on those of the package
    search = [] if folder == CONFIGS else [f"hydra.searchpath=[file://{CONFIGS}]"]
    try:
        with initialize_config_dir(str(folder.resolve()), version_base=None):
            return _config(compose(stem, overrides=[*search, *changes]))
    except (HydraException, OmegaConfBaseException, yaml.YAMLError) as error:
        raise ConfigError(_line(error)) from error
    except (OSError, ValueError) as error:  # not UTF-8, or a single number, say
        raise ConfigError.of(str(folder / f"{stem}.yaml"), error) from error
    except RecursionError as error:
        raise ConfigError(f"{folder / stem}.yaml is nested too deeply, or in itself") from error


def _names() -> str:
    return ", ".join(sorted(item.stem for item in CONFIGS.glob("*.yaml")))


def _config(composed: DictConfig | ListConfig) -> GRPOConfig:
    """Return a configuration; all keys and values are those of the schema, or a ``ConfigError`` names the first."""
    with suppress(ConfigTypeError):  # a list where a mapping belongs: it is refused below, by its name
        composed = OmegaConf.merge(as_dict(GRPOConfig()), composed)  # which it may refer to, as in ${seed}
    found = OmegaConf.to_container(composed, resolve=True)
    if not isinstance(found, dict):
        raise ConfigError(f"a configuration is a mapping of settings, got {found!r:.60}")
    return GRPOConfig(**{str(name): value for name, value in found.items()})


def saved_config(file: Path) -> GRPOConfig:
    """Return the configuration that a run has saved."""
    try:
        return _config(OmegaConf.load(file))
    except (OmegaConfBaseException, yaml.YAMLError, OSError, ConfigError) as error:
        raise ConfigError(f"{file}: {_line(error)}") from error


def _line(error: Exception) -> str:
    """Return a one-line message that names the offending key, or the line of a file."""
    mark = getattr(error, "problem_mark", None)
    if isinstance(error, yaml.MarkedYAMLError) and mark is not None:
        return f"{mark.name}, line {mark.line + 1}: {error.problem}"
    # the first line of Hydra's error says what, "full_key" says where
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException) and str(cause):
        lines = [*lines[:1], *(line.strip() for line in str(cause).splitlines())]
    keys = [line for line in lines if line.startswith("full_key:")]
    if isinstance(error, MissingConfigException):
        lines[0] += f" The package has {_names()}"
    return "; ".join([*lines[:1], *keys[:1]])
