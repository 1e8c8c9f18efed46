"""What ``torchrun`` tells a rank: in its environment, and through the store that it keeps."""

from __future__ import annotations

import os
import uuid
from datetime import timedelta
from pathlib import Path

from torch.distributed.rendezvous import rendezvous

from torchrl_moe.trainers.config import ConfigError, GRPOConfig

__all__ = ["go_on_after_a_restart", "is_launched", "launch_of", "local_rank", "may_restart", "note_launch"]

RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LAUNCH = ".launch"
"""The file that names the launch that a folder's run belongs to."""
PATIENCE = timedelta(seconds=60)


def is_launched() -> bool:
    """Whether this process is one of several ranks that a launcher has started."""
    return all(name in os.environ for name in RENDEZVOUS) and int(os.environ["WORLD_SIZE"]) > 1


def local_rank() -> int:
    """This rank's number on its machine, which is also the index of its GPU."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def may_restart() -> bool:
    """Whether all ranks will be started again if one fails (``--max-restarts``)."""
    return int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")) > 0


def launch_of() -> str:
    """Return a name shared by all ranks that one ``torchrun`` launch starts, across restarts, and by no others.

    The name is kept in the store that ``torchrun`` keeps across restarts. Its restart count would not do: a host counts
    only the failures of its own ranks, and none when ranks restart because a host joined or left (torch 2.13).

    Returns:
        ``""``, if nothing will be restarted, or there is no such store.
    """
    has_store = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and all(map(os.environ.get, RENDEZVOUS))
    if not may_restart() or not has_store:
        return ""
    store, *_ = next(rendezvous("env://", timeout=PATIENCE))
    return str(store.compare_set("torchrl_moe/launch", "", uuid.uuid4().hex).decode())


def note_launch(folder: Path, launch: str) -> None:
    """Record in a folder which launch its run belongs to, before any other file of that run; ``""``: to none."""
    if launch:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / LAUNCH).write_text(launch)
    else:
        (folder / LAUNCH).unlink(missing_ok=True)


def go_on_after_a_restart(config: GRPOConfig, launch: str) -> None:
    """Make a restarted run resume, since no user is there to request it.

    Args:
        config: ``resume`` is set if the run in its folder belongs to this launch.
        launch: what :func:`launch_of` returned.

    Raises:
        ConfigError: the folder holds an older run, or that is unknown: a restart would not know which run to continue.
    """
    folder = Path(config.out)
    if config.resume or not may_restart() or not (folder / "config.yaml").exists():
        return
    noted = folder / LAUNCH
    config.resume = launch != "" and noted.exists() and noted.read_text() == launch
    if config.resume:
        config.overwrite = False
    elif not config.overwrite or launch == "":
        raise ConfigError(
            f"out={config.out} holds a run of another start already, and with --max-restarts a run resumes by itself: "
            "name another folder, set resume=true to continue with that one, or overwrite=true to replace it"
        )
