"""``VLLMWeightSyncScheme``: how a trainer's weights reach the engine's replicas, under TorchRL's name.

The scheme holds the choices, its sender does the work. The transport of this version is ``memmap``: a weight store in
memory on one host, which a late or restarted replica can load from at any time.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torchrl_moe.weight_update.sender import WeightSender

__all__ = ["VLLMWeightSyncScheme"]

TRANSPORTS = ("memmap",)
MODES = ("hot_swap", "drain")
CACHES = ("salt", "recompute")
MEANINGLESS = ("master_address", "master_port", "gpus_per_replica", "device", "strategy")


class VLLMWeightSyncScheme:
    """The choices of a weight sync.

    Args:
        transport: ``"memmap"``: a weight store that trainer and engines map.
        mode: of requests in flight: ``"hot_swap"`` freezes them during the swap, they go on with the new weights;
            ``"drain"`` lets them finish first.
        kv: of cached prefixes: ``"salt"`` leaves them to the requests that made them and starts anew for each version;
            ``"recompute"`` drops the KV cache, and frozen requests are computed again.
        folder: of the weight store; default: a new one in ``/dev/shm`` (or the temporary folder), removed at shutdown.
        min_serving: how many replicas must hold the new version for an update to succeed; default: all but one.
        timeout_seconds: deadline of each step of each replica.
        num_replicas: checked against the engine, if given.
        **refused: TorchRL's arguments of its collective transport, which have no meaning for this one.

    Raises:
        ValueError: an unknown choice, or an argument without a meaning here.

    Example::

        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        sender.register_model(actor)
        sender.init_all_workers_group(None, vllm_engine=engine)
        report = sender.update_weights()
    """

    def __init__(
        self,
        transport: Literal["memmap"] = "memmap",
        mode: Literal["hot_swap", "drain"] = "hot_swap",
        kv: Literal["salt", "recompute"] = "salt",
        *,
        folder: str | os.PathLike[str] | None = None,
        min_serving: int | None = None,
        timeout_seconds: float = 120.0,
        num_replicas: int | None = None,
        **refused: Any,
    ) -> None:
        for name, value, allowed in (("transport", transport, TRANSPORTS), ("mode", mode, MODES), ("kv", kv, CACHES)):
            if value not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
        for name in refused:
            if name not in MEANINGLESS:
                raise TypeError(f"VLLMWeightSyncScheme has no argument {name!r}")
            raise ValueError(f"{name} belongs to a collective transport; transport={transport!r} has no process group")
        if min_serving is not None and min_serving < 0:
            raise ValueError(f"min_serving must be at least 0, got {min_serving}")
        if timeout_seconds <= 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds:g}")
        self.transport, self.mode, self.kv = transport, mode, kv
        self.min_serving, self.timeout_seconds, self.num_replicas = min_serving, timeout_seconds, num_replicas
        self.folder = Path(folder) if folder is not None else _store_folder()
        # also at interpreter exit: memory that nobody frees outlives the process
        self._clean = weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True) if folder is None else None

    def create_sender(self) -> WeightSender:
        """Return the trainer's side."""
        from torchrl_moe.weight_update.sender import WeightSender

        return WeightSender(self)

    def shutdown(self) -> None:
        """Remove the weight store, if it is the scheme's own. Idempotent."""
        if self._clean is not None:
            self._clean()

    def __repr__(self) -> str:
        return f"VLLMWeightSyncScheme(transport={self.transport!r}, mode={self.mode!r}, kv={self.kv!r})"


def _store_folder() -> Path:
    memory = Path("/dev/shm")
    usable = memory.is_dir() and os.access(memory, os.W_OK)
    return Path(tempfile.mkdtemp(prefix="torchrl_moe-weights-", dir=memory if usable else None))
