"""What benchmarks share: records of any library's numbers, costs of a step on paper, engines that take turns."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from benchmarks.engines.turns import Turns, engine_processes, is_engine
from benchmarks.report import RESULTS, Row, finish, read_records, table
from benchmarks.scale import Assumptions, Step, bound, replicas_of
from support.sources import ROOT
from support.waiting import until
from torchrl_moe.trainers.plan import ModelSizes

FILES = [path.relative_to(ROOT).with_suffix("") for path in sorted((ROOT / "benchmarks").rglob("*.py"))]


@pytest.mark.needs_vllm
@pytest.mark.parametrize("name", [".".join(path.parts) for path in FILES])
def test_it_can_be_imported(name: str) -> None:
    import_module(name)


@pytest.mark.parametrize("missed", [False, np.float64(1.08) <= 1.05, torch.tensor(1.08) <= 1.05])
def test_a_verdict_of_any_library_is_kept(missed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    row = Row(claim="time", value="1.08", target="<= 1.05", met=missed)
    assert row.met is False
    finish("one", [row, Row(claim="load", value="1.0")])
    assert read_records(RESULTS)["one"].rows == [row, Row(claim="load", value="1.0")]
    assert table([row]).endswith("| time | 1.08 | <= 1.05 | **no** |")


COUNTS = {"parameters": 1000, "trained": 1000, "adapter": 0, "adapted": 0, "layer": 200, "outside": 200, "experts": 600}
COUNTS |= {"largest": 100, "hidden": 10, "expert_width": 5, "layers": 4, "top_k": 2, "num_experts": 8, "kv": 5}
SIZES = ModelSizes(**COUNTS, kv_heads=1)
GIVEN = Assumptions(
    flops=1e6, memory_bandwidth=1e6, network=1e3, training_share=0.5, decoding_share=0.25, tokens=10, slots=4
)


def test_a_step_by_hand() -> None:
    assert replicas_of(16, GIVEN) == 6
    step = Step.of(16, 32, SIZES, GIVEN)
    token = (2 * 1000 + 4 * 5 * 5 * 2) / 2 / (1e6 * 0.25)  # weights and four half answers, over two GPUs
    assert step.answer == pytest.approx(10 * token)
    active = 1000 - 100 - 600 * 6 / 8  # the embedding, and six experts of eight, do nothing
    assert step.train == pytest.approx(32 * 10 * 8 * active / (4 * 1e6 * 0.5))
    assert step.sync == pytest.approx(6 * 2000 / 1e3)
    assert bound({"rollouts": 2.0, "training": 3.0}) == "training"  # the longest


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
    with Turns({"one": {a, b}, "two": {c}}) as turns:  # a process that has ended is passed over
        turns.give("two")
        a.kill()
        a.wait()
        turns.give("one")
        until(lambda: stopped([b, c]) == [False, True])
    until(lambda: stopped([b, c]) == [False, False])


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
