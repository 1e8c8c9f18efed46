"""``python -m benchmarks.evidence [--quick] [PART ...]``: measure what is missing, then draw.

Rows are appended to ``data/*.csv`` as they come, so an interrupted run continues where it was. ``--quick`` measures a
part of the rows, in about five minutes, into ``runs/evidence``.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.evidence import figures, gradients, lengths, real, runs
from benchmarks.evidence.table import DATA, KEYS, Table
from benchmarks.evidence.tasks import TASKS

Ranked = tuple[int, dict[str, Any]]
"""How soon something is measured, and what."""
Settings = Callable[[bool], Iterable[Ranked]]
Measured = Callable[..., Iterable[Mapping[str, object]]]
PARTS = ("lengths", "gradients", "variances", "runs", "real", "figures")
MAIN: Mapping[str, Any] = {"family": "qwen3_moe", "layers": 8, "experts": 32, "top_k": 4, "noise": "bfloat16"}


def of_lengths(quick: bool) -> Iterator[Ranked]:
    """What is measured over lengths."""
    for seed in range(1 if quick else 20):
        yield 0, {**MAIN, "seed": seed, "longest": 256, "ages": "stale"}
    others: list[dict[str, Any]] = [
        {"layers": 16}, {"family": "mixtral", "experts": 8, "top_k": 2}, {"noise": "int8 and bfloat16"},
        {"noise": "bfloat16, float32 routers"}, {"family": "olmoe"}, {"family": "deepseek_v3"}, {"layers": 2},
        {"layers": 4}, {"experts": 8, "top_k": 2}, {"experts": 64, "top_k": 8}, {"experts": 64, "top_k": 1},
        {"noise": "int8"}, {"noise": "float8"}, {"noise": "float8 and bfloat16"},
        {"noise": "int8 weights and activations"}, {"noise": "float8 weights and activations"},
    ]  # fmt: skip
    for seed in () if quick else range(5):
        for other in others:
            yield 1, {**MAIN, **other, "seed": seed, "longest": 256, "ages": "fresh"}
        for noise in ("bfloat16", "int8 and bfloat16", "float8 and bfloat16"):
            yield 1, {**MAIN, "noise": noise, "seed": seed, "longest": 256, "ages": "with weights"}
        for ages in ("older", "passes", "LoRA"):
            yield 1, {**MAIN, "seed": seed, "longest": 256, "ages": ages}
        yield 2, {**MAIN, "seed": seed, "longest": 1024, "ages": "stale"}


def of_runs(quick: bool) -> Iterator[Ranked]:
    """What is trained."""
    steps = runs.STEPS // 5 if quick else runs.STEPS
    for seed in range(1 if quick else 5):
        for rank, (task, wanted) in enumerate(runs.WANTED.items(), 1):
            if quick and task != "sums":
                continue
            for noise, stale, arms in wanted[:2] if quick else wanted:
                for arm in arms:
                    setting = {"task": task, "noise": noise, "stale": stale, "arm": arm, "lr": TASKS[task](seed).lr}
                    yield rank, {**setting, "seed": seed, "steps": steps}


def of_real(quick: bool) -> Iterator[Ranked]:
    """What the real model is trained on, where it was made; it takes hours."""
    for setting in () if quick else real.settings():
        yield 3, setting


MEASURED: Mapping[str, tuple[Settings, Measured]] = {
    "lengths": (of_lengths, lengths.measured),
    "gradients": (gradients.settings, gradients.measured),
    "variances": (gradients.of_variances, gradients.variances),
    "runs": (of_runs, runs.measured),
    "real": (of_real, real.measured),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, then draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all by default")
    parser.add_argument("--quick", action="store_true", help="a part of the rows, in about five minutes")
    options = parser.parse_args(arguments)
    parts = options.parts or PARTS
    if unknown := set(parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    torch.set_num_threads(1)
    folder = Path("runs/evidence/quick") if options.quick else DATA
    # the most important first, and each seed of all parts before the next one
    order: list[tuple[int, int, str, dict[str, Any]]] = [
        (rank, setting["seed"], part, setting)
        for part, (settings, _) in MEASURED.items()
        if part in parts
        for rank, setting in settings(options.quick)
    ]
    tables = {part: Table(folder / f"{part}.csv", KEYS[part]) for part in MEASURED}
    for _, _, part, setting in sorted(order, key=lambda item: item[:2]):
        tables[part].measure(MEASURED[part][1], **setting)
    if "figures" in parts:
        figures.draw(folder, folder if options.quick else figures.DOCS)
        figures.write_medians(folder, Path("runs/evidence") / ("quick/medians.md" if options.quick else "medians.md"))


if __name__ == "__main__":
    main()
