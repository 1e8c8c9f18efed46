"""The actor of a collector: its arguments and place; it passes calls on, tells an end from an error, and packs."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from support.collecting import Questions, chat, policy_of, queries
from torchrl_moe.collectors import AsyncLLMCollector, RayAsyncLLMCollector, ray_collectors
from torchrl_moe.collectors.ray_collectors import CollectorHost, actor_options
from torchrl_moe.data.packed import unpack
from torchrl_moe.errors import CollectionError
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def host(engine: FakeAsyncVLLM) -> Iterator[CollectorHost]:
    """Of a collector of groups of 2."""
    made, arguments = CollectorHost(), {"policy": policy_of(engine), "dataloader": Questions(), "group_size": 2}
    assert made.make(AsyncLLMCollector, {"env": chat(2), "order": "fifo", **arguments}) == 2
    yield made
    made.shutdown(None, True)


def test_a_host_without_a_collector_was_restarted() -> None:
    host = CollectorHost()
    for ask in (host.next, host.increment_version, lambda: host.call("stats"), lambda: host.read("policy_version")):
        with pytest.raises(CollectionError, match="Ray has restarted"):
            ask()
    host.shutdown(None, True)


def test_a_weight_update_counts_at_once_though_the_table_has_not_heard_of_it(
    host: CollectorHost, engine: FakeAsyncVLLM
) -> None:
    engine.replicas[0].version, engine.replicas[1].version = 6, 7  # as another driver brings them
    assert host.read("policy_version") == 0
    host.increment_version()
    assert (host.read("policy_version"), [entry.version for entry in engine.replica_table]) == (7, [6, 7])
    engine.replicas[0].die()
    engine.replicas[1].version = 8
    host.increment_version()
    assert host.read("policy_version") == 8


def test_a_postproc_is_set_once(host: CollectorHost) -> None:
    host.set_postproc(lambda batch: batch[:1])
    assert queries(*unpack(host.next())) == ["q0"]
    with pytest.raises(RuntimeError, match="postproc is set already"):
        host.set_postproc(lambda batch: batch)


def test_pauses_are_left_in_turn(host: CollectorHost) -> None:
    for resume in (True, True, False):
        host.pause(resume)
    assert host._made._rollouts.pauses == 3
    host.end_pause()
    assert host._made._rollouts.pauses == 3  # it was to stay
    host.end_pause()
    host.end_pause()
    assert host._made._rollouts.pauses == 1


# -- arguments and places ---------------------------------------------------------------------------------------------
def test_resources_are_taken_from_either_place() -> None:
    assert actor_options(None) == {"max_concurrency": 8}
    assert actor_options(None, num_cpus=2, num_gpus=None) == {"max_concurrency": 8, "num_cpus": 2}
    given = {"num_cpus": 2, "memory": 1 << 30, "max_concurrency": 4}
    assert actor_options(given, num_cpus=2, num_gpus=0.5) == {**given, "num_gpus": 0.5}
    assert given == {"num_cpus": 2, "memory": 1 << 30, "max_concurrency": 4}
    with pytest.raises(ValueError, match=r"num_cpus=3 and remote_config={'num_cpus': 2} differ"):
        actor_options({"num_cpus": 2}, num_cpus=3)


@pytest.mark.ray
def test_what_cannot_be_sent_is_named_before_an_actor_is_placed(ray_cluster: Any) -> None:
    lock = threading.Lock()
    with FakeAsyncVLLM() as engine:
        for name, given, words in (
            ("policy", {"policy": policy_of(engine)}, r"children of this.*backend='ray'.*policy_factory=.*connect"),
            ("postproc", {"postproc": lambda batch: (lock, batch)[1]}, "cannot pickle '_thread.lock'.*can be pickled"),
            ("env", {"env": (lock, chat(2))}, "pass a callable that makes it"),
        ):
            with pytest.raises(TypeError, match=rf"^{name}= cannot be sent to the collector's actor \(.*{words}"):
                RayAsyncLLMCollector(**{"env": chat(2), "dataloader": Questions(8), **given})


@pytest.mark.ray
def test_an_actor_that_no_node_has_room_for_is_said_to_wait_for_one(
    ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHRL_VLLM_TIMEOUT_SECONDS", "0.5")
    with pytest.raises(
        CollectionError, match=r"not placed within 0\.5 s .*waits for a node with {'CPU': 64\.0, 'GPU': 2\.0} free"
    ):
        RayAsyncLLMCollector(chat(2), policy_factory=print, num_cpus=64, remote_config={"num_gpus": 2})


def test_a_call_after_ray_was_left_starts_no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_collectors, "join_cluster", lambda: None)
    monkeypatch.setattr(ray_collectors, "_put", lambda arguments: arguments)
    monkeypatch.setattr(ray_collectors, "_place", lambda options: None)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "kill", lambda actor: None)
    with pytest.raises(CollectionError, match="Ray was shut down"):
        RayAsyncLLMCollector(chat(2), policy_factory=print)


@pytest.mark.ray
def test_ray_is_joined_as_asked_for(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **config: asked.append(config))
    monkeypatch.setattr(ray, "put", os.fspath)  # an error of a type of its own, after it has joined
    for joined in (True, False):
        monkeypatch.setattr(ray, "is_initialized", lambda joined=joined: joined)
        with pytest.raises(TypeError, match="expected str"):
            RayAsyncLLMCollector(chat(2), policy_factory=print, ray_init_config={"address": "somewhere"})
    assert asked == [{"address": "somewhere"}]


OF_RAY = ["ray_init_config", "remote_config", "num_cpus", "num_gpus", "sync_iter"]


def test_its_arguments_are_those_of_the_local_one_and_rays() -> None:
    local, remote = (inspect.signature(kind).parameters for kind in (AsyncLLMCollector, RayAsyncLLMCollector))
    assert list(remote) == [*local, *OF_RAY]
    for name, parameter in local.items():
        assert remote[name] == parameter
