"""Maps a name to a transport, at either end; only that one is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchrl_moe.weight_update.transports.base import Receiver, Transport, rank_of
from torchrl_moe.weight_update.transports.memmap import MemmapReceiver, MemmapTransport

__all__ = ["open_receiver", "open_transport"]


def open_transport(name: str, folder: Path, seen_as: Path | None = None, **options: Any) -> Transport:
    """Return the trainer's end of a transport.

    Args:
        name: ``"memmap"``, ``"adapter"`` or ``"gloo"``.
        folder: of the weight store.
        seen_as: the same, as the replicas see it.
        options: arguments of its constructor; ``None`` leaves a default.

    Raises:
        ValueError: there is no such transport, or not on that device.
    """
    if name == "memmap":
        return MemmapTransport(seen_as or folder)
    if name == "adapter":
        return MemmapTransport(seen_as or folder, "adapter")
    options = {option: value for option, value in options.items() if value is not None}
    if name == "gloo":
        from torchrl_moe.weight_update.transports.gloo import GlooTransport

        return GlooTransport(folder, **options)
    raise ValueError(f"unknown transport {name!r}; there are 'memmap', 'adapter' and 'gloo'")


def open_receiver(name: str, options: Mapping[str, Any], worker: Any = None) -> Receiver:
    """Return a worker's end of a transport.

    Args:
        name: the scheme's.
        options: what this transport needs to know, such as ``folder``.
        worker: the weight engine that asks; gloo takes its rank from it.

    Raises:
        ValueError: there is no such transport.
    """
    if name == "memmap":
        return MemmapReceiver(**options)
    if name == "gloo":
        from torchrl_moe.weight_update.transports.gloo import GlooReceiver

        return GlooReceiver(options, rank_of(worker.parallel_config, options["rank_offset"]))
    raise ValueError(f"unknown transport {name!r}; the worker has 'memmap' and 'gloo'")
