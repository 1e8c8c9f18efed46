"""Names of actors, and what an engine gets of a driver's environment."""

from __future__ import annotations

import dataclasses

import pytest

from torchrl_moe.modules.backends.ray.cluster import (
    RayService,
    forwarded_environment,
    parse_actor_name,
    parse_group_name,
    secrets_of_environment,
)

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


@pytest.mark.parametrize("name", ["policy", "a/b", "a replica-1", "größe"])
def test_a_groups_name_is_read_as_it_was_written(name: str) -> None:
    service = dataclasses.replace(SERVICE, name=name, namespace="of/ours")
    assert parse_group_name(service.group_name(11, "0123abcd")) == ("of/ours", name, 11)


@pytest.mark.parametrize("name", ["", "policy", "a/b/c/d", "a/b/1/0123abcd/x", "a/b/1/0123abc", "a/b/-1/0123abcd"])
def test_other_groups_are_not_ours(name: str) -> None:
    assert parse_group_name(name) is None


def test_services_are_the_same_if_all_of_it_is() -> None:
    assert dataclasses.replace(SERVICE, arguments={"model": "m"}) == SERVICE
    assert dataclasses.replace(SERVICE, arguments={"model": "n"}) != SERVICE


def test_settings_of_vllm_go_along_and_what_belongs_to_a_machine_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_LOGGING_LEVEL", "HF_HOME", "NCCL_DEBUG", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "PATH"):
        monkeypatch.setenv(name, "x")
    environment = forwarded_environment()
    assert {"VLLM_LOGGING_LEVEL", "HF_HOME", "NCCL_DEBUG"} <= environment.keys()
    assert not {"VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "PATH"} & environment.keys()


def test_access_tokens_are_no_part_of_what_ray_keeps_and_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = {"HF_TOKEN": "hf_1", "HUGGING_FACE_HUB_TOKEN": "hf_2", "VLLM_API_KEY": "key"}
    settings = {"HF_TOKEN_PATH": "/a/file", "VLLM_MAX_TOKENS": "3"}
    for name, value in {**tokens, **settings, "GITHUB_TOKEN": "not ours"}.items():
        monkeypatch.setenv(name, value)
    assert not tokens.keys() & forwarded_environment().keys()
    assert settings.items() <= forwarded_environment().items()
    assert secrets_of_environment() == tokens
