"""``TrainedState``: weights and optimizer; each rank writes and reads its own part."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # there is no public name

from torchrl_moe.trainers.rank_group import Ranks

__all__ = ["TrainedState"]

# a single process is intended here; the filter is global because the write runs in a thread
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

POLICY, OPTIMIZER = "policy", "optimizer"
State = dict[str, dict[str, Any]]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state keyed by weight names, independent of numbering and parameter groups."""


class TrainedState:
    """What training changes, in the format of ``torch.distributed.checkpoint``: any number of ranks can read it.

    Args:
        model: its parameters that require a gradient, and its buffers, are saved.
        optimizer: of these parameters; ``None``: no optimizer state.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self._model, self._optimizer = model, optimizer

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return name -> weight or buffer, this rank's part; a tied weight is there under all of its names."""
        state: dict[str, torch.Tensor] = self._model.state_dict(keep_vars=True)
        return {
            name: tensor.detach()
            for name, tensor in state.items()
            if tensor.requires_grad or not isinstance(tensor, nn.Parameter)
        }

    def _state(self) -> State:
        state: State = {POLICY: self.tensors()}
        if self._optimizer is not None:
            state[OPTIMIZER] = get_optimizer_state_dict(self._model, self._optimizer, options=FLAT)
        return state

    def copy(self, ranks: Ranks) -> State:
        """Return a snapshot in host memory, to be written while training continues.

        All ranks must call. Rank 0's snapshot has packed weights as a whole.
        """
        found: State = {}
        for group, state in self._state().items():
            copies = ((name, _copied(value)) for name, value in state.items())
            found[group] = {name: value for name, value in copies if ranks.is_first or not _is_packed(state[name])}
        return found

    @staticmethod
    def write(state: State, folder: Path, ranks: Ranks) -> None:
        """Write a copy; all ranks must call, and return when all have written.

        Args:
            state: what :meth:`copy` returned.
            folder: a folder that all ranks see.
            ranks: of the run.

        Raises:
            CheckpointException: a rank could not write its part.
        """
        save(state, checkpoint_id=folder, process_group=ranks.files, no_dist=ranks.size == 1)

    def load(self, folder: Path, ranks: Ranks) -> None:
        """Load a saved state into the model and its optimizer; all ranks must call.

        Raises:
            ValueError: it is of another model, or another adapter; nothing was changed.
        """
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        self._check({name: tuple(kind.size) for name, kind in saved.items() if hasattr(kind, "size")})
        own = self._state()
        state = {group: {name: _place_for(value) for name, value in values.items()} for group, values in own.items()}
        load(state, checkpoint_id=folder, process_group=ranks.files, no_dist=ranks.size == 1)
        for group, values in state.items():
            values |= {name: _packed(values[name], value) for name, value in own[group].items() if _is_packed(value)}
        if self._optimizer is not None:
            set_optimizer_state_dict(self._model, self._optimizer, state[OPTIMIZER], options=FLAT)

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        own = {f"{POLICY}.{name}": tuple(tensor.shape) for name, tensor in self.tensors().items()}
        theirs = {name: shape for name, shape in shapes.items() if name.startswith(f"{POLICY}.")}
        if own.keys() != theirs.keys():
            names = sorted(name.removeprefix(f"{POLICY}.") for name in own.keys() ^ theirs.keys())
            raise ValueError(f"the checkpoint is of another model: {len(names)} names differ, {names[0]} first")
        for name, here in own.items():
            if theirs[name] != here:
                name, there = name.removeprefix(f"{POLICY}."), theirs[name]
                raise ValueError(f"the checkpoint is of another model: {name} is {there} there and {here} here")


def _copied(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    if _is_packed(value):
        return value.full_tensor().detach().to("cpu", copy=True)
    # torch's own stagers fail on a part whose memory does not begin with it: torch 2.13, where transformers has read it
    # and DTensor.from_local moves it back to the mesh's GPU
    return value.detach().to("cpu", copy=True).contiguous()


# -- packed weights: tensor parallelism gives each rank a part of gate and a part of up, which lie in one tensor. A
# -- checkpoint of torch's knows parts that are one piece


def _is_packed(value: Any) -> bool:
    if not isinstance(value, DTensor):
        return False
    axes = [getattr(placement, "dim", None) for placement in value.placements]
    return any(
        isinstance(placement, _StridedShard) and axes[place] not in axes[place + 1 :]  # else it is only split again
        for place, placement in enumerate(value.placements)
    )


def _place_for(value: Any) -> Any:
    return torch.empty(value.shape, dtype=value.dtype) if _is_packed(value) else value


def _packed(whole: torch.Tensor, own: DTensor) -> DTensor:
    """Write this rank's part of a tensor into its own tensor; return that one."""
    mesh = own.device_mesh
    part = distribute_tensor(whole.to(mesh.device_type), mesh, own.placements, src_data_rank=None)
    own.to_local().copy_(part.to_local())
    return own
