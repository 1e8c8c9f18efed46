"""A service in a Ray cluster, and its drivers: those that come later, those that leave, those that are killed.

The first part scripts replicas, the second runs the toy engine, the third vLLM.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import ray

from support.actors import Holder, actor_process, groups_in_use, pids, ray_service, toy_actors
from support.processes import PYTHONPATH, group, is_gone
from support.replicas import ScriptedReplica
from support.toy_engine import bring
from support.waiting import until
from torchrl_moe.errors import EngineError, NoReplicaError, ReplicaDiedError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.ray import cluster
from torchrl_moe.modules.backends.ray.cluster import NAMESPACE, running_services
from torchrl_moe.modules.serving import async_vllm
from torchrl_moe.modules.serving.replica_table import Recovery

OTHER_DRIVER = """
import sys
import ray
from torchrl_moe.modules import AsyncVLLM
address, name, prompt, params = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="error")
engine = AsyncVLLM.connect(name)
completion = engine.generate(eval(prompt), eval(params), use_tqdm=False)
print([entry.state.name for entry in engine.replica_table], completion.outputs[0].token_ids.tolist(), flush=True)
"""


def other_driver(address: str, name: str, prompt: list[int], params: dict[str, Any]) -> str:
    """Connect and generate in a process of its own, which leaves without a word; what it printed."""
    run = subprocess.run(
        [sys.executable, "-c", OTHER_DRIVER, address, name, repr(prompt), repr(params)],
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout.splitlines()[-1]


def states(engine: AsyncVLLM) -> list[str]:
    return [entry.state.name for entry in engine.replica_table]


def versions(engine: AsyncVLLM) -> list[int]:
    return [entry.version for entry in engine.replica_table]


def generate(engine: AsyncVLLM, *args: Any, **kwargs: Any) -> list[int]:
    return engine.generate(*args, use_tqdm=False, **kwargs).outputs[0].token_ids.tolist()


def test_children_of_this_process_are_left_by_nobody_and_go_nowhere_else() -> None:
    service = AsyncVLLM({"model": "m"}, 2)
    assert service.name is None
    assert service.engine_args.model == "m"
    assert service.get_master_address() == "127.0.0.1"
    with pytest.raises(RuntimeError, match="disconnect: this service ends with its driver"):
        service.disconnect()
    with pytest.raises(TypeError, match="AsyncVLLM cannot be pickled"):
        pickle.dumps(service)
    with pytest.raises(RuntimeError, match="the service is not running"):
        service.add_replicas()


# -- scripted replicas ------------------------------------------------------------------------------------------------


def connect(monkeypatch: pytest.MonkeyPatch, dies_at: dict[int, str], versions: tuple[int, int] = (5, 5)) -> AsyncVLLM:
    """Connect to two replicas; the named die at a step."""

    def guest(index: int) -> ScriptedReplica:
        replica = ScriptedReplica(index)
        replica.version = versions[index]

        def die() -> None:
            replica.die(words := f"gone at {dies_at[index]}")
            raise ReplicaDiedError(words)

        replica.script = {"start": AssertionError("a guest makes no replica")}
        if index in dies_at:
            replica.script[dies_at[index]] = die
        return replica

    monkeypatch.setattr(cluster, "find_service", lambda name, namespace: ray_service(name=name, detached=True))
    monkeypatch.setattr(async_vllm, "ray_factory", lambda service: guest)
    return AsyncVLLM.connect("policy")


def test_who_comes_sees_what_died_and_why_while_another_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(monkeypatch, {0: "ready"}) as guest:
        assert (states(guest), versions(guest)) == (["DEAD", "SERVING"], [0, 5])
        assert guest.replica_table[0].last_error == "gone at ready"
        guest.replica_table[1].replica.version = 6  # an update of another driver
        until(lambda: versions(guest)[1] == 6)


@pytest.mark.parametrize("last", ["ready", "weights_version"])
def test_connecting_as_the_last_replica_dies_is_an_error_that_says_so(
    monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    with pytest.raises(NoReplicaError, match=r"'policy': no replica is alive\. gone at weights_version"):
        connect(monkeypatch, {0: "weights_version", 1: last})


def test_a_replica_with_older_weights_than_another_serves_once_it_has_the_newest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with connect(monkeypatch, {}, versions=(57, 0)) as guest:
        assert states(guest) == ["SERVING", "STARTING"]
        answers = guest.generate([[i] for i in range(1, 9)], use_tqdm=False)
        assert {answer.metrics.replica for answer in answers} == {0}
        guest.replica_table[1].replica.version = 57  # its maker, or another driver, has brought it
        until(lambda: states(guest) == ["SERVING", "SERVING"])
        assert [entry.version for entry in guest.replica_table] == [57, 57]
        late = guest.replica_table[1].replica
        late.die("killed")
        until(lambda: states(guest) == ["SERVING", "DEAD"])
        until(lambda: guest.replica_table[1].recovery is Recovery.NOBODY)
        assert "shutdown" not in late.life  # it is its maker's, to end and to restart


# -- the toy engine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def toy_service(ray_cluster: Any) -> Iterator[Any]:
    """Launches services over the toy engine; at the end of the test nothing of them is left."""
    made: list[AsyncVLLM] = []

    def launch(num_replicas: int = 1, **how: Any) -> AsyncVLLM:
        made.append(AsyncVLLM({"model": "toy"}, num_replicas, backend="ray", resources={"CPU": 1}, **how))
        return made[-1].start()

    with toy_actors():
        yield launch
        for engine in made:
            engine.shutdown()
    until(lambda: groups_in_use() == [])
    until(lambda: running_services(NAMESPACE) == {})


@pytest.mark.ray
def test_a_name_is_taken_while_its_service_runs_and_others_join_it_there(toy_service: Any, ray_cluster: Any) -> None:
    maker = toy_service(2, name="lasting")
    with pytest.raises(EngineError, match=r"a service 'lasting' is running already\..*'lasting' \(2 replica"):
        toy_service(1, name="lasting")
    with pytest.raises(EngineError, match=r"no service 'missing' is running\..*: 'lasting' \(2 replica"):
        AsyncVLLM.connect("missing")
    with pytest.raises(EngineError, match="None runs in namespace 'elsewhere'"):
        AsyncVLLM.connect("lasting", namespace="elsewhere")
    with pytest.raises(ValueError, match="add_replicas: other drivers"):
        maker.add_replicas()
    assert maker.num_replicas == 2
    with AsyncVLLM.connect("lasting", sampling_params={"max_tokens": 2}) as guest:
        assert (guest.name, guest.num_replicas, guest.engine_args) == ("lasting", 2, maker.engine_args)
        assert guest.sampling_params == {"max_tokens": 2}
        assert [info.model for info in guest.infos] == ["toy", "toy"]
        assert generate(guest, [5]) == [6]
        assert generate(maker, [7], request_ids="same") == generate(guest, [7], request_ids="same")
        assert [pids(entry.replica) for entry in guest.replica_table] == [
            pids(entry.replica) for entry in maker.replica_table
        ]
    with pytest.raises(RuntimeError, match="the service is not running"):
        guest.generate([1])
    assert generate(maker, [1]) == [2]  # the guest has left, no more
    assert other_driver(ray_cluster.address, "lasting", [8, 9], {}) == "['SERVING', 'SERVING'] [9, 10]"
    assert generate(maker, [1]) == [2]
    AsyncVLLM.connect("lasting").shutdown()  # ends it for all
    until(lambda: not any(entry.replica.is_alive() for entry in maker.replica_table))
    with pytest.raises((ReplicaDiedError, NoReplicaError)):
        maker.generate([1], use_tqdm=False)
    toy_service(1, name="lasting")


@pytest.mark.ray
def test_a_pickled_engine_joins_the_service_where_it_is_loaded_and_leaves_it_alone(toy_service: Any) -> None:
    maker = toy_service(2, sampling_params={"max_tokens": 2})
    processes = [pids(entry.replica) for entry in maker.replica_table]
    with pickle.loads(pickle.dumps(maker)) as guest:
        assert type(guest) is AsyncVLLM
        assert (guest.name, guest.num_replicas, guest.engine_args) == (None, 2, maker.engine_args)
        assert guest.sampling_params == {"max_tokens": 2}
        assert [pids(entry.replica) for entry in guest.replica_table] == processes
        assert generate(guest, [5]) == [6]
        with pytest.raises(ValueError, match="add_replicas: other drivers"):
            guest.add_replicas()
        again = pickle.loads(pickle.dumps(guest))
        assert generate(again, [7]) == [8]
        again.disconnect()
    assert [pids(entry.replica) for entry in maker.replica_table] == processes  # both guests have left, no more
    assert generate(maker, [1]) == [2]
    holder = ray.remote(num_cpus=0)(Holder).remote(maker)  # a Ray worker takes an engine as it is
    answer, pid = ray.get(holder.ask.remote([3, 4]), timeout=120)
    assert answer == [4, 5]
    assert pid != os.getpid()
    holder.__ray_terminate__.remote()  # cleanly, so that its own exit handlers run
    until(lambda: is_gone(pid))
    assert generate(maker, [2]) == [3]  # its death ends no replica
    pickled = pickle.dumps(maker)
    maker.shutdown()
    with pytest.raises(RuntimeError, match="pickle: the service is not running"):
        pickle.dumps(maker)
    late = pickle.loads(pickled)  # which asks nobody anything
    with pytest.raises(NoReplicaError, match=r"no replica is alive.* has no actor"):
        late.generate([1])
    with pytest.raises(RuntimeError, match="the service is not running"):
        late.generate([1])


@pytest.mark.ray
def test_a_replica_that_ray_restarts_serves_nobody_until_it_has_the_others_version(toy_service: Any) -> None:
    maker = toy_service(2, name="aging")
    publisher = AsyncVLLM.connect("aging")
    for entry in publisher.replica_table:
        entry.replica.call(bring, 20.0, version=57)
    until(lambda: versions(maker) == versions(publisher) == [57, 57])  # the one that publishes is another driver
    os.kill(pids(maker.replica_table[1].replica)[0], signal.SIGKILL)
    until(lambda: maker.replica_table[1].recovery is Recovery.UPDATE)
    assert maker.replica_table[1].replica.call(Engine.weights_version, 20.0) == 0
    until(lambda: states(publisher) == ["SERVING", "DEAD"])
    with AsyncVLLM.connect("aging") as late:
        assert states(maker) == states(late) == ["SERVING", "STARTING"]
        for driver in (maker, late):
            answers = driver.generate([[i] for i in range(1, 9)], use_tqdm=False)
            assert {answer.metrics.replica for answer in answers} == {0}
        maker.replica_table[1].replica.call(bring, 20.0, version=57)
        for driver in (maker, late):
            until(lambda driver=driver: states(driver) == ["SERVING", "SERVING"])
            assert versions(driver) == [57, 57]
            assert driver.generate([1], actor_index=1, use_tqdm=False).outputs[0].policy_versions.min() == 57
    publisher.disconnect()


@pytest.mark.ray
def test_an_access_token_reaches_the_engine_and_is_no_argument_of_the_actor(
    toy_service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    engine = toy_service(1, name="gated")
    actor, owner = (psutil.Process(pid) for pid in pids(engine.replica_table[0].replica))
    assert owner.environ()["HF_TOKEN"] == "hf_secret"
    os.kill(owner.pid, signal.SIGKILL)  # Ray makes the actor again, from the same arguments
    until(lambda: [entry.restarts for entry in engine.replica_table] == [1] and states(engine) == ["SERVING"])
    again = pids(engine.replica_table[0].replica)
    assert actor.pid not in again
    assert psutil.Process(again[1]).environ()["HF_TOKEN"] == "hf_secret"


@pytest.mark.ray
def test_a_start_that_fails_leaves_nothing_in_the_cluster(ray_cluster: Any) -> None:
    with toy_actors(), pytest.raises(ReplicaDiedError, match="replica 0 did not start: ValueError: no such model"):
        broken = {"model": "toy", "start": {"error": "no such model", "sleeper": True}}
        AsyncVLLM.launch(broken, 2, backend="ray", name="broken", resources={"CPU": 1})
    until(lambda: groups_in_use() == [] and running_services(NAMESPACE) == {})
    with pytest.raises(EngineError, match=r"(?s)TORCHRL_VLLM_TIMEOUT.*It waits for a node with {'CPU': 64.0} free"):
        AsyncVLLM({"model": "toy"}, backend="ray", resources={"CPU": 64}).start(timeout_seconds=2.0)
    until(lambda: groups_in_use() == [])


# -- vLLM -------------------------------------------------------------------------------------------------------------

IDS = [72, 105, 44, 32, 119, 111, 114, 108, 100]
GREEDY = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "logprobs": 0}


@pytest.mark.ray
@pytest.mark.engine
def test_a_real_actor_that_is_killed_is_dead_and_a_shutdown_leaves_nothing(ray_pair: AsyncVLLM) -> None:
    actors = [actor_process(entry.replica) for entry in ray_pair.replica_table]
    family = [process for actor in actors for process in (actor, *actor.children(recursive=True))]
    assert len(family) >= 8  # two times: actor, owner, engine core, worker
    os.kill(actors[1].pid, signal.SIGKILL)
    until(lambda: not ray_pair.replica_table[1].replica.is_alive())
    answer = ray_pair.generate(IDS, GREEDY, actor_index=0, use_tqdm=False)
    assert len(answer.outputs[0].token_ids) == 8
    ray_pair.shutdown()
    until(lambda: groups_in_use() == [])
    assert running_services(NAMESPACE) == {}
    assert psutil.wait_procs(family, 30)[1] == []
    assert not any(group(process.pid) for process in family)
