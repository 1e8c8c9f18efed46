"""Where ranks meet: with a deadline of ours, in a closed folder of this host."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest

from support.waiting import in_thread
from torchrl_moe.errors import WeightSyncError
from torchrl_moe.weight_update.transports.gloo import Meeting, MeetingPlace

TIMEOUT = 20.0


def test_what_one_rank_left_another_finds_and_waits_for(place: MeetingPlace) -> None:
    where = place.begin()
    one, other = Meeting(where, TIMEOUT), Meeting(where, TIMEOUT)
    found = in_thread(lambda: one.get("address"))
    other.set("address", b"10.0.0.1")
    assert found.result(TIMEOUT) == b"10.0.0.1"
    assert (one.check(["address"]), one.check(["address", "more"])) == (True, False)


def test_who_does_not_come_is_named_when_the_time_is_up_whatever_gloo_would_wait(place: MeetingPlace) -> None:
    with pytest.raises(TimeoutError, match="rank/1, rank/2 did not come"):
        Meeting(place.begin(), 0.0).wait(["rank/1", "rank/2"], timedelta(hours=1))


def test_closing_wakes_who_waits_and_ends_the_meeting_once(place: MeetingPlace) -> None:
    ended: list[int] = []
    begun = threading.Event()
    waited = Meeting(place.begin(), TIMEOUT, begun.set, lambda: ended.append(1))
    waiting = in_thread(lambda: waited.wait(["rank/1"]))
    assert begun.wait(TIMEOUT)
    waited.close()
    waited.close()
    with pytest.raises(RuntimeError, match="the meeting was closed"):
        waiting.result(TIMEOUT)
    assert ended == [1]


def test_on_one_host_each_meeting_is_a_closed_folder(place: MeetingPlace) -> None:
    first, second = place.begin(), place.begin()
    assert (set(first), first != second) == ({"folder"}, True)
    path = Path(first["folder"])
    assert [it.stat().st_mode & 0o777 for it in (path.parent, path)] == [0o700, 0o700]
    Meeting(first, TIMEOUT).set("key", b"value")
    assert place.meet(first, TIMEOUT).get("key") == b"value"
    assert not place.meet(second, TIMEOUT).check(["key"])
    place.end(first)
    place.end(first)
    assert not path.exists()
    place.close()
    place.close()
    assert not path.parent.exists()


def test_a_value_is_there_whole_or_not_at_all_whatever_its_key(place: MeetingPlace) -> None:
    where = place.begin()
    one, other = Meeting(where, TIMEOUT), Meeting(where, TIMEOUT)
    one.set("gloo/0/../1", b"first")
    one.set("gloo/0/../1", b"second")
    assert other.get("gloo/0/../1") == b"second"
    assert (other.check(["gloo/0/../1"]), other.check(["gloo", "gloo/0/../1"])) == (True, False)
    assert len(list(Path(where["folder"]).iterdir())) == 1


@pytest.mark.parametrize("how", ["the meeting", "its place"])
def test_who_is_late_for_a_meeting_that_is_over_hears_of_it_at_once(place: MeetingPlace, how: str) -> None:
    where = place.begin()
    board = Meeting(where, TIMEOUT)
    place.close() if how == "its place" else place.end(where)
    uses = [lambda: board.set("key", b"value"), lambda: board.get("key")]
    uses += [lambda: board.check(["key"]), lambda: board.wait(["key"])]
    for use in uses:
        with pytest.raises(RuntimeError, match="the trainer has given the group up"):
            use()


def test_a_folder_that_is_not_here_is_another_hosts(tmp_path: Path) -> None:
    with pytest.raises(
        WeightSyncError, match="is another host, and transport='gloo' reaches one host: use transport='memmap'"
    ):
        Meeting({"folder": str(tmp_path / "none")}, TIMEOUT)


def test_who_waits_long_asks_seldom(place: MeetingPlace) -> None:
    asked: list[int] = []
    with pytest.raises(TimeoutError):
        Meeting(place.begin(), 1.0, lambda: asked.append(1)).wait(["rank/1"])
    assert 3 < len(asked) < 30
