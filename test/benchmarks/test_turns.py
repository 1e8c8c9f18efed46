"""Engines that take turns: ended processes are passed over, and none stays stopped."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator

import psutil
import pytest

from benchmarks.engines.turns import Turns, engine_processes, is_engine
from support.waiting import until


@pytest.fixture
def sleepers() -> Iterator[list[psutil.Process]]:
    """Three processes that do nothing, ended at the end of the test."""
    started = [subprocess.Popen(["sleep", "3600"]) for _ in range(3)]
    yield [psutil.Process(process.pid) for process in started]
    for process in started:
        process.kill()
        process.wait()


def stopped(processes: list[psutil.Process]) -> list[bool]:
    return [process.status() == psutil.STATUS_STOPPED for process in processes]


def test_while_one_engine_works_the_others_are_stopped_and_none_after_an_error(sleepers: list[psutil.Process]) -> None:
    a, b, c = sleepers
    with Turns({"one": {a}, "two": {b, c}}) as turns:
        turns.give("one")
        until(lambda: stopped(sleepers) == [False, True, True])
        turns.give("two")
        until(lambda: stopped(sleepers) == [True, False, False])
        turns.give("none of these")
        until(lambda: stopped(sleepers) == [True, True, True])
    until(lambda: stopped(sleepers) == [False, False, False])
    with pytest.raises(KeyError, match="mine"), Turns({"one": {a}, "two": {b, c}}) as turns:
        turns.give("one")
        raise KeyError("mine")
    until(lambda: stopped(sleepers) == [False, False, False])


def test_a_process_that_has_ended_is_passed_over(sleepers: list[psutil.Process]) -> None:
    ended, others = sleepers[0], sleepers[1:]
    with Turns({"one": sleepers[:2], "two": sleepers[2:]}) as turns:
        turns.give("two")
        ended.kill()
        ended.wait()
        turns.give("one")
        until(lambda: stopped(others) == [False, True])
    until(lambda: stopped(others) == [False, False])


@pytest.mark.parametrize(
    ("name", "command_line", "expected"),
    [
        ("VLLM::EngineCor", "VLLM::EngineCore", True),
        ("python3", "python3 -m torchrl_moe.modules.backends.vllm.engine_process 7", True),
        ("ray::_AsyncLLME", "ray::_AsyncLLMEngine", True),
        ("raylet", "/ray/raylet --python_worker_command=default_worker.py ray::_AsyncLLMEngine", False),
        ("gcs_server", "gcs_server --log_dir=/tmp/EngineCore", False),
        ("ray::IDLE", "ray::IDLE", False),
        ("python3", "python3 -m default_worker.py --node-ip-address=Worker", False),
    ],
)
def test_what_is_stopped_is_an_engines_and_never_rays_own(name: str, command_line: str, expected: bool) -> None:
    assert is_engine(name, command_line) is expected


def test_engine_processes_are_those_that_came_since(sleepers: list[psutil.Process]) -> None:
    started: set[int] = set(psutil.pids())
    engine = subprocess.Popen(["sh", "-c", "sleep 3600; : EngineCore"])
    try:
        shell = psutil.Process(engine.pid)
        until(lambda: [child.name() for child in shell.children()] == ["sleep"])  # it is the shell's copy at first
        assert shell in engine_processes(started)
        assert engine.pid in started
        assert engine_processes(started) == set()
        assert {process.pid for process in sleepers} <= started
    finally:
        for child in shell.children():
            child.kill()
        engine.kill()
        engine.wait()
