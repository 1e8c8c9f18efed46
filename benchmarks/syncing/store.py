"""Weight store on one host: the time to publish a version and copy it, verified, into another process's memory.

It is compared with a plain memory copy, and with TorchRL's double buffer for the same tensors. Also measured: versions
that are files, whole and as deltas; and the cost of a large model's manifest, and how long it blocks an engine's event
loop.

vLLM's own reload is not included. Everything is in shared memory; the reader's destination is allocated and touched
beforehand. Copies run in one thread.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from benchmarks.report import Row, median_range
from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.modules.backends.vllm.weights import EngineWeights
from torchrl_moe.store import Manifest, WeightStoreReader, WeightStoreWriter
from torchrl_moe.store.writer import version_path
from torchrl_moe.testing import make_tiny_moe

SIZES = {"400 MB": 400_000_000, "2 GB": 2_000_000_000}
TENSORS = 738  # of an MoE of 48 experts in 4 layers, one tensor per expert
COUNTS = (231, 2_000, 10_000, 40_000)
ROUNDS, WARM_UP = 7, 2
LIMIT = 3.0  # times a plain memory copy
PATCHED_BYTES, SHARES = 400_000_000, (0.002, 0.01, 0.02)
LARGE_MODEL = 36_096  # tensors of an MoE of 94 layers and 128 experts
TICK_SECONDS, LOOP_LIMIT_MS = 0.001, 5.0
TORN_READS, TORN_TENSORS, TORN_BYTES = 40, 64, 32_000_000


def tensors_of(nbytes: int, count: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Return flat memory, and fp32 tensors of equal size in it, given their total bytes and their number."""
    each = nbytes // count // 4
    flat = torch.arange(each * count, dtype=torch.float32)
    return flat, {f"layers.{i}.weight": part for i, part in enumerate(flat.split(each))}


def copy_into(target: NDArray[np.uint8], tensors: Mapping[str, Tensor]) -> None:
    """Copy tensors one after another into flat memory with torch's copy, as a model loads them."""
    flat, place = torch.from_numpy(target), 0
    for tensor in tensors.values():
        size = tensor.nbytes
        flat[place : place + size].copy_(tensor.view(torch.uint8))
        place += size


def read_ours(target: NDArray[np.uint8], reader: WeightStoreReader, version: int) -> None:
    """Read a version; each tensor's digest is checked as it is read."""
    manifest = reader.manifest(version)
    with reader.reading(manifest, verify=True) as tensors:
        copy_into(target, tensors)


def read_theirs(target: NDArray[np.uint8], folder: str) -> None:
    """Read what TorchRL's receiver would load."""
    from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferTransport

    copy_into(target, dict(VLLMDoubleBufferTransport(folder).receive_weights().items()))


def read_on_request(connection: Connection, nbytes: int) -> None:
    """Run the reading process: reply to each request with the seconds it took, and the sum of the received bytes."""
    torch.set_num_threads(1)
    target = np.ones(nbytes, np.uint8)
    readers: dict[str, WeightStoreReader] = {}
    while (request := connection.recv()) is not None:
        folder, version = request
        started = time.perf_counter()
        if version is None:
            read_theirs(target, folder)
        else:
            read_ours(target, readers.setdefault(folder, WeightStoreReader(folder)), version)
        seconds = time.perf_counter() - started
        connection.send((seconds, int(target.view(np.uint32).sum(dtype=np.uint64))))


class ReadingProcess:
    """Another process with its own memory."""

    def __init__(self, nbytes: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=read_on_request, args=(theirs, nbytes), daemon=True)
        self._process.start()

    def read(self, folder: str, version: int | None) -> tuple[float, int]:
        """Make it read; return its seconds, and the sum of the bytes that it now has."""
        self._connection.send((folder, version))
        answer: tuple[float, int] = self._connection.recv()
        return answer

    def end(self) -> None:
        """End the process."""
        self._connection.send(None)
        self._process.join()


def timed(function: Callable[[], Any]) -> float:
    """Return the seconds of a call."""
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


