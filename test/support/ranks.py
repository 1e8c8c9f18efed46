"""Processes that are the ranks of a process group."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from support.processes import exit_code_of


def run_as_ranks(work: Callable[..., Any], *arguments: Any, seconds: float = 240.0, world_size: int = 2) -> list[Any]:
    """Run a function in forks that are ranks of the default group; return its answer in each, arrays for tensors."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = f"file://{folder}/store"
        given = [(i, world_size, store, work, arguments, answers) for i in range(world_size)]
        ranks = [context.Process(target=_run, args=one) for one in given]
        for rank in ranks:
            rank.start()
        try:
            got = _answers(answers, ranks, time.monotonic() + seconds)
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
    errors = [error for _, _, error in got if error]
    assert not errors, "\n".join(errors)
    return [value for _, value, _ in got]


def run_with_torchrun(work: Callable[..., Any], *arguments: Any, log: Path, world_size: int = 2) -> None:
    """Run a function on ranks that torchrun's own agent forks; it returns nothing, and ``log`` has what they print."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    def agent() -> None:
        nodes = {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": world_size, "rdzv_backend": "c10d"}
        nodes |= {"rdzv_endpoint": "localhost:0", "run_id": log.name, "start_method": "fork"}
        logs = DefaultLogsSpecs(log_dir=str(log), redirects=Std.ALL)
        config = LaunchConfig(max_restarts=0, monitor_interval=0.1, logs_specs=logs, **nodes)
        returned = elastic_launch(config, work)(*arguments)
        assert not any(returned.values()), returned

    log.mkdir()
    code = exit_code_of(agent, 280.0)
    said = "\n".join(file.read_text()[-3000:] for file in sorted(log.rglob("stderr.log")))
    assert code == 0, f"exit code {code}\n{said}"


def _answers(answers: Any, ranks: list[Any], deadline: float) -> list[tuple[int, Any, str]]:
    """What each rank has answered, in order; of one that died, how."""
    got: dict[int, tuple[int, Any, str]] = {}
    while len(got) < len(ranks):
        dead = [i for i, rank in enumerate(ranks) if rank.exitcode is not None]
        try:
            answer = answers.get(timeout=0.1)
            got[answer[0]] = answer
        except queue.Empty:
            for i in dead:
                got.setdefault(i, (i, None, f"rank {i} died with exit code {ranks[i].exitcode}"))
            assert time.monotonic() < deadline, f"no answer of ranks {sorted(set(range(len(ranks))) - got.keys())}"
    return [got[i] for i in range(len(ranks))]


def _run(
    rank: int, world_size: int, store: str, work: Callable[..., Any], arguments: tuple[Any, ...], answers: Any
) -> None:
    answer: tuple[int, Any, str] = (rank, None, "it was ended")
    try:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
        answer = (rank, work(*arguments), "")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = (rank, None, traceback.format_exc())
        raise
    finally:
        answers.put(answer)
        answers.close()
        answers.join_thread()
        os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts at its end
