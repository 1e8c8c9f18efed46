"""What GRPO with R3 teaches a real model: ``real_sums`` on two rewards, each run a process of the trainer's script.

The model is what ``make real-model`` makes of SmolLM2-135M, after some supervised steps; where it was not made, these
runs are left out.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

MODEL, SUPERVISED = "runs/real_moe_warm_{}", 15  # what `make real-model` makes, after so many supervised steps
SEEDS, STEPS = 3, {"even": 30, "sums": 40}
TASKS: Mapping[str, Sequence[str]] = {
    "even": (
        "data.rewards=[tutorials.real_moe.rewards:even]", "rollout.prompts_per_step=8", "optim.minibatches=1",
        "optim.lr=5e-4", "eval.prompts=32",
    ),
    "sums": (),
}  # fmt: skip
"""By name, what differs from ``real_sums``."""
COLUMNS = (
    "step", "reward", "held_out_reward", "uniform_groups", "dlogp_mean", "seconds_generate", "seconds_train",
    "seconds_sync",
)  # fmt: skip


def settings() -> Iterator[dict[str, Any]]:
    """What is trained."""
    model = Path(MODEL.format(SUPERVISED))
    if not (model / "model.safetensors").exists():
        print(f"real: left out, for {model} is not there; `make real-model` makes it", file=sys.stderr)
        return
    for seed in range(SEEDS):
        for task in TASKS:
            yield {"task": task, "seed": seed, "steps": STEPS[task], "supervised": SUPERVISED}


def measured(task: str, seed: int, steps: int, supervised: int) -> Iterator[dict[str, object]]:
    """Train once; yield a row for each step."""
    with tempfile.TemporaryDirectory() as folder:
        model, out = MODEL.format(supervised), Path(folder, "run")
        common = [f"model.source={model}", f"out={out}", f"seed={seed}", f"steps={steps}"]
        script = [sys.executable, "tutorials/grpo/train.py", "--config", "real_sums"]
        threads = {"OMP_NUM_THREADS": str(os.cpu_count() or 1)}  # generation and training take turns
        subprocess.run([*script, *common, *TASKS[task]], check=True, env={**os.environ, **threads})
        with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                yield {name: row[name] for name in COLUMNS}
