"""The ranks of a run: how they meet, what they send each other, and how they share the model."""

from __future__ import annotations

import heapq
import inspect
import os
import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from tensordict import TensorDictBase
from torch import distributed, nn
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    Store,
    TCPStore,
)
from torch.distributed.distributed_c10d import _set_pg_timeout  # there is no public way
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.rendezvous import rendezvous

from torchrl_moe.errors import RankError
from torchrl_moe.modules.policies.unstack import base_model
from torchrl_moe.objectives.grpo import Key, Number, sum_over_ranks
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, PlacementConfig
from torchrl_moe.weight_update.options import SwapOptions

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Which ranks were started together: ``torchrun`` keeps its store when it starts them again.
PAUSE = 0.01
"""Seconds between two polls of the store."""


def attempt_of(store: Store, rank: int, size: int, seconds: float) -> str:
    """Return a name shared by the ranks that were started together, and by no others.

    Addresses of ranks that are gone may be in the store. The number of restarts cannot tell them apart: a host counts
    the failures of its own ranks only (torch 2.13), so two hosts may have different numbers. Each rank asks under a
    name that was never used before, and rank 0 answers; requests left by older ranks are answered too, and nobody reads
    those answers.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + seconds
    # the others ask, wait for rank 0's answer, and confirm it
    if rank:
        store.set(f"asks/{rank}", own)
        try:
            store.wait([f"answer/{own}"], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise RankError(f"start: rank 0 did not come within {seconds:g} s") from error
        attempt = str(store.get(f"answer/{own}").decode())
        store.set(f"{attempt}/{rank}", "")
        return attempt
    # rank 0 answers each request that it finds, until every rank has confirmed this attempt
    missing = list(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
        missing = [other for other in missing if not store.check([f"{own}/{other}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankError(f"start: rank(s) {names} did not come within {seconds:g} s")
        time.sleep(PAUSE)
    return own


# Waiting for one another on a key-value store, instead of inside a collective.
FAILED, LEFT = "failed", "left"
SHORTEST, LONGEST = 0.001, 0.25
"""Least and greatest seconds between two polls of the store; in between, a twentieth of the time waited so far."""
LEAVE_SECONDS = 5.0
"""Seconds that rank 0, which hosts the store, stays alive so that the others can read why it ends."""


class Rendezvous:
    """Lets ranks begin a phase together, and reports which of them is missing, or why one has failed.

    A collective that one rank never enters blocks the others, and nothing names the missing rank. So ranks meet before
    each phase that has collectives: no rank is in one while another does something else, such as sending weights to an
    engine.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._store, self.rank, self.size, self.seconds = store, rank, size, seconds
        self.phase = "start"
        self._number = 0

    def meet(self, phase: str, patient: bool = False) -> None:
        """Wait until all ranks begin a phase."""
        self.phase, number = phase, self._number
        self._number += 1
        try:
            self._store.set(f"{number}/{self.rank}", phase)
            # the last one to arrive lets all go on
            if self._store.add(f"{number}/count", 1) == self.size:
                self._store.set(f"{number}/all", phase)
            began = time.monotonic()
            while not self._wait(lambda: self._has(f"{number}/all"), began, self.seconds):
                missing = self._missing(f"{number}/")
                # rank 0 may generate or sync for hours; any other rank that is late has failed
                if patient and 0 in missing:
                    began = time.monotonic()
                elif missing:
                    raise RankError(self._report(f"{phase}: {_names(missing)} did not come within {self.seconds:g} s"))
            other = self._store.get(f"{number}/all").decode()
            # all ranks that are here have left the previous phase: its keys go
            gone = [str(self.rank), *(("count", "all") if self.rank == 0 else ())]
            for key in gone if number else ():
                self._store.delete_key(f"{number - 1}/{key}")
        except RuntimeError as error:
            raise RankError(f"{phase}: rank 0 is gone, or cannot be reached: {_line(error)}") from error
        if other != phase:  # the collectives that follow would hang, or mix up data
            where = f"rank {self.rank} is at {phase!r} where another is at {other!r}"
            raise RankError(self._report(f"{where}: start all ranks alike, with a folder that all see"))

    def _wait(self, is_there: Callable[[], bool], began: float, seconds: float) -> bool:
        """Return whether a key appeared in time; raise the error that another rank has reported meanwhile."""
        while True:
            if self._has(FAILED):  # checked first: a late rank would complete a phase that others gave up
                raise RankError(self._store.get(FAILED).decode())
            if is_there():
                return True
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            time.sleep(min(max(waited / 20, SHORTEST), LONGEST))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _missing(self, prefix: str) -> list[int]:
        return [rank for rank in range(self.size) if not self._has(f"{prefix}{rank}")]

    def cause(self, error: BaseException) -> str:
        """Report an error here to the others; return its cause, if that is another rank, else ``""``.

        The error of a collective names no rank: then another rank has failed and reported it, or is gone, which a roll
        call detects. Any other error is this rank's own.
        """
        # the classes of torch.distributed by their names; gloo has none of its own: its plain RuntimeError by its text
        text = str(error).lower()
        of_collective = isinstance(error, RuntimeError) and (
            type(error).__name__.startswith("Dist") or any(word in text for word in ("gloo", "nccl", "pair closure"))
        )
        try:
            if not of_collective:
                last = f"last met: {self.phase}"
                self._report(f"rank {self.rank} failed ({last}): {type(error).__name__}: {_line(error)}")
                return ""
            # a roll call: ranks that do not answer it in time are gone
            self._store.set(f"here/{self.rank}", "")
            began, wanted = time.monotonic(), [f"here/{rank}" for rank in range(self.size)]
            self._wait(lambda: all(map(self._has, wanted)), began, min(self.seconds, LEAVE_SECONDS))
            missing = self._missing("here/")
            who = f"{_names(missing)} gone" if missing else "a collective failed"
            return self._report(f"{self.phase}: {who}: {_line(error)}")
        except RuntimeError:  # the store is gone, and so is rank 0
            return f"{self.phase}: rank 0 is gone" if self.rank else ""
        except RankError as other:
            return str(other)

    def _report(self, message: str) -> str:
        """Leave a message for all ranks; return the first message that any rank left."""
        return str(self._store.compare_set(FAILED, "", message).decode())

    def leave(self) -> None:
        """Sign off. Rank 0, which hosts the store, waits a limited time for the others to do so."""
        try:
            self._store.add(LEFT, 1)
            began = time.monotonic()
            while self.rank == 0 and self._store.add(LEFT, 0) < self.size and time.monotonic() - began < LEAVE_SECONDS:
                time.sleep(10 * SHORTEST)
        except RuntimeError:  # rank 0 is gone already
            return


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


