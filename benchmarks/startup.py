"""Seconds from ``from_pretrained`` to the first answer, and from the death of a process to serving again.

Each is measured as the project does it (engine processes are forked from one that has imported vLLM, and so are vLLM's
own processes) and with ``VLLM_WORKER_MULTIPROC_METHOD=spawn`` (each process imports vLLM itself), alternately. *Cold*
is the first start of a new driver, without the driver's own imports; *warm* is a later one. Quiet machine only:
``python -m benchmarks.startup [start] [recovery]``.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.report import Row, finish, median_range

ROUNDS = 3
KILLS = 3  # of each process
COLD_TARGET, WARM_TARGET, RECOVERY_TARGET = 0.6, 0.25, 12.0
SPAWN = "VLLM_WORKER_MULTIPROC_METHOD"
SMALL: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 26,
    "max_model_len": 512,
}
PARTS = ("owner", "core")  # which holds the worker
Seconds = dict[str, list[float]]


def first_answer(path: str, replicas: int) -> float:
    """Start a service, send one request per replica, shut it down; return the seconds to the last of the answers."""
    from torchrl_moe.modules import AsyncVLLM

    begun = time.perf_counter()
    with AsyncVLLM.from_pretrained(path, num_replicas=replicas, **SMALL) as engine:
        prompts = [[65 + index] for index in range(replicas)]
        answers = engine.generate(prompts, {"max_tokens": 1}, use_tqdm=False)
        seconds = time.perf_counter() - begun
    assert len(answers) == replicas
    return seconds


def start(path: str, replicas: int) -> Seconds:
    """Measure one driver's starts, this driver's first one included."""
    found = {"cold": [first_answer(path, replicas)], "warm": [first_answer(path, replicas)]}
    os.environ[SPAWN] = "spawn"
    found["spawned"] = [first_answer(path, replicas)]
    return found


def recovery(path: str, _replicas: int) -> Seconds:
    """Kill each process of a replica in turn; measure until the replica serves again."""
    found = {part: [recovered(path, part) for _ in range(KILLS)] for part in PARTS}
    os.environ[SPAWN] = "spawn"
    found["spawned"] = [recovered(path, part) for part in PARTS]
    return found


def recovered(path: str, part: str) -> float:
    """Return the seconds from the death of one process to an answer of the replica that replaces it."""
    from torchrl_moe.modules import AsyncVLLM

    before = set(processes())
    with AsyncVLLM.from_pretrained(path, **SMALL) as engine:
        process = dict(zip(PARTS, family(before), strict=True))[part]
        begun = time.perf_counter()
        process.kill()
        while (row := engine.to_pandas().iloc[0])["state"] != "SERVING" or not row["restarts"]:
            time.sleep(0.05)
        engine.generate([65], {"max_tokens": 1}, use_tqdm=False)
        return time.perf_counter() - begun


def processes() -> list[Any]:
    """Return this driver's descendants."""
    import psutil

    return psutil.Process().children(recursive=True)


def family(before: set[Any]) -> list[Any]:
    """Return owner and engine core of the only engine that was started since."""
    made = [process for process in processes() if process not in before]
    (core,) = [process for process in made if "EngineCore" in process.name() + "".join(process.cmdline())]
    return [core.parent(), core]


def in_a_new_driver(what: str, path: str, replicas: int) -> Seconds:
    """Run a measurement in a process of its own."""
    from benchmarks.generation import SETTINGS

    arguments = [sys.executable, "-m", "benchmarks.startup", "driver", what, path, str(replicas)]
    environment = {**os.environ, **SETTINGS}
    environment.pop(SPAWN, None)
    output = subprocess.run(arguments, env=environment, stdout=subprocess.PIPE, check=True, text=True).stdout
    return dict(json.loads(output.splitlines()[-1]))


def start_rows(path: str, replicas: int) -> list[Row]:
    """Compare the ways to start a number of replicas at once."""
    runs = [in_a_new_driver("start", path, replicas) for _ in range(ROUNDS)]
    seconds = {way: [run[way][0] for run in runs] for way in runs[0]}
    who = "1 replica" if replicas == 1 else f"{replicas} replicas at once"
    rows = [
        Row(claim=f"{who}, {way}: seconds to the first answer", value=median_range(seconds[way], 1)) for way in seconds
    ]
    for way, target in (("cold", COLD_TARGET), ("warm", WARM_TARGET)):
        ratios = [ours / theirs for ours, theirs in zip(seconds[way], seconds["spawned"], strict=True)]
        met = statistics.median(ratios) <= target
        rows.append(
            Row(claim=f"{who}, {way} / spawned", value=median_range(ratios), target=f"<= {target:.2f}", met=met)
        )
    return rows


def recovery_rows(path: str) -> list[Row]:
    """Kill processes until the medians are known."""
    seconds = in_a_new_driver("recovery", path, 1)
    rows = []
    for part in PARTS:
        met = statistics.median(seconds[part]) <= RECOVERY_TARGET
        claim = f"SIGKILL of the {part} to serving again, seconds"
        rows.append(Row(claim=claim, value=median_range(seconds[part], 1), target=f"<= {RECOVERY_TARGET:.0f}", met=met))
    return [*rows, Row(claim="the same, spawned, one kill of each", value=median_range(seconds["spawned"], 1))]


def main(names: list[str]) -> None:
    """Run the named measurements, or all."""
    from torchrl_moe.testing.tiny_moe import save_tiny_moe

    with tempfile.TemporaryDirectory() as folder:
        path = str(save_tiny_moe(folder))
        rows = []
        if not names or "start" in names:
            rows += [row for replicas in (1, 2) for row in start_rows(path, replicas)]
        if not names or "recovery" in names:
            rows += recovery_rows(path)
    finish("startup", rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["driver"]:
        measure = {"start": start, "recovery": recovery}[sys.argv[2]]
        print(json.dumps(measure(sys.argv[3], int(sys.argv[4]))))
    else:
        main(sys.argv[1:])
