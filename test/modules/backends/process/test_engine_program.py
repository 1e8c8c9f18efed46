"""An engine process never outlives its driver, and reports its stats by itself."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from support.processes import group
from support.waiting import until
from torchrl_moe.modules.backends.process import engine_program, link
from torchrl_moe.modules.backends.process.engine_program import Load, StatsFeed
from torchrl_moe.modules.backends.replica import Completion, CompletionOutput, ReplicaStats


def leader(code: str) -> subprocess.Popen[bytes]:
    """A process that leads a group of three: a child of its own and Python's resource tracker are in it."""
    start = (
        "import subprocess, sys; from multiprocessing import resource_tracker;"
        "from torchrl_moe.modules.backends.process import engine_program;"
        "subprocess.Popen(['sleep', '600']); resource_tracker.ensure_running(); print('up', end='');"
    )
    arguments = [sys.executable, "-c", f"{start} sys.stdin.read(); {code}"]
    process = subprocess.Popen(arguments, start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    until(lambda: len(group(process.pid)) == 3 and trackers(process.pid))
    return process


def trackers(leader: int) -> list[int]:
    return [member.pid for member in group(leader) if "multiprocessing.resource_tracker" in " ".join(member.cmdline())]


def test_ending_the_group_ends_all_of_it_and_flushes_first() -> None:
    process = leader("engine_program.end_group(7)")
    output, _ = process.communicate(timeout=60.0)
    assert output == b"up"
    assert process.returncode == 7
    until(lambda: not group(process.pid))


def test_a_group_that_is_killed_loses_all_but_the_tracker_which_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    killed = []
    kill = os.kill
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append(pid) or kill(pid, number))
    monkeypatch.setattr(engine_program, "KILL_ROUNDS", 1)  # a tracker that is ending has no name for the next
    process = leader("")
    members, (tracker,) = {member.pid for member in group(process.pid)}, trackers(process.pid)
    engine_program.kill_group(process.pid)
    assert set(killed) == members - {tracker}
    until(lambda: not group(process.pid))
    process.communicate(timeout=60.0)


LOOK_ON = """
import time
from torchrl_moe.modules.backends.process.engine_program import end_with_leader
end_with_leader()
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def orphans(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A driver, the leader of a group that it started, and the folder of the two; a member of the group looks on."""
    folder = tmp_path / "replica"
    folder.mkdir()
    member = [sys.executable, "-c", LOOK_ON]
    leader = f"import subprocess, time; subprocess.Popen(['sleep', '600']); subprocess.Popen({member}); time.sleep(600)"
    driver = (
        "import os, subprocess, sys, time;"
        f"os.environ.update({engine_program.FOLDER_VARIABLE}={str(folder)!r},"
        f" {engine_program.DRIVER_VARIABLE}=str(os.getpid()));"
        f"print(subprocess.Popen([sys.executable, '-c', {leader!r}], process_group=0).pid, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", driver], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    try:
        assert process.stdout.readline() == "up\n"
        yield process, pid, folder
    finally:
        process.kill()
        engine_program.kill_group(pid)
        process.communicate()


def test_a_group_ends_when_its_leader_and_its_driver_are_killed_at_once(
    orphans: tuple[subprocess.Popen[str], int, Path],
) -> None:
    driver, leader, folder = orphans
    assert len(group(leader)) == 3
    driver.send_signal(signal.SIGSTOP)
    os.kill(leader, signal.SIGKILL)  # now a zombie: nobody asks
    driver.kill()
    driver.wait(60.0)
    until(lambda: not group(leader))
    until(lambda: not folder.exists())


def test_a_process_that_cannot_be_inspected_counts_as_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(pid: int) -> psutil.Process:
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr(psutil, "Process", fail)
        assert engine_program._is_gone(1 << 30) is False
    assert engine_program._is_gone(1 << 30) is True


class Bench:
    """A feed, its clock, and what it sent."""

    def __init__(self) -> None:
        self.now = 100.0
        self.load = Load()
        self.requests = 0
        self.sent: list[ReplicaStats] = []
        self.feed = StatsFeed(self.load, self._said, self.sent.append, clock=lambda: self.now)

    def _said(self) -> ReplicaStats:
        return ReplicaStats(requests=self.requests)

    def tick(self, tokens: int = 0) -> None:
        self.now += 0.25
        self.load.tokens += tokens
        self.feed.tick()


def test_the_pace_is_that_of_the_last_second_and_only_what_changed_is_sent() -> None:
    bench = Bench()
    rates = []
    for tokens in (10, 10, 10, 10, 30, 0, 0, 0, 0):
        bench.tick(tokens)
        rates.append(bench.feed.stats().tokens_per_second)
    assert rates == [40.0, 40.0, 40.0, 40.0, 60.0, 50.0, 40.0, 30.0, 0.0]
    assert [stats.tokens_per_second for stats in bench.sent] == [40.0, 60.0, 50.0, 40.0, 30.0, 0.0]
    for requests in (0, 0, 3, 3, 3, 4):
        bench.requests = requests
        bench.tick()
    assert [stats.requests for stats in bench.sent[6:]] == [3, 4]  # an idle engine is silent


def answer_of(request_id: str, text: Any = "") -> Completion:
    ids = np.arange(2)
    output = CompletionOutput(
        index=0, token_ids=ids, text=text, finish_reason="stop", policy_versions=ids.astype(np.int32)
    )
    return Completion(request_id=request_id, prompt=None, prompt_token_ids=ids, num_cached_tokens=0, outputs=[output])


def test_an_answer_that_cannot_be_encoded_fails_alone_and_each_driver_gets_its_own() -> None:
    answers = [("one", "a"), ("one", "b"), ("other", "c"), ("one", "d")]
    sent = [("completions", driver, answer_of(name, object() if name == "b" else "")) for driver, name in answers]
    read = []
    for frames in engine_program._frame([*sent, ("stats", "", ReplicaStats(running=3))]):
        kind, driver = link.head_of(frames)
        body = link.decode([bytearray(frame) for frame in frames[1:]])
        read.append((kind, driver, [one.request_id for one in body] if kind == "completions" else body))
    *completions, refused, stats = sorted(read, key=lambda message: message[0])
    assert stats == ("stats", "", ReplicaStats(running=3))
    assert sorted(completions) == [
        ("completions", "one", ["a"]),
        ("completions", "one", ["d"]),
        ("completions", "other", ["c"]),
    ]
    refusal, driver, (request_id, kind, text) = refused
    assert (refusal, driver, request_id, kind) == ("refused", "one", "b", "engine")
    assert text.startswith("its answer cannot be sent: builtins.object has no plain form")
