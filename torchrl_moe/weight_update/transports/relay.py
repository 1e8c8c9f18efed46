"""A worker that passes on the version it has received to the workers of other replicas, over one group for each.

It sends whole versions only: their digests were compared before, so a damaged byte is not passed on. The trainer says
to whom. A group in which anything failed is given up, and the others continue.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from torchrl_moe._errors import SyncTimeout, TorchRLMoEError, WeightSyncError
from torchrl_moe.weight_update.transports.gloo_group import SENDER, GlooGroup
from torchrl_moe.weight_update.transports.meeting import Meeting, board_of, own_address

__all__ = ["Relay"]

LOG = logging.getLogger(__name__)
POLL_SECONDS = 0.005


class Relay:
    """What one worker passes on. Its methods may be called from several threads."""

    def __init__(self) -> None:
        self._held: tuple[str, Tensor] | None = None  # the digest, and the bytes
        self._lost = ""  # the digest of a version that did not arrive
        self._sending = 0
        self._edges: dict[int, _Edge] = {}
        self._closed = False
        self._changed = threading.Condition()

    # -- what is passed on ------------------------------------------------------------------------------------------

    def release(self, seconds: float) -> None:
        """Stop passing the version on, and wait until no transfer of it is running.

        Raises:
            SyncTimeout: one is still running.
        """
        with self._changed:
            self._held = None
            if not self._changed.wait_for(lambda: not self._sending, seconds):
                raise SyncTimeout(f"the previous version was still being passed on after {seconds:g} s")

    def hold(self, digest: str, flat: Tensor) -> None:
        """Pass these bytes on, uint8 ``[N]``; they must stay as they are until :meth:`release`."""
        with self._changed:
            self._held, self._lost = (digest, flat), ""
            self._changed.notify_all()

    def lose(self, digest: str) -> None:
        """Fail the transfers that wait for a version that did not arrive."""
        with self._changed:
            self._lost = digest
            self._changed.notify_all()

    @contextmanager
    def _bytes_of(self, digest: str, edge: _Edge, deadline: float) -> Iterator[Tensor]:
        """Wait for a version, and keep it while it is sent."""

        def settled() -> bool:
            return self._closed or edge.cancelled or self._lost == digest or self._has(digest)

        with self._changed:
            self._changed.wait_for(settled, max(deadline - time.monotonic(), 0.0))
            if self._closed or edge.cancelled or not self._has(digest) or self._held is None:
                raise WeightSyncError(f"the version with digest {digest} is not here")
            flat = self._held[1]
            self._sending += 1
        try:
            yield flat
        finally:
            with self._changed:
                self._sending -= 1
                self._changed.notify_all()

    def _has(self, digest: str) -> bool:
        return self._held is not None and self._held[0] == digest

    # -- to which replicas ------------------------------------------------------------------------------------------

    def pass_on(self, order: Mapping[str, Any]) -> None:
        """Pass a version on in a thread, once it is here and the other side is ready.

        Args:
            order: ``place``, the number of the receiving replica among this one's; the ``meeting`` with it, or ``None``
                to stop that transfer; ``world_size`` of the group, ``buffer_bytes``, ``timeout_seconds``, and the
                version's ``digest``.
        """
        place = int(order["place"])
        with self._changed:
            before = self._edges.get(place)
            if before is not None and (order["meeting"] is None or before.where != order["meeting"]):
                self._edges.pop(place).close()
                self._changed.notify_all()
            if order["meeting"] is None or self._closed:
                return
            edge = self._edges.setdefault(place, _Edge(order["meeting"]))
        thread = ThreadPoolExecutor(1, thread_name_prefix="weight-relay")
        thread.submit(self._pass_on, edge, dict(order))
        thread.shutdown(wait=False)  # it ends with its job

    def _pass_on(self, edge: _Edge, order: dict[str, Any]) -> None:
        deadline = time.monotonic() + order["timeout_seconds"]
        try:
            with edge.turn:
                group = edge.join(order)
                with self._bytes_of(order["digest"], edge, deadline) as flat:
                    while not group.all_ready():
                        if edge.cancelled or time.monotonic() > deadline:
                            raise WeightSyncError("the other side did not get ready to receive")
                        time.sleep(POLL_SECONDS)
                    group.broadcast(flat, deadline, lambda _: None)
        except (RuntimeError, OSError, TorchRLMoEError) as error:
            # the other side sees its connection break, and reports that to the trainer
            LOG.warning("a version was not passed on: %s", error)
            edge.close()

    def close(self) -> None:
        """Leave all groups. Idempotent."""
        with self._changed:
            self._closed, self._held = True, None
            for edge in self._edges.values():
                edge.close()
            self._edges.clear()
            self._changed.notify_all()


class _Edge:
    """The connection to the workers of one replica."""

    def __init__(self, where: Mapping[str, Any]) -> None:
        self.where = where
        self.turn = threading.Lock()  # one version at a time
        self.cancelled = False
        self._meeting: Meeting | None = None
        self._group: GlooGroup | None = None

    def join(self, order: Mapping[str, Any]) -> GlooGroup:
        """Meet the others, the first time."""
        if self.cancelled:
            raise WeightSyncError("it was given up")
        if self._group is None:
            self._meeting = Meeting(board_of(self.where), order["timeout_seconds"])
            size, timeout = order["world_size"], order["timeout_seconds"]
            if self.cancelled:
                raise WeightSyncError("it was given up")
            self._group = GlooGroup(
                self._meeting, SENDER, size, timeout, order["buffer_bytes"], own_address(self.where)
            )
        return self._group

    def close(self) -> None:
        """Leave the group, or give up meeting the others. Idempotent."""
        self.cancelled = True
        if self._meeting is not None:
            self._meeting.close()
        if self._group is not None:
            self._group.close()
