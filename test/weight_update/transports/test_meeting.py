"""Where ranks meet: with a deadline of ours, in a closed folder on one host, behind a secret across hosts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]  # its stubs leave them out

from support.waiting import in_thread, until
from torchrl_moe._errors import WeightSyncError
from torchrl_moe.weight_update.transports import meeting
from torchrl_moe.weight_update.transports.gloo_group import GlooGroup
from torchrl_moe.weight_update.transports.meeting import Meeting, MeetingPlace, board_of, own_address

TIMEOUT = 20.0


@pytest.fixture
def across(monkeypatch: pytest.MonkeyPatch) -> Iterator[MeetingPlace]:
    """A place as for several hosts, all of which are this one."""
    monkeypatch.setattr(meeting, "is_loopback", lambda _: False)
    made = MeetingPlace("127.0.0.1")
    yield made
    made.close()


def test_what_one_rank_left_another_finds_and_waits_for() -> None:
    board = HashStore()
    one, other = Meeting(board, TIMEOUT), Meeting(board, TIMEOUT)
    found = in_thread(lambda: one.get("address"))
    other.set("address", b"10.0.0.1")
    assert found.result(TIMEOUT) == b"10.0.0.1"
    assert (one.check(["address"]), one.check(["address", "more"])) == (True, False)


def test_who_does_not_come_is_named_when_the_time_is_up_whatever_gloo_would_wait() -> None:
    with pytest.raises(TimeoutError, match="rank/1, rank/2 did not come"):
        Meeting(HashStore(), 0.0).wait(["rank/1", "rank/2"], timedelta(hours=1))


def test_closing_wakes_who_waits_and_ends_the_meeting_once() -> None:
    ended: list[int] = []
    begun = threading.Event()
    waited = Meeting(HashStore(), TIMEOUT, begun.set, lambda: ended.append(1))
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
    board_of(first).set("key", b"value")
    assert place.meet(first, TIMEOUT).get("key") == b"value"
    assert not place.meet(second, TIMEOUT).check(["key"])
    assert own_address(first) == "127.0.0.1"
    place.end(first)
    place.end(first)
    assert not path.exists()
    place.close()
    place.close()
    assert not path.parent.exists()


def test_a_value_is_there_whole_or_not_at_all_whatever_its_key(place: MeetingPlace) -> None:
    where = place.begin()
    one, other = board_of(where), board_of(where)
    one.set("gloo/0/../1", b"first")
    one.set("gloo/0/../1", b"second")
    assert other.get("gloo/0/../1") == b"second"
    assert (other.check(["gloo/0/../1"]), other.check(["gloo", "gloo/0/../1"])) == (True, False)
    assert len(list(Path(where["folder"]).iterdir())) == 1


@pytest.mark.parametrize("how", ["the meeting", "its place"])
def test_who_is_late_for_a_meeting_that_is_over_hears_of_it_at_once(place: MeetingPlace, how: str) -> None:
    where = place.begin()
    board = board_of(where)
    if how == "its place":
        place.close()
    else:
        place.end(where)
    uses = (lambda: board.set("key", b"value"), lambda: board.get("key"), lambda: board.check(["key"]))
    for use in uses:
        with pytest.raises(RuntimeError, match="the trainer has given the group up"):
            use()
    with pytest.raises(RuntimeError, match="the trainer has given the group up"):
        Meeting(board, TIMEOUT).wait(["key"])


def test_a_folder_that_is_not_here_is_another_hosts(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="is another host: give the scheme a master_address"):
        board_of({"folder": str(tmp_path / "none")})


def test_across_hosts_ranks_meet_at_the_trainers_server(across: MeetingPlace) -> None:
    where = across.begin()
    assert (set(where), len(where["secret"])) == ({"address", "port", "name", "secret"}, 64)
    address = own_address(where)
    joining = in_thread(lambda: GlooGroup(Meeting(board_of(where), TIMEOUT), 1, 2, TIMEOUT, 9, address))
    trainer = GlooGroup(across.meet(where, TIMEOUT), 0, 2, TIMEOUT, 9, address)
    worker = joining.result(TIMEOUT)
    worker.announce()
    until(trainer.all_ready, TIMEOUT)
    got = torch.zeros(20, dtype=torch.uint8)
    receiving = in_thread(lambda: worker.broadcast(got, time.monotonic() + TIMEOUT, lambda _: None))
    trainer.broadcast(torch.arange(20, dtype=torch.uint8), time.monotonic() + TIMEOUT, lambda _: None)
    receiving.result(TIMEOUT)
    assert got.tolist() == list(range(20))
    trainer.close()
    with pytest.raises(RuntimeError, match="the trainer has given the group up"):
        worker.announce()
    worker.close()


def test_a_stranger_joins_as_no_rank(across: MeetingPlace) -> None:
    """It has found the port, speaks torch's own language, and knows all but the secret."""
    where = across.begin()
    with pytest.raises(RuntimeError):
        TCPStore(where["address"], where["port"], is_master=False, timeout=timedelta(seconds=0.2))
    stranger = board_of({**where, "secret": "00" * 32})
    with pytest.raises(OSError, match="does not have the trainer's secret"):
        stranger.set("gloo/0/1", b"my address")
    assert not across.meet(where, TIMEOUT).check(["gloo/0/1"])


def test_the_server_goes_with_the_place(across: MeetingPlace) -> None:
    where = across.begin()
    across.end(where)
    across.end(where)
    across.close()
    across.close()
    with pytest.raises(ConnectionRefusedError):
        board_of(where).check(["key"])


def test_a_port_that_was_chosen_is_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once more at once, too: a trainer that is started again keeps its firewall's port."""
    monkeypatch.setattr(meeting, "is_loopback", lambda _: False)
    port = 0
    for _ in range(3):
        place = MeetingPlace("127.0.0.1", port)
        where = place.begin()
        board_of(where).set("key", b"value")  # the connection that was used stays with the system for a minute
        assert port in (0, where["port"])
        port = where["port"]
        with pytest.raises(OSError, match="in use"):
            MeetingPlace("127.0.0.1", port).begin()
        place.close()


def test_an_address_that_is_not_this_hosts_is_an_error() -> None:
    with pytest.raises(OSError, match="assign requested address"):
        MeetingPlace("192.0.2.1").begin()  # kept for documentation: nobody has it


def test_who_waits_long_asks_seldom() -> None:
    class Asked(HashStore):
        times = 0

        def check(self, keys: list[str]) -> bool:
            self.times += 1
            return super().check(keys)

    board = Asked()
    with pytest.raises(TimeoutError):
        Meeting(board, 1.0).wait(["rank/1"])
    assert 3 < board.times < 30
