"""What a driver says to an actor and hears from it; here without Ray: the link leads to a host in this process."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from support.actors import ray_service
from support.fake_cluster import FakeCluster
from support.hosts import ToyHost
from support.processes import group, ids_request
from support.waiting import until
from torchrl_moe.errors import ReplicaDiedError
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.ray.ray_replica import RayReplica
from torchrl_moe.modules.backends.ray.replica_host import dial


class HostLink:
    """An ``ActorLink`` to a host that is here."""

    def __init__(self, host: ToyHost) -> None:
        self.driver = uuid.uuid4().hex[:8]
        self.words = ""
        self.was_left = False
        self.connection = dial(host.address())
        self.outbox = wire.Outbox(self.connection)
        self.outbox.put(wire.encode((self.driver, {})))
        self.host = host

    def end(self) -> None:
        self.words = self.words or ("left" if self.was_left else "")
        self.outbox.close()

    end_and_forget = end

    def destroy(self) -> None:
        self.outbox.close()
        self.host.shut_down()

    def log_tail(self) -> str:
        return self.words


def test_who_joins_places_no_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeCluster(monkeypatch)
    replica = RayReplica(2, ray_service(name="s", detached=True))
    replica.join()
    with pytest.raises(
        ReplicaDiedError, match="replica 2 was lost: could not be reached: it has no actor 's-replica-2'"
    ):
        replica.wait_ready(20)
    assert cluster.asked == 0


class Linked(RayReplica):
    def __init__(self, host: ToyHost) -> None:
        super().__init__(6, ray_service(name="s"))
        self._host = host

    def _open(self) -> Any:
        link = HostLink(self._host)
        self._name_calls(link.driver)
        return link


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


def test_two_drivers_may_use_the_same_ids_and_calls_at_the_same_time(two: tuple[RayReplica, RayReplica]) -> None:
    def sent(first: int) -> Any:
        return [ids_request(f"r{i}", (first, i), sampling_params={"seconds": 0.2}) for i in range(30)]

    futures = [replica.submit(sent(10 * k)) for k, replica in enumerate(two)]
    for k in range(2):
        completions = [future.result(60.0) for future in futures[k]]
        assert [completion.request_id for completion in completions] == [f"r{i}" for i in range(30)]
        assert [c.outputs[0].token_ids.tolist() for c in completions] == [[10 * k + 1, i + 1] for i in range(30)]
        assert {completion.metrics.replica for completion in completions} == {6}
    answers = [replica.collective_rpc("echo", (k,), None, 10) for k, replica in enumerate(two)]
    assert answers == [[["echo", [0], None]], [["echo", [1], None]]]


def test_an_abort_concerns_the_own_request_of_that_name_only(two: tuple[RayReplica, RayReplica]) -> None:
    one, other = (replica.submit([ids_request("same", sampling_params={"seconds": 1.0})])[0] for replica in two)
    two[0].abort(["same"])
    assert one.result(60.0).aborted
    assert not other.result(60.0).aborted


def test_a_refusal_finds_its_request_and_names_are_not_split_twice(two: tuple[RayReplica, RayReplica]) -> None:
    bad, good = two[0].submit([ids_request("a/b/c", sampling_params={"refuse": "too long"}), ids_request("d/e")])
    with pytest.raises(ValueError, match="too long"):
        bad.result(60.0)
    assert good.result(60.0).request_id == "d/e"


def test_who_leaves_fails_what_he_waits_for_and_the_other_continues(two: tuple[RayReplica, RayReplica]) -> None:
    stays, leaves = two
    (future,) = leaves.submit([ids_request("x", sampling_params={"seconds": 3600})])
    leaves.disconnect()
    leaves.disconnect()
    with pytest.raises(ReplicaDiedError, match="replica 6: this driver has left"):
        future.result(0)
    assert not leaves.is_alive()
    until(lambda: stays.stats(10).requests == 1)  # aborted, and so over
    assert stays.is_alive()


def test_a_shutdown_is_for_all_drivers(two: tuple[RayReplica, RayReplica], host: ToyHost) -> None:
    ends, hears = two
    (future,) = hears.submit([ids_request("x", sampling_params={"seconds": 3600})])
    ends.shutdown()
    with pytest.raises(ReplicaDiedError, match="replica 6 died: its engine process ended with exit code"):
        future.result(60.0)
    assert group(host._child.process.pid) == []
    assert (ends.was_ended, hears.was_ended) == (False, True)


def test_a_killed_engine_was_not_ended_by_anybody(two: tuple[RayReplica, RayReplica], host: ToyHost) -> None:
    host._child.process.kill()
    for replica in two:
        until(lambda replica=replica: not replica.is_alive())
        assert not replica.was_ended


def test_of_an_actor_that_ends_since_its_driver_left_ray_that_is_said_and_not_how_its_engine_died(
    two: tuple[RayReplica, RayReplica], host: ToyHost
) -> None:
    left, stays = two
    left._child.was_left = True
    host._child.process.kill()  # as Ray does, after the driver has left and before the actor's socket ends
    until(lambda: left.death and stays.death)
    assert left.death == "replica 6 was lost: left"
    assert stays.death.startswith("replica 6 died: its engine process ended with exit code -9")


def test_what_has_no_plain_form_is_refused_before_it_is_sent(two: tuple[RayReplica, RayReplica]) -> None:
    (future,) = two[0].submit([ids_request("x", sampling_params=lambda: None)])
    with pytest.raises(ValueError, match="the request cannot be sent to the engine process"):
        future.result(0)


def test_one_that_was_not_started_says_so_and_can_be_ended() -> None:
    replica = RayReplica(5, ray_service(name="s"))
    replica.shutdown()
    replica.disconnect()
    assert not replica.is_alive()
    with pytest.raises(RuntimeError, match="replica 5 was not started: call start"):
        replica.stats(1)
