"""What a launcher says in the environment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from torchrl_moe.trainers import ranks as torchrun
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
        "TORCHELASTIC_USE_AGENT_STORE",
    ):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_without_a_launcher_there_is_one_rank(environment: pytest.MonkeyPatch) -> None:
    assert not torchrun.is_launched() and not torchrun.may_restart()
    assert torchrun.local_rank() == 0 and torchrun.launch_of() == ""


def test_ranks_of_a_launcher(environment: pytest.MonkeyPatch) -> None:
    for name, value in {**LAUNCHED, "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        environment.setenv(name, value)
    assert torchrun.is_launched()
    assert torchrun.local_rank() == 1
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert torchrun.may_restart()


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


@pytest.fixture
def agent(environment: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """What torchrun says where it will start ranks again; each call is another torchrun, with a store of its own."""
    stores: list[TCPStore] = []

    def start() -> None:
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        said = {**LAUNCHED, "RANK": "0", "MASTER_PORT": str(stores[-1].port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in {**said, "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
            environment.setenv(name, value)

    start()
    yield start


def begin(folder: Path, resume: bool = False) -> bool:
    """A start of a run, as far as it matters here; returns whether it continued."""
    config = GRPOConfig(out=str(folder), resume=resume)
    torchrun.resume_after_restart(config, torchrun.launch_of())
    torchrun.note_launch(folder, torchrun.launch_of())
    (folder / "config.yaml").write_text("steps: 1")
    return config.resume


def test_a_run_that_is_started_again_continues_whatever_was_counted(
    environment: pytest.MonkeyPatch, agent: Callable[[], None], tmp_path: Path
) -> None:
    assert not begin(tmp_path)
    for count in ("0", "1", "0"):  # a host that came or went is no failure
        environment.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert begin(tmp_path)


def test_a_run_that_had_not_begun_begins(agent: Callable[[], None], tmp_path: Path) -> None:
    first = torchrun.launch_of()
    assert first and torchrun.launch_of() == first
    assert not begin(tmp_path)


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_run_of_another_launch_is_refused_each_time(
    environment: pytest.MonkeyPatch, agent: Callable[[], None], tmp_path: Path, count: str
) -> None:
    """Its refusal is a failure that torchrun counts: the next start must not take that for a failure of the run."""
    begin(tmp_path)
    agent()
    environment.setenv("TORCHELASTIC_RESTART_COUNT", count)
    with pytest.raises(ConfigError, match=r"holds a run of another start already, .* set resume=true"):
        begin(tmp_path)
    assert begin(tmp_path, resume=True)
    assert begin(tmp_path)  # and after a failure, it is this launch's


def test_a_launcher_without_a_store_of_its_own_cannot_say(
    environment: pytest.MonkeyPatch, agent: Callable[[], None], tmp_path: Path
) -> None:
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert torchrun.launch_of() == ""
    assert not begin(tmp_path)
    with pytest.raises(ConfigError, match="holds a run of another start already"):
        begin(tmp_path)


def test_where_nobody_starts_it_again_a_run_takes_the_folder(
    environment: pytest.MonkeyPatch, agent: Callable[[], None], tmp_path: Path
) -> None:
    assert not begin(tmp_path)
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert torchrun.launch_of() == ""
    assert not begin(tmp_path)
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError):  # it is not of this launch any more
        begin(tmp_path)