# Splitting a batch over ranks: whole groups, so that each rank has about as many tokens as any other.


def balanced(loads: Sequence[int], count: int, at_least: int = 1) -> list[list[int]]:
    """Split items into ``count`` parts whose loads are nearly equal; return the items of each part.

    Uses the differencing method of Karmarkar and Karp: the two least even partitions are merged, the heaviest part of
    one with the lightest of the other, until one partition is left. The heaviest part is never lighter than the
    heaviest item. Otherwise, with eight items per part, parts are within 5 % of the mean if loads are sums of eight
    log-normal lengths.

    >>> balanced([5, 4, 3, 2], 2)
    [[0, 3], [1, 2]]
    """
    if len(loads) < count * at_least:
        raise ValueError(f"{len(loads)} items are too few for {count} parts of at least {at_least}")
    empty: tuple[int, tuple[int, ...]] = (0, ())  # a load, and the items that add up to it
    # a heap of partitions, the least even one first; each item begins as a partition of its own
    heap = [(-load, i, [(load, (i,)), *[empty] * (count - 1)]) for i, load in enumerate(loads)]
    heapq.heapify(heap)
    for number in range(len(loads), 2 * len(loads) - 1):
        (_, _, one), (_, _, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, items + more) for (a, items), (b, more) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
    parts = [list(items) for _, items in heap[0][2]]
    # parts with too few items get the lightest ones of the longest parts
    while len(poorest := min(parts, key=len)) < at_least:
        richest = max(parts, key=len)
        lightest = min(richest, key=lambda item: loads[item])
        richest.remove(lightest)
        poorest.append(lightest)
    return [sorted(part) for part in parts]


def shares(batch: TensorDictBase, count: int, at_least: int = 1) -> list[TensorDictBase]:
    """Split a batch into whole groups, balanced by tokens."""
    places: dict[int, list[int]] = {}
    loads: dict[int, int] = {}
    for place, row in enumerate(batch.unbind(0)):
        group = int(row.get("group_id"))
        places.setdefault(group, []).append(place)
        loads[group] = loads.get(group, 0) + len(row.get(("tokens", "full")))
    # rows of a sample may lie apart in the batch; within a share they keep the batch's order
    rows = list(places.values())
    parts = balanced(list(loads.values()), count, at_least)
    return [batch[sorted(place for group in part for place in rows[group])] for part in parts]


