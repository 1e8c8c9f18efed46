"""``Checkpoints``: all that a later start needs to go on, written at once or not at all."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torchrl.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointRotation,
    GlobalRNGState,
    StateDictCheckpointAdapter,
)

from torchrl_moe.trainers.config import ConfigError

__all__ = ["Checkpoints", "NothingKept", "TrainedWeights"]

LOG = logging.getLogger(__name__)

SCORE = "score"


class TrainedWeights:
    """The part of a model that training changes, as a component of a checkpoint.

    Args:
        model: its parameters that want a gradient, and its buffers, are what is kept.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def _tensors(self) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)  # a tied weight under all of its names
        return {
            name: tensor
            for name, tensor in state.items()
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        }

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return name -> tensor."""
        return {name: tensor.detach() for name, tensor in self._tensors().items()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Copy tensors into the model.

        Raises:
            ValueError: they are of another model, or another adapter.
        """
        own = self._tensors()
        if own.keys() != state_dict.keys():
            names = sorted(own.keys() ^ state_dict.keys())
            raise ValueError(f"the checkpoint is of another model: {len(names)} names differ, {names[0]} first")
        for name, tensor in own.items():
            there, here = tuple(state_dict[name].shape), tuple(tensor.shape)
            if there != here:  # some would be broadcast: factors of an adapter of rank 1
                raise ValueError(f"the checkpoint is of another model: {name} is {there} there and {here} here")
        for name, tensor in own.items():
            tensor.copy_(state_dict[name])


class NothingKept:
    """A component that TorchRL's trainer would register by itself, and that a checkpoint can do without."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take nothing."""
        del state_dict


class Checkpoints:
    """The checkpoints of a run: the newest, and the best.

    A checkpoint is made beside the others and renamed, so a kill or a full disk costs no older one.

    Args:
        folder: of all of them.
        components: name -> what has a ``state_dict``.
        keep: how many of the newest.
    """

    def __init__(self, folder: Path, components: Mapping[str, Any], keep: int) -> None:
        self.checkpoint = Checkpoint()
        # a collector's state is no mere tensors
        self.checkpoint.register_adapter(object, StateDictCheckpointAdapter(payload_format="torch"))
        for name, component in {**components, "rng": GlobalRNGState()}.items():
            self.checkpoint.register(name, component)
        self.rotation = CheckpointRotation(folder, keep_last=keep, keep_best=(SCORE, "max"), prefix="step")
        for left in folder.glob(".*"):  # by a kill, half written
            shutil.rmtree(left, ignore_errors=True)

    def save(self, step: int, score: float) -> bool:
        """Write a checkpoint.

        Args:
            step: how many are done.
            score: by which the best is kept.

        Returns:
            Whether there was room for it; if not, that is logged, and all older ones are whole.
        """
        try:
            self.rotation.save(self.checkpoint, step=step, metadata={SCORE: score})
        except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
            if isinstance(error, RuntimeError) and not _is_write_error(error):
                raise
            LOG.warning("no checkpoint of step %d, the older ones are whole: %s", step, error)
            return False
        return True

    def load(self, path: Path | None = None) -> bool:
        """Load a checkpoint, the newest by default; return whether there is one.

        Raises:
            ConfigError: it does not fit: it is of another model, say.
        """
        path = path or self.rotation.latest()
        if path is None:
            return False
        # it is this project's own: a collector's state has objects that weights_only refuses
        try:
            self.checkpoint.load(path, map_location="cpu", tensor_load_kwargs={"weights_only": False})
        except CheckpointError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise ConfigError.of(f"resume=true, but {path} does not fit", cause) from error
        return True

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove all of another run."""
        shutil.rmtree(folder, ignore_errors=True)


def _is_write_error(error: RuntimeError) -> bool:
    return any(word in str(error) for word in ("PytorchStreamWriter", "No space left", "write failed"))
