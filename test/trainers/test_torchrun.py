"""What a launcher says in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrl_moe.trainers import torchrun
from torchrl_moe.trainers.config import ConfigError, GRPOConfig

LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in (
        *LAUNCHED,
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "TORCHELASTIC_RESTART_COUNT",
        "TORCHELASTIC_MAX_RESTARTS",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_there_is_one_rank(environment: pytest.MonkeyPatch) -> None:
    assert not torchrun.is_launched() and not torchrun.may_restart()
    assert (torchrun.local_rank(), torchrun.local_world_size(), torchrun.restarts()) == (0, 1, 0)


def test_ranks_of_a_launcher(environment: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHED, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        environment.setenv(name, value)
    assert torchrun.is_launched()
    assert (torchrun.local_rank(), torchrun.local_world_size()) == (1, 2)
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    environment.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert torchrun.may_restart() and torchrun.restarts() == 2


@pytest.mark.parametrize("missing", LAUNCHED)
def test_half_a_launcher_is_none(environment: pytest.MonkeyPatch, missing: str) -> None:
    for name in LAUNCHED.keys() - {missing}:
        environment.setenv(name, LAUNCHED[name])
    assert not torchrun.is_launched()


def test_one_rank_is_no_group(environment: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHED, "RANK": "0", "WORLD_SIZE": "1"}.items():
        environment.setenv(name, value)
    assert not torchrun.is_launched()


# -- restarts ---------------------------------------------------------------------------------------------------------


def settings(folder: Path, has_a_run: bool, resume: bool = False) -> GRPOConfig:
    if has_a_run:
        (folder / "config.yaml").write_text("steps: 1")
    return GRPOConfig(out=str(folder), resume=resume)


@pytest.mark.parametrize(
    ("count", "has_a_run", "resume", "goes_on"),
    [
        (0, False, False, False),
        (0, True, True, True),
        (1, True, False, True),
        (1, False, False, False),  # it had not begun
        (2, True, True, True),
    ],
)
def test_a_run_that_is_started_again_goes_on(
    environment: pytest.MonkeyPatch, tmp_path: Path, count: int, has_a_run: bool, resume: bool, goes_on: bool
) -> None:
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    config = settings(tmp_path, has_a_run, resume)
    torchrun.go_on_after_a_restart(config, count)
    assert config.resume == goes_on


def test_a_restart_could_not_tell_an_older_run_from_this_one(environment: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torchrun.go_on_after_a_restart(settings(tmp_path, True), 0)  # nobody will start it again
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    with pytest.raises(ConfigError, match=r"holds a run already, .* name another folder, or set resume=true"):
        torchrun.go_on_after_a_restart(settings(tmp_path, True), 0)
