"""Which transport a scheme names; only that one is imported."""

from __future__ import annotations

from importlib import import_module

from torchrl_moe.weight_update.scheme import VLLMWeightSyncScheme
from torchrl_moe.weight_update.transports.memmap import MemmapTransport
from torchrl_moe.weight_update.transports.transport import Transport

__all__ = ["open_transport"]

LOOPBACK = "127.0.0.1"
COLLECTIVE = {"gloo": "GlooTransport", "nccl": "NcclTransport"}


def open_transport(scheme: VLLMWeightSyncScheme) -> Transport:
    """Return the trainer's end of a scheme's transport."""
    if scheme.source.lora == "adapter":
        return MemmapTransport(scheme.store.seen_as, "adapter")
    if scheme.transport == "memmap":
        return MemmapTransport(scheme.store.seen_as)
    module = import_module(f"torchrl_moe.weight_update.transports.{scheme.transport}")
    options = {} if scheme.collective.device is None else {"device": scheme.collective.device}
    transport: Transport = getattr(module, COLLECTIVE[scheme.transport])(
        scheme.store.folder, address=scheme.collective.master_address or LOOPBACK, **options
    )
    return transport
