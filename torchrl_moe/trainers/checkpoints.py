"""``Checkpoints``: all that a later start needs, written in the background, either complete or absent."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import uuid
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import chain
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, TypeGuard

import torch
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard  # there is no public name
from torchrl.checkpoint import (
    Checkpoint,
    CheckpointError,
    CheckpointRotation,
    GlobalRNGState,
    StateDictCheckpointAdapter,
)

from torchrl_moe.collectors.environments import Threads
from torchrl_moe.trainers.config import ConfigError
from torchrl_moe.trainers.ranks import Ranks

# a single process is intended here; the filter is global because the write runs in a thread
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

POLICY, OPTIMIZER = "policy", "optimizer"
State = dict[str, dict[str, Any]]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
"""Optimizer state keyed by weight names, independent of numbering and parameter groups."""


class TrainedState:
    """What training changes, in the format of ``torch.distributed.checkpoint``: any number of ranks can read it."""

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
        has_begun = self._optimizer is not None and bool(self._optimizer.state)
        for group, state in self._state().items():
            copies = ((name, _copied(value)) for name, value in state.items())
            found[group] = {name: value for name, value in copies if ranks.is_first or not _is_packed(state[name])}
        if self._optimizer is not None and not has_begun:  # torch has made a state to save, as if after a step
            self._optimizer.state.clear()
            found[OPTIMIZER] = {name: value for name, value in found[OPTIMIZER].items() if not _is_of_a_weight(name)}
        return found

    @staticmethod
    def write(state: State, folder: Path, ranks: Ranks) -> None:
        """Write a copy; all ranks must call, and return when all have written."""
        save(state, checkpoint_id=folder, process_group=ranks.files, no_dist=ranks.size == 1)

    def load(self, folder: Path, ranks: Ranks) -> None:
        """Load a saved state into the model and its optimizer; all ranks must call."""
        # shapes first: torch would load a part of another model, and say nothing
        saved = FileSystemReader(folder).read_metadata().state_dict_metadata
        there = {name: tuple(kind.size) for name, kind in saved.items() if hasattr(kind, "size")}
        theirs = {name: shape for name, shape in there.items() if name.startswith(f"{POLICY}.")}
        here = {f"{POLICY}.{name}": tuple(tensor.shape) for name, tensor in self.tensors().items()}
        if names := sorted(name.removeprefix(f"{POLICY}.") for name in here.keys() ^ theirs.keys()):
            raise ValueError(f"the checkpoint is of another model: {len(names)} names differ, {names[0]} first")
        for name, shape in here.items():
            if theirs[name] != shape:
                what = f"{name.removeprefix(f'{POLICY}.')} is {theirs[name]} there and {shape} here"
                raise ValueError(f"the checkpoint is of another model: {what}")
        own = self._state()
        # weights of which nothing was saved, since no gradient had reached them: their optimizer begins
        known = {name.rpartition(".")[0] for name in saved}
        begins: dict[str, Any] = {
            name: torch.zeros_like(value)
            for name, value in own.get(OPTIMIZER, {}).items()
            if _is_of_a_weight(name) and f"{OPTIMIZER}.{name}".rpartition(".")[0] not in known
        }
        for name in begins:
            del own[OPTIMIZER][name]
        state: State = {
            group: {
                name: torch.empty(value.shape, dtype=value.dtype) if _is_packed(value) else value
                for name, value in values.items()
            }
            for group, values in own.items()
        }
        load(state, checkpoint_id=folder, process_group=ranks.files, no_dist=ranks.size == 1)
        # of packed weights the whole was read: write this rank's part of it into the model
        for group, values in own.items():
            for name, value in values.items():
                if _is_packed(value):
                    mesh, whole = value.device_mesh, state[group][name]
                    part = distribute_tensor(whole.to(mesh.device_type), mesh, value.placements, src_data_rank=None)
                    value.to_local().copy_(part.to_local())
                    state[group][name] = value
        if self._optimizer is not None:
            set_optimizer_state_dict(self._model, self._optimizer, {**state[OPTIMIZER], **begins}, options=FLAT)


def _is_of_a_weight(name: str) -> bool:
    """Whether an entry of a flat optimizer state is of a weight, and not of a group of them."""
    return name.startswith("state.")


def _copied(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    if not isinstance(value, DTensor):
        return value.detach().to("cpu", copy=True)
    if _is_packed(value):
        return value.full_tensor().detach().to("cpu", copy=True)
    # torch's own stagers fail on a part whose memory does not begin with it: torch 2.13, where transformers has read it
    # and DTensor.from_local moves it back to the mesh's GPU
    return value.detach().to("cpu", copy=True).contiguous()


# Packed weights: tensor parallelism gives each rank a part of gate and a part of up, which lie in one tensor. A
# checkpoint of torch's knows parts that are one piece.
def _is_packed(value: object) -> TypeGuard[DTensor]:
    if not isinstance(value, DTensor):
        return False
    axes = [getattr(placement, "dim", None) for placement in value.placements]
    return any(
        isinstance(placement, _StridedShard) and axes[place] not in axes[place + 1 :]  # else it is only split again
        for place, placement in enumerate(value.placements)
    )


LOG = logging.getLogger(__name__)

SCORE, SHARDS = "score", "shards"
CLOSE_SECONDS = 60.0
"""Seconds that a rank waits at its end for a checkpoint that all ranks write."""


class RandomNumbers(GlobalRNGState):
    """The states of Python's, NumPy's and torch's random generators; a run may continue with another number of GPUs."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the states; a GPU without a saved state keeps its own."""
        found = dict(state_dict)
        of_gpus = found.pop("torch_cuda", [])[: torch.cuda.device_count()]
        super().load_state_dict(found | ({"torch_cuda": of_gpus} if of_gpus else {}))


