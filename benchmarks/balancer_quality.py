"""How well requests are placed: throughput, prefix hits and evenness against eight rivals, on a simulated fleet.

Seeds are held out, and so are the parameters of all settings but the first: the balancer was made without them. The
oracle knows the true contents of every cache and keeps the same load bound as ours. ``balancer_fidelity`` holds the
simulator against real vLLM. The whole table goes to ``runs/bench/balancer_quality.csv``.
"""

from __future__ import annotations

import csv
import itertools
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from benchmarks.balancing.fleet import Fleet, FleetSpec, Outcome, SimRequest
from benchmarks.balancing.rivals import RIVALS, Ours
from benchmarks.balancing.workloads import WORKLOADS, Shape
from benchmarks.report import RESULTS, Row, finish

REQUESTS = 4000
LOSS = (0.33, 0.66)
OURS, OWN = "ours", ("ours", "ours, session first", "oracle")
MANY_REPLICAS, MANY_REQUESTS = 1024, 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A fleet, what is asked of it, and how many rollouts each replica has at a time."""

    spec: FleetSpec
    shape: Shape
    concurrency: int
    seed: int


SETTINGS: Mapping[str, Setting] = {
    "8 replicas": Setting(spec=FleetSpec(), shape=Shape(), concurrency=32, seed=41),
    "16 replicas, little KV, long turns": Setting(
        spec=FleetSpec(replicas=16, kv_tokens=70_000),
        shape=Shape(template=300, question=(50, 900), answer=200, group=16, turns=(4, 28), observation=(50, 900)),
        concurrency=14,
        seed=42,
    ),
    "4 replicas, much KV, long answers": Setting(
        spec=FleetSpec(replicas=4, kv_tokens=350_000, step_per_request=0.00005),
        shape=Shape(template=2500, group=4, answer=600, spread=0.8, pause=5.0, hot=0.6),
        concurrency=56,
        seed=43,
    ),
}


def bound(mean: float) -> float:
    """Return the largest load that a placement should make."""
    return max(1.15 * mean, mean + 1.0)


def fleet_of(setting: Setting, workload: str) -> Fleet:
    """Return a fresh fleet with its jobs."""
    jobs = WORKLOADS[workload](setting.shape, random.Random(setting.seed), itertools.count(1))
    return Fleet(setting.spec, jobs, setting.concurrency * setting.spec.replicas, bound)


def compare(setting: Setting, workload: str) -> dict[str, Outcome]:
    """Run every rival on the same jobs."""
    outcomes = {}
    for name, make in RIVALS.items():
        fleet = fleet_of(setting, workload)
        outcomes[name] = fleet.run(make(fleet), REQUESTS, LOSS if workload == "replica loss" else None)
    return outcomes


def cell_rows(where: str, outcomes: Mapping[str, Outcome]) -> list[Row]:
    """Return what was promised of one cell."""
    ours, oracle = outcomes[OURS], outcomes["oracle"]
    best = max((name for name in outcomes if name not in OWN), key=lambda name: outcomes[name].throughput)
    speed = ours.throughput / outcomes[best].throughput
    hits = ours.hits / oracle.hits
    return [
        Row(
            claim=f"{where}: tokens/s / the best rival's",
            value=f"{speed:.3f} ({best})",
            target=">= 0.98",
            met=speed >= 0.98,
        ),
        Row(
            claim=f"{where}: prefix hits / the oracle's",
            value=f"{hits:.3f} ({ours.hits:.3f} / {oracle.hits:.3f})",
            target=">= 0.90",
            met=hits >= 0.9,
        ),
        Row(
            claim=f"{where}: largest load / max(1.15 mean, mean + 1)",
            value=f"{ours.excess:.3f}",
            target="<= 1",
            met=ours.excess <= 1.0 + 1e-9,
        ),
    ]


class Timed(Ours):
    """Ours, with a clock around what a request costs."""

    seconds: list[float]

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)
        self.seconds = []

    def place(self, request: SimRequest) -> int:
        """As ours."""
        request.ids  # noqa: B018  made by the caller, not by the balancer
        started = time.perf_counter()
        index = super().place(request)
        self.seconds.append(time.perf_counter() - started)
        return index


def many() -> list[Row]:
    """A thousand replicas, a million requests."""
    setting = Setting(
        spec=FleetSpec(replicas=MANY_REPLICAS), shape=Shape(template=100, question=(50, 250)), concurrency=16, seed=14
    )
    fleet = fleet_of(setting, "groups")
    policy = Timed(fleet)
    started = time.perf_counter()
    outcome = fleet.run(policy, MANY_REQUESTS)
    minutes = (time.perf_counter() - started) / 60
    micro = statistics.median(policy.seconds) * 1e6
    name = f"{MANY_REPLICAS} replicas, {outcome.requests} requests in groups"
    return [
        Row(claim=f"{name}: choose and lease, us, median", value=f"{micro:.1f}"),
        Row(claim=f"{name}: choose and lease, us, mean", value=f"{statistics.fmean(policy.seconds) * 1e6:.1f}"),
        Row(claim=f"{name}: the whole simulation, minutes", value=f"{minutes:.1f}"),
        Row(
            claim=f"{name}: largest load / max(1.15 mean, mean + 1)",
            value=f"{outcome.excess:.3f}",
            target="<= 1",
            met=outcome.excess <= 1.0 + 1e-9,
        ),
    ]


def write(table: Sequence[tuple[str, str, str, Outcome]]) -> None:
    """Write every cell of every rival."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    with (RESULTS / "balancer_quality.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "workload", "policy", "tokens_per_second", "hits", "preemptions", "load_of_bound"])
        for setting, workload, name, o in table:
            figures = (f"{o.throughput:.0f}", f"{o.hits:.4f}", o.preemptions, f"{o.excess:.3f}")
            writer.writerow([setting, workload, name, *figures])


def main() -> None:
    """Compare in every cell, then run the large fleet."""
    rows, table = [], []
    for name, setting in SETTINGS.items():
        for workload in WORKLOADS:
            outcomes = compare(setting, workload)
            rows += cell_rows(f"{name}, {workload}", outcomes)
            table += [(name, workload, rival, outcome) for rival, outcome in outcomes.items()]
            for rival, o in outcomes.items():
                figures = f"{o.throughput:8.0f} tok/s, hits {o.hits:.3f}, {o.preemptions:5d} preempted"
                print(f"{name}, {workload}, {rival:20s} {figures}, load {o.excess:.2f} of the bound", flush=True)
    write(table)
    rows += many()
    finish("balancer_quality", rows)


if __name__ == "__main__":
    main()
