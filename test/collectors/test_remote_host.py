"""Arguments of collectors in Ray, what an actor is asked for, and what happens where there is no room for it."""

from __future__ import annotations

import inspect
import os
import threading
from typing import Any

import pytest
import ray
from torchrl.collectors import llm

from support.collecting import Questions, chat, policy_of
from support.signatures import parameters
from torchrl_moe.collectors import AsyncLLMCollector, RayAsyncLLMCollector, RayLLMCollector
from torchrl_moe.collectors.remote_host import RemoteHost, actor_options
from torchrl_moe.errors import CollectionError
from torchrl_moe.testing import FakeAsyncVLLM


def test_resources_are_taken_from_either_place() -> None:
    assert actor_options(None) == {"max_concurrency": 8}
    assert actor_options(None, num_cpus=2, num_gpus=None) == {"max_concurrency": 8, "num_cpus": 2}
    given = {"num_cpus": 2, "memory": 1 << 30, "max_concurrency": 4}
    assert actor_options(given, num_cpus=2, num_gpus=0.5) == {**given, "num_gpus": 0.5}
    assert given == {"num_cpus": 2, "memory": 1 << 30, "max_concurrency": 4}
    with pytest.raises(ValueError, match=r"num_cpus=3 and remote_config={'num_cpus': 2} differ: pass one"):
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
        RemoteHost("AsyncLLMCollector", {}, actor_options({"num_gpus": 2}, num_cpus=64))


def test_a_call_after_ray_was_left_starts_no_other_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    host = object.__new__(RemoteHost)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(CollectionError, match="Ray was shut down"):
        host.begin("next")
    host.end(1.0, None, None, True)


@pytest.mark.ray
def test_ray_is_joined_as_asked_for(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(ray, "init", lambda **config: asked.append(config))
    monkeypatch.setattr(ray, "put", os.fspath)  # an error of a type of its own, after it has joined
    for joined in (True, False):
        monkeypatch.setattr(ray, "is_initialized", lambda joined=joined: joined)
        with pytest.raises(TypeError, match="expected str"):
            RemoteHost("AsyncLLMCollector", {}, {}, {"address": "somewhere"})
    assert asked == [{"address": "somewhere"}]


OF_RAY = ["ray_init_config", "remote_config", "num_cpus", "num_gpus", "sync_iter"]


def test_its_arguments_are_those_of_the_local_one_and_rays() -> None:
    local, remote = (inspect.signature(kind).parameters for kind in (AsyncLLMCollector, RayAsyncLLMCollector))
    assert list(remote) == [*local, *OF_RAY]
    for name, parameter in local.items():
        assert remote[name] == parameter


def test_its_arguments_are_those_of_torchrls() -> None:
    ours = inspect.signature(RayLLMCollector).parameters
    theirs, local = parameters(llm.RayLLMCollector), parameters(llm.LLMCollector)
    assert set(ours) == {*theirs, *local}
    for name, parameter in {**theirs, **local}.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
