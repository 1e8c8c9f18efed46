"""Ranks: how they find and wait for one another, what they exchange, and what names one that is missing."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch
from tensordict import TensorDict, lazy_stack
from torch.distributed import (
    HashStore,
    TCPStore,  # type: ignore[attr-defined]
)

from support.ranks import run_as_ranks
from support.waiting import until
from torchrl_moe.errors import RankError
from torchrl_moe.trainers import ranks as ranks_module
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.ranks import Ranks, Rendezvous, attempt_of, balanced, join_ranks, shares


class Party:
    """Three ranks, each of which does in its thread what it is told."""

    def __init__(self, seconds: float) -> None:
        self.store = HashStore()
        self.ranks = [Rendezvous(self.store, rank, 3, seconds) for rank in range(3)]
        self._threads = [ThreadPoolExecutor(1) for _ in self.ranks]

    def let(self, rank: int, work: Callable[[Rendezvous], Any]) -> Future[Any]:
        return self._threads[rank].submit(work, self.ranks[rank])

    def meet(self, rank: int, phase: str = "training", patient: bool = False) -> Future[Any]:
        return self.let(rank, lambda one: one.meet(phase, patient))

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown()


@pytest.fixture
def make() -> Iterator[Callable[[float], Party]]:
    made: list[Party] = []

    def party(seconds: float) -> Party:
        made.append(Party(seconds))
        return made[-1]

    yield party
    for one in made:
        one.close()


def message(future: Future[Any]) -> str:
    with pytest.raises(RankError) as caught:
        future.result(60)
    return str(caught.value)


def test_nobody_continues_before_the_last_has_come(make: Any) -> None:
    party = make(60.0)
    early = [party.meet(0), party.meet(2)]
    until(lambda: party.store.check(["0/0", "0/2"]))
    assert not any(future.done() for future in early)
    for future in (*early, party.meet(1)):
        future.result(60)


def test_ranks_that_begin_other_phases_end(make: Any) -> None:
    """The collectives that follow would be others, too."""
    party = make(60.0)
    waiting = [party.meet(rank, "whether to resume") for rank in (0, 2)]
    until(lambda: party.store.add("0/count", 0) == 2)
    third = party.meet(1, "rollouts")
    (told,) = {message(future) for future in waiting}
    assert re.match(r"rank [02] is at 'whether to resume' where another is at 'rollouts': start all ranks alike", told)
    third.exception(60)  # it may have gone on
    assert message(party.meet(1)) == told


def test_what_was_written_for_phases_that_are_over_is_removed(make: Any) -> None:
    party = make(60.0)
    counts = []
    for number in range(6):
        for future in [party.meet(rank, f"phase {number}") for rank in range(3)]:
            future.result(60)
        counts.append(party.store.num_keys())
    assert counts[2:] == [counts[1]] * 4


@pytest.mark.parametrize(("late", "names"), [([1], "rank 1"), ([0, 2], "ranks 0, 2")])
def test_a_deadline_names_the_ranks_that_are_missing(make: Any, late: list[int], names: str) -> None:
    party = make(0.5)
    waiting = [party.meet(rank, "weight sync") for rank in range(3) if rank not in late]
    told = {message(future) for future in waiting}
    assert told == {f"weight sync: {names} did not come within 0.5 s"}
    assert {message(party.meet(rank, "weight sync")) for rank in late} == told  # they hear of it, once they come


def test_rank_0_alone_may_take_its_time_where_the_others_are_patient(make: Any) -> None:
    party = make(0.2)
    waiting = [party.meet(rank, "rollouts", True) for rank in (1, 2)]
    threading.Event().wait(0.7)  # longer than three deadlines
    assert not any(future.done() for future in waiting)
    for future in (*waiting, party.meet(0, "rollouts", True)):
        future.result(60)
    assert message(make(0.2).meet(0, "rollouts", True)) == "rollouts: ranks 1, 2 did not come within 0.2 s"


def test_all_hear_of_an_error_and_the_first_one_counts(make: Any) -> None:
    party = make(60.0)
    waiting = party.meet(2, "step 3")
    party.ranks[1].phase = "training"
    assert party.ranks[1].cause(ValueError("no such\nexpert")) == ""  # it is its own
    told = "rank 1 failed (last met: training): ValueError: no such"
    assert message(waiting) == told
    assert party.ranks[0].cause(KeyError("second")) == ""  # it is its own, too
    assert message(party.meet(0)) == told


def test_a_collective_that_broke_asks_who_is_still_there(make: Any, monkeypatch: MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_module, "LEAVE_SECONDS", 0.5)
    party = make(60.0)
    broken = RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer\nmore")
    asked = [party.let(rank, lambda one: one.cause(broken)) for rank in (0, 2)]
    for future in asked:
        assert future.result(60) == "start: rank 1 gone: [gloo/transport/tcp/pair.cc:553] Connection closed by peer"


def test_rank_0_stays_until_the_others_have_left(make: Any) -> None:
    party = make(60.0)
    last = party.let(0, lambda one: one.leave())
    party.let(1, lambda one: one.leave()).result(60)
    assert not last.done()
    party.let(2, lambda one: one.leave()).result(60)
    last.result(60)


def attempts(store: HashStore, ranks: list[int], seconds: float = 60.0) -> list[str]:
    with ThreadPoolExecutor(3) as threads:
        return list(threads.map(lambda rank: attempt_of(store, rank, 3, seconds), ranks))


def test_ranks_share_a_name_that_no_older_ones_had() -> None:
    store = HashStore()
    store.set("asks/1", "of old")  # half an attempt, in which rank 0 had not come
    found = [attempts(store, ranks) for ranks in ([0, 1, 2], [2, 1, 0], [1, 0, 2])]
    assert all(len(set(names)) == 1 for names in found) and len({names[0] for names in found}) == 3


@pytest.mark.parametrize(("there", "missing"), [([0], r"rank\(s\) 1, 2 did"), ([1, 2], "rank 0 did")])
def test_a_rank_that_does_not_come_is_named(there: list[int], missing: str) -> None:
    with pytest.raises(RankError, match=missing):
        attempts(HashStore(), there, 0.2)


def talk() -> dict[str, Any]:
    ranks = join_ranks(60.0)
    found: dict[str, Any] = {"who": (ranks.rank, ranks.size, ranks.is_first)}
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
    gathered = [{"own": 0}, {"own": 1}, {"own": 2}]
    same = {"gathered": gathered, "told": "of 0", "group": True, "sum": (2.0, [1.0, 6.0])}
    # sums are divided by three, as gradients that are averaged need it
    assert run_as_ranks(talk, world_size=3) == [
        {**same, "who": (rank, 3, rank == 0), "part": [part]} for rank, part in enumerate("abc")
    ]


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
def test_a_rank_without_a_gpu_of_its_number_is_refused(monkeypatch: MonkeyPatch, count: int, own: str) -> None:
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
def test_a_rank_that_is_gone_is_named(tmp_path: Path, monkeypatch: MonkeyPatch, victim: int, collective: bool) -> None:
    monkeypatch.setattr(ranks_module, "LEAVE_SECONDS", 1.0)
    survivor = 1 - victim
    with pytest.raises(AssertionError, match=f"rank {victim} died with exit code -9"):
        run_as_ranks(killed, tmp_path, victim, collective)
    assert f"rank {victim}" in (tmp_path / str(survivor)).read_text()


LAUNCHED = {"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
ELASTIC = ("RESTART_COUNT", "MAX_RESTARTS", "USE_AGENT_STORE")


@pytest.fixture
def environment(monkeypatch: MonkeyPatch) -> MonkeyPatch:
    for name in (*LAUNCHED, "LOCAL_RANK", "LOCAL_WORLD_SIZE", *(f"TORCHELASTIC_{name}" for name in ELASTIC)):
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


@pytest.mark.parametrize("missing", ["", *LAUNCHED])
def test_a_launcher_says_all_or_nothing(environment: MonkeyPatch, missing: str) -> None:
    assert not ranks_module.is_launched() and not ranks_module.may_restart()
    assert ranks_module.local_rank() == 0 and ranks_module.launch_of() == ""
    for name in LAUNCHED.keys() - {missing}:
        environment.setenv(name, LAUNCHED[name])
    environment.setenv("LOCAL_RANK", "1")
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    assert ranks_module.is_launched() is (missing == "")
    assert ranks_module.local_rank() == 1 and ranks_module.may_restart()
    environment.setenv("WORLD_SIZE", "1")  # one rank is no group
    assert not ranks_module.is_launched()


# -- restarts ---------------------------------------------------------------------------------------------------------
Start = Callable[[], None]


@pytest.fixture
def agent(environment: MonkeyPatch) -> Iterator[Callable[[], None]]:
    """What torchrun says where it will start ranks again; each call is another torchrun, with a store of its own."""
    stores: list[TCPStore] = []

    def start() -> None:
        stores.append(TCPStore("localhost", 0, is_master=True, wait_for_workers=False))
        said = {**LAUNCHED, "RANK": "0", "MASTER_PORT": str(stores[-1].port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        for name, value in {**said, "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
            environment.setenv(name, value)

    start()
    yield start


def begin(folder: Path, resume: bool = False) -> bool:
    """A start of a run, as far as it matters here; returns whether it continued."""
    config = GRPOConfig(out=str(folder), resume=resume)
    resumes = ranks_module.resumes_after_restart(config, ranks_module.launch_of())
    folder.mkdir(exist_ok=True)
    ranks_module.note_launch(folder, ranks_module.launch_of())
    (folder / "config.yaml").write_text("steps: 1")
    return resumes


def test_a_run_that_is_started_again_continues(environment: MonkeyPatch, agent: Start, tmp_path: Path) -> None:
    launch = ranks_module.launch_of()
    assert launch and ranks_module.launch_of() == launch
    assert not begin(tmp_path)
    for count in ("0", "1", "0"):  # a host that came or went is no failure
        environment.setenv("TORCHELASTIC_RESTART_COUNT", count)
        assert begin(tmp_path)


@pytest.mark.parametrize("count", ["0", "1"])
def test_a_run_of_another_launch_is_refused(environment: MonkeyPatch, agent: Start, tmp_path: Path, count: str) -> None:
    """Its refusal is a failure that torchrun counts: the next start must not take that for a failure of the run."""
    begin(tmp_path)
    agent()
    environment.setenv("TORCHELASTIC_RESTART_COUNT", count)
    with pytest.raises(ConfigError, match=r"holds a run of another start already, .* set resume=true"):
        begin(tmp_path)
    assert begin(tmp_path, resume=True)
    assert begin(tmp_path)  # and after a failure, it is this launch's


def test_where_nobody_starts_it_again_a_run_takes_the_folder(
    environment: MonkeyPatch, agent: Start, tmp_path: Path
) -> None:
    assert not begin(tmp_path)
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "0")
    assert ranks_module.launch_of() == "" and not begin(tmp_path)
    environment.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    with pytest.raises(ConfigError):  # it is not of this launch any more
        begin(tmp_path)
    environment.setenv("TORCHELASTIC_USE_AGENT_STORE", "False")
    assert ranks_module.launch_of() == "" and not begin(tmp_path / "other")
    with pytest.raises(ConfigError, match="holds a run of another start already"):
        begin(tmp_path / "other")


# -- shares -----------------------------------------------------------------------------------------------------------


def spread(loads: list[int], parts: list[list[int]]) -> float:
    """How much more than the mean the heaviest part has."""
    sums = [sum(loads[i] for i in part) for part in parts]
    return max(sums) * len(parts) / sum(sums) - 1


@pytest.mark.parametrize("ranks", [2, 3, 8, 32, 64])
@pytest.mark.parametrize("sigma", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("group_size", [8, 16])
def test_eight_groups_for_each_rank_are_within_five_percent(ranks: int, sigma: float, group_size: int) -> None:
    """Lengths are log-normal, cut at 16384 tokens, as generated answers are."""
    for seed in range(3):
        draw = np.random.default_rng([ranks, int(2 * sigma), group_size, seed])
        loads = np.clip(draw.lognormal(6.0, sigma, (8 * ranks, group_size)), 1, 16384).astype(int).sum(-1).tolist()
        parts = balanced(loads, ranks)
        # nothing makes a share lighter than its heaviest group
        assert spread(loads, parts) <= max(0.05, max(loads) * ranks / sum(loads) - 1)


@settings(max_examples=60)
@given(st.data())
def test_every_item_is_in_one_part_and_no_part_is_too_small(data: st.DataObject) -> None:
    count, at_least = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    loads = data.draw(st.lists(st.integers(0, 1 << 20), min_size=count * at_least, max_size=60))
    parts = balanced(loads, count, at_least)
    assert sorted(itertools.chain(*parts)) == list(range(len(loads)))
    assert len(parts) == count and min(map(len, parts)) >= at_least
    assert all(part == sorted(part) for part in parts)
    if at_least == 1:  # what greedy assignment guarantees at worst, and this method, too
        mean = sum(loads) / count
        assert max(sum(loads[i] for i in part) for part in parts) <= mean + max(loads)


def test_the_best_of_all_partitions_where_there_are_few() -> None:
    loads = [9, 7, 6, 5, 5, 4]  # 36 in all
    assert [sum(loads[i] for i in part) for part in balanced(loads, 2)] == [18, 18]


def test_a_group_stays_whole_and_its_rows_in_order() -> None:
    lengths = [(3, 4), (4, 2), (3, 1), (9, 5), (4, 2), (3, 2), (7, 1), (4, 9)]
    rows = [
        TensorDict({"group_id": torch.tensor(group), "tokens": {"full": torch.arange(length)}, "place": place})
        for place, (group, length) in enumerate(lengths)
    ]
    found = [[row["place"] for row in share.unbind(0)] for share in shares(lazy_stack(rows), 2)]
    assert sorted(found) == [[0, 2, 3, 5, 6], [1, 4, 7]]  # of 26 tokens 7 + 5 + 1, and 13 of group 4
