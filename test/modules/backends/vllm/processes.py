"""What the tests of processes share: replicas over the toy engine, and waiting for processes to be gone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.modules.backends.vllm import child
from torchrl_moe.modules.backends.vllm.local_replica import LocalReplica, engine_environment

TESTS = Path(__file__).parents[3]


def toy_environment() -> dict[str, str]:
    environment = engine_environment()
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS), environment["PYTHONPATH"]])
    return environment


def use_toy_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "MODULE", "modules.backends.vllm.toy_engine")


def toy_replica(index: int = 0, **start: Any) -> LocalReplica:
    return LocalReplica(index, {"model": "toy", "start": start}, toy_environment())


def ids_request(request_id: str, ids: tuple[int, ...] = (1, 2, 3), **fields: Any) -> Request:
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
