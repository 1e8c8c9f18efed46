"""Who sends to whom: worked out by hand for trees of a few replicas."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest

from torchrl_moe.weight_update.transports.tree import Tree


class Node:
    """A replica, as far as a tree knows it."""


def senders(tree: Tree, nodes: Sequence[Node], digest: str) -> list[int | None]:
    """The index of the sender of each, in the order in which they ask; ``None`` for the trainer."""
    found = [tree.join(node, digest).sender() for node in nodes]
    return [None if sender is None else list(nodes).index(sender) for sender in found]


@pytest.fixture
def nodes() -> list[Node]:
    return [Node() for _ in range(8)]


def test_places_are_filled_from_the_trainer_down(nodes: list[Node]) -> None:
    assert senders(Tree(2), nodes, "v1") == [None, None, 0, 0, 1, 1, 2, 2]
    assert senders(Tree(4), nodes, "v1") == [None, None, None, None, 0, 0, 0, 0]
    assert senders(Tree(1), nodes[:4], "v1") == [None, 0, 1, 2]


def test_no_sender_has_more_than_the_fan_out_and_numbers_tell_its_children_apart() -> None:
    tree, many = Tree(3), [Node() for _ in range(100)]
    places = [tree.join(node, "v1") for node in many]
    for sender in (None, *many):
        numbers = [place.number for place in places if place.sender() is sender]
        assert sorted(numbers) == list(range(len(numbers)))
        assert len(numbers) <= 3


def test_a_place_is_kept_from_version_to_version(nodes: list[Node]) -> None:
    tree = Tree(2)
    before = [tree.join(node, "v1") for node in nodes]
    assert [tree.join(node, "v2") for node in nodes] == before


def test_who_is_under_one_that_left_goes_to_another_that_has_the_version(nodes: list[Node]) -> None:
    tree = Tree(2)
    senders(tree, nodes, "v1")
    tree.leave(nodes[0])
    assert tree.takes(nodes[0], "v1") is False
    # counted without it: the second rises, the third goes where room is, and the others keep their places
    assert senders(tree, nodes[1:], "v2") == [None, None, 3, 0, 0, 1, 1]


def test_a_replica_that_is_gone_gives_its_place_free() -> None:
    tree, first, second = Tree(1), Node(), Node()
    tree.join(first, "v1")
    assert tree.join(second, "v1").sender() is first
    del first
    gc.collect()
    assert tree.join(second, "v1").parent is None


def test_it_is_known_who_was_asked_for_a_version(nodes: list[Node]) -> None:
    tree = Tree(1)
    senders(tree, nodes[:2], "v1")
    assert tree.join(nodes[1], "v2").sender() is nodes[0]
    assert [tree.takes(node, "v2") for node in nodes[:3]] == [None, True, False]


def test_who_takes_the_version_already_is_the_first_choice(nodes: list[Node]) -> None:
    tree = Tree(2)
    senders(tree, nodes[:4], "v1")  # 2 and 3 are under 0, and 1 has room for two
    for node in (nodes[1], nodes[2]):
        tree.leave(node)
    tree.join(nodes[2], "v1")  # at the top, in the place of 1, with room for two
    assert tree.join(nodes[4], "v2").sender() is nodes[0]  # nobody takes it yet: the first that has room
    tree.join(nodes[3], "v2")
    assert tree.join(nodes[5], "v2").sender() is nodes[3]


def test_nobody_is_put_under_one_that_it_sends_to(nodes: list[Node]) -> None:
    tree = Tree(1)
    senders(tree, nodes[:3], "v1")
    tree.leave(nodes[0])
    assert tree.join(nodes[3], "v2").parent is None  # where the first was
    assert tree.join(nodes[1], "v2").sender() is nodes[3]  # and not 2, which is under it
    assert tree.join(nodes[2], "v2").sender() is nodes[1]


def test_places_under_the_trainer_are_given_before_there_is_a_version(nodes: list[Node]) -> None:
    tree = Tree(2)
    assert [tree.at_the_top(node) for node in nodes[:3]] == [True, True, False]
    assert tree.at_the_top(nodes[0])
    tree.leave(nodes[0])
    assert tree.at_the_top(nodes[2])


def test_a_fan_out_of_nobody_is_refused() -> None:
    with pytest.raises(ValueError, match="fan_out must be at least 1, got 0"):
        Tree(0)
