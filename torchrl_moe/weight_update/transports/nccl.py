"""The NCCL transport: vLLM's own weight-transfer engines, one communicator for each replica.

Nothing travels while a replica serves: it checks names, shapes and dtypes, and in the pause each tensor is broadcast
into the model as it arrives, packed into buffers. What is sent is the version in the store, so a late replica gets the
same. The trainer compares digests as it reads; what NCCL delivers is not hashed, so the check of the new weights, or
``verify="canary"``, is the only proof there.

Written to the interface of vLLM 0.32 and 0.33; the order of calls is tested without a GPU.
"""

from __future__ import annotations

import socket
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
from vllm.distributed.weight_transfer.nccl_engine import (
    NCCLTrainerInitInfo,
    NCCLTrainerWeightTransferEngine,
    NCCLWeightTransferEngine,
    NCCLWeightTransferUpdateInfo,
)

from torchrl_moe.errors import ManifestMismatch, TorchRLMoEError, WeightSyncError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Replica, StageReport, SwapReport
from torchrl_moe.store import Manifest, WeightStoreReader
from torchrl_moe.weight_update.transports.base import StageOptions, workers_of

if TYPE_CHECKING:
    from vllm.distributed.weight_transfer.base import WeightTransferEngine


class StoredVersion(WeightSource):
    """A version of the store as vLLM's source of weights, moved to the device that sends."""

    def __init__(self, reader: WeightStoreReader, device: torch.device) -> None:
        self._reader, self._device = reader, device
        self.manifest: Manifest | None = None

    def metadata(self) -> list[ParamMeta]:
        """Return name, dtype and shape of each tensor, in order."""
        assert self.manifest is not None  # set before anything is sent
        return [ParamMeta(name, dtype, tuple(shape)) for name, (dtype, shape) in self.manifest.tensors.items()]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        assert self.manifest is not None
        with self._reader.reading(self.manifest, verify=True) as tensors:
            for name, tensor in tensors.items():
                yield name, tensor.to(self._device)


class Client:
    """The calls of vLLM's sender, of which two reach a replica: to join, and to swap.

    Our swap pauses, starts, loads, finishes, checks and goes on, so all of that is in the call that vLLM makes beside
    its broadcast.
    """

    def __init__(self, replica: Replica, timeout: float) -> None:
        self._replica, self._timeout = weakref.ref(replica), timeout
        self.swap: Callable[[], SwapReport] | None = None
        self.answer: Future[SwapReport] = Future()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        replica = self._replica()
        if replica is None:
            raise WeightSyncError("the replica is gone")
        replica.call(Engine.init_weights, self._timeout, "nccl", {"init": init_info})

    def start_weight_update(self) -> None:
        """Do nothing: the swap does it, once the replica is paused."""

    def update_weights(self, update_info: Mapping[str, Any] | list[dict[str, Any]]) -> None:
        """Have the replica swap; it knows the tensors from its manifest, which is that of ``update_info``."""
        del update_info
        assert self.swap is not None
        try:
            report = self.swap()
        except BaseException as error:
            self.answer.set_exception(error)
            raise
        self.answer.set_result(report)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Do nothing: the swap has done it."""


@dataclass(frozen=True, slots=True)
class _Link:
    """One replica's communicator, and what is sent over it."""

    sender: NCCLTrainerWeightTransferEngine
    client: Client
    source: StoredVersion


