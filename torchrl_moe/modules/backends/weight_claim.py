"""Who may change a replica's weights: one driver at a time, by an epoch that every claim raises.

A driver that lost its claim learns it from the first command of the old epoch, which is refused before anything is
paused: so two drivers never load halves of two versions. A claim ends with its driver, or when the driver gives it up.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

from torchrl_moe._errors import WeightSyncError

__all__ = ["WeightClaim", "WeightOwner", "this_process"]


def this_process() -> str:
    """Return the name of this driver, for messages."""
    return f"process {os.getpid()} on {socket.gethostname()}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightClaim:
    """The reply to a claim.

    Attributes:
        epoch: of this claim; 0 if it was refused.
        owner: the name of the driver that owns the weights now.
    """

    epoch: int
    owner: str


class WeightOwner:
    """The driver that owns a replica's weights, and the epoch of its claim; kept in the engine process."""

    def __init__(self) -> None:
        self._epoch = 0
        self._driver: str | None = None
        self._name = ""

    def claim(self, driver: str, name: str, takeover: bool) -> WeightClaim:
        """Give a driver the weights, if none owns them, if it owns them already, or by ``takeover``.

        Args:
            driver: its id, by which it is known when it leaves.
            name: its name, for messages.
            takeover: whether to take them from a driver that lives.
        """
        if self._driver not in (None, driver) and not takeover:
            return WeightClaim(epoch=0, owner=self._name)
        self._epoch, self._driver, self._name = self._epoch + 1, driver, name
        return WeightClaim(epoch=self._epoch, owner=name)

    def check(self, epoch: int) -> None:
        """Refuse a command of an older claim.

        Raises:
            WeightSyncError: another driver has claimed the weights since; the message names it.
        """
        if epoch != self._epoch:
            whose = "a driver that is gone" if self._driver is None else self._name
            raise WeightSyncError(
                f"the replica takes its weights from {whose} now: call init_all_workers_group(takeover=True) to take "
                "them back"
            )

    def why_not_swap(self, epoch: int, version: int, digest: str, staged: str) -> str:
        """Return why a version may not be swapped in, or "": the claim is old, or another version was staged last.

        Args:
            epoch: of the claim that the command goes with.
            version: its number, for the message.
            digest: of what the driver wants; "" names nothing.
            staged: the digest of what was staged last; "" if nothing is.
        """
        try:
            self.check(epoch)
        except WeightSyncError as error:
            return str(error)
        return "" if digest and digest == staged else f"version {version} is not what was staged last"

    def holds(self, epoch: int) -> bool:
        """Whether a claim is the last one, and of a driver that lives."""
        return epoch == self._epoch and self._driver is not None

    def give_up(self, epoch: int) -> None:
        """End a claim, unless another came since."""
        if epoch == self._epoch:
            self._driver = None

    def left(self, driver: str) -> None:
        """End the claim of a driver that is gone."""
        if self._driver == driver:
            self._driver = None