class Checkpoints:
    """The checkpoints of a run: the newest, and the best.

    A checkpoint is made beside the others and renamed when all ranks have written their part, so a kill or a full disk
    costs no older one. Weights and optimizer are copied, and written while the run continues.
    """

    def __init__(
        self,
        folder: Path,
        trained: TrainedState,
        components: Mapping[str, object],
        keep: int,
        ranks: Ranks | None = None,
    ) -> None:
        self._trained, self._ranks = trained, ranks or Ranks()
        self.checkpoint = Checkpoint()
        # a collector's state holds more than tensors
        self.checkpoint.register_adapter(object, StateDictCheckpointAdapter(payload_format="torch"))
        for name, component in {**components, "rng": RandomNumbers()}.items():
            self.checkpoint.register(name, component)
        self.rotation = CheckpointRotation(folder, keep_last=keep, keep_best=(SCORE, "max"), prefix="step")
        self._pending: Future[bool] | None = None
        self._threads = Threads(1, "torchrl_moe-checkpoint")  # the process may end before a write does
        self._loaded: Path | None = None
        self._loaded_names: Collection[str] = ()
        # partly written when a process was killed; what else is there is somebody else's
        left_over = chain.from_iterable(map(folder.glob, (".step-*", "..step-*", ".seen-*")))
        for left in left_over if self._ranks.is_first else ():
            if left.name.endswith(".older"):
                recover(left)
            shutil.rmtree(left, ignore_errors=True)

    def add(self, name: str, component: object) -> None:
        """Keep a hook's state too; restore it, if the checkpoint that was loaded has it.

        Raises:
            ValueError: the name is taken.
        """
        name = f"trainer_module.{name}"
        if name in self.checkpoint:
            raise ValueError(f"there is a module of the name {name.partition('.')[2]} already: choose another")
        self.checkpoint.register(name, component)
        if self._loaded is None or name not in self._loaded_names:
            return
        if self._loaded.is_dir():
            self._load_components(self._loaded, [name])
        else:
            LOG.warning("the state of %s is not restored: newer checkpoints have replaced %s", name, self._loaded)

    def _load_components(self, path: Path, names: Sequence[str] | None = None) -> None:
        # it is this project's own: a collector's state has objects that weights_only refuses
        self.checkpoint.load(path, components=names, map_location="cpu", tensor_load_kwargs={"weights_only": False})

    def check_folder(self) -> None:
        """Refuse a folder that some ranks do not see: a checkpoint would lack their parts, and look complete."""
        if self._ranks.size == 1:
            return
        # rank 0 makes a folder, and each rank looks for it
        folder, mark = self.rotation.directory, f".seen-{uuid.uuid4().hex}"
        if self._ranks.is_first:
            (folder / mark).mkdir(parents=True)
        mark = self._ranks.from_first(mark, "looking for the folder")
        seen = self._ranks.gather((folder / mark).exists())
        if self._ranks.is_first:
            (folder / mark).rmdir()
        if not all(seen):
            blind = ", ".join(str(rank) for rank, sees in enumerate(seen) if not sees)
            raise ConfigError(f"out={folder.parent}: rank(s) {blind} do not see rank 0's folder: name a shared one")

    def save(self, step: int, score: float) -> None:
        """Begin to write a checkpoint, once the previous one is written."""
        # one at a time; what is small is written here, weights and optimizer in a thread, from a copy
        self.wait()
        draft, fits = self.rotation.directory / f".step-{step:012d}.draft", True
        if self._ranks.is_first:
            shutil.rmtree(draft, ignore_errors=True)
            try:
                self.checkpoint.save(draft, metadata={SCORE: score})
            except (OSError, RuntimeError) as error:  # torch.save raises RuntimeError on a full disk
                if not _is_write_error(error):
                    raise
                _warn(step, error)
                fits = False
        if self._ranks.from_first(fits, "checkpoint"):
            self._pending = self._threads.submit(self._publish, self._trained.copy(self._ranks), draft, step)

    def _publish(self, state: State, draft: Path, step: int) -> bool:
        """Write weights and optimizer, and give the checkpoint its name; return whether there was room for it."""
        try:
            self._trained.write(state, draft / SHARDS, self._ranks)
            # all ranks have written: only now does the folder get the name of a checkpoint
            if self._ranks.is_first:
                exchange(draft, self.rotation.directory / f"step-{step:012d}")
                self.rotation.prune()
        except (CheckpointException, OSError) as error:
            if self._ranks.is_first:
                shutil.rmtree(draft, ignore_errors=True)
            # a full disk is a warning on each rank; any other error ends the run
            causes = [failure for failure, _ in getattr(error, "failures", {}).values()] or [error]
            if not all(map(_is_write_error, causes)):
                raise
            _warn(step, causes[0])
            return False
        return True

    def wait(self) -> bool:
        """Wait for the checkpoint that was begun last."""
        pending, self._pending = self._pending, None
        return pending is not None and pending.result()

    def load(self, path: Path | None = None) -> bool:
        """Load a checkpoint, the newest by default; return whether there is one."""
        path = self._ranks.from_first(path or self.rotation.latest(), "looking for a checkpoint")
        if path is None:
            return False
        setting = f"resume=true, but {path} does not fit"
        if not (path / SHARDS).is_dir():
            raise ConfigError(f"{setting}: it holds no {SHARDS}, like those of older versions")
        try:
            self._trained.load(path / SHARDS, self._ranks)
            self._load_components(path)
        except CheckpointError as error:
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            raise ConfigError.of(setting, cause) from error
        except CheckpointException as error:
            failure = next(iter(error.failures.values()))[0]
            cause = failure if isinstance(failure, Exception) else OSError(str(failure))
            raise ConfigError.of(setting, cause) from error
        except (OSError, ValueError, EOFError, UnpicklingError) as error:
            raise ConfigError.of(setting, error) from error
        self._loaded, self._loaded_names = path, Checkpoint.manifest(path)["components"]
        return True

    def close(self) -> None:
        """Wait for a write in progress, but not for long where other ranks may hang. Idempotent.

        A write error is logged and not raised: this is called while a run ends, perhaps because of another error.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        wait([pending], None if self._ranks.size == 1 else CLOSE_SECONDS)
        if not pending.done():
            LOG.warning("the last checkpoint was still being written when the run ended: it may be missing")
        elif (error := pending.exception()) is not None:
            LOG.error("the last checkpoint was not written: %r", error)

    @staticmethod
    def forget(folder: Path) -> None:
        """Remove all of another run, and nothing that is not a run's."""
        for made in folder.glob("step-*"):
            shutil.rmtree(made, ignore_errors=True)
        with contextlib.suppress(OSError):  # there is none, or it holds what is somebody else's
            folder.rmdir()


