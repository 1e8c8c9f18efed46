"""A replica behind an actor: over a host in this process, and in a real cluster, over the toy engine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray

from support.actors import FakeActor, FakeCluster, ToyHost, groups_in_use, pids, ray_service, toy_actors
from support.processes import PYTHONPATH, group, ids_request, is_gone
from support.waiting import HOUR, until
from torchrl_moe.errors import EngineError, ReplicaDiedError
from torchrl_moe.modules.backends.engine import Engine
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.ray import cluster, ray_replica
from torchrl_moe.modules.backends.ray.actor import dial
from torchrl_moe.modules.backends.ray.cluster import (
    NAMESPACE,
    RayService,
    end_service,
    find_service,
    parse_group_name,
    running_services,
)
from torchrl_moe.modules.backends.ray.ray_replica import ActorLink, RayReplica


# -- over a host in this process --------------------------------------------------------------------------------------
class HostLink:
    """An ``ActorLink`` to a host that is here."""

    reason, was_left = "", False

    def __init__(self, host: ToyHost) -> None:
        self.host, self.driver = host, uuid.uuid4().hex[:8]
        self.stream = dial(host.address())
        self.outbox = link.Outbox(self.stream)
        self.outbox.put(link.message("hello", {}, self.driver))

    def end(self) -> None:
        self.reason = self.reason or ("left" if self.was_left else "")
        self.outbox.close()

    end_and_forget = end

    def destroy(self) -> None:
        self.outbox.close()
        self.host.shut_down()

    def log_tail(self) -> str:
        return self.reason


class Linked(RayReplica):
    def __init__(self, host: ToyHost) -> None:
        super().__init__(6, ray_service(name="s"))
        self._host = host

    def _open(self) -> Any:
        return HostLink(self._host)


@pytest.fixture
def host() -> Iterator[ToyHost]:
    host = ToyHost()
    yield host
    host.end()


@pytest.fixture
def two(host: ToyHost) -> Iterator[tuple[RayReplica, RayReplica]]:
    """Two drivers of one engine."""
    replicas = Linked(host), Linked(host)
    for replica in replicas:
        replica.start()
        assert replica.wait_ready(30).model == "toy"
    yield replicas
    for replica in replicas:
        replica.disconnect()


def long_request(replica: RayReplica) -> Any:
    """What a request becomes that takes an hour."""
    return replica.submit([ids_request("x", sampling_params={"seconds": 3600})])[0]


def test_who_leaves_fails_what_he_waits_for_and_the_other_continues(two: tuple[RayReplica, RayReplica]) -> None:
    stays, leaves = two
    future = long_request(leaves)
    leaves.disconnect()
    leaves.disconnect()
    with pytest.raises(ReplicaDiedError, match="replica 6: this driver has left"):
        future.result(0)
    assert not leaves.is_alive()
    until(lambda: stays.call(Engine.stats, 10).requests == 1)  # aborted, and so over
    assert stays.is_alive()


def test_a_shutdown_is_for_all_drivers(two: tuple[RayReplica, RayReplica], host: ToyHost) -> None:
    ends, hears = two
    future = long_request(hears)
    ends.shutdown()
    with pytest.raises(ReplicaDiedError, match="replica 6 died: its engine process ended with exit code"):
        future.result(60.0)
    assert group(host._child.process.pid) == []
    assert (ends.was_ended, hears.was_ended) == (False, True)


def test_of_an_actor_that_ends_as_its_driver_left_ray_that_is_said(
    two: tuple[RayReplica, RayReplica], host: ToyHost
) -> None:
    left, stays = two
    left._child.was_left = True
    host._child.process.kill()  # as Ray does, after the driver has left and before the actor's socket ends
    until(lambda: left.death and stays.death)
    assert left.death == "replica 6 was lost: left"
    assert stays.death.startswith("replica 6 died: its engine process ended with exit code -9")


# -- what it asks of Ray ----------------------------------------------------------------------------------------------
SERVICE = ray_service(name="policy", detached=True)
NAME = "policy-replica-0"


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    monkeypatch.setattr(ray_replica, "WAIT_SECONDS", 0.001)
    return FakeCluster(monkeypatch)


def ended_link(places: bool) -> ActorLink:
    """A link that has tried: nobody is at the address of a fake actor."""
    link = ActorLink(0, SERVICE, 0, places)
    until(lambda: link.reason)
    return link


@pytest.mark.parametrize("was_there", [True, False], ids=["restarted", "came-later"])
def test_who_ends_a_service_ends_the_actor_that_another_driver_put_there(fake: FakeCluster, was_there: bool) -> None:
    if was_there:
        fake.actors[NAME] = FakeActor(SERVICE, "old")
    link = ended_link(places=False)
    fake.actors[NAME] = new = FakeActor(SERVICE, "new")
    link.destroy()
    assert (fake.killed, new.said) == ([new], ["shut down"])
    assert fake.removed == ["new"]  # the old one went with its actor
    link.destroy()
    assert fake.killed == [new]


def test_who_ends_a_service_leaves_another_one_of_its_name_alone(
    fake: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_replica, "GONE_SECONDS", HOUR)  # it waits for its own actor's end, which has come
    fake.actors[NAME] = old = FakeActor(SERVICE, "old")
    link = ended_link(places=False)
    fake.actors[NAME] = other = FakeActor(ray_service(name="policy", detached=True, cpus=2.0), "other")
    link.destroy()
    assert (fake.killed, other.said, fake.removed) == ([old], [], ["old"])


def test_a_driver_that_leaves_while_it_waits_for_a_place_gives_the_group_back(fake: FakeCluster) -> None:
    link = ActorLink(0, SERVICE, 0)
    until(lambda: NAME in fake.actors)  # it has its name at once, so that others find it
    mine = fake.actors[NAME]
    link.end_and_forget()
    until(lambda: fake.removed == ["asked-1"])
    assert (fake.killed, mine.said) == ([mine], [])


def test_a_driver_that_is_too_late_gives_its_group_back_and_joins_the_other_ones_actor(fake: FakeCluster) -> None:
    fake.faster = {NAME: FakeActor(SERVICE, "theirs")}
    link = ended_link(places=True)
    assert "Connection refused" in link.reason  # it was dialled: nobody is there
    assert (fake.asked, fake.removed, fake.killed) == (1, ["asked-1"], [])
    link.end_and_forget()
    assert fake.killed == []


def test_an_actor_that_ends_as_it_is_dialled_is_asked_again(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    fake.actors[NAME] = FakeActor(SERVICE, "restarting")
    near, far = socket.socketpair()
    sent: list[bytes] = []
    refused = iter([ConnectionRefusedError("nobody listens"), EOFError("it closed its port")])

    def dial(address: Any) -> Any:
        if (error := next(refused, None)) is not None:
            raise error
        return SimpleNamespace(send=sent.append, moved_at=0.0, hang_up=near.close, close=near.close)

    monkeypatch.setattr(ray_replica, "dial", dial)
    with near, far:
        link = ActorLink(0, SERVICE, 0, places=False)
        until(lambda: sent)
        assert link.reason == ""
        link.end_and_forget()


def test_who_joins_places_no_actor_and_ends_none(fake: FakeCluster) -> None:
    replica = RayReplica(2, ray_service(name="s", detached=True))
    replica.join()
    said = "replica 2 was lost: could not be reached: it has no actor 's-replica-2'"
    with pytest.raises(ReplicaDiedError, match=said):
        replica.wait_ready(20)
    replica.shutdown()
    assert (fake.asked, fake.killed, fake.removed) == (0, [], [])


# -- in a cluster -----------------------------------------------------------------------------------------------------
@pytest.fixture
def nothing_left(ray_cluster: Any) -> Iterator[None]:
    """Each test leaves the cluster empty: no placement group, no name, all CPUs free."""
    with toy_actors():
        yield
    until(lambda: groups_in_use() == [])
    until(lambda: running_services(NAMESPACE) == {})
    until(lambda: ray.available_resources().get("CPU") == 4.0)


START = 120.0
Make = Callable[..., RayReplica]


@pytest.fixture
def in_cluster(nothing_left: None) -> Iterator[Make]:
    """Makes replicas, and shuts them down."""
    made: list[RayReplica] = []

    def make(service: RayService, index: int = 0, ready: bool = True) -> RayReplica:
        made.append(RayReplica(index, service))
        made[-1].start()
        if ready:
            made[-1].wait_ready(START)
        return made[-1]

    yield make
    for replica in made:
        replica.shutdown()


def answer(replica: RayReplica) -> list[int]:
    (future,) = replica.submit([ids_request("answer", (1, 2))])
    return future.result(60.0).outputs[0].token_ids.tolist()


# -- placing ----------------------------------------------------------------------------------------------------------
@pytest.mark.ray
def test_two_replicas_that_each_fill_a_node_lie_on_two_and_are_known_by_name(in_cluster: Make) -> None:
    service = ray_service(name="pair", cpus=2.0)
    replicas = [in_cluster(service, index, ready=False) for index in (1, 0)]
    assert [replica.wait_ready(START).model for replica in replicas] == ["toy", "toy"]
    assert running_services(NAMESPACE) == {"pair": [0, 1]}
    mine = [row for row in ray.util.placement_group_table().values() if row["state"] != "REMOVED"]
    assert [row["strategy"] for row in mine] == ["PACK", "PACK"]
    assert len({node for row in mine for node in row["bundles_to_node_id"].values()}) == 2
    assert ray.available_resources().get("CPU", 0.0) == 0.0
    for replica in replicas:
        actor, engine = pids(replica)[0], psutil.Process(pids(replica)[1])
        assert (engine.environ()["OMP_NUM_THREADS"], engine.ppid()) == ("2", actor)
        assert answer(replica) == [2, 3]


KILLED_WHILE_PLACING = """
import os, sys, threading
import ray
from support.actors import ray_service, toy_actors
from torchrl_moe.modules.backends.ray.ray_replica import ActorLink, RayReplica
address, *names = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="error")
have_groups = threading.Barrier(len(names), action=lambda: os.kill(os.getpid(), 9))
ActorLink._create = lambda link, group: have_groups.wait()
with toy_actors():
    replicas = [RayReplica(0, ray_service(name=name, detached=True)) for name in names]
    for replica in replicas:
        replica.start()
    threading.Event().wait(600)
