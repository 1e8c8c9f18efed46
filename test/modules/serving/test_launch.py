"""How a service is launched: what is refused, what makes replicas and asks Ray."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from torchrl_moe.modules.backends.engine_kind import engine_kind
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
from torchrl_moe.modules.backends.vllm import engine_args as kind
from torchrl_moe.modules.serving.launch import (
    EngineArguments,
    check_backend,
    default_timeout,
    local_factory,
    pretrained_arguments,
    ray_factory,
    ray_service,
)


def test_an_unknown_backend_no_replica_and_words_of_ray_are_refused() -> None:
    check_backend("local", 1, name=None)
    check_backend("ray", 2, name="policy")
    with pytest.raises(ValueError, match=r"backend must be 'local' .* or 'ray'"):
        check_backend("mpi", 1)
    with pytest.raises(ValueError, match="num_replicas must be an integer from 1 to 65536, got 0"):
        check_backend("local", 0)
    with pytest.raises(ValueError, match="name given with backend='local': only backend='ray' takes them"):
        check_backend("local", 1, name="policy", resources=None)
    with pytest.raises(ValueError, match=r"devices=\[\[0\]\] given with backend='ray': Ray chooses devices"):
        check_backend("ray", 1, [[0]])


def test_an_engine_is_known_by_its_name() -> None:
    for engine in ("vllm", "transformers"):
        assert engine_kind(engine).PROGRAM.startswith(f"torchrl_moe.modules.backends.{engine}.")


def test_an_actor_class_is_refused() -> None:
    with pytest.raises(ValueError, match="actor_class must be None: a replica is a process with an engine"):
        check_backend("ray", 1, None, object)


def arguments(model: str = "org/model", *, devices: int | None = None, compiles: bool = True, **given: Any) -> Any:
    return pretrained_arguments(model, devices, compiles, False, given)


def test_a_folder_without_a_model_is_refused_and_a_hub_name_is_not(tmp_path: Path) -> None:
    assert arguments("Qwen/Qwen3-30B-A3B") == {"model": "Qwen/Qwen3-30B-A3B", "tensor_parallel_size": 1}
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        arguments(str(tmp_path))
    with pytest.raises(ValueError, match="the folder does not exist"):
        arguments(str(tmp_path / "none"))
    (tmp_path / "config.json").write_text("{}")
    assert arguments(str(tmp_path))["model"] == str(tmp_path)


def test_devices_are_the_tensor_parallel_size_by_another_name() -> None:
    none = {"tensor_parallel_size": None, "data_parallel_size": None, "pipeline_parallel_size": None}
    assert arguments(**none) == {"model": "org/model", "tensor_parallel_size": 1}
    assert arguments(devices=4, **none)["tensor_parallel_size"] == 4
    assert arguments(devices=4, tensor_parallel_size=4, data_parallel_size=2) == {
        "model": "org/model",
        "tensor_parallel_size": 4,
        "data_parallel_size": 2,
    }
    with pytest.raises(ValueError, match="num_devices=4 and tensor_parallel_size=2 differ: pass one"):
        arguments(devices=4, tensor_parallel_size=2)
    for given in ({"devices": 0}, {"tensor_parallel_size": 0}):
        with pytest.raises(ValueError, match="must be an integer from 1 to 65536, or None, got 0"):
            arguments(**given)


def test_engine_arguments_are_read_as_torchrl_reads_them() -> None:
    given = EngineArguments(model="m", seed=3)
    assert (given.model, given.seed, given["seed"]) == ("m", 3, 3)
    assert given == {"model": "m", "seed": 3}
    assert pickle.loads(pickle.dumps(given)) == given
    with pytest.raises(AttributeError, match=r"engine_args\.dtype: it was not given"):
        given.dtype  # noqa: B018


def test_what_is_not_compiled_has_vllms_mode_for_it_unless_another_is_named() -> None:
    assert "compilation_config" not in arguments()
    assert arguments(compiles=False)["compilation_config"] == {"mode": 0}
    both = arguments(compiles=False, compilation_config={"custom_ops": ["none"]})
    assert both["compilation_config"] == {"mode": 0, "custom_ops": ["none"]}
    for given in ({"mode": 3}, 3):
        assert arguments(compiles=False, compilation_config=given)["compilation_config"] == given
    assert arguments(compilation_config={"mode": 1})["compilation_config"] == {"mode": 1}


def test_the_environment_may_give_a_start_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRL_VLLM_TIMEOUT_SECONDS", raising=False)
    assert default_timeout() == 600.0
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "1200")
    assert default_timeout() == 1200.0
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "soon")
    with pytest.raises(ValueError, match="must be a positive number of seconds, got 'soon'"):
        default_timeout()


def test_a_float32_head_is_one_more_override() -> None:
    def overrides(**given: Any) -> Any:
        return pretrained_arguments("org/model", None, True, True, given)["hf_overrides"]

    assert overrides() == {"head_dtype": "float32"}
    assert overrides(hf_overrides={"num_hidden_layers": 2}) == {"num_hidden_layers": 2, "head_dtype": "float32"}
    with pytest.raises(ValueError, match="needs hf_overrides to be a mapping"):
        overrides(hf_overrides=dict)


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
    return ray_service(kind, ARGUMENTS, 3, name=name, namespace=namespace, resources=resources, verbose=True)


def test_replicas_of_one_service_have_seeds_of_their_own(started: list[bool]) -> None:
    service = service_of()
    make = ray_factory(service)
    replicas = [make(2), make(0), make(2)]
    assert all(isinstance(replica, RayReplica) and replica._service is service for replica in replicas)
    assert [replica.index for replica in replicas] == [2, 0, 2]
    assert [cast(RayReplica, replica)._number for replica in replicas] == [0, 1, 2]


def test_an_access_token_does_not_travel_in_actor_arguments(started: list[bool]) -> None:
    with pytest.raises(ValueError, match=r"hf_token: Ray keeps and shows .* set HF_TOKEN in the environment"):
        ray_service(
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
