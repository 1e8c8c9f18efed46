"""A gloo communicator of its own between one sender and the workers of one replica, to send flat bytes through.

It is independent of ``torch.distributed``'s default group in either process. Where its ranks meet, workers also
announce that they are ready: so nothing is sent to one that will not read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed
from torch import Tensor

from torchrl_moe._errors import SyncTimeout
from torchrl_moe.weight_update.store.writing import at_end
from torchrl_moe.weight_update.transports.meeting import Meeting

__all__ = ["BUFFER_BYTES", "SENDER", "GlooGroup"]

BUFFER_BYTES = 64 << 20
SENDER = 0
LOOPBACK = "127.0.0.1"
LEAST_SECONDS = 0.001

dist: Any = torch.distributed  # its stubs leave out groups


class GlooGroup:
    """One communicator. Making it waits until all ranks are there. It ends when it is dropped.

    ``GLOO_SOCKET_IFNAME`` chooses the interface, as it does for torch.

    Args:
        meeting: where the ranks meet; closed with the group.
        rank: 0 sends.
        world_size: the sender and the workers.
        timeout: seconds to connect with the others, once all are there.
        buffer_bytes: sent at a time; the same on all ranks.

    Raises:
        SyncTimeout: not all came.
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
            self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore("gloo", meeting), rank, world_size, options.pop())
        except BaseException as error:
            meeting.close()
            if not isinstance(error, RuntimeError | TimeoutError):
                raise
            raise SyncTimeout(
                f"the {world_size} ranks of a gloo group did not meet within {round(timeout, 1):g} s: {error}"
            ) from None
        self._end = at_end(self, _end, self._group, meeting)

    def broadcast(self, flat: Tensor, deadline: float, on_bucket: Callable[[int], None]) -> None:
        """Send ``flat`` from the sender to all workers, or receive it, in buckets.

        Args:
            flat: uint8 ``[N]``, of the same N on all ranks.
            deadline: by ``time.monotonic()``.
            on_bucket: called after each bucket with the number of bytes so far; if it raises, the transfer ends.

        Raises:
            SyncTimeout: the deadline passed.
            RuntimeError: of gloo: another rank is gone.
        """
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


def _options(timeout: float) -> Any:
    options = dist.ProcessGroupGloo._Options()
    interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    options._devices = [
        dist.ProcessGroupGloo.create_device(**({"interface": interface} if interface else {"hostname": LOOPBACK}))
    ]
    options._timeout = timedelta(seconds=timeout)
    return options


def _end(group: Any, meeting: Meeting) -> None:
    group.abort()
    meeting.close()
