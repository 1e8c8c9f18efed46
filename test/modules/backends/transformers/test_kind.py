"""Plain transformers as a kind of engine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import torchrl_moe
from torchrl_moe.modules.backends.engine_kind import EngineKind, find_kind
from torchrl_moe.modules.backends.transformers import kind


def test_it_has_all_that_a_kind_has_and_its_program_is_there() -> None:
    assert find_kind("torchrl_moe.modules.backends.transformers.kind") is kind
    wanted = {*EngineKind.__annotations__, *(name for name in vars(EngineKind) if not name.startswith("_"))}
    assert wanted <= {*vars(kind)}
    path = Path(torchrl_moe.__file__).parents[1].joinpath(*kind.PROGRAM.split(".")).with_suffix(".py")
    assert {"def preload(", "def run(", "def main("} <= {
        line.partition("(")[0] + "(" for line in path.read_text().splitlines()
    }


def test_a_replica_has_one_device_and_may_be_forked() -> None:
    assert kind.devices_per_replica({"model": "m"}) == 1
    assert kind.reason_not_to_fork({"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}) == ""


def test_the_environment_says_how_loud_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRANSFORMERS_VERBOSITY", raising=False)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 9)
    environment = kind.engine_environment(num_replicas=2)
    assert (environment["TRANSFORMERS_VERBOSITY"], environment["OMP_NUM_THREADS"]) == ("warning", "4")
    assert kind.engine_environment("3", verbose=True)["CUDA_VISIBLE_DEVICES"] == "3"
    assert kind.engine_environment(verbose=True)["TRANSFORMERS_VERBOSITY"] == "info"
