"""A lease gives its place back once, however often it is released."""

from __future__ import annotations

import threading

import pytest

from torchrl_moe.modules.serving.balancer import Lease, LoadBalancer


def inflight(balancer: LoadBalancer) -> list[int]:
    return [entry.inflight for entry in balancer.replica_table]


def test_a_lease_says_where_and_which_version() -> None:
    lb = LoadBalancer(["a", "b"])
    lb.replica_table.set_version(0, 4)
    lease = lb.acquire()
    assert (lease.index, lease.version) == (0, 4)
    lb.replica_table.set_version(0, 5)
    assert lease.version == 4
    assert repr(lease) == "Lease(replica=0, version=4, held)"
    lease.release()
    assert repr(lease) == "Lease(replica=0, version=4, released)"


def test_releasing_twice_gives_one_place_back() -> None:
    lb = LoadBalancer(["a"])
    first, _second = lb.acquire(), lb.acquire()
    first.release()
    first.release()
    assert inflight(lb) == [1]


def test_releasing_from_many_threads_at_once_gives_one_place_back() -> None:
    lb = LoadBalancer(["a"])
    leases = [lb.acquire() for _ in range(200)]
    barrier = threading.Barrier(4)

    def release_all() -> None:
        barrier.wait()
        for lease in leases:
            lease.release()

    threads = [threading.Thread(target=release_all) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inflight(lb) == [0]


def test_two_threads_that_both_found_the_lease_held_give_one_place_back() -> None:
    lb = LoadBalancer(["a"])
    lease = lb.acquire()
    threads = [threading.Thread(target=lease.release) for _ in range(2)]
    with lb.replica_table.changed:  # both get past any first look, and wait here
        for thread in threads:
            thread.start()
        threads[0].join(0.05)
    for thread in threads:
        thread.join()
    assert inflight(lb) == [0]


def test_a_lease_as_a_context_ends_with_it() -> None:
    lb = LoadBalancer(["a"])
    with lb.acquire() as lease:
        assert isinstance(lease, Lease)
        assert inflight(lb) == [1]
    assert inflight(lb) == [0]


def test_an_error_inside_the_context_passes_and_the_place_is_given_back() -> None:
    lb = LoadBalancer(["a"])
    with pytest.raises(KeyError, match="mine"), lb.acquire() as lease:
        lease.release()  # and again at the end of the context
        raise KeyError("mine")
    assert inflight(lb) == [0]


def test_a_lease_keeps_the_replica_that_it_was_given_for() -> None:
    lb = LoadBalancer(["a"])
    lease = lb.acquire()
    lb.replica_table.mark_dead(0)
    lb.replica_table.replace(0, "b")
    assert (lease.replica, lb.replica_table[0].replica) == ("a", "b")
    lease.release(False)
    assert inflight(lb) == [0]
