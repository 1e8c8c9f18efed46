"""The model that a run starts from: passed in, made by a function, or left by an earlier start of the run."""

from __future__ import annotations

import os
import re
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrl_moe.modules.policies.adapters import has_adapters
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig
from torchrl_moe.trainers.function_names import is_function_name
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.policy_model import PolicyModel

__all__ = ["new_start", "starting_model", "starts"]


def new_start(folder: Path) -> Path:
    """Return a folder name for the model that a run starts from, distinct from that of an older run."""
    return folder / f"start-{uuid.uuid4().hex[:8]}"


def starts(folder: Path) -> list[Path]:
    """Return the models in a run's folder that it, or an older run, has started from; others' folders are none."""
    return [path for path in folder.glob("start-*") if re.fullmatch(r"start-[0-9a-f]{8}", path.name)]


def starting_model(model: Any, tokenizer: Any, config: GRPOConfig, placement: Placement) -> PolicyModel:
    """Load the model of a run.

    Several ranks load it from one folder, which rank 0 chooses. Rank 0 first writes there a model that was passed in or
    made by a function. The other ranks' random numbers, and the model they were passed, are ignored.

    Args:
        model: see :class:`~torchrl_moe.trainers.MoEGRPOTrainer`.
        tokenizer: of the model; ``None``: the one beside it.
        config: of the run.
        placement: how ranks share the model.

    Raises:
        ConfigError: see :meth:`PolicyModel.load`, or several ranks and a model with an adapter of its own.
    """
    given = config.model.source if model is None else model
    ranks = placement.ranks
    if not placement.is_shared:
        earlier = _earlier_start(model, config)
        return PolicyModel.load(earlier or model, tokenizer, config.model)
    where: str | None = None
    is_new = False
    if ranks.is_first:
        where = _earlier_start(model, config) or _folder(given)
        is_new = where is None
        where = where or str(_write(given, tokenizer, config, Path(config.out)))
    where, is_new = ranks.from_first((where, is_new), "making the model")
    assert where is not None
    loaded = PolicyModel.load(where, None if is_new else tokenizer, config.model, placement)
    return replace(loaded, start=Path(where)) if is_new else loaded


def _earlier_start(model: Any, config: GRPOConfig) -> str | None:
    """Return where an earlier start of this run saved the model that a function made: it is not made again."""
    source = config.model.source
    if not config.resume or model is not None or source is None or not is_function_name(source):
        return None
    written = [path for path in starts(Path(config.out)) if (path / "config.json").is_file()]
    return str(max(written, key=lambda path: (path / "config.json").stat().st_mtime)) if written else None


def _folder(given: Any) -> str | None:
    """Return the folder or hub name that was passed in, if any."""
    if isinstance(given, str | os.PathLike) and not is_function_name(os.fspath(given)):
        return os.fspath(given)
    return None


def _write(given: Any, tokenizer: Any, config: GRPOConfig, folder: Path) -> Path:
    if has_adapters(given):
        raise ConfigError(
            "a model with an adapter of its own is for one rank: give several the bare one, and set model.lora"
        )
    whole = replace(config.model, lora=LoRAConfig(), activation_checkpointing=False)
    return PolicyModel.load(given, tokenizer, whole).save(new_start(folder))
