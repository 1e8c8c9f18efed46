"""What every transport is told: how a replica prepares a version."""

from __future__ import annotations

from torchrl_moe.weight_update.transports.transport import StageOptions


def test_a_version_is_verified_and_staged_as_the_machine_allows_unless_told_otherwise() -> None:
    assert StageOptions() == StageOptions(stage="auto", verify="digest", threads=1)
