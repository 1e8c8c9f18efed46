"""Which ranks were started together: ``torchrun`` keeps its store when it starts them again."""

from __future__ import annotations

import time
import uuid
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]

from torchrl_moe._errors import RankError

__all__ = ["attempt_of"]

PAUSE = 0.01
"""Seconds between two polls of the store."""


def attempt_of(store: Store, rank: int, size: int, seconds: float) -> str:
    """Return a name shared by the ranks that were started together, and by no others.

    Addresses of ranks that are gone may be in the store. The number of restarts cannot tell them apart: a host counts
    the failures of its own ranks only (torch 2.13), so two hosts may have different numbers. Each rank asks under a
    name that was never used before, and rank 0 answers; requests left by older ranks are answered too, and nobody reads
    those answers.

    Args:
        store: that all ranks reach.
        rank: number of this rank.
        size: number of ranks.
        seconds: how long a rank waits for another.

    Raises:
        RankError: a rank did not arrive in time.
    """
    own, deadline = uuid.uuid4().hex, time.monotonic() + seconds
    if rank:
        store.set(f"asks/{rank}", own)
        try:
            store.wait([f"answer/{own}"], timedelta(seconds=seconds))
        except RuntimeError as error:
            raise RankError(f"start: rank 0 did not come within {seconds:g} s") from error
        attempt = str(store.get(f"answer/{own}").decode())
        store.set(f"{attempt}/{rank}", "")
        return attempt
    missing = list(range(1, size))
    while missing:
        for other in missing:
            if store.check([f"asks/{other}"]):
                store.set(f"answer/{store.get(f'asks/{other}').decode()}", own)
        missing = [other for other in missing if not store.check([f"{own}/{other}"])]
        if missing and time.monotonic() > deadline:
            names = ", ".join(map(str, missing))
            raise RankError(f"start: rank(s) {names} did not come within {seconds:g} s")
        time.sleep(PAUSE)
    return own
