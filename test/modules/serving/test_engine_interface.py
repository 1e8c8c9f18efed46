"""What TorchRL's code asks of an engine, and of its actors one by one."""

from __future__ import annotations

import dataclasses
import math
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from support.processes import PYTHONPATH
from torchrl_moe.errors import ReplicaDiedError
from torchrl_moe.modules.serving import balancer
from torchrl_moe.testing import FakeAsyncVLLM


@pytest.fixture
def three() -> Iterator[FakeAsyncVLLM]:
    """Three fake replicas."""
    with FakeAsyncVLLM(3) as three:
        yield three


FRESH = """
import sys, time, weakref
from torchrl_moe.modules.serving import fleet
from torchrl_moe.modules.serving.replica_table import FaultPolicy
from torchrl_moe.testing import FakeAsyncVLLM

fleet.TICK_SECONDS = 0.02

class Child: pass

def end():  # as the replicas of processes do
    engine.replicas[0].die()
    time.sleep(0.4)
    print(engine.replica_table[0].restarts, engine.replica_table[0].state.name, flush=True)

child = Child()
weakref.finalize(child, end)
engine = FakeAsyncVLLM(faults=FaultPolicy(first_delay=0.0))
assert isinstance(engine, FakeAsyncVLLM) and engine.__class__ is FakeAsyncVLLM
print({"torchrl", "vllm", "ray"} & set(sys.modules), flush=True)
"""


def test_a_process_that_ends_with_an_engine_has_not_loaded_torchrl_and_restarts_nothing() -> None:
    run = subprocess.run(
        [sys.executable, "-c", FRESH], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=100
    )
    assert run.stdout.splitlines() == ["set()", "0 SERVING"], run.stderr


def test_an_engine_counts_as_torchrls_and_its_wrapper_refuses_it_by_its_type() -> None:
    from torchrl.modules.llm.backends.vllm import RLvLLMEngine
    from torchrl.modules.llm.policies import vLLMWrapper

    with FakeAsyncVLLM() as engine:
        assert isinstance(engine, RLvLLMEngine)
        assert issubclass(FakeAsyncVLLM, RLvLLMEngine)
        assert RLvLLMEngine.__abstractmethods__ <= set(dir(engine))
        with pytest.raises(ValueError, match=r"model must be .* Got <class '.*FakeAsyncVLLM'>"):
            vLLMWrapper(engine, input_mode="tokens")


def test_a_group_of_the_users_own_has_a_place_to_meet(three: FakeAsyncVLLM) -> None:
    assert three.get_master_address() == "127.0.0.1"
    port = three.get_master_port()
    assert three.get_master_port() == port
    with socket.socket() as mine:
        mine.bind(("127.0.0.1", port))


def test_weights_come_by_a_sender_of_ours_and_no_workers_method(three: FakeAsyncVLLM) -> None:
    with pytest.raises(RuntimeError, match=r"init_weight_update_group: no sender has this engine\. Make one: VLLMW"):
        three.init_weight_update_group()
    given: list[Any] = []
    three.register_weight_sync(None, given.append)
    three.init_weight_update_group()
    three.update_weights(iter([("w", 1)]))
    assert given == [[("w", 1)]]
    for method in ("load_weights_from_storage", "init_weight_update_group", "update_weight_broadcast"):
        with pytest.raises(ValueError, match=rf"'{method}'\): {balancer.WEIGHTS[:20]}"):
            three.collective_rpc(method)


# -- actor handles ----------------------------------------------------------------------------------------------------


FEW: dict[str, Any] = {"sampling_params": {"max_tokens": 2}, "use_tqdm": False}


def test_each_actor_answers_by_itself(three: FakeAsyncVLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [actor.generate("hi", **FEW).metrics.replica for actor in three.actors] == [0, 1, 2]
    last = three.actors[2]
    assert [one.metrics.replica for one in last.generate(prompt_token_ids=[[1], [2]], **FEW)] == [2, 2]
    assert last.get_tokenizer() is three.get_tokenizer()
    assert last.ready() is True
    assert (last.get_num_unfinished_requests(), last.get_cache_usage()) == (0, 0.0)
    assert last.get_world_size() == 1
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 3, "data_parallel_size": 5}
    monkeypatch.setattr(three, "infos", [dataclasses.replace(three.infos[0], **sizes)])
    assert last.get_world_size() == 30  # all ranks of a replica


def test_what_is_asked_of_one_actor_concerns_that_one(three: FakeAsyncVLLM) -> None:
    for entry in three.replica_table:
        three.load_balancer.acquire_at(entry.index, prompt=[1, 2, 3]).release()
    caches = [entry.cache for entry in three.replica_table]
    assert three.actors[1].reset_prefix_cache() is True
    lost = [entry.cache != cache for entry, cache in zip(three.replica_table, caches, strict=True)]
    assert lost == [False, True, False]


def test_an_actor_whose_replica_died_says_so(three: FakeAsyncVLLM) -> None:
    three.replicas[1].die("gone")
    actor = three.actors[1]
    assert math.isnan(actor.get_cache_usage())
    assert actor.ready() is False
    with pytest.raises(ReplicaDiedError, match="replica 1, which actor_index names, is dead"):
        actor.generate("hi", **FEW)
    three.shutdown()
    assert not any(actor.ready() for actor in three.actors)


def test_what_torchrls_actors_have_besides_is_refused_by_name(three: FakeAsyncVLLM) -> None:
    actor = three.actors[0]
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
