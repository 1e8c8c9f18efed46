"""NCCL through vLLM's own engines: the order of calls, what arrives, and how a transfer ends that fails.

There is no GPU here: vLLM's classes are the real ones, a queue stands in for their communicator.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from vllm.distributed.weight_transfer import nccl_engine

from torchrl_moe.errors import WeightSyncError
from torchrl_moe.modules.backends.replica import StageReport, SwapReport
from torchrl_moe.store import Manifest, WeightStoreWriter
from torchrl_moe.weight_update.transports.base import StageOptions
from torchrl_moe.weight_update.transports.nccl import NCCLReceiver, NCCLTransport
from torchrl_moe.weight_update.transports.registry import open_receiver, open_transport

TIMEOUT = 20.0
SIZES = {"tensor_parallel_size": 2, "pipeline_parallel_size": 1, "data_parallel_size": 1}


class Wire:
    """A communicator: what one end puts in, the other takes out; destroying it ends all waiting."""

    def __init__(self) -> None:
        self.pieces: queue.Queue[Tensor] = queue.Queue(maxsize=1)
        self.ended = threading.Event()

    def put(self, piece: Tensor) -> None:
        while not self.ended.is_set():
            with contextlib.suppress(queue.Full):
                return self.pieces.put(piece, timeout=0.01)
        raise RuntimeError("the communicator was aborted")

    def get(self) -> Tensor:
        while not self.ended.is_set():
            with contextlib.suppress(queue.Empty):
                return self.pieces.get(timeout=0.01)
        raise RuntimeError("the communicator was aborted")

    def destroy(self) -> None:
        self.ended.set()


class Replica:
    """A replica with one worker's receiver, that notes what it is asked."""

    index = 3

    def __init__(self) -> None:
        self.log: list[str] = []
        self.loaded: dict[str, Tensor] = {}
        self.staged: Manifest | None = None
        self.fails: dict[str, Exception] = {}
        self.receiver: NCCLReceiver | None = None

    def wait_ready(self, timeout: float) -> Any:
        return SimpleNamespace(**SIZES)

    def is_alive(self) -> bool:
        return True

    def call(self, verb: Callable[..., Any], timeout: float, *args: Any, **kwargs: Any) -> Any:
        self.log.append(verb.__name__)
        if verb.__name__ in self.fails:
            raise self.fails[verb.__name__]
        return getattr(self, verb.__name__)(*args, **kwargs)

    def init_weights(self, transport: str, options: dict[str, Any]) -> None:
        config = SimpleNamespace(parallel_config=None, model_config=None)
        worker = SimpleNamespace(config=None, vllm_config=config, device=torch.device("cpu"), model=None)
        receiver = open_receiver(transport, options, worker)
        assert isinstance(receiver, NCCLReceiver)
        self.receiver = receiver

    def stage_weights(self, version: int, verify: str, threads: int, manifest: str) -> StageReport:
        self.staged = found = Manifest.from_json(manifest)
        assert (found.version, verify, threads) == (version, "digest", 1)
        return StageReport(seconds=0.0, nbytes=found.nbytes, digest=found.digest)

    def swap(self) -> SwapReport:
        assert self.receiver is not None and self.staged is not None
        model: Any = SimpleNamespace(load_weights=lambda pairs: self.loaded.update(pairs))
        self.receiver.load_into(model, self.staged)
        return SwapReport()


@pytest.fixture
def wires(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Wire, Any]]:
    """Put wires in the place of NCCL; return those that were made, each with what its workers were told."""
    made: list[tuple[Wire, Any]] = []
    meeting: queue.Queue[Wire] = queue.Queue()

    def trainer_end(info: Any) -> Wire:
        wire = Wire()
        made.append((wire, info))
        meeting.put(wire)
        return wire

    def worker_end(info: Any, parallel_config: Any) -> Wire:
        assert (info.rank_offset, info.world_size) == (1, 3)
        return meeting.get(timeout=TIMEOUT)

    def produce(iterator: Iterator[Any], group: Wire, post_iter_func: Callable[[Any], Tensor], **_: Any) -> None:
        for item in iterator:
            group.put(post_iter_func(item).clone())

    def consume(iterator: Iterator[Any], group: Wire, post_unpack_func: Callable[[Any], Any], **_: Any) -> None:
        for name, (shape, dtype) in iterator:
            tensor = group.get()
            assert (list(tensor.shape), tensor.dtype) == (shape, dtype)
            post_unpack_func([(name, tensor)])

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", trainer_end)
    monkeypatch.setattr(nccl_engine, "worker_init_process_group", worker_end)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", produce)
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_consumer", consume)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(synchronize=lambda: None))
    return made


def version(writer: WeightStoreWriter, number: int) -> tuple[Manifest, dict[str, Tensor]]:
    tensors = {f"t{i}": torch.full((i, 3), float(number + i), dtype=torch.bfloat16) for i in range(4)}
    tensors["router"] = torch.full((2, 2), number / 3)  # in float32: each tensor has its dtype
    return writer.publish(tensors.items(), number), tensors