# What ``torchrun`` tells a rank: in its environment, and through the store that it keeps.
RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH = ".launch"
"""The file that names the launch that a folder's run belongs to."""
PATIENCE = timedelta(seconds=60)


def is_launched() -> bool:
    """Whether this process is one of several ranks that a launcher has started."""
    return all(name in os.environ for name in RENDEZVOUS) and int(os.environ["WORLD_SIZE"]) > 1


def local_rank() -> int:
    """This rank's number on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def may_restart() -> bool:
    """Whether all ranks will be started again if one fails (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def launch_of() -> str:
    """Return a name shared by all ranks that one ``torchrun`` launch starts, across restarts, and by no others.

    The name is kept in the store that ``torchrun`` keeps across restarts. Its restart count would not do: a host counts
    only the failures of its own ranks, and none when ranks restart because a host joined or left (torch 2.13).
    """
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and all(map(os.environ.get, RENDEZVOUS))
    # without restarts a run resumes only if its user says so
    if not may_restart() or not has_store:
        return ""
    store, *_ = next(rendezvous("env://", timeout=PATIENCE))
    return str(store.compare_set("torchrl_moe/launch", "", uuid.uuid4().hex).decode())


def note_launch(folder: Path, launch: str) -> None:
    """Record in a folder which launch its run belongs to, before any other file of that run; ``""``: to none."""
    if launch:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAUNCH).write_text(launch)
    else:
        (folder / LAUNCH).unlink(missing_ok=True)


def resumes_after_restart(config: GRPOConfig, launch: str) -> bool:
    """Whether a run resumes: because it is asked to, or because it was started again and no user is there to ask.

    Raises:
        ConfigError: the folder holds a run of another launch.
    """
    folder = Path(config.out)
    if config.resume or not may_restart() or not (folder / "config.yaml").exists():
        return config.resume
    noted = folder / LAUNCH
    if launch != "" and noted.exists() and noted.read_text() == launch:
        return True
    if not config.overwrite or launch == "":
        raise ConfigError(
            f"out={config.out} holds a run of another start already, and with --max-restarts a run resumes by itself: "
            "name another folder, set resume=true to continue with that one, or overwrite=true to replace it"
        )
    return False


# The processes that train one model, and what they exchange besides the model's own collectives.
T = TypeVar("T")
PATIENCE_WITH_FILES = 10
"""Factor on the timeout while a rank writes: disks are slow, and nothing else is blocked meanwhile."""


class Ranks:
    """A single process; :class:`RankGroup` is several."""

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
        """Report an error raised inside to the other ranks; if its cause is another rank, name that rank."""
        yield

    def close(self) -> None:
        """End the process group, if it was made here. Idempotent."""


class RankGroup(Ranks):
    """The ranks of the default process group."""

    def __init__(self, seconds: float, owns_group: bool) -> None:
        self.rank, self.size = distributed.get_rank(), distributed.get_world_size()
        self._owns_group, self._closed = owns_group, False
        timeout = timedelta(seconds=seconds)
        # separate groups: these collectives never mix with the model's, nor those of files with those of a step
        self._group = distributed.new_group(backend="gloo", timeout=timeout)
        self.files = distributed.new_group(backend="gloo", timeout=PATIENCE_WITH_FILES * timeout)
        # a store of their own, on a free port of rank 0's host, whose number the others are sent
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
            # the others learn of it; if another rank is the cause, this rank's error says so
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
    """Return the ranks of this run: of the existing process group, or of the one that a launcher has configured."""
    owns_group = not distributed.is_initialized() and is_launched()
    if owns_group:
        backend = "gloo"
        if torch.cuda.is_available():
            own, count, backend = local_rank(), torch.cuda.device_count(), "cpu:gloo,cuda:nccl"
            if own >= count:
                raise ConfigError(
                    f"LOCAL_RANK={own}: a rank uses the GPU of this index; {count} are visible. Start no more ranks "
                    "than a machine has GPUs, and let each see all of them (CUDA_VISIBLE_DEVICES)"
                )
            torch.cuda.set_device(own)
        timeout = timedelta(seconds=seconds)
        store, rank, size = next(rendezvous("env://", timeout=timeout))
        # keys of an earlier attempt may be left in the launcher's store: each attempt has its own prefix
        store = PrefixStore(attempt_of(store, rank, size, seconds), store)
        deadline = timeout if collective_seconds is None else timedelta(seconds=collective_seconds)
        distributed.init_process_group(backend, timeout=deadline, store=store, rank=rank, world_size=size)
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return Ranks()
    return RankGroup(seconds, owns_group)