class NCCLTransport:
    """The trainer's end; see :class:`~torchrl_moe.weight_update.transports.base.Transport`.

    Args:
        folder: of the weight store.
        device: the GPU that sends; default: the current one.
        address: where workers reach the trainer; default: the name of this host.
        port: of the first replica's meeting, the others' are the next ones; 0 or ``None``: free ones.
        buffer_bytes: of a packed buffer; default: vLLM's.
        num_buffers: how many of them; default: vLLM's.

    Raises:
        ValueError: this process has no GPU.
    """

    def __init__(
        self,
        folder: Path,
        device: torch.device | None = None,
        address: str | None = None,
        port: int | None = None,
        buffer_bytes: int | None = None,
        num_buffers: int | None = None,
    ) -> None:
        if not torch.cuda.is_available():
            raise ValueError(
                "transport='nccl' sends from a GPU, and this process has none: use transport='memmap', on several "
                "hosts with folder= on a file system that they share"
            )
        self._device = torch.device("cuda", torch.cuda.current_device()) if device is None else device
        self._reader, self._address, self._port = WeightStoreReader(folder), address or socket.gethostname(), port
        packed = {"packed_buffer_size_bytes": buffer_bytes, "packed_num_buffers": num_buffers}
        self._packed = {name: value for name, value in packed.items() if value is not None}
        self._links: weakref.WeakKeyDictionary[Replica, _Link] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # of the links
        self._timeout = 0.0  # of the last call of ``open``

    def open(self, replica: Replica, timeout: float) -> None:
        """Make a communicator with a replica's workers, in place of an earlier one."""
        self._drop(replica)
        self._timeout = timeout
        workers = workers_of(replica.wait_ready(timeout))
        source, client = StoredVersion(self._reader, self._device), Client(replica, timeout)
        # each replica has a meeting of its own
        if self._port:
            port = self._port + replica.index
        else:
            with socket.socket() as free:
                free.bind(("", 0))
                port = free.getsockname()[1]
        with torch.cuda.device(self._device):
            info = NCCLTrainerInitInfo(
                master_address=self._address, master_port=port, world_size=workers + 1, rank=0, **self._packed
            )
            sender = NCCLTrainerWeightTransferEngine.trainer_init(info, client=client, source=source)
        with self._lock:
            self._links[replica] = _Link(sender, client, source)

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        """Let a replica check a version; its bytes come in the pause."""
        if replica not in self._links:  # the last transfer failed
            self.open(replica, timeout)
        return replica.call(
            Engine.stage_weights, timeout, manifest.version, options.verify, options.threads, manifest.to_json()
        )

    def swapping(self, replica: Replica, manifest: Manifest, swap: Callable[[], SwapReport]) -> SwapReport:
        # around the end of a communicator too: an error of another class would end the update of all replicas
        try:
            return self._swapping(replica, manifest, swap)
        except TorchRLMoEError:  # some of which are of these kinds too
            raise
        except (RuntimeError, OSError) as error:  # of torch, NCCL and sockets
            raise WeightSyncError(f"version {manifest.version} was not sent: {error}") from error

    def _swapping(self, replica: Replica, manifest: Manifest, swap: Callable[[], SwapReport]) -> SwapReport:
        if replica not in self._links:  # the attempt before failed
            self.open(replica, self._timeout)
        link = self._links[replica]
        link.source.manifest, link.client.swap, link.client.answer = manifest, swap, Future()
        executor = ThreadPoolExecutor(1, thread_name_prefix="weight-nccl")
        sending = executor.submit(self._send, link)
        executor.shutdown(wait=False)  # the thread ends with its job
        is_through = False
        try:
            first: list[Future[Any]] = [link.client.answer, sending]
            wait(first, return_when=FIRST_COMPLETED)
            if not link.client.answer.done():  # the broadcast ended before the replica did
                raise WeightSyncError(f"version {manifest.version} was not sent: {sending.exception()}")
            report = link.client.answer.result()
            # a replica that did not take it left the broadcast waiting, which the end of the communicator ends
            if report.error is None:
                sending.result()
                is_through = True
            return report
        finally:
            if not is_through:
                self._drop(replica)

    def _send(self, link: _Link) -> None:
        with torch.cuda.device(self._device):
            link.sender.send_weights()

    def _drop(self, replica: Replica) -> None:
        with self._lock:
            link = self._links.pop(replica, None)
        if link is not None:
            link.sender.shutdown()  # which aborts what still runs

    def close(self) -> None:
        for replica in list(self._links):
            self._drop(replica)


class NCCLReceiver:
    """A worker's end, which loads versions into its model as they arrive.

    Args:
        init_info: what vLLM's sender tells its workers.
        worker: our weight-transfer engine, whose configuration and model vLLM's own one gets.
    """

    def __init__(self, init_info: dict[str, Any], worker: WeightTransferEngine[Any, Any]) -> None:
        self._engine = NCCLWeightTransferEngine(worker.config, worker.vllm_config, worker.device, worker.model)
        self._engine.init_transfer_engine(self._engine.parse_init_info(init_info))

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Do nothing: the bytes come in the pause."""

    def manifest(self, version: int) -> Manifest:
        """Raise: what is sent is known from staging only."""
        raise ManifestMismatch(f"version {version} was not staged")

    def reading(self, manifest: Manifest) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Raise: tensors go into the model, and are not kept."""
        raise WeightSyncError(f"version {manifest.version} is loaded as it arrives")

    def load_into(self, model: nn.Module, manifest: Manifest) -> None:
        self._engine.model = model
        kinds = manifest.tensors
        self._engine.receive_weights(
            NCCLWeightTransferUpdateInfo(
                names=list(kinds),
                dtype_names=[str(dtype).removeprefix("torch.") for dtype, _ in kinds.values()],
                shapes=[list(shape) for _, shape in kinds.values()],
            )
        )

    def close(self) -> None:
        self._engine.shutdown()
