"""The gloo transport: one communicator per replica, over which the store's bytes are broadcast while it generates.

All ranks are on one host.

A replica announces that it will read before anything is sent, so that nothing waits for one that refuses a version
until a deadline. A group in which anything failed is closed, and made again for the next version: the other replicas
have their own, and notice nothing. A worker receives the bytes into one buffer that is kept from version to version;
tensors are views of it, and never copied before they are loaded.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import shutil
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]  # its stubs leave them out

from torchrl_moe.errors import ManifestMismatch, ReplicaDiedError, SyncTimeout, TorchRLMoEError, WeightSyncError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.replica import Replica, StageReport, SwapReport
from torchrl_moe.store import Manifest, TensorEntry, WeightStoreReader
from torchrl_moe.store.content import Bytes, check_digest
from torchrl_moe.store.folder import at_end
from torchrl_moe.weight_update.transports.base import StageOptions, workers_of

MEETING_POLL_SECONDS = (0.005, 0.2)  # between two polls: first, and at most


class Meeting(Store):
    """Where the ranks of one group meet, as gloo uses a store: a folder of this host, with a file for each value.

    Only this user can open it, and there is no port; what the group sends afterwards goes through gloo's connections,
    which have neither authentication nor encryption. It has our deadline and a way to close it: torch's own waits have
    neither. ``FileStore`` waits for minutes for a file whose folder is gone, and no other thread runs meanwhile.
    """

    def __init__(
        self,
        where: Mapping[str, str],
        seconds: float,
        check: Callable[[], object] = lambda: None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__()
        self._folder, self._deadline = Path(where["folder"]), time.monotonic() + seconds
        if not self._folder.is_dir():
            raise WeightSyncError(
                f"the trainer's {self._folder} is not here, so this is another host, and transport='gloo' reaches one "
                "host: use transport='memmap' and folder= on a file system that the hosts share"
            )
        self._check_others, self._on_close = check, on_close
        self._closed = threading.Event()

    def _file(self, key: str) -> Path:
        return self._folder / quote(key, safe="")

    @contextmanager
    def _naming_the_end(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise RuntimeError("the trainer has given the group up") from None

    def set(self, key: str, value: str | bytes) -> None:
        # written under another name first, so that no rank reads half of it
        with self._naming_the_end():
            whole = tempfile.NamedTemporaryFile(dir=self._folder, prefix=".", delete=False)  # noqa: SIM115  it is moved
            with whole:
                whole.write(value.encode() if isinstance(value, str) else bytes(value))
            os.replace(whole.name, self._file(key))

    def get(self, key: str) -> bytes:
        self.wait([key])
        with self._naming_the_end():
            return self._file(key).read_bytes()

    def check(self, keys: list[str]) -> bool:
        with self._naming_the_end():
            found = set(os.listdir(self._folder))
        return all(self._file(key).name in found for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until all of these are there; ``timeout`` is gloo's, and the meeting's own deadline holds instead."""
        del timeout
        pause, longest = MEETING_POLL_SECONDS
        while not self.check(keys):
            self._check_others()
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"{', '.join(keys)} did not come")
            if self._closed.wait(pause):
                raise RuntimeError("the meeting was closed")
            pause = min(pause * 1.5, longest)

    def has_extended_api(self) -> bool:  # only the methods above are there
        return False

    def close(self) -> None:
        """End all waiting. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._on_close()


class MeetingPlace:
    """Where all groups of one trainer meet; each in a folder of its own."""

    def __init__(self) -> None:
        self._names = map(str, itertools.count())
        self._folder: Path | None = None
        self._lock = threading.Lock()

    def begin(self) -> dict[str, str]:
        """Make a group's folder, and return what a rank needs to find it, as plain data."""
        with self._lock:
            if self._folder is None:  # of mode 0700
                self._folder = Path(tempfile.mkdtemp(prefix="torchrl_moe-meeting-"))
                self._clean = at_end(self, shutil.rmtree, str(self._folder), True)
            path = self._folder / next(self._names)
            path.mkdir(0o700)
            return {"folder": str(path)}

    def meet(self, where: Mapping[str, str], seconds: float, check: Callable[[], object] = lambda: None) -> Meeting:
        """Return the trainer's own end of a meeting that it began; closing that ends it for all."""
        return Meeting(where, seconds, check, lambda: self.end(where))

    def end(self, where: Mapping[str, str]) -> None:
        """Remove a group's folder. Idempotent."""
        shutil.rmtree(where["folder"], ignore_errors=True)  # a rank may be writing into it

    def close(self) -> None:
        """Remove all folders. Idempotent."""
        with self._lock:
            if self._folder is not None:
                self._clean()
                self._folder = None