# Which placements are impossible, and what to do instead.
def check_placement(size: int, config: GRPOConfig) -> None:
    """Refuse settings under which this many ranks cannot share the model, or not correctly."""
    own, rollout = config.placement, config.rollout
    if size == 1:
        for name in ("tensor_parallel", "expert_parallel", "replicate"):
            count, how = getattr(own, name), "needs several ranks: start it by torchrun --nproc-per-node N"
            _require(count == 1, f"placement.{name}={count} {how}")
        _require(not own.cpu_offload, "placement.cpu_offload=True is FSDP2's, which needs several ranks")
        return
    check_axes(size, config)
    # with as many ranks as tensor parallelism takes, none are left to shard over
    has_fsdp = size > own.tensor_parallel
    _require(not own.cpu_offload or has_fsdp, "placement.cpu_offload=True is FSDP2's: give it ranks beside TP")
    _require(
        not own.cpu_offload or torch.cuda.is_available(),
        "placement.cpu_offload=True needs GPUs to offload from: without any, weights are in the host's memory anyway",
    )
    _require(
        config.model.lora.rank == 0 or own.tensor_parallel == own.expert_parallel == own.replicate == 1,
        "model.lora.rank goes with plain FSDP2: set placement.tensor_parallel, expert_parallel and replicate to 1",
    )
    _require(
        config.engine.sync.get("lora") != "adapter",
        "engine.sync.lora=adapter is for one rank: leave it out, and ranks send weights with the adapter added",
    )
    _require(
        has_fsdp or config.optim.max_tokens is None,
        "tensor parallelism alone needs optim.max_tokens=null: transformers sums the gradients of norms again in each "
        "backward pass, so a step may have only one",
    )
    swap, limit = config.engine.sync.get("timeout_seconds", SwapOptions().timeout_seconds), own.collective_timeout
    _require(
        limit > swap,
        f"placement.collective_timeout={limit:g} must be above engine.sync.timeout_seconds={swap:g}: while rank 0 "
        "waits so long for readers of the weight store, the others wait in a collective",
    )
    _require(not config.engine.sleep, "engine.sleep=True is for one GPU that one rank shares with the engine")
    # each share of a batch has a whole group, and a sample for each minibatch
    shares, prompts, parts = size // own.tensor_parallel, rollout.prompts_per_step, config.optim.minibatches
    _require(
        prompts >= shares,
        f"rollout.prompts_per_step={prompts} is too few: each of {shares} shares of a batch has a whole group",
    )
    answers = prompts // shares * rollout.group_size
    _require(
        answers >= parts,
        f"optim.minibatches={parts} is too many: a rank has {answers} answers of a step, or a few more",
    )


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise ConfigError(message)


