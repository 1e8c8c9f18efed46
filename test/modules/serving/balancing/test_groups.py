"""Groups: one version for all, from the first request until every one of them was lost."""

from __future__ import annotations

import pytest

from torchrl_moe.modules.serving import candidates as groups_module
from torchrl_moe.modules.serving.candidates import Groups


def test_the_first_request_settles_the_version() -> None:
    groups = Groups()
    assert groups.version("g") is None
    groups.join("g", 3)
    groups.join("g", 4)
    assert groups.version("g") == 3


@pytest.mark.parametrize(
    ("ends", "expected"),
    [([False, None], None), ([None, None], None), ([True, False], 3), ([False, True], 3), ([False], 3)],
    ids=str,
)
def test_it_is_unsettled_once_all_have_ended_and_none_was_answered(
    ends: list[bool | None], expected: int | None
) -> None:
    groups = Groups()
    for over, end in zip([groups.join("g", 3), groups.join("g", 3)], ends, strict=False):
        over(end)
    assert groups.version("g") == expected


def test_groups_with_requests_under_way_are_never_forgotten() -> None:
    groups, count = Groups(), 131_072 + 1
    ends = [groups.join(str(number), 1) for number in range(count)]
    groups.join("0", 2)(True)  # a later request of the first is on the same version
    assert {groups.version(str(number)) for number in range(count)} == {1}
    for over in ends:
        over(True)
    assert len(groups._answered) == 131_072  # these are bounded
    assert groups.version("0") is None
    assert groups.version(str(count - 1)) == 1


def test_an_end_that_settles_what_others_wait_for_is_reported_once() -> None:
    groups, told = Groups(), []
    groups.listeners.add(told.append)
    groups.join("other", 3)
    first, second, third = (groups.join("g", 3) for _ in range(3))
    first(False)
    assert groups.may_begin_again("g") is True
    second(False)
    assert told == []  # the third may still be answered
    third(None)
    assert told == ["g"]
    assert groups.may_begin_again("g") is False
    fourth, fifth = (groups.join("g", 4) for _ in range(2))
    assert groups.may_begin_again("g") is True
    fourth(True)
    fifth(True)
    assert told == ["g", "g"]
    assert (groups.may_begin_again("g"), groups.version("g")) == (False, 4)


def test_the_number_of_groups_is_bounded_and_the_one_of_longest_ago_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(groups_module, "MOST_GROUPS", 2)
    groups = Groups()
    for name in ("a", "b", "a", "c"):
        groups.join(name, 1)(True)
    assert [groups.version(name) for name in "abc"] == [1, None, 1]
