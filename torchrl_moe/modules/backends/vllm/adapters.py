"""Builds vLLM's ``LoRARequest`` from what users pass, in the engine process, and loads the adapter that it names."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from torchrl_moe.modules.backends.vllm.sampling import check_wire

__all__ = ["Adapters", "build_lora_request"]


def build_lora_request(spec: Any) -> Any:
    """Return vLLM's ``LoRARequest`` of a mapping of its fields or of such an object; ``None`` stays.

    Raises:
        ValueError: neither of them, or an id below 1, or no path, or a field that is missing, unknown or of a wrong
            type.
    """
    if spec is None:
        return None
    from vllm.lora.request import LoRARequest

    if not isinstance(spec, LoRARequest | Mapping):
        raise ValueError(f"lora_request must be vllm.lora.request.LoRARequest or a mapping, got {type(spec).__name__}")
    if isinstance(spec, Mapping):
        if not {"lora_path": None, **spec}["lora_path"]:
            raise ValueError(f"lora_request names no lora_path, the folder of the adapter: {dict(spec)!r}")
        try:
            spec = LoRARequest(**spec)
        except (TypeError, ValueError) as error:
            raise ValueError(f"lora_request: {error}") from error
    check_wire("lora_request", spec)
    return spec


class Adapters:
    """The adapters of one engine.

    vLLM loads an adapter inside the step that first needs it, and one that cannot be loaded ends the engine. So each is
    loaded beforehand, by a command of its own: then a bad one costs its own request only.

    Args:
        engine: the ``AsyncLLM``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._loads: dict[int, tuple[str, asyncio.Task[Any]]] = {}

    async def load(self, spec: Any) -> Any:
        """Return vLLM's request of a spec, see :func:`build_lora_request`, once its adapter is loaded.

        Raises:
            ValueError: it cannot be, and the next request tries again; or its id is another adapter's, which vLLM would
                use in silence.
        """
        lora = build_lora_request(spec)
        if lora is None:
            return None
        number, path = lora.lora_int_id, lora.lora_path
        if number not in self._loads or lora.load_inplace:
            self._loads[number] = path, asyncio.get_running_loop().create_task(self._engine.add_lora(lora))
        known, task = self._loads[number]
        if known != path:
            raise ValueError(
                f"lora_int_id={number} is the adapter of {known!r}, not of {path!r}: give each one an id of its own, "
                "or pass load_inplace=True to replace it."
            )
        try:
            await asyncio.shield(task)  # others may wait for it too
        except Exception as error:  # vLLM's own is no narrower
            if self._loads.get(number) == (path, task):
                del self._loads[number]
            raise ValueError(f"adapter {lora.lora_name!r} of {path!r} cannot be loaded: {error}") from error
        return lora
