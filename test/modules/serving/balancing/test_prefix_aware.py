"""``prefix-aware``: to who holds the prefix, past the template, while that one is not too busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

from torchrl_moe.modules.serving.balancer import Lease, LoadBalancer
from torchrl_moe.modules.serving.candidates import ReplicaState
from torchrl_moe.modules.serving.strategies import PrefixAware, RoutingContext

TEMPLATE = list(range(100))


def balancer(num_replicas: int, **kwargs: float) -> LoadBalancer:
    return LoadBalancer(list(range(num_replicas)), [PrefixAware(**kwargs), "requests"])  # type: ignore[arg-type]


def question(number: int, tokens: int = 40) -> list[int]:
    return [1000 + number] * tokens


def place(lb: LoadBalancer, prompts: Sequence[object], hold: bool = False) -> list[int]:
    leases = [lb.acquire(prompt) for prompt in prompts] if hold else []
    if hold:
        return [lease.index for lease in leases]
    indices = []
    for prompt in prompts:
        with lb.acquire(prompt) as lease:
            indices.append(lease.index)
    return indices


def test_a_longer_prompt_goes_where_its_beginning_went() -> None:
    lb = balancer(4)
    first = place(lb, [question(i) for i in range(4)])
    assert first == [0, 1, 2, 3]
    longer = [question(i) + [7] * 50 for i in (2, 0, 3, 1)]
    assert place(lb, longer) == [2, 0, 3, 1]
    assert place(lb, [prompt + [8] * 50 for prompt in longer]) == [2, 0, 3, 1]


def test_a_conversation_comes_back_even_if_it_is_the_first_one() -> None:
    lb = balancer(4)
    turns = [TEMPLATE + question(1), TEMPLATE + question(1) + [5] * 40, TEMPLATE + question(1) + [5] * 40 + [6] * 9]
    assert place(lb, turns) == [0, 0, 0]


def test_the_longest_of_several_beginnings_decides() -> None:
    lb = balancer(3)
    place(lb, [question(i) for i in range(2, 10)])  # so that nothing below is a template
    lb.acquire_at(0, prompt=question(1, 32)).release()
    lb.acquire_at(1, prompt=question(1, 64)).release()
    assert place(lb, [question(1, 80), question(1, 40) + [5] * 40]) == [1, 0]


def test_distinct_questions_behind_one_template_fan_out_on_idle_replicas() -> None:
    lb = balancer(4)
    assert place(lb, [TEMPLATE + question(i) for i in range(8)]) == [0, 1, 2, 3] * 2


def test_and_yet_each_question_comes_back_to_its_own_replica() -> None:
    lb = balancer(4)
    prompts = [TEMPLATE + question(i) for i in range(8)]
    first = place(lb, prompts)
    assert place(lb, prompts[::-1]) == first[::-1]
    assert place(lb, [prompt + [5] * 30 for prompt in prompts]) == first


def test_siblings_share_a_replica_up_to_the_bound() -> None:
    lb = balancer(4)
    background = [lb.acquire_at(i % 4) for i in range(160)]  # mean 40
    siblings = place(lb, [TEMPLATE + question(1)] * 6, hold=True)
    assert len(set(siblings)) == 1
    burst = place(lb, [TEMPLATE + question(2)] * 64, hold=True)
    assert Counter(burst).most_common(1)[0][1] >= 8
    mean = (160 + 6 + 64) / 4
    assert max(entry.inflight for entry in lb.replica_table) <= 1.15 * mean
    assert len(background) == 160


def test_a_group_on_idle_replicas_is_a_burst_and_is_spread() -> None:
    lb = balancer(4)
    for total, _ in enumerate(range(64), 1):
        lb.acquire(question(1))
        mean = total / 4
        assert max(entry.inflight for entry in lb.replica_table) <= max(1.15 * mean, mean + 1)


def test_a_replica_with_10_000_pending_gets_nothing() -> None:
    lb = balancer(4)
    lb.acquire_at(2, prompt=question(1)).release()
    held = [lb.acquire_at(2) for _ in range(10_000)]
    assert 2 not in place(lb, [question(1)] * 200)
    assert len(held) == 10_000


def test_a_prompt_that_spills_has_one_home_again_afterwards() -> None:
    lb = balancer(8)
    place(lb, [question(9), question(8)])
    lb.acquire_at(0, prompt=question(1)).release()
    first, second = lb.acquire(question(1)), lb.acquire(question(1))
    assert (first.index, second.index) == (0, 2)  # one above the mean is too many on an idle fleet; 2 is next in turn
    first.release()
    second.release()
    assert place(lb, [question(1)] * 10) == [2] * 10  # the other may have evicted it by now


def test_a_prefix_that_many_prompts_begin_with_has_several_homes() -> None:
    lb = balancer(8)
    place(lb, [question(i) for i in range(30)])
    document = [7] * 200
    for i in range(8):
        lb.acquire_at((0, 5)[i % 2], prompt=document + question(100 + i)).release()
    with lb.acquire_at(5):  # too busy for more: the other one has it too
        assert place(lb, [document + question(200)]) == [0]
    assert lb.acquire().index not in (0, 5)  # whose turn would it have been


def test_equal_lengths_are_not_equal_prompts() -> None:
    lb = balancer(4)
    prompts = [[token] * 256 for token in range(200)]
    assert Counter(place(lb, prompts)) == {0: 50, 1: 50, 2: 50, 3: 50}


def test_prompts_with_the_same_first_8_tokens_are_spread() -> None:
    lb = balancer(4)
    assert len(set(place(lb, [[*range(8), i, *question(i)] for i in range(200)]))) == 4


def test_prefixes_cached_under_other_weights_count_for_nothing() -> None:
    lb = balancer(4)
    lb.acquire_at(2, prompt=question(1)).release()
    assert place(lb, [question(1)]) == [2]
    lb.replica_table.set_version(2, 1)
    assert place(lb, [question(1)]) == [0]


@pytest.mark.parametrize("lost", ["restart", "reset"])
def test_a_lost_cache_counts_for_nothing(lost: str) -> None:
    lb = balancer(4)
    lb.acquire_at(2, prompt=question(1)).release()
    if lost == "restart":
        for state in (ReplicaState.DEAD, ReplicaState.STARTING, ReplicaState.SERVING):
            lb.replica_table.set_state(2, state)
    else:
        lb.replica_table.forget_prefixes(2)
    assert place(lb, [question(1)]) == [0]


def test_a_holder_that_is_away_is_replaced_for_the_while() -> None:
    lb = balancer(4)
    lb.acquire_at(2, prompt=question(1)).release()
    lb.replica_table.set_state(2, ReplicaState.DRAINING)
    assert place(lb, [question(1)] * 3) == [0, 0, 0]
    lb.replica_table.set_state(2, ReplicaState.SERVING)
    assert set(place(lb, [question(1)] * 4)) <= {0, 2}


@pytest.mark.parametrize(
    ("prompt", "longer"),
    [
        ("a" * 200, "a" * 200 + "b" * 100),
        (
            [{"role": "user", "content": "a" * 200}],
            [{"role": "user", "content": "a" * 200}, {"role": "x", "content": ""}],
        ),
    ],
    ids=["text", "chat"],
)
def test_text_and_chats_have_prefixes_too(prompt: object, longer: object) -> None:
    lb = balancer(4)
    lb.acquire_at(3, prompt=prompt).release()
    assert place(lb, [longer, "c" * 200, prompt]) == [3, 0, 3]


def test_without_a_prompt_there_is_no_opinion() -> None:
    lb = balancer(2)
    with lb.replica_table.changed:
        assert PrefixAware().choose(lb.replica_table.serving(), RoutingContext()) is None


def test_prefix_length_limits_what_is_looked_at() -> None:
    lb = balancer(4, prefix_length=32)
    place(lb, [question(9), question(8)])
    lb.acquire_at(3, prompt=question(1, 32) + [5] * 100).release()
    assert place(lb, [question(1, 32) + [6] * 100]) == [3]
    assert place(lb, [question(1, 15) + [6] * 100]) == [2]  # another first block: the next in turn


def test_the_threshold_says_how_far_above_the_mean_affinity_goes() -> None:
    counts = {}
    for threshold in (1.0, 1.5):
        lb = balancer(4, overload_threshold=threshold)
        held = [lb.acquire_at(i % 4) for i in range(160)]
        leases: list[Lease] = [lb.acquire(question(1)) for _ in range(40)]
        counts[threshold] = Counter(lease.index for lease in leases).most_common(1)[0][1]
        assert len(held) == 160
    # with k placed, a replica takes no more than (160 + k) / 4 + 1 = 51 of 40 + 11; or 1.5 * (160 + k) / 4, which the
    # first 32 on one replica keep to
    assert counts == {1.0: 11, 1.5: 32}
