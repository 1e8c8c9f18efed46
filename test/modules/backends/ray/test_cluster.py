"""Joining a Ray cluster, names and environments of actors; Ray itself is played."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.exceptions import GetTimeoutError

from support.actors import ray_service
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.backends.ray.actor import actor_environment
from torchrl_moe.modules.backends.ray.cluster import (
    RayService,
    forwarded_environment,
    parse_actor_name,
    parse_group_name,
    secrets_of_environment,
)

SOME = RayService(
    name="my-replica-1",
    detached=True,
    num_replicas=12,
    kind="support.toy_kind",
    arguments={"model": "m"},
    resources={"CPU": 1},
)


def test_a_name_is_read_as_it_was_written() -> None:
    assert SOME.actor_name(11) == "my-replica-1-replica-11"
    assert parse_actor_name(SOME.actor_name(11)) == ("my-replica-1", 11)


@pytest.mark.parametrize("name", ["policy", "a/b", "a replica-1", "größe"])
def test_a_groups_name_is_read_as_it_was_written(name: str) -> None:
    service = dataclasses.replace(SOME, name=name, namespace="of/ours")
    assert parse_group_name(service.group_name(11, "0123abcd")) == ("of/ours", name, 11)


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


# -- the cluster -------------------------------------------------------------------------------------------------------


class Played:
    """Notes how Ray is initialised; ``address="auto"`` finds a cluster or not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, running: bool = False, found: bool = False) -> None:
        self.inits: list[dict[str, Any]] = []
        self.found = found
        monkeypatch.setattr(ray, "is_initialized", lambda: running)
        monkeypatch.setattr(ray, "init", self.init)
        monkeypatch.setattr(ray, "shutdown", lambda: pytest.fail("Ray was shut down"))

    def init(self, **how: Any) -> None:
        self.inits.append(how)
        if how["address"] == "auto" and not self.found:
            raise ConnectionError("Could not find any running Ray instance")


def test_a_ray_that_runs_is_used_as_it_is_and_a_cluster_that_is_found_is_joined(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for running, inits in ((True, []), (False, [{"address": "auto"}])):
        played = Played(monkeypatch, running=running, found=True)
        assert cluster.join_cluster() is False
        assert played.inits == inits


def test_one_is_started_only_where_there_is_none_and_only_if_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    played = Played(monkeypatch)
    with pytest.raises(EngineError, match=r"no Ray cluster was found: .* Set RAY_ADDRESS"):
        cluster.join_cluster(start=False)
    assert [init["address"] for init in played.inits] == ["auto"]
    assert cluster.join_cluster() is True
    assert [init["address"] for init in played.inits] == ["auto", "auto", "local"]


def test_a_shortage_tells_a_cluster_too_small_from_one_too_full(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "Resources": {"CPU": 8.0, "GPU": 2.0}},
        {"Alive": True, "Resources": {"CPU": 4.0}},
        {"Alive": False, "Resources": {"CPU": 64.0, "GPU": 8.0}},
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "available_resources", lambda: {"CPU": 5.0})
    full = cluster.shortage({"GPU": 2.0})
    assert "with {'GPU': 2.0} free" in full
    assert "2 node(s) have {'GPU': 2.0}; {'GPU': 0.0}; free in total: {'GPU': 0.0}. Others hold them" in full
    assert "No node is large enough" in cluster.shortage({"GPU": 4.0})
    assert "No node is large enough" in cluster.shortage({"GPU": 1.0, "CPU": 16.0})


ACTORS = [
    {"name": "b-replica-1", "namespace": "ours"},
    {"name": "b-replica-0", "namespace": "ours"},
    {"name": "a-replica-0", "namespace": "ours"},
    {"name": "a-replica-1", "namespace": "theirs"},
    {"name": "somebody", "namespace": "ours"},
]


