"""``Ranks``: the processes that train one model, and what they exchange besides the model's own collectives."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import distributed
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from torchrl_moe._errors import RankError
from torchrl_moe.objectives.normalisation import Key, Number, sum_over_ranks
from torchrl_moe.trainers import torchrun
from torchrl_moe.trainers.attempt import attempt_of
from torchrl_moe.trainers.config import ConfigError
from torchrl_moe.trainers.rendezvous import Rendezvous

__all__ = ["RankGroup", "Ranks", "join_ranks"]

T = TypeVar("T")
PATIENCE_WITH_FILES = 10
"""Factor on the timeout while a rank writes: disks are slow, and nothing else is blocked meanwhile."""


class Ranks:
    """A single process; :class:`RankGroup` is several.

    Attributes:
        rank: number of this rank.
        size: number of ranks.
        files: a separate group for files written in the background; ``None`` where there is no group.
    """

    rank, size = 0, 1
    files: distributed.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which has the engine, the collector and the run's folder."""
        return self.rank == 0

    def meet(self, phase: str, patient: bool = False) -> None:
        """Wait until all ranks are here, see :meth:`Rendezvous.meet`."""

    def gather(self, value: T) -> list[T]:
        """Return the value of each rank; all must call. Values are pickled, so keep them small."""
        return [value]

    def from_first(self, value: T, phase: str) -> T:
        """Return rank 0's value, however long it takes; all must call."""
        del phase
        return value

    def scatter(self, values: Sequence[T] | None) -> T:
        """Return this rank's part of rank 0's list, which has one part per rank; all must call."""
        assert values is not None
        return values[0]

    def sum(self, denominators: Mapping[Key, Number]) -> dict[Key, Number]:
        """Sum the denominators of losses, scaled for gradients that are averaged over ranks."""
        return dict(denominators)

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Copy rank 0's tensors, which are on the CPU, into those of the other ranks; all must call."""

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Report an error raised inside to the other ranks; if its cause is another rank, name that rank.

        Raises:
            RankError: another rank has failed or is gone.
        """
        yield

    def close(self) -> None:
        """End the process group, if it was made here. Idempotent."""


class RankGroup(Ranks):
    """The ranks of the default process group.

    Args:
        seconds: how long one waits for another.
        owns_group: whether to end the default group with this.
    """

    def __init__(self, seconds: float, owns_group: bool) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._owns_group, self._closed = owns_group, False
        timeout = timedelta(seconds=seconds)
        # separate groups: these collectives never mix with the model's, nor those of files with those of a step
        self._group = distributed.new_group(backend="gloo", timeout=timeout)
        self.files = distributed.new_group(backend="gloo", timeout=PATIENCE_WITH_FILES * timeout)
        host = os.environ.get("MASTER_ADDR", "localhost")
        store = TCPStore(host, 0, is_master=True, wait_for_workers=False) if self.is_first else None
        box = [store.port if store is not None else 0]
        distributed.broadcast_object_list(box, group=self._group)
        store = store or TCPStore(host, box[0], is_master=False, timeout=timeout)
        self._rendezvous = Rendezvous(store, self.rank, self.size, seconds)

    def meet(self, phase: str, patient: bool = False) -> None:
        self._rendezvous.meet(phase, patient)

    def gather(self, value: T) -> list[T]:
        boxes: list[Any] = [None] * self.size
        distributed.all_gather_object(boxes, value, group=self._group)
        return boxes

    def from_first(self, value: T, phase: str) -> T:
        self.meet(phase, patient=True)
        box = [value]
        distributed.broadcast_object_list(box, group=self._group)
        return box[0]

    def scatter(self, values: Sequence[T] | None) -> T:
        box: list[Any] = [None]
        distributed.scatter_object_list(box, None if values is None else list(values), group=self._group)
        found: T = box[0]
        return found

    def sum(self, denominators: Mapping[Key, Number]) -> dict[Key, Number]:
        return sum_over_ranks(denominators, self._group)

    def copy_first(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            distributed.broadcast(tensor, 0, group=self._group)

    @contextmanager
    def guard(self) -> Iterator[None]:
        try:
            yield
        except RankError:
            raise
        except BaseException as error:
            cause = self._rendezvous.cause(error)
            if cause:
                raise RankError(cause) from error
            raise

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._rendezvous.leave()
        if not self._owns_group:
            distributed.destroy_process_group(self._group)
            distributed.destroy_process_group(self.files)
        elif distributed.is_initialized():
            distributed.destroy_process_group()


def join_ranks(seconds: float, collective_seconds: float | None = None) -> Ranks:
    """Return the ranks of this run: of the existing process group, or of the one that a launcher has configured.

    Args:
        seconds: how long one waits for another.
        collective_seconds: how long a collective of the default group may take, if it is made here; an existing group
            keeps its timeout; ``None``: ``seconds``.

    Raises:
        ConfigError: this rank sees no GPU with its local rank's index.
        RankError: another rank did not arrive in time.
    """
    owns_group = not distributed.is_initialized() and torchrun.is_launched()
    if owns_group:
        with_cuda = torch.cuda.is_available()
        if with_cuda:
            torch.cuda.set_device(_own_gpu())
        backend = "cpu:gloo,cuda:nccl" if with_cuda else "gloo"
        timeout = timedelta(seconds=seconds)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        store = PrefixStore(attempt_of(store, rank, size, seconds), store)
        deadline = timeout if collective_seconds is None else timedelta(seconds=collective_seconds)
        distributed.init_process_group(backend, timeout=deadline, store=store, rank=rank, world_size=size)
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return Ranks()
    return RankGroup(seconds, owns_group)


def _own_gpu() -> int:
    own, count = torchrun.local_rank(), torch.cuda.device_count()
    if own >= count:
        raise ConfigError(
            f"LOCAL_RANK={own}: a rank uses the GPU of this index; {count} are visible. Start no more ranks than a "
            "machine has GPUs, and let each see all of them (CUDA_VISIBLE_DEVICES)"
        )
    return own