"""

DRIVER = """
import sys, time
import ray
from support.actors import pids, ray_service, toy_actors
from support.processes import ids_request
from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
address, how = sys.argv[1:]
ray.init(address=address, log_to_driver=False, logging_level="error")
with toy_actors():
    waits = how == "waits"
    replica = RayReplica(0, ray_service(name=how, detached=waits, cpus=64.0 if waits else 1.0))
    replica.start()
    replica.wait_ready(600)
replica.submit([ids_request("x", sampling_params={"seconds": 3600})])
print(*pids(replica), flush=True)
time.sleep(600)
"""


def driver(ray_cluster: Any, program: str, *arguments: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": PYTHONPATH}
    command = [sys.executable, "-c", program, ray_cluster.address, *arguments]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def placed() -> list[Any]:
    return [parse_group_name(name) for name in groups_in_use()]


@pytest.mark.ray
def test_a_group_of_a_killed_driver_is_found_by_its_name_and_removed_by_any_other(
    in_cluster: Any, ray_cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "MAKING_SECONDS", 0.2)  # nobody is about to make an actor
    service = ray_service(name="torn/c", detached=True)
    lives = in_cluster(service, 1)
    # a driver that is killed between the group and the actor of the first replica of each service
    with driver(ray_cluster, KILLED_WHILE_PLACING, "torn/a", "torn/b", "torn/c") as process:
        assert process.wait(120) == -signal.SIGKILL
    torn = [(NAMESPACE, f"torn/{name}", 0) for name in "abc"]
    assert placed() == [*torn, (NAMESPACE, "torn/c", 1)]
    with pytest.raises(EngineError, match="no service 'torn/a' is running"):
        find_service("torn/a", None)
    until(lambda: placed() == [*torn[1:], (NAMESPACE, "torn/c", 1)])
    end_service("torn/b", None)
    until(lambda: placed() == [torn[2], (NAMESPACE, "torn/c", 1)])
    with pytest.raises(EngineError, match="no service 'torn/b' is running"):
        end_service("torn/b", None)
    assert find_service("torn/c", None) == service
    until(lambda: placed() == [(NAMESPACE, "torn/c", 1)])
    assert answer(lives) == [2, 3]
    end_service("torn/c", None)
    assert running_services(NAMESPACE) == {}
    until(lambda: groups_in_use() == [] and not lives.is_alive())


@pytest.mark.ray
def test_a_driver_that_is_killed_leaves_no_replica_but_one_that_waits_for_a_place_which_can_be_ended_by_name(
    nothing_left: None, ray_cluster: Any
) -> None:
    with driver(ray_cluster, DRIVER, "waits") as process:
        until(lambda: running_services(NAMESPACE) == {"waits": [0]}, START)
        process.kill()
    assert placed() == [(NAMESPACE, "waits", 0)]
    end_service("waits", None)
    with driver(ray_cluster, DRIVER, "killed") as process:
        assert process.stdout is not None and process.stderr is not None
        line = process.stdout.readline().split()
        assert line, process.stderr.read()
        process.kill()
    actor, engine = map(int, line)
    until(lambda: not group(engine))
    until(lambda: is_gone(actor))  # Ray may take half a minute


@pytest.mark.ray
def test_a_name_of_another_service_is_refused_and_that_is_left_alone(in_cluster: Any) -> None:
    first = in_cluster(ray_service(name="taken", detached=True))
    other = in_cluster(ray_service(name="taken", detached=True, seconds=1), ready=False)
    with pytest.raises(ReplicaDiedError, match="'taken-replica-0' belongs to another service of that name"):
        other.wait_ready(START)
    other.shutdown()
    assert answer(first) == [2, 3]


# -- the end ----------------------------------------------------------------------------------------------------------
@pytest.mark.ray
def test_a_killed_actor_is_dead_in_rays_words_and_leaves_nothing(in_cluster: Make) -> None:
    replica = in_cluster(ray_service(name="killed", sleeper=True))
    actor, engine = pids(replica)
    assert len(group(engine)) == 2
    future = long_request(replica)
    os.kill(actor, signal.SIGKILL)
    with pytest.raises(ReplicaDiedError, match="replica 0 was lost: The actor is dead because its worker process"):
        future.result(60.0)
    assert not replica.is_alive()
    (late,) = replica.submit([ids_request("late")])
    assert isinstance(late.exception(60.0), ReplicaDiedError)
    until(lambda: not group(engine))
    until(lambda: groups_in_use() == [])  # before anybody shuts it down


@pytest.mark.ray
def test_a_process_that_left_ray_is_not_brought_back_by_a_replica_that_it_had(ray_cluster: Any) -> None:
    """Ray joins a cluster, or starts one, as soon as it is asked anything."""
    with toy_actors():
        replica = RayReplica(0, ray_service(name="left"))
        replica.start()
        replica.wait_ready(START)
    ray.shutdown()
    try:
        until(lambda: replica.death)
        replica.shutdown()
        assert not ray.is_initialized()
        assert replica.death == "replica 0 was lost: the connection to its actor ended: this process has left Ray"
    finally:
        ray.shutdown()
        ray.init(address=ray_cluster.address, log_to_driver=False, logging_level="error")
