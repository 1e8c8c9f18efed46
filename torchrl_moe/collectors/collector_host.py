"""What runs in the Ray actor of a collector: a local collector, and the calls on it. It does not import Ray."""

from __future__ import annotations

import contextlib
import io
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import cloudpickle
import torch
from tensordict import TensorDictBase
from torch import Tensor

from torchrl_moe.collectors.arguments import EnvLike
from torchrl_moe.collectors.async_collector import AsyncLLMCollector, evaluate
from torchrl_moe.collectors.llm_collector import LLMCollector
from torchrl_moe.errors import CollectionError, EngineError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.replica_table import ReplicaTable

KINDS = {"AsyncLLMCollector": AsyncLLMCollector, "LLMCollector": LLMCollector}
ASK_SECONDS = 2.0

# -- batches as bytes -------------------------------------------------------------------------------------------------
#
# torch pickles each tensor as a separate file, and the whole storage for a view of it. A batch has twenty tensors a
# row: as arrays they cost a fifth of the time to read.


def pack(value: object) -> bytes:
    """Return the bytes of any picklable object."""
    file = io.BytesIO()
    pickler = cloudpickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table[Tensor] = _reduce
    pickler.dump(value)
    return file.getvalue()


def unpack(packed: bytes) -> Any:
    """Return the packed object; its tensors have their own, writable memory."""
    return pickle.loads(packed)


def _reduce(tensor: Tensor) -> tuple[object, ...]:
    """Reduce a tensor to an array; one with a dtype unknown to numpy (bfloat16) or with a gradient, as torch does."""
    try:
        return torch.from_numpy, (tensor.numpy(),)
    except (TypeError, RuntimeError):
        return tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)


# -- the host ---------------------------------------------------------------------------------------------------------


class CollectorHost:
    """Holds a collector for a driver in another process. Methods may be called from several threads at a time."""

    def __init__(self) -> None:
        self._made: AsyncLLMCollector | LLMCollector | None = None
        self._batches: Iterator[TensorDictBase | None] | None = None
        self._pauses: list[AbstractContextManager[None]] = []

    def make(self, kind: str, arguments: Mapping[str, Any]) -> int | None:
        """Make the collector, and return the answers in a batch."""
        self._made = KINDS[kind](**arguments)
        turns: int | None = self._made.dialog_turns_per_batch
        return turns

    @property
    def _collector(self) -> AsyncLLMCollector | LLMCollector:
        # Ray makes the object again after the actor has died, and nobody calls make a second time
        if self._made is None:
            raise CollectionError("Ray has restarted the collector's actor, and its position in the data is lost")
        return self._made

    def next(self, is_writer: bool = False) -> bytes:
        """Return a packed tuple of the next batch, or of the ``None`` in its place; an empty tuple at the end."""
        if isinstance(self._collector, AsyncLLMCollector):
            self._collector.is_paced_by_updates = is_writer
        self._batches = iter(self._collector) if self._batches is None else self._batches
        try:
            return pack((next(self._batches),))
        except StopIteration:
            return pack(())
        except Exception:
            self._batches = None  # the generator is closed, and would look exhausted
            raise

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of the collector."""
        return getattr(self._collector, method)(*arguments)

    def read(self, attribute: str) -> object:
        """Return an attribute of the collector."""
        return getattr(self._collector, attribute)

    def increment_version(self) -> None:
        """Record a weight update, after asking the replicas for their versions, since their stats arrive later."""
        table: ReplicaTable | None = getattr(getattr(self._collector.policy, "model", None), "replica_table", None)
        for entry in table or ():
            if table is not None and entry.state is ReplicaState.SERVING:
                with contextlib.suppress(EngineError, OSError):  # the stats will report the version, or the death
                    version = entry.replica.call(Engine.weights_version, ASK_SECONDS)
                    with table.lock:
                        # its stats may have come in between
                        if version > entry.version:
                            table.set_version(entry.index, version)
        self._collector.increment_version()

    def set_postproc(self, postproc: Callable[[TensorDictBase], TensorDictBase]) -> None:
        """Set what is applied to each batch."""
        if self._collector.postproc is not None:
            raise RuntimeError("postproc is set already")
        self._collector.postproc = postproc

    def evaluate(
        self, env: EnvLike, n: int, dataloader: Iterable[object] | None, generate_kwargs: Mapping[str, Any]
    ) -> TensorDictBase:
        """Answer held-out prompts; see :func:`~torchrl_moe.collectors.async_collector.evaluate`."""
        return evaluate(self._collector.policy, env, n, dataloader, **generate_kwargs)

    def pause(self, resume: bool) -> None:
        """Enter the collector's ``pause`` and stay in it until :meth:`end_pause`."""
        # the driver's context is left in another call, perhaps in another thread
        pause = self._collector.pause(resume)
        pause.__enter__()
        self._pauses.append(pause)

    def end_pause(self) -> None:
        """Leave the last pause."""
        self._pauses.pop().__exit__(None, None, None)

    def shutdown(self, timeout: float | None, close_env: bool) -> None:
        """Shut the collector down."""
        if self._made is not None:
            self._made.shutdown(timeout=timeout, close_env=close_env)