class Contest:
    """The same tensors in both ways, alternately, beside a plain copy."""

    def __init__(self, nbytes: int, count: int) -> None:
        self._flat, self.tensors = tensors_of(nbytes, count)
        self.nbytes = sum(tensor.numel() * 4 for tensor in self.tensors.values())
        self.ours = tempfile.mkdtemp(prefix="torchrl_moe-bench-", dir="/dev/shm")
        self.theirs = tempfile.mkdtemp(prefix="torchrl_moe-bench-", dir="/dev/shm")
        self.writer = WeightStoreWriter(self.ours)
        self.reading = ReadingProcess(self.nbytes)
        self.version = 0

    def plain(self) -> float:
        """Copy the same bytes in one piece into memory that was touched before."""
        target = torch.ones(self.nbytes, dtype=torch.uint8)
        return timed(lambda: np.copyto(target.numpy(), self._flat.view(torch.uint8).numpy()))

    def by_ours(self) -> float:
        """Publish a version, and let the other process read it."""
        self.change()
        self.version += 1
        published = timed(lambda: self.writer.publish(self.tensors.items(), self.version))
        return published + self.checked(self.reading.read(self.ours, self.version))

    def by_theirs(self) -> float:
        """The same by TorchRL's transport."""
        from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferTransport

        self.change()
        published = timed(lambda: VLLMDoubleBufferTransport(self.theirs).send_weights("model", self.tensors))
        return published + self.checked(self.reading.read(self.theirs, None))

    def change(self) -> None:
        """Change the first tensor."""
        next(iter(self.tensors.values())).add_(1.0)

    def checked(self, answer: tuple[float, int]) -> float:
        """Return a reader's seconds; raise if it has wrong bytes."""
        seconds, total = answer
        sums = [
            tensor.view(torch.int32).numpy().view(np.uint32).sum(dtype=np.uint64) for tensor in self.tensors.values()
        ]
        assert total == int(np.sum(sums)), "the reader has other bytes than were sent"
        return seconds

    def end(self) -> None:
        """Free the memory."""
        self.reading.end()
        for folder in (self.ours, self.theirs):
            shutil.rmtree(folder)


def against_copies() -> list[Row]:
    """Return the times of both ways as multiples of a plain copy, by size."""
    rows = []
    for name, nbytes in SIZES.items():
        contest = Contest(nbytes, TENSORS)
        ours, ratio = [], []
        for round_ in range(WARM_UP + ROUNDS):
            copy, own, other = contest.plain(), contest.by_ours(), contest.by_theirs()
            if round_ >= WARM_UP:
                ours.append(own / copy)
                ratio.append(other / own)
        contest.end()
        rows.append(
            Row(
                claim=f"{name}: publish + verified copy by the reader, in plain memory copies",
                value=median_range(ours),
                target=f"<= {LIMIT:.0f}",
                met=statistics.median(ours) <= LIMIT,
            )
        )
        rows.append(
            Row(
                claim=f"{name}: TorchRL's double buffer / ours",
                value=median_range(ratio),
                target="> 1",
                met=statistics.median(ratio) > 1.0,
            )
        )
    return rows


