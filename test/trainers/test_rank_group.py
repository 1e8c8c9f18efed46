"""What ranks say to one another, and what they say of one that is missing, has failed, or is gone."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.ranks import run_as_ranks
from torchrl_moe.errors import RankError
from torchrl_moe.trainers import ranks as rendezvous
from torchrl_moe.trainers.config import ConfigError
from torchrl_moe.trainers.ranks import Ranks, join_ranks


def talk() -> dict[str, Any]:
    ranks = join_ranks(60.0)
    found: dict[str, Any] = {"rank": ranks.rank, "size": ranks.size, "first": ranks.is_first}
    for number in range(3):
        ranks.meet(f"phase {number}")
    found["gathered"] = ranks.gather({"own": ranks.rank})
    found["told"] = ranks.from_first(f"of {ranks.rank}", "telling")
    found["part"] = ranks.scatter([["a"], ["b"], ["c"]] if ranks.is_first else None)
    total = ranks.sum({"tokens": float(ranks.rank + 1), "counts": torch.tensor([ranks.rank, 6.0])})
    found["sum"] = total["tokens"], total["counts"].tolist()  # type: ignore[attr-defined]
    ranks.close()
    ranks.close()
    found["group"] = dist.is_initialized()  # which was there before
    return found


def test_three_ranks_talk() -> None:
    found = run_as_ranks(talk, world_size=3)
    for rank, one in enumerate(found):
        assert (one["rank"], one["size"], one["first"]) == (rank, 3, rank == 0)
        assert one["gathered"] == [{"own": 0}, {"own": 1}, {"own": 2}]
        assert (one["told"], one["part"], one["group"]) == ("of 0", [["a"], ["b"], ["c"]][rank], True)
        assert one["sum"] == (2.0, [1.0, 6.0])  # divided by three, as gradients that are averaged need it


def test_a_single_process_talks_to_itself() -> None:
    ranks = join_ranks(1.0)
    assert type(ranks) is Ranks and ranks.is_first
    ranks.meet("alone")
    assert (ranks.gather(3), ranks.from_first(4, "telling"), ranks.scatter([5])) == ([3], 4, 5)
    assert ranks.sum({"tokens": 6.0}) == {"tokens": 6.0}
    with pytest.raises(ZeroDivisionError), ranks.guard():
        raise ZeroDivisionError
    ranks.close()


def launched(rank: int, port: int, restarts: int, answers: Any) -> None:
    """As torchrun starts a rank; its store is the agent's."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": str(restarts)}
    ranks = join_ranks(60.0, 33.0)
    default = dist.group.WORLD._get_backend(torch.device("cpu"))  # type: ignore[union-attr]
    assert default.options._timeout.total_seconds() == 33.0
    answers.put((rank, ranks.gather(rank)))
    ranks.close()
    answers.close()
    answers.join_thread()
    os._exit(0)  # gloo's threads may outlive the interpreter


def test_ranks_of_hosts_that_have_counted_other_restarts_meet() -> None:
    """A host counts the failures of its own ranks; the agents' store has what older ranks have left."""
    agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    context = multiprocessing.get_context("fork")
    for counts in ((0, 0), (0, 1), (1, 2), (1, 2)):
        answers = context.Queue()
        arguments = [(rank, agent.port, restarts, answers) for rank, restarts in enumerate(counts)]
        ranks = [context.Process(target=launched, args=one) for one in arguments]
        for rank in ranks:
            rank.start()
        try:
            assert sorted(answers.get(timeout=120) for _ in ranks) == [(0, [0, 1]), (1, [0, 1])]
        finally:
            for rank in ranks:
                rank.join(10)
                rank.kill()


@pytest.mark.parametrize(("count", "own"), [(1, "1"), (2, "7")])
def test_a_rank_without_a_gpu_of_its_number_is_refused(monkeypatch: pytest.MonkeyPatch, count: int, own: str) -> None:
    """As where each task of a cluster's launcher sees one GPU only."""
    launcher = {"RANK": own, "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": own}
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    with pytest.raises(ConfigError, match=rf"LOCAL_RANK={own}: .*; {count} are visible.*CUDA_VISIBLE_DEVICES"):
        join_ranks(1.0)


# -- faults -----------------------------------------------------------------------------------------------------------


def heard(work: Callable[[Ranks], Any], seconds: float = 60.0) -> str:
    """The error that a rank ends with."""
    ranks = join_ranks(seconds)
    try:
        with ranks.guard():
            ranks.meet("begin")
            work(ranks)
    except (ArithmeticError, OSError, RankError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        ranks.close()
    return "nothing"


def one_raises(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ZeroDivisionError("a reward\nof 0")
    ranks.meet("training")


def test_all_hear_of_the_rank_that_raised() -> None:
    first, second, third = run_as_ranks(heard, one_raises, world_size=3)
    assert second == "ZeroDivisionError: a reward\nof 0"
    assert first == third == "RankError: rank 1 failed (last met: begin): ZeroDivisionError: a reward"


def first_raises_while_another_is_in_a_collective(ranks: Ranks) -> None:
    if ranks.rank == 1:
        raise ConnectionError("no engine")
    ranks.gather(ranks.rank)


def test_a_collective_that_breaks_names_the_rank_that_raised() -> None:
    """Its deadline is that of the groups: the rank that raised lives on, as in a notebook."""
    first, second = run_as_ranks(heard, first_raises_while_another_is_in_a_collective, 1.0)
    assert first == "RankError: rank 1 failed (last met: begin): ConnectionError: no engine"
    assert second == "ConnectionError: no engine"


def killed(folder: Path, victim: int, collective: bool) -> str:
    ranks = join_ranks(30.0)
    try:
        with ranks.guard():
            ranks.meet("begin")
            if ranks.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            if collective:
                ranks.gather(0)
            ranks.meet("training", patient=True)
    except RankError as error:
        (folder / str(ranks.rank)).write_text(str(error))
    return ""


@pytest.mark.parametrize(("victim", "collective"), [(1, True), (0, True), (0, False)])
def test_a_rank_that_is_gone_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: int, collective: bool
) -> None:
    monkeypatch.setattr(rendezvous, "LEAVE_SECONDS", 1.0)
    survivor = 1 - victim
    with pytest.raises(AssertionError, match=f"rank {victim} died with exit code -9"):
        run_as_ranks(killed, tmp_path, victim, collective)
    assert f"rank {victim}" in (tmp_path / str(survivor)).read_text()
