"""Where the time of a loss step goes: the model's body, head and loss, backward; ours against TorchRL's.

Model, batch and peers are those of :mod:`benchmarks.logprob_memory`. ``python -m benchmarks.loss_step [--quick]``.
"""

from __future__ import annotations

import statistics
import time
import warnings
from dataclasses import asdict, dataclass
from typing import Any

import torch

from benchmarks.logprob_memory import (
    PEERS,
    TIME_GOAL,
    Case,
    forward,
    make_batch,
    make_loss,
    measure,
    read_arguments,
    sizes,
)
from benchmarks.report import Row, finish, median_range


@dataclass(frozen=True, slots=True)
class Split:
    """Seconds of each step."""

    body: list[float]
    head_and_loss: list[float]
    backward: list[float]


def work(peer: str, case: Case) -> Split:
    """Time one peer in this process; the first step warms up."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    loss, model = make_loss(peer, case)
    body = 0.0

    def enter(*_: Any) -> None:
        nonlocal body
        body -= time.perf_counter()

    def leave(*_: Any) -> None:
        nonlocal body
        body += time.perf_counter()

    model.model.register_forward_pre_hook(enter)
    model.model.register_forward_hook(leave)
    td, split = make_batch(case), Split([], [], [])
    for step in range(case.steps + 1):
        model.zero_grad()
        body = 0.0
        start = time.perf_counter()
        total = forward(loss, td)
        middle = time.perf_counter()
        total.backward()
        if step:
            split.body.append(body)
            split.head_and_loss.append(middle - start - body)
            split.backward.append(time.perf_counter() - middle)
    return split


def rows_of(claim: str, case: Case, pairs: int, goal: float | None) -> list[Row]:
    """Measure both peers in turn, and compare part by part."""
    runs: dict[str, list[Split]] = {peer: [] for peer in PEERS}
    for _ in range(pairs):
        for peer in PEERS:
            runs[peer].append(Split(**measure(peer, case, "benchmarks.loss_step")))
    parts = {"body": ("body",), "head and loss": ("head_and_loss",), "backward": ("backward",)}
    parts["step"] = ("body", "head_and_loss", "backward")
    rows = []
    for part, names in parts.items():
        theirs, ours = (
            [sum(statistics.median(asdict(run)[name]) for name in names) for run in runs[peer]] for peer in PEERS
        )
        times = [b / a for a, b in zip(theirs, ours, strict=True)]
        target = goal if part == "step" else None
        rows.append(
            Row(
                claim=f"{claim}: {part}, seconds",
                value=f"{statistics.median(theirs):.2f} -> {statistics.median(ours):.2f}, {median_range(times)} of "
                "TorchRL's",
                target="" if target is None else f"<= {target:.2f}x",
                met=None if target is None else statistics.median(times) <= target,
            )
        )
    return rows


def main(arguments: list[str] | None = None) -> None:
    """Measure a full batch, and report."""
    quick = read_arguments(arguments, work)
    if quick is None:
        return
    vocabulary, width, pairs = sizes(quick)
    case = Case(vocabulary=vocabulary, lengths=(width,) * 8)
    rows = rows_of(f"V={vocabulary}, 8 x {width}", case, pairs, None if quick else TIME_GOAL)
    finish("loss_step", rows)


if __name__ == "__main__":
    main()
