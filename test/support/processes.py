"""Processes of tests: those of replicas over the toy engine, those that are gone, those made to end."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from support import toy_kind
from torchrl_moe.modules.backends.process.process_replica import LocalReplica
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.backends.vllm.engine_args import engine_environment

TESTS = Path(__file__).parents[1]
PYTHONPATH = os.pathsep.join([str(TESTS), str(TESTS.parent)])
"""Of a process that imports what tests do."""


def toy_environment() -> dict[str, str]:
    environment = engine_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment["PYTHONPATH"]])
    return environment


def toy_replica(index: int = 0, **start: Any) -> LocalReplica:
    return LocalReplica(index, toy_kind, {"model": "toy", "start": start}, toy_environment())


def ids_request(request_id: str, ids: Any = (1, 2, 3), **fields: Any) -> Request:
    fields.setdefault("sampling_params", None)
    return Request(request_id=request_id, prompt_token_ids=np.array(ids, np.int32), **fields)


def process_of(replica: LocalReplica) -> psutil.Process:
    assert replica._child is not None
    return psutil.Process(replica._child.process.pid)


def group(leader: int) -> list[psutil.Process]:
    """The living processes of a process group."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


def is_gone(pid: int) -> bool:
    """Whether a process has ended; that its parent did not ask how is not ours."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def exit_code_of(work: Callable[[], object], seconds: float = 60.0) -> int | None:
    """Run a function in a child; return its exit status, negative for a signal. A fork: torch is not imported again."""

    def run() -> None:
        faulthandler.disable()  # a death is expected here
        work()
        os._exit(0)

    child = multiprocessing.get_context("fork").Process(target=run)
    child.start()
    child.join(seconds)
    return child.exitcode