def transport_of(folder: Path, **kwargs: Any) -> NCCLTransport:
    found = open_transport("nccl", folder, device=torch.device("cpu"), **kwargs)
    assert isinstance(found, NCCLTransport)
    return found


def test_versions_arrive_bit_by_bit_in_the_swap_and_not_before(tmp_path: Path, wires: list[tuple[Wire, Any]]) -> None:
    replica, transport = Replica(), transport_of(tmp_path, address="trainer", port=7000)
    writer = WeightStoreWriter(tmp_path)
    transport.open(replica, TIMEOUT)
    for number in (1, 2):
        manifest, tensors = version(writer, number)
        replica.loaded.clear()
        assert transport.stage(replica, manifest, StageOptions(), TIMEOUT).digest == manifest.digest
        assert replica.loaded == {}
        assert transport.swapping(replica, manifest, replica.swap).error is None
        assert all(replica.loaded[name].equal(tensor) for name, tensor in tensors.items())
        assert [replica.loaded[name].dtype for name in ("t1", "router")] == [torch.bfloat16, torch.float32]
    assert replica.log == ["init_weights", "stage_weights", "stage_weights"]
    ((wire, info),) = wires
    assert (info.master_address, info.master_port, info.world_size, info.packed) == ("trainer", 7003, 3, True)
    transport.close()
    transport.close()
    assert wire.ended.is_set()


@pytest.mark.parametrize("how", ["reports", "raises", "damaged bytes"])
def test_a_transfer_that_fails_ends_the_broadcast_and_the_next_attempt_joins_again(
    tmp_path: Path, wires: list[tuple[Wire, Any]], how: str
) -> None:
    replica, transport = Replica(), transport_of(tmp_path)
    writer = WeightStoreWriter(tmp_path)
    transport.open(replica, TIMEOUT)
    manifest, _ = version(writer, 1)
    transport.stage(replica, manifest, StageOptions(), TIMEOUT)
    file = tmp_path / "v1.safetensors"
    content = file.read_bytes()

    def fail() -> SwapReport:
        if how == "reports":
            return SwapReport(started=False, error="it could not pause")
        raise WeightSyncError("it could not pause")

    if how == "reports":
        assert transport.swapping(replica, manifest, fail).error == "it could not pause"
    elif how == "raises":
        with pytest.raises(WeightSyncError, match="it could not pause"):
            transport.swapping(replica, manifest, fail)
    else:
        file.write_bytes(content[:-1] + b"\xff")
        with pytest.raises(WeightSyncError, match=r"version 1 was not sent: .*bytes of .* are not those published"):
            transport.swapping(replica, manifest, replica.swap)
        file.write_bytes(content)
    assert wires[0][0].ended.is_set()
    for number in (1, 2):  # tried once more, as every swap is; then another version
        if number == 2:
            manifest, _ = version(writer, 2)
            transport.stage(replica, manifest, StageOptions(), TIMEOUT)
        assert transport.swapping(replica, manifest, replica.swap).error is None
        assert replica.loaded["router"].eq(number / 3).all()
    assert len(wires) == 2


@pytest.mark.parametrize("where", ["it joins", "its communicator ends"])
def test_what_torch_raises_is_an_error_of_the_sync(
    tmp_path: Path, wires: list[tuple[Wire, Any]], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Else it would end the whole update, and not this replica's."""
    replica, transport = Replica(), transport_of(tmp_path)
    manifest, _ = version(WeightStoreWriter(tmp_path), 1)

    def refuse(*_: Any) -> Wire:
        raise RuntimeError("NCCL error: unhandled system error")

    if where == "it joins":
        monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", refuse)
        monkeypatch.setattr(nccl_engine, "worker_init_process_group", lambda info, config: Wire())
    else:
        transport.open(replica, TIMEOUT)
        wires[0][0].destroy = lambda: (wires[0][0].ended.set(), refuse())  # type: ignore[method-assign]
    with pytest.raises(WeightSyncError, match="version 1 was not sent: NCCL error: unhandled system error"):
        transport.swapping(replica, manifest, lambda: SwapReport(started=False, error="it could not pause"))


def test_buffers_are_as_asked_for_and_ports_are_free_ones_and_workers_that_do_not_join_are_the_replicas_error(
    tmp_path: Path, wires: list[tuple[Wire, Any]]
) -> None:
    replica, transport = Replica(), transport_of(tmp_path, buffer_bytes=1 << 20, num_buffers=3)
    transport.open(replica, TIMEOUT)
    ((_, info),) = wires
    assert (info.packed_buffer_size_bytes, info.packed_num_buffers, info.master_port > 0) == (1 << 20, 3, True)
    replica.fails["init_weights"] = WeightSyncError("no NCCL here")
    with pytest.raises(WeightSyncError, match="no NCCL here"):
        transport.open(replica, TIMEOUT)


def test_without_a_gpu_it_is_refused_and_says_what_to_use(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(ValueError, match="transport='nccl' sends from a GPU, and this process has none: use"):
        open_transport("nccl", tmp_path)
