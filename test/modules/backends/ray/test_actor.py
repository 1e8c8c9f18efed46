"""The environment of an engine process in an actor; the actor itself is run by test_actor_link.py."""

from __future__ import annotations

import dataclasses

import pytest

from support.actors import ray_service
from torchrl_moe.modules.backends.ray.actor import actor_environment


def test_on_cpus_there_is_a_thread_for_each_that_was_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # of the process that started the node
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    environment = actor_environment(
        ray_service(name="s", cpus=3.0), {"VLLM_LOGGING_LEVEL": "DEBUG", "HF_HOME": "there"}
    )
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert actor_environment(ray_service(name="s", cpus=0.5), {})["OMP_NUM_THREADS"] == "1"


def test_on_gpus_the_engine_has_those_that_ray_gave_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "TORCH_COMPILE_DISABLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    service = dataclasses.replace(ray_service(name="s"), resources={"CPU": 2.0, "GPU": 2.0})
    environment = actor_environment(service, {})
    assert environment["CUDA_VISIBLE_DEVICES"] == "2,5"
    assert "TORCH_COMPILE_DISABLE" not in environment
    assert "OMP_NUM_THREADS" not in environment


def test_a_verbose_service_logs_at_vllms_own_level(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_LOGGING_LEVEL", raising=False)
    quiet = ray_service(name="s")
    assert actor_environment(quiet, {})["VLLM_LOGGING_LEVEL"] == "WARNING"
    assert actor_environment(dataclasses.replace(quiet, verbose=True), {})["VLLM_LOGGING_LEVEL"] == "INFO"
