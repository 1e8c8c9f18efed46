"""What ``torchrun`` says in the environment of a rank."""

from __future__ import annotations

import os
from pathlib import Path

from torchrl_moe.trainers.config import ConfigError, GRPOConfig

__all__ = ["go_on_after_a_restart", "is_launched", "local_rank", "local_world_size", "may_restart", "restarts"]

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
    """How often all ranks have been started again, because one on this machine failed."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def may_restart() -> bool:
    """Whether all ranks will be started again if one fails (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def go_on_after_a_restart(config: GRPOConfig, restarts: int) -> None:
    """Let a run that is started again resume, as nobody is there to ask for it.

    Args:
        config: ``resume`` is set, if this run has left its settings in its folder before.
        restarts: of the machine that has most: each counts the failures of its own ranks.

    Raises:
        ConfigError: the folder holds an older run, which a restart would go on with.
    """
    if config.resume or not may_restart():
        return
    has_a_run = (Path(config.out) / "config.yaml").exists()
    if has_a_run and not restarts:
        raise ConfigError(
            f"out={config.out} holds a run already, and --max-restarts could not tell it from this one: name another "
            "folder, or set resume=true"
        )
    config.resume = has_a_run
