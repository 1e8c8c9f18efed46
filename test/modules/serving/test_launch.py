"""How a service is launched: what is refused, what makes replicas and asks Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch

from torchrl_moe.modules.backends.process.replica import LocalReplica
from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
from torchrl_moe.modules.backends.vllm import kind
from torchrl_moe.modules.serving.launch import (
    check_backend,
    check_model,
    default_timeout,
    engine_kind,
    engine_of,
    local_factory,
    ray_factory,
    with_fp32_head,
)


def test_an_unknown_backend_no_replica_and_words_of_ray_are_refused() -> None:
    check_backend("local", 1, name=None)
    check_backend("ray", 2, name="policy")
    with pytest.raises(ValueError, match=r"backend must be 'local' .* or 'ray'"):
        check_backend("mpi", 1)
    with pytest.raises(ValueError, match="num_replicas must be at least 1, got 0"):
        check_backend("local", 0)
    with pytest.raises(ValueError, match="name given with backend='local': only backend='ray' knows them"):
        check_backend("local", 1, name="policy", resources=None)
    with pytest.raises(ValueError, match=r"devices=\[\[0\]\] given with backend='ray': Ray chooses devices"):
        check_backend("ray", 1, [[0]])


def test_an_engine_is_known_by_its_name_and_by_its_kind() -> None:
    for engine in ("vllm", "transformers"):
        found = engine_kind(engine)
        assert f"torchrl_moe.modules.backends.{engine}.engine_process" == found.PROGRAM
        assert engine_of(cast(Any, found).__name__) == engine
    assert engine_of("support.toy_kind") == "vllm"  # all others are made like it
    with pytest.raises(ValueError, match="engine must be one of vllm, transformers, got 'sglang'"):
        engine_kind("sglang")


def test_a_folder_without_a_model_is_refused_and_a_hub_name_is_not(tmp_path: Path) -> None:
    assert check_model("Qwen/Qwen3-30B-A3B") == "Qwen/Qwen3-30B-A3B"
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        check_model(str(tmp_path))
    with pytest.raises(ValueError, match="the folder does not exist"):
        check_model(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    assert check_model(str(tmp_path)) == str(tmp_path)


def test_the_environment_may_give_a_start_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRL_VLLM_TIMEOUT_SECONDS", raising=False)
    assert default_timeout() == 600.0
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "1200")
    assert default_timeout() == 1200.0
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="must be a number of seconds, got 'soon'"):
        default_timeout()


def test_a_float32_head_is_one_more_override() -> None:
    assert with_fp32_head(None) == {"head_dtype": "float32"}
    assert with_fp32_head({"num_hidden_layers": 2}) == {"num_hidden_layers": 2, "head_dtype": "float32"}
    with pytest.raises(ValueError, match="needs hf_overrides to be a mapping"):
        with_fp32_head(dict)


def test_a_replica_that_is_added_takes_devices_that_nobody_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    listed = [0, 1]
    make = local_factory(kind, ARGUMENTS, 2, False, listed=lambda: listed)

    def devices(index: int) -> str:
        return cast(LocalReplica, make(index))._environment["CUDA_VISIBLE_DEVICES"]

    assert [devices(index) for index in (0, 1)] == ["0,1", "2,3"]
    listed.append(2)
    assert devices(2) == "4,5"
    with pytest.raises(ValueError, match=r"4 replicas of 2 GPU\(s\) need 8, but 6 are visible"):
        make(3)
    listed.remove(0)
    listed.append(4)
    assert (devices(4), devices(2)) == ("0,1", "4,5")  # those of the one that was removed; a restart keeps its own


def test_a_replica_has_the_devices_that_its_user_names_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 6)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2")
    make = local_factory(kind, ARGUMENTS, 2, False, None, lambda: [0, 1], [[0, 3], ["cuda:5", "cuda:1"]])
    environments = [cast(LocalReplica, make(index))._environment["CUDA_VISIBLE_DEVICES"] for index in (0, 1, 2)]
    assert environments == ["7,4", "2,6", "5,3"]


ARGUMENTS = {"model": "m", "tensor_parallel_size": 2}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A cluster without GPUs; its one item says whether joining it had to start it."""
    answer = [False]
    monkeypatch.setattr(cluster, "join_cluster", lambda: answer[0])
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0})
    return answer


def service_of(name: str | None = None, namespace: str | None = None, resources: Any = None) -> Any:
    make = ray_factory(kind, ARGUMENTS, 3, name=name, namespace=namespace, resources=resources, verbose=True)
    replica = make(2)
    assert isinstance(replica, RayReplica)
    assert replica.index == 2
    assert make(0)._service is replica._service  # one service, whatever replica is made when
    return replica._service


def test_an_access_token_does_not_travel_in_actor_arguments(started: list[bool]) -> None:
    with pytest.raises(ValueError, match=r"hf_token: Ray keeps and shows .* set HF_TOKEN in the environment"):
        ray_factory(
            kind, {**ARGUMENTS, "hf_token": "hf_secret"}, 1, name=None, namespace=None, resources=None, verbose=True
        )


def test_without_a_name_it_has_one_that_nobody_else_has_and_ends_with_its_driver(started: list[bool]) -> None:
    one, two = service_of(), service_of()
    assert one.name != two.name
    assert not one.detached
    assert one.namespace == "torchrl_moe"
    assert (one.num_replicas, one.arguments, one.verbose) == (3, ARGUMENTS, True)
    assert one.resources == {"CPU": 2.0}  # for each of its devices


def test_with_a_name_it_outlives_its_driver(started: list[bool]) -> None:
    service = service_of("policy", "ours", {"CPU": 3, "slot": 1})
    assert (service.name, service.namespace, service.detached) == ("policy", "ours", True)
    assert service.resources == {"CPU": 3.0, "slot": 1.0}


def test_a_cluster_that_ends_with_this_process_cannot_keep_a_service(started: list[bool]) -> None:
    started[0] = True
    with pytest.warns(UserWarning, match="one was started that ends with this process, and the service 'policy' with"):
        service_of("policy")
    service_of()  # nothing was promised
