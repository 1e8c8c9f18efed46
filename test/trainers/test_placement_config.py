"""A single process is the default, and numbers that cannot be are refused by name."""

from __future__ import annotations

import pytest

from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.config import ConfigError, PlacementConfig


def test_by_default_fsdp2_has_all_ranks() -> None:
    placement = PlacementConfig()
    assert (placement.tensor_parallel, placement.expert_parallel, placement.replicate) == (1, 1, 1)
    assert placement.reshard_after_forward and not placement.cpu_offload


def test_it_is_a_group_of_settings() -> None:
    found = load_config("tiny_cpu", ["placement.expert_parallel=4", "placement.timeout=30"]).placement
    assert found == PlacementConfig(expert_parallel=4, timeout=30.0)


@pytest.mark.parametrize(
    "override", ["tensor_parallel=0", "expert_parallel=-1", "replicate=0", "timeout=0", "collective_timeout=-1"]
)
def test_what_is_no_number_of_ranks_or_seconds(override: str) -> None:
    with pytest.raises(ConfigError, match=rf"placement\.{override.split('=')[0]}=.* must be a (whole )?number"):
        load_config("tiny_cpu", [f"placement.{override}"])
