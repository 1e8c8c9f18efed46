"""``Rendezvous``: where ranks wait for one another, on a key-value store instead of inside a collective."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch.distributed import Store  # type: ignore[attr-defined]

from torchrl_moe._errors import RankError

__all__ = ["Rendezvous"]

FAILED, LEFT = "failed", "left"
SHORTEST, LONGEST = 0.001, 0.25
"""Least and greatest seconds between two polls of the store; in between, a twentieth of the time waited so far."""
FAREWELL = 5.0
"""Seconds that rank 0, which hosts the store, stays alive so that the others can read why it ends."""


class Rendezvous:
    """Lets ranks begin a phase together, and reports which of them is missing, or why one has failed.

    A collective that one rank never enters blocks the others, and nothing names the missing rank. So ranks meet before
    each phase that has collectives: no rank is in one while another does something else, such as sending weights to an
    engine.

    Args:
        store: that all ranks reach; rank 0's process holds it.
        rank: number of this rank.
        size: number of ranks.
        seconds: how long a rank waits for another.
    """

    def __init__(self, store: Store, rank: int, size: int, seconds: float) -> None:
        self._store, self.rank, self.size, self.seconds = store, rank, size, seconds
        self.phase = "start"
        self._number = 0

    def meet(self, phase: str, patient: bool = False) -> None:
        """Wait until all ranks begin a phase.

        Args:
            phase: its name, for messages.
            patient: whether the others wait without limit for rank 0, which may be waiting for the engine.

        Raises:
            RankError: a rank did not arrive in time, is gone, has failed, or begins another phase.
        """
        self.phase, number = phase, self._number
        self._number += 1
        try:
            self._store.set(f"{number}/{self.rank}", phase)
            if self._store.add(f"{number}/count", 1) == self.size:
                self._store.set(f"{number}/all", phase)
            began = time.monotonic()
            while not self._wait(lambda: self._has(f"{number}/all"), began, self.seconds):
                missing = self._missing(f"{number}/")
                if patient and 0 in missing:
                    began = time.monotonic()
                elif missing:
                    raise RankError(self._tell(f"{phase}: {_names(missing)} did not come within {self.seconds:g} s"))
            other = self._store.get(f"{number}/all").decode()
            self._forget(number - 1)  # all ranks that are here have left the previous phase
        except RuntimeError as error:
            raise RankError(f"{phase}: rank 0 is gone, or cannot be reached: {_line(error)}") from error
        if other != phase:  # the collectives that follow would hang, or mix up data
            told = f"rank {self.rank} is at {phase!r} where another is at {other!r}"
            raise RankError(self._tell(f"{told}: start all ranks alike, with a folder that all see"))

    def _wait(self, is_there: Callable[[], bool], began: float, seconds: float) -> bool:
        """Return whether a key appeared in time; raise the error that another rank has reported meanwhile."""
        while True:
            if self._has(FAILED):  # checked first: a late rank would complete a phase that others gave up
                raise RankError(self._store.get(FAILED).decode())
            if is_there():
                return True
            waited = time.monotonic() - began
            if waited > seconds:
                return False
            time.sleep(min(max(waited / 20, SHORTEST), LONGEST))

    def _has(self, key: str) -> bool:
        return bool(self._store.check([key]))

    def _missing(self, prefix: str) -> list[int]:
        return [rank for rank in range(self.size) if not self._has(f"{prefix}{rank}")]

    def _forget(self, number: int) -> None:
        keys = [f"{number}/{self.rank}"] + ([f"{number}/count", f"{number}/all"] if self.rank == 0 else [])
        for key in keys if number >= 0 else ():
            self._store.delete_key(key)

    def cause(self, error: BaseException) -> str:
        """Report an error here to the others; return its cause, if that is another rank, else ``""``.

        The error of a collective names no rank: then another rank has failed and reported it, or is gone, which a roll
        call detects. Any other error is this rank's own.
        """
        try:
            if isinstance(error, RuntimeError) and _is_of_collective(error):
                return self._cause_of_collective(error)
            self._tell(f"rank {self.rank} failed (last met: {self.phase}): {type(error).__name__}: {_line(error)}")
        except RuntimeError:  # the store is gone, and so is rank 0
            return f"{self.phase}: rank 0 is gone" if self.rank else ""
        except RankError as other:
            return str(other)
        return ""

    def _cause_of_collective(self, error: RuntimeError) -> str:
        self._store.set(f"here/{self.rank}", "")
        began, wanted = time.monotonic(), [f"here/{rank}" for rank in range(self.size)]
        self._wait(lambda: all(map(self._has, wanted)), began, min(self.seconds, FAREWELL))
        missing = self._missing("here/")
        who = f"{_names(missing)} gone" if missing else "a collective failed"
        return self._tell(f"{self.phase}: {who}: {_line(error)}")

    def _tell(self, message: str) -> str:
        """Leave a message for all ranks; return the first message that any rank left."""
        return str(self._store.compare_set(FAILED, "", message).decode())

    def leave(self) -> None:
        """Sign off. Rank 0, which hosts the store, waits a limited time for the others to do so."""
        try:
            self._store.add(LEFT, 1)
            began = time.monotonic()
            while self.rank == 0 and self._store.add(LEFT, 0) < self.size and time.monotonic() - began < FAREWELL:
                time.sleep(10 * SHORTEST)
        except RuntimeError:  # rank 0 is gone already
            return


def _names(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _is_of_collective(error: RuntimeError) -> bool:
    """Whether a process group raised the error: gloo has no exception class of its own."""
    text = str(error).lower()
    return type(error).__name__.startswith("Dist") or any(word in text for word in ("gloo", "nccl", "pair closure"))
