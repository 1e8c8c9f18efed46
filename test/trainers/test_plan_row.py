"""Shares of a plan, by hand."""

from __future__ import annotations

from torchrl_moe.trainers.config import GRPOConfig
from torchrl_moe.trainers.plan import ranks_of_host, shards, share_of


def test_the_largest_share_counts() -> None:
    assert share_of(9, 4, 2) == 6
    assert share_of(8, 4, 4) == 8


def test_copies_are_sharded_each_by_itself_and_a_host_has_so_many_ranks() -> None:
    config = GRPOConfig()
    assert (shards(config), ranks_of_host(config)) == (1, 1)
    config.hardware.trainer_gpus, config.placement.replicate = 32, 4
    assert (shards(config), ranks_of_host(config)) == (8, 8)
