"""The engine process's side of an adapter update: load a version beside the others, then give it to new requests.

Nothing is paused. A request keeps the adapter that it began with, and vLLM keys cached prefixes by an adapter's name,
which no two versions share. An adapter that vLLM evicts is read from its files again in the step that needs it, and one
that cannot be read ends the engine. So each version is copied to files of our own, which stay until no request uses it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchrl_moe._errors import ManifestMismatch, WeightSyncError
from torchrl_moe.modules.backends.process.parent_watch import FOLDER_VARIABLE
from torchrl_moe.modules.backends.reports import SwapReport
from torchrl_moe.modules.backends.vllm.adapters import build_lora_request, load_adapter, unused_modules
from torchrl_moe.modules.backends.vllm.engine_requests import EngineRequests
from torchrl_moe.weight_update.store import Manifest, copy_adapter
from torchrl_moe.weight_update.transports.base import StageReport

__all__ = ["AdapterVersions"]

FIRST_NUMBER = 1 << 30  # users count their own from 1
LEAVE_SECONDS = 0.1  # between two checks whether an old adapter is still in use


@dataclass(frozen=True, slots=True, eq=False)
class _Loaded:
    """An adapter in the engine: its version, vLLM's request of it, and our copy of its files."""

    version: int
    lora: Any
    folder: Path


class AdapterVersions:
    """The versions of a trainer's adapter in one ``AsyncLLM``.

    Args:
        engine: the ``AsyncLLM``.
        requests: of the engine; those without an adapter of their own get ours.
        check: called with what is about to be done; raises if the engine cannot do that now.
    """

    def __init__(self, engine: Any, requests: EngineRequests, check: Callable[[str], None] = lambda _: None) -> None:
        self._engine, self._requests, self._check = engine, requests, check
        self._store: Path | None = None
        self._numbers = itertools.count(FIRST_NUMBER)
        self._staged: _Loaded | None = None
        self._serving: _Loaded | None = None
        self._leaving: set[asyncio.Task[None]] = set()

    def init(self, options: Mapping[str, Any], replaced: bool) -> None:
        """Note the weight store's ``folder``.

        Args:
            options: with the folder.
            replaced: whether the weights are no longer those that the engine was started from.

        Raises:
            ValueError: the engine was started without LoRA, or its weights were replaced.
        """
        if self._engine.vllm_config.lora_config is None:
            raise ValueError(
                "lora='adapter' needs an engine with LoRA, and this one was started without: pass enable_lora=True and "
                "max_lora_rank=, at least the adapter's; on a CPU also lora_target_modules= without the experts, for "
                "example ['qkv_proj', 'o_proj']. With max_loras=2 requests of two versions run side by side."
            )
        if replaced:
            raise ValueError(
                "lora='adapter' sends no weights, and this engine's were replaced by a sender's, so that a restarted "
                "replica would not have them: start the engine from the model that the adapter is for"
            )
        self._store = Path(options["folder"])

    async def stage(self, version: int) -> StageReport:
        """Load a version, which no request uses yet.

        Raises:
            WeightSyncError: the store does not have it whole, or :meth:`init` was not called.
            ManifestMismatch: the engine cannot load it, or would leave a part of it out.
            EngineError: the engine sleeps.
        """
        self._check("the update of an adapter")
        if self._store is None:
            raise WeightSyncError("the weight transport is not initialised: call init_all_workers_group() first")
        started = time.perf_counter()
        folder = Path(tempfile.mkdtemp(prefix="adapter-", dir=os.environ.get(FOLDER_VARIABLE)))
        try:
            manifest = await asyncio.to_thread(copy_adapter, self._store, version, folder)
            fetched = time.perf_counter()
            adapter = await self._load(version, folder)
        except BaseException:
            shutil.rmtree(folder)
            raise
        self._retire(self._staged)
        self._staged = adapter
        return _report(manifest, started, fetched)

    async def _load(self, version: int, folder: Path) -> _Loaded:
        number = next(self._numbers)
        fields = {"lora_name": f"synced-{number}", "lora_int_id": number, "lora_path": str(folder)}
        unused: Any
        (unused,) = await asyncio.gather(load_adapter(self._engine, fields), return_exceptions=True)
        if isinstance(unused, BaseException):
            raise ManifestMismatch(f"the engine cannot load adapter version {version}: {unused}")
        if unused:
            await self._engine.remove_lora(number)
            raise ManifestMismatch(f"adapter version {version} {unused_modules(unused)}, or send lora='merged'")
        return _Loaded(version, build_lora_request(fields), folder)

    def swap(self, version: int) -> SwapReport:
        """Give the version staged last to all new requests."""
        adapter = self._staged
        if adapter is None or adapter.version != version:
            return SwapReport(started=False, error=f"adapter version {version} is not the one staged last")
        self.leave()
        self._staged, self._serving = None, adapter
        self._requests.change_adapter(adapter.lora, version)
        return SwapReport()

    def leave(self) -> None:
        """Remove the version in use, once no request uses it: another one, or whole weights have taken its place."""
        self._retire(self._serving)
        self._serving = None

    def _retire(self, adapter: _Loaded | None) -> None:
        if adapter is not None:
            task = asyncio.get_running_loop().create_task(self._remove(adapter))
            self._leaving.add(task)
            task.add_done_callback(self._leaving.discard)

    async def _remove(self, adapter: _Loaded) -> None:
        while self._requests.uses(adapter.lora):
            await asyncio.sleep(LEAVE_SECONDS)
        error: Any
        (error,) = await asyncio.gather(self._engine.remove_lora(adapter.lora.lora_int_id), return_exceptions=True)
        if not isinstance(error, BaseException):  # else the engine is ending
            shutil.rmtree(adapter.folder, ignore_errors=True)


def _report(manifest: Manifest, started: float, fetched: float) -> StageReport:
    now = time.perf_counter()
    return StageReport(
        seconds=now - started,
        nbytes=manifest.nbytes,
        digest=manifest.digest,
        fetched=fetched - started,
        loaded=now - fetched,
    )