BUFFER_BYTES = 64 << 20
SENDER = 0
LOOPBACK = "127.0.0.1"
LEAST_SECONDS = 0.001

dist: Any = torch.distributed  # its stubs leave out groups


class GlooGroup:
    """A communicator of its own between the sender and the workers of one replica, to send flat bytes through.

    It is independent of ``torch.distributed``'s default group in either process. Making it waits until all ranks are
    there, and it ends when it is dropped. Where its ranks meet, workers also announce that they are ready: so nothing
    is sent to one that will not read. ``GLOO_SOCKET_IFNAME`` chooses the interface, as it does for torch.
    """

    def __init__(
        self,
        meeting: Meeting,
        rank: int,
        world_size: int,
        timeout: float,
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        options = [_options(timeout)]
        self.rank, self.world_size = rank, world_size
        self._meeting, self._buffer_bytes = meeting, buffer_bytes
        self._transfers = 0
        try:
            # this frame holds no options, nor their sockets: if this fails, a log may keep the error with its frames
            self._group = dist.ProcessGroupGloo(dist.PrefixStore("gloo", meeting), rank, world_size, options.pop())
        except BaseException as error:
            meeting.close()
            if not isinstance(error, RuntimeError | TimeoutError):
                raise
            raise SyncTimeout(
                f"the {world_size} ranks of a gloo group did not meet within {round(timeout, 1):g} s: {error}"
            ) from None
        abort = self._group.abort  # a bound method of torch's group, not of this object

        def end() -> None:
            abort()
            meeting.close()

        self._end = at_end(self, end)

    def broadcast(self, flat: Tensor, deadline: float, on_bucket: Callable[[int], None]) -> None:
        """Send ``flat`` from the sender to all workers, or receive it, in buckets."""
        group = self._group
        if group is None:
            raise RuntimeError("the group was closed")
        for start in range(0, len(flat), self._buffer_bytes):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = SENDER, 0
            options.timeout = timedelta(seconds=max(deadline - time.monotonic(), LEAST_SECONDS))
            try:
                group.broadcast([flat[start : start + self._buffer_bytes]], options).wait()
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise
                raise SyncTimeout(f"{start} of {len(flat)} bytes were sent when the time was up: {error}") from None
            on_bucket(min(start + self._buffer_bytes, len(flat)))
        self._transfers += 1

    def announce(self) -> None:
        """Announce, as a worker, that the next transfer will be read."""
        self._meeting.set(f"ready/{self._transfers}/{self.rank}", b"")

    def all_ready(self) -> bool:
        """Whether all workers have announced the next transfer."""
        keys = [f"ready/{self._transfers}/{rank}" for rank in range(1, self.world_size)]
        return bool(self._meeting.check(keys))

    def close(self) -> None:
        """End the communicator and its threads; ranks that wait for this one get an error. Idempotent."""
        self._end()
        self._group = None


def _options(timeout: float) -> object:
    options = dist.ProcessGroupGloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    where = {"interface": interface} if interface else {"hostname": LOOPBACK}
    options._devices = [dist.ProcessGroupGloo.create_device(**where)]
    options._timeout = timedelta(seconds=timeout)
    return options


def as_tensor(flat: Bytes) -> Tensor:
    """Return bytes as a tensor, without a copy, and without torch's warning that they cannot be written to."""
    if not len(flat):
        return torch.empty(0, dtype=torch.uint8)
    memory = (ctypes.c_uint8 * len(flat)).from_address(flat.ctypes.data)
    return torch.frombuffer(memory, dtype=torch.uint8)


def tensor_in(flat: Tensor, entry: TensorEntry) -> Tensor:
    """Return a tensor of a version as a view of its bytes, uint8 ``[N]``."""
    if not entry.nbytes:
        return torch.empty(entry.shape, dtype=entry.torch_dtype)
    return flat[entry.offset : entry.offset + entry.nbytes].view(entry.torch_dtype).view(entry.shape)


RANK_OFFSET = 1  # of a replica's workers, behind the trainer
POLL_SECONDS = 0.002
GRACE_SECONDS = 5.0  # that a replica gets to say why a transfer failed


class GlooTransport:
    """The trainer's end: sends versions to replicas of this host by broadcast, to each replica separately."""

    def __init__(
        self,
        folder: str | os.PathLike[str],
        device: torch.device | str | int = "cpu",
        buffer_bytes: int | None = None,
    ) -> None:
        if torch.device(device).type != "cpu":
            raise ValueError(f"device={str(device)!r}: transport='gloo' sends from the CPU")
        self._reader = WeightStoreReader(os.fspath(folder))
        self._buffer_bytes = BUFFER_BYTES if buffer_bytes is None else buffer_bytes
        if self._buffer_bytes < 1:
            raise ValueError(f"buffer_bytes must be at least 1, got {buffer_bytes}")
        self._place = MeetingPlace()
        self._groups: weakref.WeakKeyDictionary[Replica, GlooGroup] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()  # of the groups

    def open(self, replica: Replica, timeout: float) -> None:
        """Connect with a replica's workers, replacing an earlier group."""
        self._drop(replica)
        world_size = workers_of(replica.wait_ready(timeout)) + RANK_OFFSET
        try:
            where = self._place.begin()
        except OSError as error:
            raise WeightSyncError(f"no gloo group on this host: {error}") from None
        options = {
            "meeting": where,
            "world_size": world_size,
            "rank_offset": RANK_OFFSET,
            "timeout_seconds": timeout,
            "buffer_bytes": self._buffer_bytes,
        }
        # the workers go to the meeting in threads of theirs, and then the trainer does
        try:
            replica.call(Engine.init_weights, timeout, "gloo", options)
        except BaseException:
            self._place.end(where)
            raise
        known = weakref.ref(replica)  # what the group keeps must not keep the replica

        def check() -> None:
            if (there := known()) is not None and not there.is_alive():
                raise ReplicaDiedError("the replica ended before its workers joined")

        try:
            meeting = self._place.meet(where, timeout, check)
            group = GlooGroup(meeting, SENDER, world_size, timeout, self._buffer_bytes)
        except TorchRLMoEError:  # one of which is an OSError too
            raise
        except (RuntimeError, OSError) as error:
            raise WeightSyncError(f"no gloo group on this host: {error}") from None
        with self._lock:
            self._groups[replica] = group

    def _drop(self, replica: Replica) -> None:
        """Close a replica's group: its workers' ends will be new, or gone."""
        with self._lock:
            group = self._groups.pop(replica, None)
        if group is not None:
            group.close()

    def stage(self, replica: Replica, manifest: Manifest, options: StageOptions, timeout: float) -> StageReport:
        deadline, name = time.monotonic() + timeout, f"version {manifest.version}"
        try:
            if replica not in self._groups:
                self.open(replica, timeout)
            with self._reader.flat(manifest) as (whole, flat):
                # the replica waits for the bytes while it answers, so it is asked in a thread
                caller = ThreadPoolExecutor(1, thread_name_prefix="weight-stage")
                what = (whole.version, options.verify, options.threads, whole.to_json())
                answer = caller.submit(lambda: replica.call(Engine.stage_weights, timeout, *what))
                caller.shutdown(wait=False)  # the thread ends with its job
                try:
                    self._send(self._groups[replica], whole, flat, answer, deadline)
                    return answer.result(max(deadline - time.monotonic(), 0))
                except TimeoutError as error:
                    raise SyncTimeout(f"{name} did not arrive within {timeout:g} s: {error}") from None
                except RuntimeError as error:  # of gloo, which knows only that a connection broke
                    self._drop(replica)
                    raise (_error_of(answer) or WeightSyncError(f"{name} was not sent: {error}")) from None
        except BaseException:
            self._drop(replica)
            raise

    def _send(
        self, group: GlooGroup, manifest: Manifest, flat: Bytes, answer: Future[StageReport], deadline: float
    ) -> None:
        # nothing is sent to a replica that will not read: it may refuse the version, and would be waited for
        while not group.all_ready():
            if answer.done():
                answer.result()
                raise WeightSyncError(f"the replica took version {manifest.version} without waiting for its bytes")
            if time.monotonic() > deadline:
                raise SyncTimeout("the replica did not get ready to receive")
            time.sleep(POLL_SECONDS)

        def check(_: int) -> None:
            if answer.done():
                answer.result()

        group.broadcast(as_tensor(flat), deadline, check)

    def swapping(self, replica: Replica, manifest: Manifest, swap: Callable[[], SwapReport]) -> SwapReport:
        """Swap: the bytes are there."""
        del replica, manifest
        return swap()

    def close(self) -> None:
        for replica in list(self._groups):
            self._drop(replica)
        self._place.close()


def _error_of(answer: Future[StageReport]) -> BaseException | None:
    """Return a replica's own error for a transfer that failed, if it comes in time."""
    with contextlib.suppress(TimeoutError):
        return answer.exception(GRACE_SECONDS)
    return None


class GlooReceiver:
    """A worker's end. It connects to its sender in a thread: a worker that waits generates nothing."""

    def __init__(self, options: Mapping[str, Any], rank: int) -> None:
        self._timeout = float(options["timeout_seconds"])
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._held: Manifest | None = None
        self._lock = threading.Lock()  # of the buffer
        self._meeting = Meeting(options["meeting"], self._timeout)
        joining = ThreadPoolExecutor(1, thread_name_prefix="weight-meeting")
        size, buffer_bytes = options["world_size"], options["buffer_bytes"]
        self._group = joining.submit(GlooGroup, self._meeting, rank, size, self._timeout, buffer_bytes)
        joining.shutdown(wait=False)  # the thread ends with its job

    def fetch(self, manifest: Manifest, *, verify: bool, threads: int) -> None:
        """Receive a version; call it from a thread."""
        deadline, size = time.monotonic() + self._timeout, manifest.extent
        if not self._lock.acquire(timeout=self._timeout):
            raise SyncTimeout(f"the previous version was still being read after {self._timeout:g} s")
        arrived = False
        try:
            self._held = None
            if len(self._buffer) < size:
                self._buffer = torch.empty(size, dtype=torch.uint8)
            group, flat = self._group.result(), self._buffer[:size]
            content: Bytes = flat.numpy()
            left = sorted(manifest.entries, key=lambda entry: entry.offset, reverse=True)
            jobs: list[Future[None]] = []

            def compare(entries: list[TensorEntry]) -> None:
                for entry in entries:
                    check_digest(manifest.version, entry, content[entry.offset : entry.end].data)

            def note(count: int) -> None:
                # tensors that are there whole are compared while others arrive
                whole = []
                while left and left[-1].end <= count:
                    whole.append(left.pop())
                if verify:
                    jobs.append(pool.submit(compare, whole))

            with ThreadPoolExecutor(threads, thread_name_prefix="weight-digest") as pool:
                # the trainer sends once all workers have announced that they read
                group.announce()
                group.broadcast(flat, deadline, note)
            for job in jobs:
                job.result()
            self._held, arrived = manifest, True
        finally:
            if not arrived:
                self._leave()  # the trainer makes a new group
            self._lock.release()

    def _leave(self) -> None:
        if self._group.done() and self._group.exception() is None:
            self._group.result().close()

    def manifest(self, version: int) -> Manifest:
        held = self._held
        if held is None or held.version != version:
            raise ManifestMismatch(
                f"version {version} was not received; {'no version' if held is None else f'version {held.version}'} was"
            )
        return held

    @contextmanager
    def reading(self, manifest: Manifest) -> Iterator[Mapping[str, Tensor]]:
        """Keep the next version out of the buffer, and yield the tensors in it; do not keep them afterwards."""
        with self._lock:
            if self.manifest(manifest.version) != manifest:
                raise ManifestMismatch(f"version {manifest.version} was received again since its manifest was read")
            yield {entry.name: tensor_in(self._buffer, entry) for entry in manifest.entries}

    def close(self) -> None:
        """Leave the group, or give up meeting it; a receiver that still waits gets an error. Idempotent."""
        self._meeting.close()
        self._group.add_done_callback(lambda _: self._leave())
        self._held = None
