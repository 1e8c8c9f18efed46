"""``PlanRow``: a line of a plan, and the machines that it can refer to."""

from __future__ import annotations

from dataclasses import dataclass

from torchrl_moe.trainers.config import GRPOConfig

__all__ = ["ENGINE", "FLOAT32", "HOST", "TRAINER", "UPDATE", "PlanRow", "ranks_of_host", "shards", "share_of"]

TRAINER, ENGINE, HOST, UPDATE = "trainer, each GPU", "engine, each GPU", "host of the trainer", "weight update"
FLOAT32 = 4


@dataclass(frozen=True, slots=True)
class PlanRow:
    """A line of a plan.

    Attributes:
        part: which machine it is for.
        item: what takes the memory or bandwidth.
        bytes: upper bound.
        how: the calculation, in words.
        at_once: whether it exists at the same time as the other items of its part.
    """

    part: str
    item: str
    bytes: int
    how: str
    at_once: bool = True


def share_of(numbers: int, shards: int, each: int) -> int:
    """Return the bytes of the largest share, when elements of ``each`` bytes are split into so many shares."""
    return -(-numbers // shards) * each


def shards(config: GRPOConfig) -> int:
    """Return the number of ranks that a weight is split over."""
    return config.hardware.trainer_gpus // config.placement.replicate


def ranks_of_host(config: GRPOConfig) -> int:
    """Return the number of ranks on rank 0's host."""
    return min(config.hardware.trainer_gpus, config.hardware.gpus_per_host)
