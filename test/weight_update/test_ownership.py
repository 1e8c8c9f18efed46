"""One driver at a time updates an engine: whose its weights are, and what another one hears."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.weights import THIS_DRIVER, Connect, Fleet, always, value_in, values, weights
from torchrl_moe.errors import WeightsOwnedError, WeightSyncError
from torchrl_moe.testing.fake_weights import FakeFleet, FakeWeightReplica, SoftError
from torchrl_moe.weight_update import VLLMDoubleBufferSyncScheme

OTHER = "process 7 on elsewhere"


def owner_of(replica: FakeWeightReplica) -> str:
    """Whose its weights are, as another driver hears that asks for them."""
    return replica.owner.claim("other", OTHER, False).owner


def other_driver(engine: FakeFleet, *replicas: int, takeover: bool = False) -> None:
    """Another driver claims replicas."""
    for index in replicas:
        engine.fakes[index].owner.claim("other", OTHER, takeover)


@pytest.mark.parametrize("replica", [0, 2])
def test_an_engine_that_another_driver_updates_is_not_touched(connect: Connect, replica: int) -> None:
    engine = FakeFleet(3)
    other_driver(engine, replica)
    with pytest.raises(WeightsOwnedError, match=f"replica {replica} are updated by {OTHER}: end its sender"):
        connect(engine)
    assert engine.weight_sync is None
    for fake in engine.fakes:
        assert set(fake.asked) <= {"metadata", "claim_weights", "give_up_weights"}
    other_driver(engine, 0, 1, 2)
    assert all(fake.owner.claim("other", OTHER, False).granted for fake in engine.fakes)  # nobody else has one


def test_a_takeover_ends_the_other_ones_updates_and_it_may_have_them_back(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    sender.update_weights(weights(1))
    other_driver(engine, 0, 1, takeover=True)
    asked = [fake.asked["swap_weights"] for fake in engine.fakes]
    with pytest.raises(WeightSyncError, match=f"takes its weights from {OTHER} now") as caught:
        sender.update_weights(weights(2))
    assert caught.value.report is not None
    assert caught.value.report.failed.keys() == {0, 1}
    assert ([fake.asked["swap_weights"] for fake in engine.fakes], engine.states) == (asked, ["SERVING"] * 2)
    assert values(engine) == [1.0, 1.0]
    with pytest.raises(WeightsOwnedError, match=OTHER):
        sender.init_all_workers_group(None, vllm_engine=engine)
    sender.init_all_workers_group(None, vllm_engine=engine, takeover=True)
    assert sender.update_weights(weights(3)).failed == {}
    assert values(engine) == [3.0, 3.0]


@pytest.mark.parametrize("then", ["published", "refused"])
def test_a_restarted_replica_never_gets_what_another_sender_has_replaced(connect: Connect, then: str) -> None:
    engine = FakeFleet(2)
    first = connect(engine)
    first.update_weights(weights(1))
    if then == "published":
        assert first.publish(weights(2)) == 2
        engine.restart(0)
        first.bring(0)
        assert values(engine) == [1.0, 1.0]  # nobody has the second one yet
    else:
        for fake in engine.fakes:
            fake.fail["swap_weights"] = always(SoftError("not these"))
        with pytest.raises(WeightSyncError):
            first.update_weights(weights(2))
        for index in range(2):
            engine.restart(index)
            first.bring(index)
    second = connect(engine)
    assert second.update_weights(weights(30)).version == 2
    second.shutdown()
    first.init_all_workers_group(None, vllm_engine=engine)
    engine.restart(0)
    with pytest.raises(WeightSyncError, match="nothing was applied since the engine got this sender"):
        first.bring(0)
    with pytest.raises(WeightSyncError, match=r"version 2 is not the one published last \(none\)"):
        first.apply(2)
    assert first.update_weights(weights(3)).version == 3
    first.bring(0)
    assert (engine.versions, values(engine)) == ([3, 3], [3.0, 3.0])


def test_a_receiver_of_a_directory_claims_too_and_again_once_who_took_its_replicas_has_left(tmp_path: Path) -> None:
    scheme, engine = VLLMDoubleBufferSyncScheme(tmp_path), FakeFleet(2)
    sender = scheme.create_sender()
    sender.publish(weights(1))
    other_driver(engine, 0, 1)
    receiver = scheme.create_receiver(engine)
    for version in (1, 2):
        for _ in range(2):
            with pytest.raises(WeightSyncError, match=OTHER):
                receiver.poll_and_apply()
        for fake in engine.fakes:
            fake.owner.give_up("other")
        assert receiver.poll_and_apply()
        assert values(engine) == [version] * 2
        other_driver(engine, 0, 1, takeover=True)
        sender.publish(weights(2))
    sender.shutdown()


def test_a_sender_that_moves_to_another_engine_or_is_shut_down_gives_the_one_it_had_up(connect: Connect) -> None:
    first, second = FakeFleet(2), FakeFleet(2)
    sender = connect(first)
    sender.update_weights(weights(1))
    sender.init_all_workers_group(None, vllm_engine=second)
    assert all(fake.owner.claim("other", OTHER, False).granted for fake in first.fakes)
    assert owner_of(second.fakes[0]) == THIS_DRIVER
    sender.shutdown()
    other_driver(second, 0, 1)
    with pytest.raises(WeightsOwnedError):
        connect(second)


def test_a_version_of_the_same_number_from_elsewhere_does_not_count_as_held(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    sender.publish(weights(1))
    for index in range(2):
        engine.replica_table.set_version(index, 1)
    other_driver(engine, 0, 1, takeover=True)
    with pytest.raises(WeightSyncError, match="fewer than 1 replicas hold version 1"):
        sender.apply(1)


def test_a_sender_that_is_replaced_in_its_update_swaps_nothing_that_the_newer_one_staged(connect: Connect) -> None:
    engine = FakeFleet(2)
    older = connect(engine)
    version = older.publish(weights(1))
    staged = older.prefetch(version)
    swap = older._swap
    assert swap is not None
    assert older._published is not None
    newer = connect(engine)
    assert newer.prefetch(newer.publish(weights(2))).keys() == {0, 1}
    outcomes = swap.swap(older._published, staged, [0, 1])  # it had begun before
    assert [outcome.error for outcome in outcomes] == ["version 1 is not what was staged last"] * 2


def test_a_takeover_between_staging_and_the_swap_pauses_nothing(fleet: Fleet) -> None:
    engine, sender = fleet(1)
    version = sender.publish(weights(1))
    staged = sender.prefetch(version)
    other_driver(engine, 0, takeover=True)
    with pytest.raises(WeightSyncError, match=f"takes its weights from {OTHER} now"):
        sender.apply(version, staged)
    assert (engine.states, value_in(engine, 0)) == (["SERVING"], None)


def test_a_driver_that_lost_the_weights_brings_no_restarted_replica_if_another_one_says_so(fleet: Fleet) -> None:
    engine, sender = fleet(2)
    sender.update_weights(weights(1))
    other_driver(engine, 0, 1, takeover=True)
    new = engine.restart(1)
    with pytest.raises(WeightSyncError, match="another driver updates this engine now"):
        sender.bring(1)
    assert (engine.states[1], new.weights) == ("STARTING", {})
    engine.fakes[0].die()  # and nobody can say
    sender.bring(1)
    assert value_in(engine, 1) == 1.0
