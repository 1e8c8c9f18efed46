"""Requests that no replica took: kept by what they need, and named again only by what concerns them."""

from __future__ import annotations

from typing import Any

from support.requests import named_requests
from torchrl_moe.errors import NoReplicaError
from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.in_flight import GROUP, Call, InFlight, Unplaced
from torchrl_moe.modules.serving.replica_table import ReplicaTable
from torchrl_moe.modules.serving.requests import placements


class Yard:
    """Replicas that are all starting, and requests that wait for them, each with its turn in order."""

    def __init__(self, replicas: int = 4) -> None:
        self.table = ReplicaTable(range(replicas))
        self.balancer = LoadBalancer(type("Holder", (), {"replica_table": self.table})())
        self.unplaced = Unplaced(self.table)
        self.count = 0

    def request(self, **placement: Any) -> InFlight:
        self.count += 1
        (request,) = Call(self.balancer, named_requests(f"{self.count}"), placements(1, **placement)).requests
        request.turn = float(self.count), self.count
        return request

    def park(self, waits_for: int = 0, **placement: Any) -> InFlight:
        request = self.request(**placement)
        request.refusal = NoReplicaError(f"none for {self.count}")
        self.unplaced.put_first(request, waits_for)
        return request

    def serve(self, index: int, version: int) -> None:
        self.table.set_version(index, version)
        self.table.set_state(index, ReplicaState.SERVING)


def test_those_of_the_same_needs_wait_behind_the_one_that_was_tried() -> None:
    yard = Yard()
    first, second, other = yard.park(), yard.request(), yard.request(min_version=1)
    assert (yard.unplaced.join(second), yard.unplaced.join(other)) == (True, False)
    assert second.refusal is first.refusal
    assert yard.unplaced.alike(second) == [first, second]
    assert (yard.unplaced.next_alike(second), yard.unplaced.next_alike(other)) == ([first], [])
    assert (len(yard.unplaced), yard.unplaced.alike(other)) == (2, [])
    later = yard.park()  # it was tried for all of them
    assert yard.unplaced.alike(first) == [later, first, second]


def test_what_is_taken_out_leaves_nothing_behind() -> None:
    yard = Yard()
    requests = [yard.park(group_ids=["g"]), yard.park(group_ids=["g"], min_version=1), yard.park()]
    assert [yard.unplaced.remove(request) for request in requests[:1] * 2] == [True, False]
    yard.unplaced.settle("g")
    assert yard.unplaced.affected() == requests[1:2]
    assert [yard.unplaced.remove(request) for request in requests[1:]] == [True, True]
    assert (len(yard.unplaced), bool(yard.unplaced), yard.unplaced._groups) == (0, False, {})


def test_a_group_that_settles_concerns_only_its_own() -> None:
    yard = Yard()
    a, _, c = (yard.park(waits_for=GROUP, group_ids=[name]) for name in "abc")
    for group in ("c", "a", "unknown", "a"):
        yard.unplaced.settle(group)
    assert yard.unplaced.affected() == [a, c]
    assert yard.unplaced.affected() == []


def test_a_change_concerns_those_that_wait_for_the_replica_and_those_that_it_may_take_now() -> None:
    yard = Yard()
    yard.balancer.groups.join("g", 2)(True)
    yard.balancer.groups.join("h", 0)
    named, other = yard.park(actor_index=3), yard.park(waits_for=0, actor_index=0)
    new, pinned = yard.park(min_version=3, waits_for=1), yard.park(waits_for=1, group_ids=["g"])
    settling = yard.park(waits_for=GROUP, group_ids=["h"])
    assert yard.unplaced.affected() == []
    yard.table.set_state(3, ReplicaState.QUARANTINED)
    assert yard.unplaced.affected() == [named]
    assert yard.unplaced.affected() == []  # once
    yard.table.note_version(9)  # a replica that restarts comes with that
    assert yard.unplaced.affected() == [named, other, new, pinned]
    yard.serve(2, 2)
    assert yard.unplaced.affected() == [pinned]
    yard.table.set_version(2, 3)
    assert yard.unplaced.affected() == [new]
    yard.table.set_state(1, ReplicaState.DEAD)
    assert yard.unplaced.affected() == [new, pinned]
    yard.table.set_version(2, 0)
    assert yard.unplaced.affected() == [settling]


def test_what_changed_before_anybody_waited_concerns_nobody() -> None:
    yard = Yard()
    yard.serve(0, 1)
    request = yard.park(waits_for=0)
    assert yard.unplaced.affected() == []
    yard.unplaced.remove(request)
    yard.table.set_state(0, ReplicaState.SYNCING)
    yard.park(waits_for=0)
    assert yard.unplaced.affected() == []


def test_kinds_are_named_in_order_of_arrival_and_by_the_first_of_each() -> None:
    yard = Yard()
    requests = [yard.park(min_version=version) for version in (1, 2, 3)]
    yard.unplaced.remove(requests[0])
    yard.unplaced.join(yard.request(min_version=2))
    yard.unplaced.put_first(requests[0], 0)
    yard.serve(0, 0)
    assert yard.unplaced.affected() == requests
