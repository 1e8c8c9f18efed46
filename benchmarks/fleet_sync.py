"""What a weight update costs with 16 to 1024 replicas.

The sender is the real one; the replicas are fakes in this process with given times to stage and to swap a version. The
limit is the critical path of these times alone: all replicas stage at once, and an eighth of them is swapped at a time.
CPU time is of this process, fakes included.
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import torch

from benchmarks.report import Row, finish, median_range
from torchrl_moe.testing.fake_weights import FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme

FLEETS, ROUNDS = (16, 64, 256, 1024), 3
STAGE_SECONDS, SWAP_SECONDS, WAVES = 0.5, 0.1, 8


class Threads:
    """The greatest number of threads of this process, sampled at every call of a replica."""

    def __init__(self) -> None:
        self.most = 0

    def look(self, *_: Any) -> None:
        """Count them now."""
        self.most = max(self.most, threading.active_count())


def waiting(seconds: float) -> Any:
    """Return a hook that makes a fake's command take this long."""

    def wait(_: int) -> None:
        time.sleep(seconds)

    return wait


def updates(count: int) -> dict[str, list[float]]:
    """Return seconds, CPU seconds and threads of some updates of a fleet, round by round."""
    engine, threads = FakeFleet(count), Threads()
    for replica in engine.fakes:
        replica.fail = {"stage_weights": waiting(STAGE_SECONDS), "swap_weights": waiting(SWAP_SECONDS)}
        replica.note = threads.look
    sender = VLLMWeightSyncScheme(rolling=1 / WAVES).create_sender()
    found: dict[str, list[float]] = {"seconds": [], "cpu": [], "threads": []}
    began = time.perf_counter()
    sender.init_all_workers_group(vllm_engine=engine)
    found["opened"] = [time.perf_counter() - began]
    for round_ in range(ROUNDS + 1):
        threads.most, began, cpu = 0, time.perf_counter(), time.process_time()
        report = sender.update_weights({"a": torch.full((2, 2), float(round_)), "b": torch.full((3,), round_)})
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert not report.failed
        assert all(replica.weights["a"][0, 0] == round_ for replica in engine.fakes)
        if round_:  # the first one is a warm-up
            for name, value in (("seconds", seconds), ("cpu", cpu), ("threads", float(threads.most))):
                found[name].append(value)
    sender.shutdown()
    engine.shutdown()
    return found


def growing() -> list[Row]:
    """Return the costs of updates for several fleet sizes."""
    rows, least, limit = [], None, STAGE_SECONDS + WAVES * SWAP_SECONDS
    for count in FLEETS:
        found = updates(count)
        middle = statistics.median(found["seconds"])
        least = least or middle
        times, bigger = middle / least, count / FLEETS[0]
        name = f"{count} replicas"
        rows += [
            Row(claim=f"{name}: seconds of an update", value=median_range(found["seconds"])),
            Row(
                claim=f"{name}: the same / the replicas' time alone ({limit:.1f} s)",
                value=median_range([seconds / limit for seconds in found["seconds"]]),
            ),
            Row(claim=f"{name}: CPU of the driver per replica, ms", value=median_range(_per_replica(found, count))),
            Row(claim=f"{name}: most threads", value=f"{max(found['threads']):.0f}"),
            Row(claim=f"{name}: seconds to open them", value=f"{found['opened'][0]:.2f}"),
        ]
        if count > FLEETS[0]:
            rows.append(
                Row(
                    claim=f"{name}: time / that of {FLEETS[0]} replicas (this fleet is {bigger:.0f} times as large)",
                    value=f"{times:.2f}",
                    target=f"< {bigger:.0f}",
                    met=times < bigger,
                )
            )
    return rows


def _per_replica(found: dict[str, list[float]], count: int) -> list[float]:
    return [1e3 * seconds / count for seconds in found["cpu"]]


if __name__ == "__main__":
    torch.set_num_threads(1)
    finish("fleet_sync", growing())
