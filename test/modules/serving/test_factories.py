"""How a service makes its replicas; of Ray only what is asked of it. Local ones are in test_async_vllm.py."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
from torchrl_moe.modules.serving.factories import ray_factory

ARGUMENTS = {"model": "m", "tensor_parallel_size": 2}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A cluster without GPUs; its one item says whether joining it had to start it."""
    answer = [False]
    monkeypatch.setattr(cluster, "join_cluster", lambda: answer[0])
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: {"CPU": 8.0})
    return answer


def service_of(name: str | None = None, namespace: str | None = None, resources: Any = None) -> Any:
    make = ray_factory(ARGUMENTS, 3, name=name, namespace=namespace, resources=resources, verbose=True)
    replica = make(2)
    assert isinstance(replica, RayReplica)
    assert replica.index == 2
    assert make(0)._service is replica._service  # one service, whatever replica is made when
    return replica._service


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
