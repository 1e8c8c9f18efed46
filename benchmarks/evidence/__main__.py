"""``python -m benchmarks.evidence [--quick] [lengths|gradients|runs|figures ...]``: measure what is missing, then draw.

Rows are appended to ``data/*.csv`` as they come, so an interrupted run continues where it was. ``--quick`` measures a
part of the rows, in about ten minutes, into ``runs/evidence``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import figures, gradients, lengths, runs
from benchmarks.evidence.table import DATA, Table

PARTS = ("lengths", "gradients", "runs", "figures")
MAIN: Mapping[str, Any] = {"family": "qwen3_moe", "layers": 8, "experts": 32, "top_k": 4, "noise": "bfloat16"}


def of_lengths(quick: bool) -> Iterator[dict[str, Any]]:
    """What is measured over lengths, the most important first."""
    if quick:
        yield {**MAIN, "seed": 0, "longest": 256, "ages": "stale"}
        return
    for seed in range(5):
        yield {**MAIN, "seed": seed, "longest": 256, "ages": "stale"}
    others = [
        {"layers": 16}, {"family": "mixtral", "experts": 8, "top_k": 2}, {"family": "olmoe"}, {"family": "deepseek_v3"},
        {"noise": "int8 and bfloat16"}, {"noise": "bfloat16, float32 routers"}, {"layers": 2}, {"layers": 4},
        {"experts": 8, "top_k": 2}, {"experts": 64, "top_k": 8}, {"experts": 64, "top_k": 1},
        {"noise": "int8"}, {"noise": "float8"}, {"noise": "float8 and bfloat16"},
    ]  # fmt: skip
    for seed in range(5):
        for other in others:
            yield {**MAIN, **other, "seed": seed, "longest": 256, "ages": "fresh"}
    for seed in range(5):
        yield {**MAIN, "seed": seed, "longest": 256, "ages": "older"}
        yield {**MAIN, "seed": seed, "longest": 1024, "ages": "stale"}
    for seed in range(5, 20):
        yield {**MAIN, "seed": seed, "longest": 512, "ages": "stale"}


def of_runs(quick: bool) -> Iterator[dict[str, Any]]:
    """What is trained, the most important first; all arms of a seed and noise side by side."""
    steps, lr = (40, runs.LR) if quick else (runs.STEPS, runs.LR)
    wanted: Sequence[tuple[str, int, Sequence[str]]] = (
        [("none", 0, ("live", "R3")), ("random flips 0.3", 0, ("live", "R3"))] if quick else runs.WANTED
    )
    for seed in range(1 if quick else 5):
        for noise, stale, arms in wanted:
            for arm in arms:
                yield {"noise": noise, "stale": stale, "arm": arm, "lr": lr, "seed": seed, "steps": steps}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a part of the rows, in about ten minutes")
    options = parser.parse_args(arguments)
    parts = options.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    folder = Path("runs/evidence/quick") if options.quick else DATA
    if "lengths" in parts:
        table = Table(folder / "lengths.csv", lengths.KEYS)
        for setting in of_lengths(options.quick):
            table.measure(lengths.measured, **setting)
    if "gradients" in parts:
        table = Table(folder / "gradients.csv", gradients.KEYS)
        for setting in gradients.settings(options.quick):
            table.measure(gradients.measured, **setting)
    if "runs" in parts:
        table = Table(folder / "runs.csv", runs.KEYS)
        for setting in of_runs(options.quick):
            table.measure(runs.measured, **setting)
    if "figures" in parts:
        figures.draw(folder, folder if options.quick else figures.DOCS)


if __name__ == "__main__":
    main()
