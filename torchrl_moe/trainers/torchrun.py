"""What ``torchrun`` says in the environment of a rank."""

from __future__ import annotations

import os

__all__ = ["is_launched", "local_rank", "local_world_size", "may_restart", "restarts"]

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def is_launched() -> bool:
    """Whether this process is one of several ranks that a launcher has started."""
    return all(name in os.environ for name in RENDEZVOUS) and int(os.environ["WORLD_SIZE"]) > 1


def local_rank() -> int:
    """This rank's number on its machine: that of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """How many ranks are on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def restarts() -> int:
    """How often all ranks have been started again, because one failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def may_restart() -> bool:
    """Whether all ranks will be started again if one fails (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0
