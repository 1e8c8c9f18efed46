"""The replicas of an engine one by one, by TorchRL's names for its actors' methods."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import pytest

from torchrl_moe.errors import ReplicaDiedError
from torchrl_moe.testing import FakeAsyncVLLM

FEW: dict[str, Any] = {"sampling_params": {"max_tokens": 2}, "use_tqdm": False}


@pytest.fixture
def engine() -> Iterator[FakeAsyncVLLM]:
    """Three fake replicas."""
    with FakeAsyncVLLM(3) as engine:
        yield engine


def test_there_is_one_for_each_replica_that_is_listed(engine: FakeAsyncVLLM) -> None:
    assert [actor.index for actor in engine.actors] == [0, 1, 2]
    assert engine.actors == engine.actors
    engine.remove_replica(1)
    assert [actor.index for actor in engine.actors] == [0, 2]
    assert repr(engine.actors[1]) == "ActorHandle(#2 SERVING v0 inflight=0)"


def test_each_answers_by_itself(engine: FakeAsyncVLLM) -> None:
    replicas = [actor.generate("hi", **FEW).metrics.replica for actor in engine.actors]
    assert replicas == [0, 1, 2]
    last = engine.actors[2]
    assert [one.metrics.replica for one in last.generate(prompt_token_ids=[[1], [2]], **FEW)] == [2, 2]
    assert last.get_tokenizer() is engine.get_tokenizer()
    assert last.ready() is True
    assert last.get_world_size() == 1
    assert (last.get_num_unfinished_requests(), last.get_cache_usage()) == (0, 0.0)


def test_the_world_is_all_ranks_of_a_replica(engine: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 5}
    monkeypatch.setattr(engine, "infos", [dataclasses.replace(engine.infos[0], **sizes)])
    assert engine.actors[0].get_world_size() == 30


def test_what_is_asked_of_one_concerns_that_one(engine: FakeAsyncVLLM) -> None:
    for entry in engine.replica_table:
        engine.load_balancer.acquire_at(entry.index, prompt=[1, 2, 3]).release()
    caches = [entry.cache for entry in engine.replica_table]
    assert engine.actors[1].reset_prefix_cache() is True
    lost = [entry.cache != cache for entry, cache in zip(engine.replica_table, caches, strict=True)]
    assert lost == [False, True, False]


def test_one_that_died_says_so(engine: FakeAsyncVLLM) -> None:
    engine.replicas[1].die("gone")
    actor = engine.actors[1]
    assert math.isnan(actor.get_cache_usage())
    assert actor.ready() is False
    with pytest.raises(ReplicaDiedError, match="replica 1, which actor_index names, is dead"):
        actor.generate("hi", **FEW)
    engine.shutdown()
    assert not any(actor.ready() for actor in engine.actors)


def test_what_torchrls_actors_have_besides_is_refused_by_name(engine: FakeAsyncVLLM) -> None:
    actor = engine.actors[0]
    words = {
        "init_weight_transfer_engine": "weights come by a sender",
        "update_weights_native": "weights come by a sender",
        "collective_rpc_v1": r"engine\.collective_rpc",
        "sleep": r"engine\.sleep",
        "wake_up": r"engine\.wake_up",
    }
    for name, instead in words.items():
        with pytest.raises(AttributeError, match=f"a replica of this engine has no {name}: .*{instead}"):
            getattr(actor, name)
        assert not hasattr(actor, name)
    with pytest.raises(AttributeError, match="'ActorHandle' object has no attribute 'unknown'"):
        actor.unknown  # noqa: B018