def check_axes(size: int, config: GRPOConfig) -> None:
    """Refuse parallel sizes that do not fit the number of ranks; ``ConfigError`` as in :func:`check_placement`."""
    own = config.placement
    tensor, expert, copies = own.tensor_parallel, own.expert_parallel, own.replicate
    _require(
        size % (tensor * copies) == 0,
        f"placement: {size} ranks are no multiple of tensor_parallel={tensor} times replicate={copies}",
    )
    of_copy = size // copies
    _require(
        copies == 1 or of_copy > tensor,
        f"placement.replicate={copies} leaves {of_copy} rank(s) for a copy, over which FSDP2 shards: at least "
        f"{2 * tensor} are needed",
    )
    _require(
        expert == 1 or (expert % tensor == 0 and of_copy % expert == 0),
        f"placement.expert_parallel={expert} must be a multiple of tensor_parallel={tensor} that divides the "
        f"{of_copy} ranks of a copy",
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """How the ranks of a run share its model: ``replicate * shards * tensor_parallel`` of them.

    By default a single process has the whole model.
    """

    ranks: Ranks = field(default_factory=Ranks)
    config: PlacementConfig = field(default_factory=PlacementConfig)

    @classmethod
    def of(cls, ranks: Ranks, config: GRPOConfig) -> Placement:
        """Return the placement of a run."""
        check_placement(ranks.size, config)
        return cls(ranks, config.placement)

    @property
    def is_shared(self) -> bool:
        """Whether there are several ranks."""
        return self.ranks.size > 1

    @property
    def data_size(self) -> int:
        """Number of shares of a batch; the ranks of a tensor-parallel group see the same share."""
        return self.ranks.size // self.config.tensor_parallel

    @property
    def shards(self) -> int:
        """Number of ranks that FSDP2 shards over."""
        return self.data_size // self.config.replicate

    def to_ranks(self, shares: Sequence[T]) -> list[T]:
        """Return the part of each rank, given ``data_size`` shares."""
        return [shares[rank // self.config.tensor_parallel] for rank in range(self.ranks.size)]

    def gather(self, value: T) -> list[T]:
        """Return one small value per share, from one of the ranks that see it; all ranks must call."""
        return self.ranks.gather(value)[:: self.config.tensor_parallel]

    def load(
        self, pretrained: Callable[..., PreTrainedModel], dtype: torch.dtype, rounds: bool = True
    ) -> PreTrainedModel:
        """Load a model of which each rank reads its part only; ``rounds``: whether it is gathered in ``dtype``."""
        from transformers.distributed import DistributedConfig

        config = self.config
        if problem := not_in_this_transformers(config):
            raise ConfigError(problem)
        copies = {"dp_replicate_size": config.replicate} if config.replicate > 1 else {}
        distributed_config = DistributedConfig(
            tp_size=config.tensor_parallel,
            ep_size=config.expert_parallel,
            fsdp_size=self.shards,
            fsdp_cpu_offload=config.cpu_offload,
            fsdp_mixed_precision=rounds and dtype == torch.bfloat16,
            **copies,
        )
        model = pretrained(distributed_config=distributed_config)
        self._settle(model)
        return model

    def shard(self, model: nn.Module, dtype: torch.dtype, rounds: bool = True) -> None:
        """Shard, layer by layer, a model that each rank holds completely; adapters are taken from rank 0.

        ``rounds``: whether it is gathered in ``dtype``.
        """
        # each rank has initialised its own adapter
        self.ranks.copy_first(weight.data for weight in model.parameters() if weight.requires_grad)
        cast = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
        precision = cast if rounds and dtype == torch.bfloat16 else MixedPrecisionPolicy()
        offload = CPUOffloadPolicy() if self.config.cpu_offload else OffloadPolicy()
        # the layers first: the last call takes what is in none of them
        for part in (*decoder_layers(model), model):
            fully_shard(part, mp_policy=precision, offload_policy=offload)
        self._settle(model)

    def _settle(self, model: nn.Module) -> None:
        if not self.config.reshard_after_forward and isinstance(model, FSDPModule):
            model.set_reshard_after_forward(False)
        # groups that torch made for the model's meshes have torch's own deadline
        seconds = timedelta(seconds=self.config.collective_timeout)
        meshes = {id(mesh): mesh for weight in model.parameters() if (mesh := getattr(weight, "device_mesh", None))}
        for mesh in meshes.values():
            for axis in range(mesh.ndim):
                _set_pg_timeout(seconds, mesh.get_group(axis))


def not_in_this_transformers(config: PlacementConfig) -> str | None:
    """Say which setting the installed transformers has no way for, and what to do; ``None`` if it has each."""
    from transformers.distributed import DistributedConfig

    # what a release can do is told by the parameters that its config has
    known = inspect.signature(DistributedConfig).parameters
    newer = "or use a newer transformers (5.24 has it), which vLLM 0.33 does not take beside it"
    if config.replicate > 1 and "dp_replicate_size" not in known:
        return (
            f"placement.replicate={config.replicate}: the installed transformers shards a model over all ranks only. "
            f"Set it to 1, {newer}"
        )
    if config.expert_parallel not in (1, config.tensor_parallel) and "ep_implementation" not in known:
        allowed = " or ".join(sorted({"1", f"tensor_parallel={config.tensor_parallel}"} - {"tensor_parallel=1"}))
        return (
            f"placement.expert_parallel={config.expert_parallel}: the installed transformers splits experts only "
            f"among the ranks that split layers. Set it to {allowed}, {newer}"
        )
    return None


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """Return the layers that FSDP2 shards one by one, as the model's own plan names them."""
    base = base_model(model)
    # entries of the plan such as "layers.*", as patterns
    plan: Collection[str] = getattr(base, "fsdp_plan", ())
    stacks = [re.escape(name).replace(r"\*", r"\d+") for name in plan if name.endswith("*")]
    layers = [module for name, module in base.named_modules() if any(re.fullmatch(stack, name) for stack in stacks)]
    if not layers:
        raise ConfigError(f"{type(base).__name__} has no fsdp_plan, which names its layers: train with one rank")
    return layers
