"""The model that a run starts from: given, made, or where an earlier start of the run has left it."""

from __future__ import annotations

import os
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchrl_moe.modules.policies.adapters import has_adapters
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig
from torchrl_moe.trainers.function_names import is_function_name
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.policy_model import PolicyModel

__all__ = ["new_start", "starting_model"]


def new_start(folder: Path) -> Path:
    """Return a name for the model that a run starts from, beside that of an older run."""
    return folder / f"start-{uuid.uuid4().hex[:8]}"


def starting_model(model: Any, tokenizer: Any, config: GRPOConfig, placement: Placement) -> PolicyModel:
    """Load the model of a run.

    Several ranks load it from one folder: what is given, or what a function makes, rank 0 writes there first. The other
    ranks' random numbers, and what they were given, do not count.

    Args:
        model: see :class:`~torchrl_moe.trainers.MoEGRPOTrainer`.
        tokenizer: of the model; ``None``: the one beside it.
        config: of the run.
        placement: how ranks share the model.

    Raises:
        ConfigError: see :meth:`PolicyModel.load`, or several ranks and a model with an adapter of its own.
    """
    source, folder = config.model.source, Path(config.out)
    starts = sorted(folder.glob("start-*/config.json"), key=lambda path: path.stat().st_mtime)
    if config.resume and model is None and source is not None and is_function_name(source) and starts:
        model = str(starts[-1].parent)  # no need to make it again
    if not placement.is_shared:
        return PolicyModel.load(model, tokenizer, config.model)
    given = source if model is None else model
    if isinstance(given, str | os.PathLike) and not is_function_name(os.fspath(given)):
        return PolicyModel.load(given, tokenizer, config.model, placement)
    start: Path | None = None
    if placement.ranks.is_first:
        start = _write(given, tokenizer, config, folder)
    start = placement.ranks.from_first(start, "making the model")
    assert start is not None
    return replace(PolicyModel.load(str(start), None, config.model, placement), start=start)


def _write(given: Any, tokenizer: Any, config: GRPOConfig, folder: Path) -> Path:
    if has_adapters(given):
        raise ConfigError(
            "a model with an adapter of its own is for one rank: give several the bare one, and set model.lora"
        )
    whole = replace(config.model, lora=LoRAConfig(), activation_checkpointing=False)
    return PolicyModel.load(given, tokenizer, whole).save(new_start(folder))