@pytest.fixture
def actors(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Name of an actor -> what it answers to ``describe``: a value, or an error."""
    answers: dict[str, Any] = {}

    def get(reference: Any, timeout: float) -> Any:
        if isinstance(answers[reference], Exception):
            raise answers[reference]
        service, group = answers[reference] if isinstance(answers[reference], tuple) else (answers[reference], "")
        return SimpleNamespace(service=service, group=SimpleNamespace(id=bytes.fromhex(group)))

    def get_actor(name: str, namespace: str) -> Any:
        assert namespace == "ours"
        return SimpleNamespace(describe=SimpleNamespace(remote=lambda: name))

    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: ACTORS)
    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(cluster, "placement_group_table", dict)
    return answers


def test_a_name_that_is_taken_is_refused_with_those_that_are(actors: dict[str, Any]) -> None:
    cluster.check_free("c", "ours")
    cluster.check_free("a", None)  # free in the namespace that is used if none is named
    with pytest.raises(EngineError, match=r"'b' is running already\. Services in namespace 'ours': 'a' \(1 .*'b' \(2 "):
        cluster.check_free("b", "ours")


def test_a_service_that_is_not_there_or_does_not_answer_is_distinguished(actors: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match=r"no service 'c' is running\. Services in namespace 'ours': 'a'.*name='c'"):
        cluster.find_service("c", "ours")
    with pytest.raises(EngineError, match=r"None runs in namespace 'empty'"):
        cluster.find_service("c", "empty")
    actors["a-replica-0"] = GetTimeoutError("late")
    with pytest.raises(EngineError, match=r"'a': none of its replicas \[0\] answered within 20 s: late"):
        cluster.find_service("a", "ours")


# -- what is left -----------------------------------------------------------------------------------------------------


def group(name: str, number: int, state: str = "CREATED") -> dict[str, str]:
    return {"name": name, "state": state, "placement_group_id": f"{number:02x}" * 18}


@pytest.fixture
def groups(actors: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The placement groups of the cluster; those that are removed say so."""
    rows: list[dict[str, str]] = []

    def remove(handle: Any) -> None:
        for row in rows:
            if row["placement_group_id"] == handle.id.hex():
                row["state"] = "REMOVED"

    monkeypatch.setattr(cluster, "placement_group_table", lambda: {row["placement_group_id"]: row for row in rows})
    monkeypatch.setattr(cluster, "remove_placement_group", remove)
    monkeypatch.setattr(cluster, "MAKING_SECONDS", 0.0)
    return rows


def removed(rows: list[dict[str, str]]) -> list[int]:
    return [int(row["placement_group_id"][:2], 16) for row in rows if row["state"] == "REMOVED"]


def test_groups_in_which_no_actor_lies_are_removed_and_no_others(
    actors: dict[str, Any], groups: list[dict[str, str]]
) -> None:
    groups += [
        group("ours/b/0/aaaaaaaa", 1),  # it has an actor
        group("ours/b/7/aaaaaaaa", 2),  # it has none
        group("ours/b/1/aaaaaaaa", 3),  # that of the actor
        group("ours/b/1/bbbbbbbb", 4),  # beside it
        group("theirs/b/7/aaaaaaaa", 5),
        group("ours/c/0/aaaaaaaa", 6),
        group("b-replica-7-aaaaaaaa", 7),  # nobody of ours names them so
        group("ours/b/8/aaaaaaaa", 8, state="PENDING"),
    ]
    actors["b-replica-1"] = ray_service(name="b"), groups[2]["placement_group_id"]
    assert cluster.remove_leftovers("b", "ours") == 3
    assert removed(groups) == [2, 4, 8]
    assert cluster.remove_leftovers("b", "ours") == 0


def test_who_ends_a_service_asks_those_that_run_and_kills_those_that_wait_for_a_place_at_once(
    actors: dict[str, Any], groups: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups += [
        group("ours/b/0/aaaaaaaa", 1, state="PENDING"),
        group("ours/b/1/aaaaaaaa", 2, state="PENDING"),
        group("ours/b/1/bbbbbbbb", 3),
    ]
    asked, killed = [], []

    def get_actor(name: str, namespace: str) -> Any:
        return SimpleNamespace(name=name, shut_down=SimpleNamespace(remote=lambda: name))

    def wait(references: list[str], num_returns: int, timeout: float) -> None:
        assert num_returns == len(references)
        asked.extend(references)

    monkeypatch.setattr(ray, "get_actor", get_actor)
    monkeypatch.setattr(ray, "wait", wait)
    monkeypatch.setattr(ray, "kill", lambda actor: killed.append(actor.name))
    monkeypatch.setattr(cluster, "GONE_SECONDS", 0.0)
    cluster.end_service("b", "ours")
    assert asked == ["b-replica-1"]
    assert killed == ["b-replica-0", "b-replica-1"]
    assert removed(groups) == [1, 2, 3]


def test_of_two_groups_of_an_actor_that_does_not_answer_none_is_removed(
    actors: dict[str, Any], groups: list[dict[str, str]]
) -> None:
    groups += [group("ours/b/0/aaaaaaaa", 1), group("ours/b/0/bbbbbbbb", 2)]
    actors["b-replica-0"] = GetTimeoutError("late")
    assert cluster.remove_leftovers("b", "ours") == 0


def test_a_group_whose_actor_comes_meanwhile_stays(
    actors: dict[str, Any], groups: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    groups.append(group("ours/b/2/aaaaaaaa", 1))
    late = {"name": "b-replica-2", "namespace": "ours"}
    monkeypatch.setattr(cluster.time, "sleep", lambda seconds: monkeypatch.setitem(ACTORS_BY_NAME, "late", late))
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: [*ACTORS, *ACTORS_BY_NAME.values()])
    assert cluster.remove_leftovers("b", "ours") == 0
    assert removed(groups) == []


ACTORS_BY_NAME: dict[str, Any] = {}
