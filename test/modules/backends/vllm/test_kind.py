"""vLLM as a kind of engine: its processes' environment, and when they are not forked."""

from __future__ import annotations

import os
import site
from pathlib import Path

import pytest

import torchrl_moe
from torchrl_moe.modules.backends.engine_kind import EngineKind, find_kind
from torchrl_moe.modules.backends.vllm import kind
from torchrl_moe.modules.backends.vllm.kind import engine_environment, reason_not_to_fork


def test_the_environment_is_the_drivers_and_what_vllm_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND", "PYTHONPATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OF_THE_USER", "1")
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    environment = engine_environment(num_replicas=2)
    assert environment["OF_THE_USER"] == "1"
    assert environment["OMP_NUM_THREADS"] == "4"  # a core stays free, the others are shared
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["TORCH_COMPILE_DISABLE"] == "1"
    assert environment["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    assert environment["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert environment["PYTHONPATH"] == str(Path(torchrl_moe.__file__).parents[1])
    assert "VLLM_LOGGING_LEVEL" not in os.environ


def test_the_environment_gives_way_to_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("PYTHONPATH", "theirs")
    environment = engine_environment(verbose=True)
    assert (environment["OMP_NUM_THREADS"], environment["VLLM_LOGGING_LEVEL"]) == ("7", "DEBUG")
    assert environment["PYTHONPATH"].split(os.pathsep)[1:] == ["theirs"]


def test_an_installed_package_leaves_the_users_paths_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of site-packages would come before them."""
    monkeypatch.setenv("PYTHONPATH", "theirs")
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(Path(torchrl_moe.__file__).parents[1])])
    assert engine_environment()["PYTHONPATH"] == "theirs"


def test_many_replicas_on_few_cores_have_a_thread_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert engine_environment(num_replicas=8)["OMP_NUM_THREADS"] == "1"


def test_on_gpus_the_replica_sees_its_own_devices_and_cpu_settings_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    environment = engine_environment("2,3")
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert "TORCH_COMPILE_DISABLE" not in environment
    assert "OMP_NUM_THREADS" not in environment


def test_an_engine_is_no_rank_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own process group would look for torchrun's store, and wait."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"):
        monkeypatch.setenv(name, "1")
        assert name not in engine_environment()
    monkeypatch.setenv("OF_RANK", "1")
    assert engine_environment()["OF_RANK"] == "1"


def test_a_users_setting_keeps_processes_from_being_forked() -> None:
    assert reason_not_to_fork({}) == reason_not_to_fork({"VLLM_WORKER_MULTIPROC_METHOD": "fork"}) == ""
    assert reason_not_to_fork({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}) == "VLLM_WORKER_MULTIPROC_METHOD=spawn is set"


def test_it_has_all_that_a_kind_has_and_its_program_is_there() -> None:
    found = find_kind("torchrl_moe.modules.backends.vllm.kind")
    assert found is kind
    wanted = {*EngineKind.__annotations__, *(name for name in vars(EngineKind) if not name.startswith("_"))}
    assert wanted <= {*vars(kind)}
    path = Path(torchrl_moe.__file__).parents[1].joinpath(*kind.PROGRAM.split(".")).with_suffix(".py")
    assert {"def preload(", "def run(", "def main("} <= {
        line.partition("(")[0] + "(" for line in path.read_text().splitlines()
    }
