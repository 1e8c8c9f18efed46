"""The engine that weights are sent to: checks of its type, its size and its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

from torchrl_moe._errors import NoReplicaError, ReplicaDiedError
from torchrl_moe.modules.serving.replica_table import TableEntry
from torchrl_moe.modules.serving.service import GenerationService
from torchrl_moe.weight_update.options import SyncOptions
from torchrl_moe.weight_update.source.layout import Kinds
from torchrl_moe.weight_update.transports.base import workers_of

__all__ = ["check_numbers", "engine_of", "tensors_of"]


def engine_of(vllm_engine: Any) -> GenerationService:
    """Return an engine whose weights can be updated.

    Raises:
        ValueError: it is not an ``AsyncVLLM``.
    """
    if not isinstance(vllm_engine, GenerationService):
        raise ValueError(
            f"vllm_engine must be an AsyncVLLM, got {type(vllm_engine).__name__}: pass what "
            "torchrl_moe.modules.AsyncVLLM.from_pretrained() or make_async_vllm_engine() returned"
        )
    return vllm_engine


def check_numbers(engine: GenerationService, options: SyncOptions) -> None:
    """Compare an engine with the numbers of a scheme.

    Raises:
        ValueError: they differ.
    """
    count, wanted = engine.num_replicas, options.collective.gpus_per_replica
    if options.num_replicas not in (None, count):
        raise ValueError(f"num_replicas={options.num_replicas}, but the engine has {count}")
    if options.swapping.must_hold(count) > count:
        raise ValueError(f"min_serving={options.swapping.min_serving}, but the engine has {count} replicas")
    size = workers_of(engine.infos[0]) if engine.infos else 1
    if wanted not in (None, size):
        raise ValueError(f"gpus_per_replica={wanted}, but each replica of the engine has {size} workers")


def tensors_of(engine: GenerationService, entries: Iterable[TableEntry], seconds: float) -> Kinds:
    """Ask the first living replica for its tensors.

    Args:
        engine: only for the error.
        entries: its replicas that can be asked.
        seconds: the deadline.

    Raises:
        NoReplicaError: none is alive.
        EngineError: it does not answer.
    """
    for entry in entries:
        with contextlib.suppress(ReplicaDiedError):
            kinds: Kinds = entry.replica.metadata(seconds)
            return kinds
    raise NoReplicaError(f"no replica serves: {engine!r}")
