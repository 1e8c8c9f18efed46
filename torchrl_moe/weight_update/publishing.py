"""Writing versions to the weight store from any source of weights, at once or while the next forward pass runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.modules.policies.unstack import ModelWeights
from torchrl_moe.store import (
    Manifest,
    WeightStoreReader,
    WeightStoreWriter,
    adapter_tensors,
    check_tensors,
)
from torchrl_moe.store.folder import naming_the_folder
from torchrl_moe.weight_update.options import Canary, SourceOptions, StoreOptions, canary_of
from torchrl_moe.weight_update.report import ReplicaSync, SyncReport
from torchrl_moe.weight_update.source import (
    Dtypes,
    Kinds,
    Source,
    Weights,
    adapter_files,
    agreed,
    cast_kinds,
    check_adapter,
    dtypes_of_first,
    from_first,
    is_first,
    source_of,
    trained_model,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """A version in the store."""

    version: int
    manifest: Manifest | None
    began: float = 0.0
    seconds: float = 0.0
    canary: Canary | None = field(default=None, repr=False)

    @property
    def digest(self) -> str:
        """Of what it holds; empty on ranks that did not write it."""
        return "" if self.manifest is None else self.manifest.digest

    @property
    def nbytes(self) -> int:
        """Of its tensors; 0 on ranks that did not write it."""
        return 0 if self.manifest is None else self.manifest.nbytes

    def report(self, replicas: Iterable[ReplicaSync] = ()) -> SyncReport:
        return SyncReport(
            version=self.version,
            nbytes=self.nbytes,
            digest=self.digest,
            published=self.seconds,
            replicas=tuple(replicas),
        )


class Publisher:
    """Writes versions."""

    def __init__(self, store: StoreOptions, source: SourceOptions, with_canary: bool) -> None:
        self._store, self._options = store, source
        self._with_canary = with_canary
        self._writer: WeightStoreWriter | None = None
        self._canaries: dict[int, Canary | None] = {}  # of the versions that are in the store
        self._module: nn.Module | None = None
        self.model: ModelWeights | None = None
        self.expected: Kinds | None = None
        self.engine_dtype: torch.dtype | None = None

    def register(self, model: nn.Module) -> None:
        self._module = trained_model(model)
        self.model = ModelWeights(self._module, self.expected or ())

    def check(self, expected: Kinds) -> None:
        """Check that the registered model, if there is one, is what an engine has."""
        if self._module is not None:
            check_tensors(ModelWeights(self._module, expected).kinds, expected)

    def expect(self, expected: Kinds, engine_dtype: torch.dtype | None) -> None:
        """Store the engine's tensors; tied names that it has twice are sent twice."""
        self.expected, self.engine_dtype = expected, engine_dtype
        if self._module is not None:
            self.model = ModelWeights(self._module, expected)

    def newest(self) -> int:
        """Return the newest version in the store, possibly an earlier trainer's; -1 if there is none."""
        with naming_the_folder(self._store.folder):
            newest = WeightStoreReader(self._store.folder).newest()
        return -1 if newest is None else newest

    def publish(self, weights: Weights | None, number: Callable[[], int]) -> Published:
        """Write a version. Of several ranks, rank 0 writes, unless another has an engine of its own; with sharded
        weights all must call it, and rank 0's number counts. Each casts its part to what is written before it sends it.
        """
        source = self._source(weights)
        if not source.is_sharded:
            # every rank has the whole model: the others count along, and write nothing
            version = number()
            if not is_first() and self.expected is None:
                return Published(version=version, manifest=None)
            canary = self._canary(weights)
            return self._write(source, source.tensors(), version, canary)
        # sharded: every rank has a part of each tensor
        wanted: Dtypes = ()

        def begin() -> int:
            nonlocal wanted
            wanted = source.gathered_in(self._kinds(source))
            return number()

        # a rank that fails here fails on all: none may wait for the others' parts
        version = agreed(begin)
        # gathered tensor by tensor, in what rank 0 writes: half the bytes where it writes bfloat16
        stream = source.tensors(dtypes_of_first(wanted))
        canary = self._canary(weights)
        done, is_written = Published(version=version, manifest=None), False
        try:
            if is_first():
                done = self._write(source, stream, version, canary)
                is_written = True
        finally:
            for _ in stream:  # the other ranks wait for this one's part of every tensor
                pass
            # the others learn whether there is a version, and no more
            is_written = bool(from_first(is_written))
        if not is_written:
            raise WeightSyncError(f"rank 0 could not publish version {version}; see the error of rank 0")
        return done

    def publish_behind(self, weights: Weights | None, version: int) -> Future[Published]:
        """Write a version in its own thread; the tensors must not change meanwhile."""
        source = self._source(weights)
        if source.is_sharded:
            raise ValueError("wait=False: sharded weights are gathered by all ranks, which the forward would disturb")
        if not is_first() and self.expected is None:
            done: Future[Published] = Future()
            done.set_result(Published(version=version, manifest=None))
            return done
        canary = self._canary(weights)
        # one thread for this version only
        thread = ThreadPoolExecutor(1, thread_name_prefix="weight-publisher")
        future = thread.submit(self._write, source, _unchanged(source, source.changes()), version, canary)
        thread.shutdown(wait=False)  # it ends with its only task
        return future

    def protect(self, version: int) -> None:
        """Keep a version in the store until another one is protected."""
        if self._writer is not None:  # else it is not one of this trainer's
            self._writer.protected = version

    def doubt(self) -> None:
        """Note that a replica could not read a version: the next one is written whole."""
        if self._writer is not None:
            self._writer.doubt()

    def republish(self, version: int, number: Callable[[], int]) -> Published:
        """Publish an older version's contents under a new number, without rewriting a byte."""
        new, began = number(), time.perf_counter()
        if not is_first() and self.expected is None:
            return Published(version=new, manifest=None)
        with naming_the_folder(self._store.folder):
            # files are linked under the new number
            manifest = self._open().republish(version, new)
            return self._published(manifest, began, self._canaries.get(version))

    def _source(self, weights: Weights | None) -> Source:
        return source_of(weights, self.model, self.expected)

    def _kinds(self, source: Source) -> Kinds:
        """Return what a source's tensors are written as, if they are the engine's."""
        if self.expected is not None:
            check_tensors(source.kinds, self.expected)
        return cast_kinds(source.kinds, self._options.dtype, self.expected, self.engine_dtype)

    def _write(
        self, source: Source, tensors: Iterator[tuple[str, Tensor]], version: int, canary: Canary | None
    ) -> Published:
        kinds, began = self._kinds(source), time.perf_counter()
        with naming_the_folder(self._store.folder):
            return self._published(self._open().publish(tensors, version, kinds), began, canary)

    def _published(self, manifest: Manifest, began: float, canary: Canary | None) -> Published:
        version, seconds = manifest.version, time.perf_counter() - began
        # the store drops its oldest; their canaries go too
        kept = set(WeightStoreReader(self._store.folder).versions())
        self._canaries = {v: c for v, c in (self._canaries | {version: canary}).items() if v in kept}
        return Published(version=version, manifest=manifest, began=began, seconds=seconds, canary=canary)

    def _open(self) -> WeightStoreWriter:
        if self._writer is not None and not self._writer.is_there():  # the folder was removed: it is made again
            self._writer.close()
            self._writer = None
        if self._writer is None:
            store = self._store
            self._writer = WeightStoreWriter(store.folder, store.keep_versions, delta=store.delta, fsync=store.fsync)
        return self._writer

    def _canary(self, weights: Weights | None) -> Canary | None:
        """Return the canary of the model that is sent; tensors without a model have none."""
        module = self._module if weights is None else weights
        if not self._with_canary or not isinstance(module, nn.Module):
            return None
        return canary_of(trained_model(module), self.engine_dtype)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _unchanged(source: Source, before: str) -> Iterator[tuple[str, Tensor]]:
    """Yield a source's tensors; at the end, raise an error if they no longer hold what they did ``before``."""
    yield from source.tensors()
    if source.changes() != before:
        raise ManifestMismatch(
            "the weights were changed while they were copied: call sender.wait_published() before the "
            "optimiser's step, or sender.guard(optimizer) once"
        )


class AdapterPublisher(Publisher):
    """Writes versions of a peft model's adapter; the base weights, which may be quantised, are not sent."""

    def register(self, model: nn.Module) -> None:
        module = trained_model(model)
        check_adapter(module, self.expected)
        self._module = module

    def check(self, expected: Kinds) -> None:
        """Check that the registered model's adapter, if there is one, fits an engine's weights."""
        if self._module is not None:
            check_adapter(self._module, expected)

    def expect(self, expected: Kinds, engine_dtype: torch.dtype | None) -> None:
        self.expected, self.engine_dtype = expected, engine_dtype

    def _source(self, weights: Weights | None) -> Source:
        model = self._module if weights is None else weights
        if model is None:
            raise RuntimeError("publish: no model; call register_model(model) first, or pass one")
        if not isinstance(model, nn.Module):
            raise ValueError(f"lora='adapter' sends the adapter of a peft model, got {type(weights).__name__}")
        model = trained_model(model)
        check_adapter(model, self.expected)  # at every version: what is active may have changed
        tensors = adapter_tensors(adapter_files(model))
        return Source(
            {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}, lambda: iter(tensors.items())
        )

    def _kinds(self, source: Source) -> Kinds:
        return source.kinds
