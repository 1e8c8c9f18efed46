"""Builds vLLM's ``LoRARequest`` from what users pass, in the engine process, and loads the adapter that it names."""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchrl_moe.modules.backends.process.engine_program import FOLDER_VARIABLE
from torchrl_moe.modules.backends.vllm.sampling import check_wire

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.v1.engine.async_llm import AsyncLLM

SHOWN_MODULES = 4


def build_lora_request(spec: object) -> LoRARequest | None:
    """Return vLLM's ``LoRARequest`` of a mapping of its fields or of such an object; ``None`` stays."""
    if spec is None:
        return None
    from vllm.lora.request import LoRARequest

    if isinstance(spec, Mapping):
        if not spec.get("lora_path"):
            raise ValueError(f"lora_request names no lora_path, the folder of the adapter: {dict(spec)!r}")
        try:
            spec = LoRARequest(**spec)
        except (TypeError, ValueError) as error:
            raise ValueError(f"lora_request: {error}") from error
    if not isinstance(spec, LoRARequest):
        raise ValueError(f"lora_request must be vllm.lora.request.LoRARequest or a mapping, got {type(spec).__name__}")
    check_wire("lora_request", spec)
    return spec


class UnusedModulesError(ValueError):
    """An adapter has modules that the engine does not adapt."""


def new_folder() -> Path:
    """Make a folder for our copy of an adapter's files."""
    return Path(tempfile.mkdtemp(prefix="adapter-", dir=os.environ.get(FOLDER_VARIABLE)))


async def load_adapter(engine: AsyncLLM, fields: Mapping[str, object]) -> LoRARequest:
    """Load an adapter, by the fields of vLLM's request; one with modules that the engine does not adapt is refused."""
    by_worker = await engine.collective_rpc("torchrl_moe_load_adapter", args=(dict(fields),))
    # each pipeline stage adapts only its own layers; what none adapts vLLM would leave out in silence
    if unused := sorted(set.intersection(*map(set, by_worker))):
        await engine.remove_lora(fields["lora_int_id"])
        more = ", ..." if len(unused) > SHOWN_MODULES else ""
        raise UnusedModulesError(
            f"it has {len(unused)} modules that the engine does not adapt ({', '.join(unused[:SHOWN_MODULES])}{more}): "
            "start it with lora_target_modules= that names them"
        )
    lora = build_lora_request(fields)
    assert lora is not None
    return lora


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """An adapter under a user's id: its number in the engine, the path that was given, our copy, and vLLM's request."""

    number: int
    path: str
    folder: Path
    loading: asyncio.Task[LoRARequest]


class Adapters:
    """The adapters of one engine.

    vLLM loads an adapter inside the step that first needs it, or needs it again after it was evicted, and one that
    cannot be loaded ends the engine. So each is loaded beforehand, from a copy of its files, by a command of its own:
    then a bad one costs its own request only. In the engine it has a number and a name of its own: numbers have 31
    bits there, and cached prefixes are found by name.
    """

    def __init__(self, engine: AsyncLLM) -> None:
        self._engine = engine
        self._known: dict[int, _Known] = {}
        self._numbers = itertools.count(1)

    async def load(self, spec: object) -> LoRARequest | None:
        """Return vLLM's request of a spec, see :func:`build_lora_request`, once its adapter is loaded."""
        lora = build_lora_request(spec)
        if lora is None:
            return None
        number, path = lora.lora_int_id, lora.lora_path
        # one load for all requests that name it; a user replaces it by load_inplace only, once that is loaded
        known = self._known.get(number)
        if known is None or lora.load_inplace:
            ours, folder = next(self._numbers), new_folder()
            loading = asyncio.get_running_loop().create_task(self._load(lora, ours, folder))
            new = _Known(ours, path, folder, loading)
            if known is None:
                self._known[number] = new
            known = new
        elif known.path != path:
            raise ValueError(
                f"lora_int_id={number} is the adapter of {known.path!r}, not of {path!r}: give each one an id of its "
                "own, or pass load_inplace=True to replace it."
            )
        try:
            return await asyncio.shield(known.loading)  # others may wait for it too
        except Exception as error:  # vLLM's own is no narrower
            if self._known.get(number) is known:
                del self._known[number]
            raise ValueError(f"adapter {lora.lora_name!r} of {path!r} cannot be loaded: {error}") from error

    async def _load(self, lora: LoRARequest, number: int, folder: Path) -> LoRARequest:
        try:
            is_copied = await asyncio.to_thread(_copy, lora.lora_path, folder)
            fields = {
                **{name: getattr(lora, name) for name in type(lora).__struct_fields__},
                "lora_name": f"{lora.lora_name}-{number}",
                "lora_int_id": number,
                "lora_path": str(folder) if is_copied else lora.lora_path,
                "load_inplace": False,  # once: vLLM would load it in every step
            }
            loaded = await load_adapter(self._engine, fields)
        except BaseException:
            shutil.rmtree(folder)
            raise
        before, loading = self._known.get(lora.lora_int_id), asyncio.current_task()
        assert loading is not None
        left = before.folder if before is not None and before.loading.done() else None
        if before is None or left is None or before.number < number:  # its id stands for it from now on
            self._known[lora.lora_int_id] = _Known(number, lora.lora_path, folder, loading)
        else:
            left, folder = folder, before.folder
        if left is not None and left.is_dir():  # requests that began with the other one may have to load it again
            shutil.rmtree(left)
            left.symlink_to(folder)
        return loaded


def _copy(path: str, folder: Path) -> bool:
    """Copy what vLLM reads of an adapter; return False if it is not there, of which vLLM says more."""
    from vllm.lora.utils import get_adapter_absolute_path

    source = Path(get_adapter_absolute_path(path))
    if not source.is_dir():
        return False
    for file in source.glob("adapter_*"):
        shutil.copyfile(file, folder / file.name)
    return True
