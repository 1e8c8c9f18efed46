"""Names of actors, and what an engine gets of a driver's environment."""

from __future__ import annotations

import dataclasses

import pytest

from torchrl_moe.modules.backends.ray.ray_service import RayService, forwarded_environment, parse_actor_name

SERVICE = RayService(
    name="my-replica-1",
    detached=True,
    num_replicas=12,
    kind="support.toy_kind",
    arguments={"model": "m"},
    resources={"CPU": 1},
)


def test_a_name_is_read_as_it_was_written() -> None:
    assert SERVICE.actor_name(11) == "my-replica-1-replica-11"
    assert parse_actor_name(SERVICE.actor_name(11)) == ("my-replica-1", 11)


@pytest.mark.parametrize("name", ["replica-1", "-replica-1", "policy", "policy-replica-", "policy-replica-x"])
def test_other_actors_are_not_ours(name: str) -> None:
    assert parse_actor_name(name) is None


def test_services_are_the_same_if_all_of_it_is() -> None:
    assert dataclasses.replace(SERVICE, arguments={"model": "m"}) == SERVICE
    assert dataclasses.replace(SERVICE, arguments={"model": "n"}) != SERVICE


def test_settings_of_vllm_go_along_and_what_belongs_to_a_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "HF_HOME", "NCCL_DEBUG", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "PATH"):
        monkeypatch.setenv(name, "x")
    environment = forwarded_environment()
    assert {"VLLM_LOGGING_LEVEL", "HF_HOME", "NCCL_DEBUG"} <= environment.keys()
    assert not {"VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "PATH"} & environment.keys()
