"""``PlanRow``: a line of a plan, and the machines that it may be of."""

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
        part: of the machines.
        item: what needs it.
        bytes: how much, at most.
        how: how that is worked out.
        at_once: whether it is there at the same time as the others of its part.
    """

    part: str
    item: str
    bytes: int
    how: str
    at_once: bool = True


def share_of(numbers: int, shards: int, each: int) -> int:
    """Return the bytes of the largest of so many shares of numbers, of ``each`` bytes."""
    return -(-numbers // shards) * each


def shards(config: GRPOConfig) -> int:
    """Return over how many ranks a weight is split."""
    return config.hardware.trainer_gpus // config.placement.replicate


def ranks_of_host(config: GRPOConfig) -> int:
    """Return how many ranks rank 0's host has."""
    return min(config.hardware.trainer_gpus, config.hardware.gpus_per_host)
