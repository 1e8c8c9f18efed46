"""The machines of a plan are settings like any other."""

from __future__ import annotations

import pytest

from torchrl_moe.trainers import ConfigError
from torchrl_moe.trainers.compose import load_config
from torchrl_moe.trainers.config import HardwareConfig


def test_a_link_of_ones_own_is_added_to_the_others() -> None:
    config = load_config("tiny_cpu", ["hardware.links.mine=3.5", "hardware.gpu_gb=24"])
    assert config.hardware.gpu_gb == 24
    assert config.hardware.links == {**HardwareConfig().links, "mine": 3.5}


@pytest.mark.parametrize("name", ["gpu_gb", "host_gb", "gpus_per_host", "trainer_gpus"])
def test_there_is_no_machine_of_nothing(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"hardware\.{name}=0.* must be a (whole )?number"):
        load_config("tiny_cpu", [f"hardware.{name}=0"])
