"""``VLLMWeightSyncScheme``: the options of how weights reach an engine, and the sender and receiver made with them.

With every transport a version is first written to a weight store, from which a late or restarted replica can load it
at any time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn

import torch
from torchrl.weight_update import WeightSyncScheme

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.store.folder import LOCK, WriterLock, at_end, is_in_memory
from torchrl_moe.weight_update.options import (
    ROLLING_SHARE,
    CollectiveOptions,
    SourceOptions,
    StoreOptions,
    SwapOptions,
    SyncOptions,
    one_of,
)
from torchrl_moe.weight_update.sender import SenderTransport, VLLMWeightReceiver, VLLMWeightSender
from torchrl_moe.weight_update.transports.base import StageOptions

PREFIX = "torchrl_moe-weights-"
ORPHAN_SECONDS = 60.0  # a writer makes its file before it locks it
TRANSPORTS = ("memmap", "gloo", "nccl")


class VLLMWeightSyncScheme(WeightSyncScheme):
    """The options of a weight sync. TorchRL's arguments come first, in its order.

    Args:
        master_address: with ``"nccl"``, where workers reach the trainer (default: this host's name). With ``"gloo"`` it
            must be a loopback address, since all ranks are on one host and meet in a folder. Not used with
            ``"memmap"``.
        master_port: with ``"nccl"``, of the first replica's communicator; the others' are the next ones (default:
            free ones).
        gpus_per_replica: checked against the engine's workers per replica, if given.
        num_replicas: checked against the engine, if given.
        strategy: TorchRL's; both of its ways take the same weights.
        device: with ``"nccl"``, the GPU that sends (default: the current one). Else weights are sent from host memory;
            ``"gloo"`` refuses a GPU.
        transport: ``"memmap"``: a weight store that trainer and engines map; ``"gloo"`` broadcasts it.
            ``"nccl"`` broadcasts it from a GPU into the engines' models during their pause, by vLLM's own
            weight-transfer engines, without a digest on the way. It was not run yet: tests have no GPUs.
        mode: what happens to requests in flight: ``"hot_swap"`` freezes them during the swap, and they continue with
            the new weights; ``"drain"`` lets them finish first; ``"abort_resume"`` cuts them, and the engine resumes
            them itself.
        kv: what happens to cached prefixes: ``"salt"`` keeps them for the requests that made them, and each version
            starts an empty prefix cache; ``"recompute"`` drops the KV cache, and frozen requests are computed again.
        rolling: how many replicas, or which share of them, are swapped at the same time; at least one.
        min_serving: how many replicas, or which share of them, must hold the new version for an update to succeed
            (default: nine of ten, and at least one), and must serve meanwhile (default: all but ``rolling``; one may
            always be swapped).
        prefetch: how many threads of a replica read and hash a version.
        verify: ``"digest"``: every byte is hashed where it arrives; ``"canary"``: the engine's log-probs of a fixed
            prompt are compared with those of the model that is sent (not if tensors are sent instead of a model);
            ``"off"``: neither. In every case the engine must generate a token with a finite log-prob; where it is
            paused, or too busy to do so in time, the report says so (``unproved``).
        folder: of the weight store; default: a new one in ``/dev/shm`` (or the temporary folder), removed at shutdown.
            Several hosts need one on a file system that they share. It must be empty or a store's own, and only its
            user may read it.
        keep_versions: how many versions are kept at the same time, at least 2.
        fsync: whether versions outlive a crash of the machine.
        delta: whether only the elements that changed since the last version are written, bit by bit, where that is
            less than half of all; it costs the trainer's host as much memory as the model has bytes. ``"auto"``: in a
            folder that is not in memory.
        dtype: of floating tensors: ``"engine"`` sends none wider than in the engine, ``"trainer"`` sends them
            unchanged, a floating dtype of torch sends that one.
        lora: ``"merged"``: peft's adapters are added to their weights; ``"adapter"``: only the registered model's
            adapter is sent, and vLLM's own LoRA applies it, while requests run. The engine needs ``enable_lora=True``.
        timeout_seconds: deadline of each step of each replica.
        buffer_bytes: bytes that gloo (64 MiB) or NCCL (vLLM's own default) send at a time.
        num_buffers: of ``"nccl"``: how many buffers take turns (default: vLLM's).

    Raises:
        ValueError: an unknown option, or an argument that has no meaning for the transport.

    A scheme that made its own store makes another one when it is unpickled.

    Example::

        sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
        sender.register_model(actor)
        sender.init_all_workers_group(None, vllm_engine=engine)
        report = sender.update_weights()
    """

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        gpus_per_replica: int | None = None,
        num_replicas: int | None = None,
        strategy: Literal["tensordict", "state_dict"] = "tensordict",
        device: torch.device | str | int | None = None,
        *,
        transport: Literal["memmap", "gloo", "nccl"] = "memmap",
        mode: Literal["hot_swap", "drain", "abort_resume"] = "hot_swap",
        kv: Literal["salt", "recompute"] = "salt",
        rolling: int | float = ROLLING_SHARE,
        min_serving: int | float | None = None,
        prefetch: int = 1,
        verify: Literal["digest", "canary", "off"] = "digest",
        folder: str | os.PathLike[str] | None = None,
        keep_versions: int = 2,
        fsync: bool = False,
        delta: Literal["auto"] | bool = "auto",
        dtype: Literal["engine", "trainer"] | torch.dtype = "engine",
        lora: Literal["merged", "adapter"] = "merged",
        timeout_seconds: float = 120.0,
        buffer_bytes: int | None = None,
        num_buffers: int | None = None,
    ) -> None:
        if master_address in TRANSPORTS:
            raise ValueError(
                f"master_address={master_address!r} is TorchRL's first argument, and not the transport: write "
                f"transport={master_address!r}"
            )
        one_of("strategy", strategy, ("tensordict", "state_dict"))
        one_of("transport", transport, TRANSPORTS)
        one_of("verify", verify, ("digest", "canary", "off"))
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1 thread, got {prefetch}")
        # every option is checked before anything is made: each group by itself, then with the transport
        swapping = SwapOptions(
            mode=mode, kv=kv, rolling=rolling, min_serving=min_serving, timeout_seconds=timeout_seconds
        )
        source = SourceOptions(dtype=dtype, lora=lora)
        source.check(transport=transport, mode=mode, kv=kv, verify=verify, fsync=fsync, delta=delta)
        collective = CollectiveOptions(
            master_address=master_address,
            master_port=master_port,
            gpus_per_replica=gpus_per_replica,
            device=device,
            buffer_bytes=buffer_bytes,
            num_buffers=num_buffers,
        )
        collective.check(transport)
        if not isinstance(delta, bool):
            one_of("delta, unless True or False,", delta, ("auto",))
        if delta is True and transport != "memmap":
            raise ValueError(f"delta=True needs transport='memmap': {transport!r} sends whole versions")
        # patches are for weights in a folder that is not in memory; it may not be there yet
        if delta == "auto":
            delta = transport == "memmap" and lora == "merged" and folder is not None and not is_in_memory(Path(folder))
        # Checked under a stand-in for the folder: a refused scheme must not leave a new one in /dev/shm.
        known = Path("." if folder is None else folder)
        store = StoreOptions(folder=known, seen_as=known, keep_versions=keep_versions, fsync=fsync, delta=delta)
        with warnings.catch_warnings():  # that its state_dict strategy is experimental: here both send the same
            warnings.filterwarnings("ignore", "state_dict strategy is experimental")
            super().__init__(strategy)
        self.folder = _store_folder() if folder is None else Path(folder)
        self.options = SyncOptions(
            transport=transport,
            store=replace(store, folder=self.folder, seen_as=self.folder),
            source=source,
            staging=StageOptions(verify=verify, threads=prefetch),
            swapping=swapping,
            collective=collective,
            num_replicas=num_replicas,
        )
        # also at interpreter exit: shared memory outlives the process
        self._clean = None if folder is not None else at_end(self, shutil.rmtree, str(self.folder), True)

    def create_sender(self) -> VLLMWeightSender:
        """Return the trainer's side."""
        return VLLMWeightSender(self)

    def create_receiver(self, vllm_engine: object) -> VLLMWeightReceiver:
        """Return the engine's side, which only observes: the sender updates the replicas.

        Raises:
            ValueError: ``vllm_engine`` is not an ``AsyncVLLM``.
        """
        return VLLMWeightReceiver(self, vllm_engine)

    def create_transport(self) -> SenderTransport:
        """Return a sender under the names of TorchRL's transports."""
        return SenderTransport(self)

    def init_on_sender(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse: this is for weights in a collector's own workers, and here an engine holds them.

        Raises:
            TypeError: always.
        """
        self._refuse(
            f"init_on_sender({', '.join([*map(repr, args), *kwargs])})",
            "create_sender(), then sender.init_all_workers_group(None, vllm_engine=engine), and "
            "sender.register_collector(collector) for its policy version",
        )

    def init_on_receiver(self, *args: object, **kwargs: object) -> NoReturn:
        """Refuse, as :meth:`init_on_sender` does.

        Raises:
            TypeError: always.
        """
        self._refuse(f"init_on_receiver({', '.join([*map(repr, args), *kwargs])})", "create_receiver(engine)")

    def _refuse(self, call: str, instead: str) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__}.{call}: collectors have no part in this scheme, an engine holds the weights. Use "
            f"{instead}"
        )

    def shutdown(self) -> None:
        """Remove the weight store, if the scheme made it. Idempotent."""
        super().shutdown()
        if self._clean is not None:
            self._clean()

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "_clean": self._clean is not None}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__({**state, "_clean": None})
        if state["_clean"]:  # the original scheme removes its folder at any time, and may be on another host
            self.folder = _store_folder()
            store = replace(self.options.store, folder=self.folder, seen_as=self.folder)
            self.options = replace(self.options, store=store)
            self._clean = at_end(self, shutil.rmtree, str(self.folder), True)

    def __repr__(self) -> str:
        swapping, staging, options = self.options.swapping, self.options.staging, self.options
        return (
            f"{type(self).__name__}(transport={options.transport!r}, mode={swapping.mode!r}, kv={swapping.kv!r}, "
            f"verify={staging.verify!r}, delta={options.store.delta})"
        )


def _store_folder() -> Path:
    place = Path("/dev/shm")
    if not (place.is_dir() and os.access(place, os.W_OK)):
        place = Path(tempfile.gettempdir())
    _remove_orphans(place)
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))


def _remove_orphans(place: Path) -> None:
    """Remove stores of ours whose trainer was killed; that memory would stay in use until the host restarts."""
    for folder in place.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError, WeightSyncError):  # it is another user's, or it has a writer
            idle = time.time() - (folder / LOCK).stat().st_mtime  # no lock file yet: its writer is about to start
            if folder.stat().st_uid == os.getuid() and idle > ORPHAN_SECONDS:
                lock = WriterLock(folder)
                shutil.rmtree(folder, ignore_errors=True)
                lock.close()
