"""New weights in an engine over plain transformers: fetched and checked while it serves, loaded between two steps.

The model object stays, its tensors are exchanged. A version is loaded by transformers' own loader, which stacks a
checkpoint's experts, into a second model; that lasts for a moment, and so does the memory of both. New weights must
pass the weight check before a token is made with them: if they fail, the old ones are put back, and no request has
noticed.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchrl_moe._errors import WeightSyncError
from torchrl_moe.modules.backends.checkpoint import checkpoint_folder, checkpoint_metadata
from torchrl_moe.modules.backends.replica import PauseMode, Scoring
from torchrl_moe.modules.backends.reports import SwapReport
from torchrl_moe.modules.backends.transformers.engine_requests import EngineRequests
from torchrl_moe.modules.backends.weight_proof import compare_log_probs
from torchrl_moe.weight_update.store import Manifest, WeightStoreReader, check_tensors
from torchrl_moe.weight_update.transports.base import Receiver, StageReport
from torchrl_moe.weight_update.transports.registry import open_receiver

__all__ = ["EngineWeights", "exchange"]

TRANSPORTS = ("memmap", "gloo")
PROBE_IDS = (0, 0)
REPORTED = ("missing_keys", "unexpected_keys", "mismatched_keys")  # of transformers' loader


class OnlyWorker:
    """What a transport needs to know of a worker: this one is rank 0 of 1."""

    data_parallel_index, world_size, rank = 0, 1, 0

    @property
    def parallel_config(self) -> OnlyWorker:
        """Itself."""
        return self


class EngineWeights:
    """The weights of one engine.

    Args:
        model: the model that serves.
        source: the folder or hub name that it was loaded from.
        requests: of the engine, whose ``version`` is that of the weights.
        known: what the loader reported of the checkpoint; a version may lack no more.
    """

    def __init__(self, model: Any, source: str, requests: EngineRequests, known: Mapping[str, Any]) -> None:
        self._model, self._source, self._requests, self._known = model, source, requests, known
        self._receiver: Receiver | None = None
        self._reader: WeightStoreReader | None = None
        self._expected: dict[str, Any] = {}
        self._staged: Manifest | None = None

    async def init(self, transport: str, options: Mapping[str, Any]) -> None:
        """Open a transport, and close the one before.

        Raises:
            ValueError: this engine does not support it.
        """
        if transport not in TRANSPORTS:
            hint = "lora='merged'" if transport == "adapter" else "transport='memmap' or 'gloo'"
            raise ValueError(f"engine='transformers' takes no weights by {transport!r}: use {hint}")
        self.close()
        self._receiver = open_receiver(transport, options, OnlyWorker())
        self._reader = WeightStoreReader(options["folder"]) if transport == "memmap" else None
        self._expected = await asyncio.to_thread(lambda: checkpoint_metadata(checkpoint_folder(self._source)))

    def _open(self) -> Receiver:
        if self._receiver is None:
            raise WeightSyncError("the weight transport is not initialised: call init_all_workers_group() first")
        return self._receiver

    async def stage(self, version: int, verify: str, threads: int, manifest: str | None) -> StageReport:
        """Fetch a version and check it, while requests run.

        Raises:
            WeightSyncError: the transport was not opened, or the version is not what the engine expects.
        """
        receiver, started = self._open(), time.perf_counter()
        found = await asyncio.to_thread(self._fetch, receiver, version, verify == "digest", threads, manifest)
        self._staged, seconds = found, time.perf_counter() - started
        return StageReport(seconds=seconds, nbytes=found.nbytes, digest=found.digest, fetched=seconds)

    def _fetch(self, receiver: Receiver, version: int, verify: bool, threads: int, manifest: str | None) -> Manifest:
        found = receiver.manifest(version) if manifest is None else Manifest.from_json(manifest)
        check_tensors(found.tensors, self._expected)
        receiver.fetch(found, verify=verify, threads=threads)
        if verify and self._reader is not None:
            self._reader.verify(found, threads)
        return found

    async def swap(
        self, version: int, pause: PauseMode, clear_cache: bool, canary: Mapping[str, Any] | None, patience: float
    ) -> SwapReport:
        """Serve a version that was staged. Never raises for a failed update: the old weights serve on.

        Args:
            version: its number.
            pause: ``"wait"`` lets requests in flight finish before; ``"abort"`` has them read their tokens again.
            clear_cache: has them do so, too.
            canary: the trainer's log-probs of a prompt, for the weight check; ``None``: any finite log-prob passes.
            patience: unused: the weight check waits for nothing.
        """
        del patience
        started = time.perf_counter()
        if pause == "wait" and self._requests.is_frozen:
            error = "the engine is paused with requests in flight, which cannot finish: resume() it first"
            return SwapReport(started=False, error=error)
        async with self._requests.between_steps(pause):
            paused = time.perf_counter()
            load = self._requests.compute(self._load, version, canary)
            (error_or_none,) = await asyncio.gather(load, return_exceptions=True)
            done = time.perf_counter()
            if error_or_none is None:
                self._requests.version = version
                if clear_cache or pause == "abort":
                    self._requests.read_again()
        return SwapReport(
            started=error_or_none is None,
            pausing_seconds=paused - started,
            loading_seconds=done - paused,
            paused_seconds=done - started,
            error=None if error_or_none is None else f"{type(error_or_none).__name__}: {error_or_none}",
        )

    def _load(self, version: int, canary: Mapping[str, Any] | None) -> None:
        """Exchange the weights and check the new ones; if they fail, put the old ones back."""
        staged = self._staged
        if staged is None or staged.version != version:
            raise WeightSyncError(f"version {version} is not what was staged last")
        with self._open().reading(staged) as tensors:
            before = exchange(self._model, tensors, self._known)
        try:
            self._prove(canary)
        except BaseException:
            _put(self._model, before)
            raise

    def _prove(self, canary: Mapping[str, Any] | None) -> None:
        ids = PROBE_IDS if canary is None else canary["token_ids"]
        scores = self._requests.decoder.score(ids, Scoring())[1:]
        if not np.isfinite(scores).all():
            raise WeightSyncError("the new weights give a log-prob that is not a number")
        if canary is not None:
            compare_log_probs(scores.tolist(), canary["log_probs"], canary["tolerance"])

    def close(self) -> None:
        """Close the transport. Idempotent."""
        for one in (self._receiver, self._reader):
            if one is not None:
                one.close()
        self._receiver = self._reader = self._staged = None


def exchange(model: Any, tensors: Mapping[str, Tensor], known: Mapping[str, Any]) -> dict[str, Tensor]:
    """Give a model other weights, and return those that it had, by its own names.

    Args:
        model: of transformers; it stays the same object, and keeps its hooks.
        tensors: by checkpoint name; they are copied.
        known: what its loader reported of the checkpoint that it came from.

    Raises:
        WeightSyncError: they are not what the model is made of; then it is as it was.
    """
    fresh, info = type(model).from_pretrained(
        None,
        config=copy.deepcopy(model.config),
        state_dict=dict(tensors),
        dtype=model.dtype,
        output_loading_info=True,
    )
    wrong = {name: sorted(map(str, set(info[name]) - set(known.get(name, ())))) for name in REPORTED}
    if found := [f"{name} {', '.join(keys[:4])}" for name, keys in wrong.items() if keys]:
        raise WeightSyncError(f"{type(model).__name__} cannot take these weights: {'; '.join(found)}")
    theirs = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    new = {
        name: tensor.clone() if tensor.untyped_storage().data_ptr() in theirs else tensor
        for name, tensor in fresh.state_dict().items()
    }
    before = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    _put(model, new)
    return before


def _put(model: Any, state: Mapping[str, Tensor]) -> None:
    """Replace a model's tensors, by its own names; the new ones are not copied if they are on its device."""
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.data = state[name].to(tensor.device)