def steps_saved(folder: Path) -> int:
    """Return after how many steps the newest checkpoint in a folder was made; 0 if there is none."""
    newest = CheckpointRotation(folder, keep_last=1, prefix="step").latest() if folder.is_dir() else None
    return 0 if newest is None else int(newest.name.rpartition("-")[2])


def _warn(step: int, error: BaseException) -> None:
    LOG.warning("no checkpoint of step %d, the older ones are intact: %s", step, error)


def _is_write_error(error: BaseException) -> bool:
    marks = ("PytorchStreamWriter", "No space left", "write failed")
    return isinstance(error, OSError) or (isinstance(error, RuntimeError) and any(mark in str(error) for mark in marks))


# Putting a complete folder in the place of an older one.
def exchange(draft: Path, folder: Path, replaces: Callable[[str], bool] = lambda _: True) -> None:
    """Put a complete folder in the place of an older one, which is restored if that fails."""
    # what an earlier kill left first; then two renamings, with the older folder hidden between them
    older = folder.with_name(f".{folder.name}.older")
    recover(older)
    _clear(older, folder, replaces)
    if folder.exists():
        os.replace(folder, older)  # a folder that is not empty cannot be replaced
    try:
        os.replace(draft, folder)
    except BaseException:
        if older.exists():
            os.replace(older, folder)
        raise
    _clear(older, folder, replaces)


def _clear(older: Path, folder: Path, replaces: Callable[[str], bool]) -> None:
    # entries that the new folder does not replace move into it: a user's files beside a model stay
    for entry in older.iterdir() if older.exists() else ():
        if not replaces(entry.name) and not os.path.lexists(folder / entry.name):
            os.replace(entry, folder / entry.name)
    shutil.rmtree(older, ignore_errors=True)


def recover(older: Path) -> None:
    """Put back a folder that a kill caught between its two renamings, when it was the only copy."""
    folder = older.with_name(older.name.removeprefix(".").removesuffix(".older"))
    if older.exists() and not folder.exists():
        os.replace(older, folder)
