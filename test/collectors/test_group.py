"""A complete group's rows say which group they are of."""

from __future__ import annotations

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from torchrl_moe.collectors.group import Group
from torchrl_moe.collectors.prompt_stream import Prompt


def turn(*versions: list[int]) -> TensorDictBase:
    """One turn of as many samples; -1 is of the prompt."""
    rows = []
    for one in versions:
        made = [version for version in one if version >= 0]
        row = TensorDict(
            policy_versions=TensorDict(full=torch.tensor(one)),
            tokens=TensorDict(response=torch.zeros(len(made))),
            policy_version=torch.tensor(min(made, default=-1)),
        )
        rows.append(row)
    return lazy_stack(rows)


def group() -> Group:
    return Group(7, Prompt(0, TensorDict()), begun_version=9)


def test_samples_stay_together_and_turns_in_their_order() -> None:
    one = group()
    one.complete([[turn([3, 3]), turn([4])], [turn([5, 6])]], only_last=False)
    assert one.rows is not None
    assert [row["policy_versions", "full"].tolist() for row in one.rows.unbind(0)] == [[3, 3], [4], [5, 6]]
    assert one.rows["group_id"].tolist() == [7, 7, 7]
    assert (one.oldest, one.tokens) == (3, 5)


def test_samples_of_one_environment_are_taken_apart() -> None:
    one = group()
    one.complete([[turn([3], [4]), turn([5], [6])]], only_last=False)
    assert one.rows is not None
    assert one.rows["policy_version"].tolist() == [3, 5, 4, 6]


def test_versions_stand_where_torchrls_scripts_look_if_asked_for() -> None:
    one = group()
    one.complete([[turn([3], [4]), turn([5], [6])]], only_last=True, version_in_next=True)
    assert one.rows is not None
    assert one.rows["next", "policy_version"].tolist() == one.rows["policy_version"].tolist() == [5, 6]


def test_the_age_counts_turns_that_are_not_kept() -> None:
    one = group()
    one.complete([[turn([3, 3]), turn([5])]], only_last=True)
    assert one.rows is not None
    assert one.rows["policy_version"].tolist() == [5]
    assert (one.oldest, one.tokens) == (3, 3)


def test_a_group_without_a_token_is_as_old_as_its_beginning() -> None:
    one = group()
    one.complete([[turn([-1])]], only_last=False)
    assert one.oldest == 9


def test_a_restored_group_is_as_old_as_it_was_and_apart_from_the_trainers_rows() -> None:
    one = group()
    one.complete([[turn([3, 3])]], only_last=False)
    state = one.state_dict(version=5)
    assert one.rows is not None
    one.rows[0].set("advantage", torch.ones(1))
    again = Group.restored(8, state, version=20)
    assert again.rows is not None
    assert "advantage" not in again.rows[0].keys()  # noqa: SIM118
    assert (again.number, again.oldest, again.tokens) == (8, 18, 2)
    assert again.rows["group_id"].tolist() == [7]
    assert again.ready_at > 0