def by_tensor_count() -> list[Row]:
    """Return the time of the same bytes in more and more tensors."""
    rows, first = [], 0.0
    for count in COUNTS:
        contest = Contest(SIZES["400 MB"], count)
        seconds = [contest.by_ours() for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
        contest.end()
        median = statistics.median(seconds)
        first = first or median
        rows.append(
            Row(
                claim=f"400 MB in {count} tensors: seconds, times that of {COUNTS[0]}",
                value=f"{median:.3f}, {median / first:.1f}x",
            )
        )
    return rows


def torn(
    publish: Callable[[dict[str, Tensor], int], Any], read: Callable[[], dict[str, float] | None]
) -> tuple[int, int]:
    """Publish constant versions continuously while another thread reads; return counts of torn and refused reads."""
    stop = threading.Event()

    def write() -> None:
        version = 1
        while not stop.is_set():
            version += 1
            publish(constant(version), version)

    publish(constant(1), 1)
    writer = threading.Thread(target=write)
    writer.start()
    try:
        values = [read() for _ in range(TORN_READS)]
    finally:
        stop.set()
        writer.join()
    return sum(v is not None and len(set(v.values())) > 1 for v in values), values.count(None)


def constant(version: int) -> dict[str, Tensor]:
    """Return a version whose tensors all hold its number."""
    each = TORN_BYTES // TORN_TENSORS // 4
    return {f"layers.{i}.weight": torch.full((each,), float(version)) for i in range(TORN_TENSORS)}


def torn_reads() -> list[Row]:
    """Return how many reads of either way mix two versions while a writer continues."""
    from torchrl.weight_update.llm.vllm_double_buffer import VLLMDoubleBufferTransport

    with tempfile.TemporaryDirectory(dir="/dev/shm") as ours, tempfile.TemporaryDirectory(dir="/dev/shm") as theirs:
        writer, reader = WeightStoreWriter(ours), WeightStoreReader(ours)
        newest = [1]

        def publish(tensors: dict[str, Tensor], version: int) -> None:
            writer.publish(tensors.items(), version)
            newest[0] = version

        def read() -> dict[str, float] | None:
            try:
                manifest = reader.manifest(newest[0])
                with reader.reading(manifest) as tensors:
                    return {name: float(tensor.mean()) for name, tensor in tensors.items()}
            except ManifestMismatch:  # its slot was reused for a newer version meanwhile
                return None

        transport = VLLMDoubleBufferTransport(theirs)

        def read_theirs() -> dict[str, float] | None:
            try:
                return {name: float(tensor.mean()) for name, tensor in transport.receive_weights().items()}
            except json.JSONDecodeError:  # it read the metadata during a write
                return None

        own, refused = torn(publish, read)
        other, crashed = torn(lambda tensors, _: transport.send_weights("model", tensors), read_theirs)
    return [
        Row(
            claim=f"reads that mix two versions while a writer continues, of {TORN_READS}: ours",
            value=f"{own} ({refused} refused)",
            target="0",
            met=own == 0,
        ),
        Row(
            claim=f"reads that mix two versions while a writer continues, of {TORN_READS}: TorchRL's",
            value=f"{other} ({crashed} raised)",
        ),
    ]


def patches() -> list[Row]:
    """Return what a patch costs, of a bfloat16 model of which some elements change between two versions."""
    return [row for share in SHARES for row in patches_of(share)]


def patches_of(share: float) -> list[Row]:
    """Return bytes in parts of the whole, and times in plain memory copies."""
    flat = (torch.arange(PATCHED_BYTES // 2, dtype=torch.int32) % 30_000).to(torch.int16).view(torch.bfloat16)
    tensors = {f"layers.{i}.weight": part for i, part in enumerate(flat.chunk(TENSORS))}
    target = np.ones(flat.nbytes, np.uint8)
    sizes, written, read, rng = [], [], [], np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="torchrl_moe-bench-", dir="/dev/shm") as folder:
        writer, reader = WeightStoreWriter(folder, delta=True), WeightStoreReader(folder)
        for version in range(1, 1 + WARM_UP + ROUNDS):
            flat.view(torch.int16).numpy()[rng.integers(0, len(flat), int(len(flat) * share))] ^= 1
            plain = timed(lambda: np.copyto(target, flat.view(torch.uint8).numpy()))
            written.append(timed(lambda number=version: writer.publish(tensors.items(), number)) / plain)
            read.append(timed(lambda number=version: read_ours(target, reader, number)) / plain)
            sizes.append(version_path(Path(folder), version).stat().st_size / flat.nbytes)
            assert np.array_equal(target, flat.view(torch.uint8).numpy())
    what, largest = f"{flat.nbytes / 1e6:.0f} MB of bfloat16, {100 * share:g} % changed", max(sizes[1:])
    return [
        Row(
            claim=f"{what}: bytes, in parts of the whole", value=f"{largest:.4f}", target="<= 0.05", met=largest <= 0.05
        ),
        Row(claim=f"{what}: publish, in plain memory copies", value=median_range(written[WARM_UP:])),
        Row(claim=f"{what}: verified copy, in plain memory copies", value=median_range(read[WARM_UP:])),
    ]


def changed_by_a_step() -> list[Row]:
    """Return which share of a bfloat16 engine's elements a step of AdamW on float32 masters changes, by learning rate.

    Weights have the deviation of 0.02 of a model's initialisation, gradients a norm of at most 1; random tokens.
    """
    return [
        Row(
            claim=f"bfloat16 elements that change in step 1 and in step 12, learning rate {rate:g}",
            value=" and ".join(f"{100 * share:.2g} %" for share in _changed(rate)),
        )
        for rate in (1e-6, 1e-5, 1e-4, 1e-3)
    ]


def _changed(rate: float) -> tuple[float, float]:
    sizes = {"hidden_size": 256, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128}
    model, shares = make_tiny_moe("qwen3_moe", num_hidden_layers=4, **sizes), []
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02) if parameter.ndim > 1 else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    before = [parameter.detach().bfloat16() for parameter in model.parameters()]
    for _ in range(12):
        ids = torch.randint(0, 259, (4, 64))
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        now = [parameter.detach().bfloat16() for parameter in model.parameters()]
        changed = sum(int((old != new).sum()) for old, new in zip(before, now, strict=True))
        shares.append(changed / sum(tensor.numel() for tensor in now))
        before = now
    return shares[0], shares[-1]


class NoWorkers:
    """An engine whose workers stage at once, after they have been busy at two polls."""

    def __init__(self) -> None:
        self._answers = iter([[False], [False], [True]])

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Do nothing."""

    async def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        """Answer like workers that have fetched the version."""
        del args
        if method == "torchrl_moe_stage":
            return next(self._answers)
        return [{"running": False, "reason": "", "fetched": 0.0, "error": None}]


async def longest_wait(work: Any) -> float:
    """Return the greatest lag, in ms, of an event loop while something ran in it."""
    task, late = asyncio.ensure_future(work), 0.0
    while not task.done():
        before = time.perf_counter()
        await asyncio.sleep(TICK_SECONDS)
        late = max(late, time.perf_counter() - before - TICK_SECONDS)
    await task
    return 1000 * late


def manifests() -> list[Row]:
    """Return the time to read a large model's manifest, and how long it blocks the event loop of a staging engine."""
    tensors = {f"model.layers.{i // 384}.mlp.experts.{i % 384}.weight": torch.ones(16) for i in range(LARGE_MODEL)}
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    reads, waits, idle = [], [], []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        writer = WeightStoreWriter(folder)
        for version in range(1, 1 + WARM_UP + ROUNDS):
            text = writer.publish(tensors.items(), 2 * version).to_json()
            reads.append(1000 * timed(lambda text=text: Manifest.from_json(text)))

            async def stage(number: int) -> None:
                weights = EngineWeights(NoWorkers(), lambda: kinds)
                await weights.init("memmap", {"folder": folder})
                waits.append(await longest_wait(weights.stage(number, "digest", 1, None)))
                idle.append(await longest_wait(asyncio.sleep(0.3)))

            writer.publish(tensors.items(), 2 * version + 1)
            asyncio.run(stage(2 * version + 1))
    longest = statistics.median(waits[WARM_UP:])
    return [
        Row(claim=f"reading a manifest of {LARGE_MODEL} tensors, ms", value=median_range(reads[WARM_UP:])),
        Row(
            claim=f"{LARGE_MODEL} tensors staged: greatest lag of the engine's event loop, ms (nothing staged: "
            f"{median_range(idle[WARM_UP:])})",
            value=median_range(waits[WARM_UP:]),
            target=f"<= {LOOP_LIMIT_MS:g}",
            met=longest <= LOOP_LIMIT_MS,
        ),
    ]
