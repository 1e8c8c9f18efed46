"""A gloo communicator of its own between one trainer and the workers of one replica, to send flat bytes through.

It has no part in ``torch.distributed``'s default group, in either process. They meet at a store of the trainer's, which
listens on one address only; where the addresses are numbers, no host name is looked up. The store also carries the word
that a worker is ready: so nobody sends to one that will not read.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

from torchrl_moe._errors import SyncTimeout

__all__ = ["BUCKET_BYTES", "TRAINER", "GlooGroup", "join_rendezvous", "open_rendezvous"]

BUCKET_BYTES = 64 << 20
TRAINER = 0
LEAST_SECONDS = 0.001

dist: Any = torch.distributed  # its stubs leave out stores and groups
Store = Any


def open_rendezvous(address: str, timeout: float) -> Store:
    """Return a store that listens at a free port of ``address``, and nowhere else."""
    listener = socket.create_server((address, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout),
        master_listen_fd=listener.detach(),
    )


def join_rendezvous(address: str, port: int, timeout: float) -> Store:
    """Return the store that :func:`open_rendezvous` opened."""
    return dist.TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=timeout))


def own_address(address: str, port: int) -> str:
    """Return the address by which this host reaches another one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))  # sends nothing
        return str(probe.getsockname()[0])


class GlooGroup:
    """One communicator. Making it waits until all ranks are there.

    ``GLOO_SOCKET_IFNAME`` chooses the interface, as it does for torch; without it, it is the one that leads to the
    rendezvous.

    Args:
        store: where the ranks meet.
        rank: 0 is the trainer.
        world_size: the trainer and the workers.
        timeout: seconds to wait for the others.
        bucket_bytes: sent at a time; the same on all ranks.

    Raises:
        SyncTimeout: not all came.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout: float, bucket_bytes: int = BUCKET_BYTES
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        options._devices = [
            dist.ProcessGroupGloo.create_device(interface=interface)
            if interface
            else dist.ProcessGroupGloo.create_device(hostname=own_address(store.host, store.port))
        ]
        options._timeout = timedelta(seconds=timeout)
        self.rank, self.world_size = rank, world_size
        self._store, self._bucket_bytes = store, bucket_bytes
        self._transfers = 0
        try:
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, world_size, options)
        except RuntimeError as error:
            raise SyncTimeout(
                f"the {world_size} ranks of a gloo group did not meet within {timeout:g} s: {error}"
            ) from None

    def broadcast(self, flat: Tensor, deadline: float, on_bucket: Callable[[int], None]) -> None:
        """Send ``flat`` from the trainer to all workers, or receive it, in buckets.

        Args:
            flat: uint8 ``[N]``, of the same N on all ranks.
            deadline: by ``time.monotonic()``.
            on_bucket: called after each bucket with the bytes that are there so far; an error of it ends the transfer.

        Raises:
            SyncTimeout: the deadline passed.
            RuntimeError: of gloo: another rank is gone.
        """
        if self._group is None:
            raise RuntimeError("the group was closed")
        for start in range(0, len(flat), self._bucket_bytes):
            options = dist.BroadcastOptions()
            options.rootRank, options.rootTensor = TRAINER, 0
            options.timeout = timedelta(seconds=max(deadline - time.monotonic(), LEAST_SECONDS))
            try:
                self._group.broadcast([flat[start : start + self._bucket_bytes]], options).wait()
            except RuntimeError as error:
                if time.monotonic() < deadline:
                    raise
                raise SyncTimeout(f"{start} of {len(flat)} bytes were sent when the time was up: {error}") from None
            on_bucket(min(start + self._bucket_bytes, len(flat)))
        self._transfers += 1

    def announce(self) -> None:
        """Say, as a worker, that the next transfer will be read."""
        self._store.set(f"ready/{self._transfers}/{self.rank}", b"")

    def all_ready(self) -> bool:
        """Whether all workers have announced the next transfer."""
        keys = [f"ready/{self._transfers}/{rank}" for rank in range(1, self.world_size)]
        return bool(self._store.check(keys))

    def close(self) -> None:
        """End the communicator and its threads; ranks that wait for this one get an error. Idempotent."""
        if self._group is not None:
            self._group.abort()
            self._group = None
