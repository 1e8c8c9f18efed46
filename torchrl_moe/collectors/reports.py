"""Reports of a collector of any kind: samples, tables, a progress bar."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torchrl.collectors import BaseCollector
from tqdm.auto import tqdm

from torchrl_moe._checks import check_number, renamed
from torchrl_moe.modules.policies.rollout import flat_samples
from torchrl_moe.render.tables import data_frame, html_table, number_text, one_line, print_table
from torchrl_moe.render.tokens import MOST_TOKENS, Color, TokenSample, read_samples, show_token_samples

if TYPE_CHECKING:
    import pandas

# -- the progress bar -------------------------------------------------------------------------------------------------


class CollectionProgress:
    """A progress bar over answers. As a context manager it closes at the end and on an error; a Ctrl-C does not."""

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total if total >= 0 else None
        self._shown = shown
        self._bar: tqdm[NoReturn] | None = None

    def begin(self, answers: int) -> None:
        """Show it, with the progress so far, unless it is shown already."""
        if self._shown and self._bar is None:
            self._bar = tqdm(total=self._total, initial=answers, desc="collect", unit="answer", dynamic_ncols=True)

    def show(self, answers: int, metrics: Mapping[str, object]) -> None:
        """Show how many answers there are; the same call again changes nothing."""
        self.begin(answers)
        if self._bar is not None:
            # the bar is drawn once, by update
            self._bar.set_postfix(metrics, refresh=False)
            self._bar.update(answers - self._bar.n)

    def close(self) -> None:
        """Close it and leave its last line. Idempotent."""
        self._shown = False
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):  # else it may continue: a Ctrl-C, or a generator that is closed
            self.close()


# -- rows of a batch --------------------------------------------------------------------------------------------------


ABSENT = "–"


class SampleReader:
    """Reads rewards, tokens, texts and versions of rows, of any collector and input mode; ``–`` is a missing value."""

    COLUMNS = ("group", "prompt", "answer", "reward", "tokens", "version", "segments", "finish_reason")
    WIDE = ("prompt", "answer")
    """Columns of long text."""

    def __init__(self, policy: object) -> None:
        # not only wrappers of ours: a key that a policy does not name is TorchRL's
        self.policy = policy
        self._text, self._tokens, self._masks = (
            getattr(policy, f"{name}_key", None) or name for name in ("text", "tokens", "masks")
        )
        self._tokenizer = getattr(policy, "tokenizer", None)

    def metrics(self, batch: TensorDictBase) -> dict[str, int | float]:
        """Return the numbers of rows, groups and generated tokens, and mean and standard deviation of the rewards.

        The deviation is the population's (divided by the number of rows). NaN if no row has a reward.
        """
        rows = flat_samples(batch)
        is_padded = bool(rows) and self._is_padded(rows[0])  # one policy wrote all of them
        rewards = [reward for row in rows if (reward := _reward(row)) is not None] or [float("nan")]
        groups = {str(group) for row in rows if (group := _plain(row.get("group_id", None))) is not None}
        return {
            "rows": len(rows),
            "groups": len(groups),
            "tokens": sum(self._num_tokens(row, is_padded) for row in rows),
            "reward_mean": float(np.mean(rewards)),
            "reward_std": float(np.std(rewards)),
        }

    def cells(self, row: TensorDictBase, characters: int) -> tuple[str, ...]:
        """Return the texts of :attr:`COLUMNS` of a row, batch size ``[]``; prompts and answers are cut."""
        versions = row.get(("policy_versions", "full"), None)
        if versions is None:
            version = _cell(_plain(row.get("policy_version", None)))
        elif len(known := versions[versions >= 0]):  # -1: not sampled
            low, high = int(known.min()), int(known.max())
            version = f"{low}" if low == high else f"{low} to {high}"
        else:
            version = ABSENT
        return (
            _cell(_plain(row.get("group_id", None))),
            *(one_line(self._part(row, part), characters) for part in ("prompt", "response")),
            _cell(_reward(row)),
            _cell(self._num_tokens(row, self._is_padded(row))),
            version,
            _cell(_plain(row.get("num_segments", None))),
            _cell(_plain(row.get("finish_reason", None))),
        )

    def _is_padded(self, row: TensorDictBase) -> bool:
        return bool(getattr(row.get(self._tokens, None), "padded", False))

    def _num_tokens(self, row: TensorDictBase, is_padded: bool) -> int:
        ids = self._ids(row, "response", is_padded)
        return 0 if ids is None else len(ids)

    def _ids(self, row: TensorDictBase, part: str, is_padded: bool) -> torch.Tensor | None:
        """Return the ids of the prompt or the response, padding left out."""
        ids = row.get((self._tokens, part), None)
        if ids is None or not is_padded:
            return ids
        mask = row.get((self._masks, "all_attention_mask")).bool()
        # the mask is of the whole row: prompts are its left end, responses its right one
        return ids[mask[: len(ids)] if part == "prompt" else mask[len(mask) - len(ids) :]]

    def _part(self, row: TensorDictBase, part: str) -> str:
        """Return the prompt or the response as text; in token mode it is decoded here."""
        text = _plain(row.get((self._text, part), None))
        if text is not None:
            return str(text)
        ids = self._ids(row, part, self._is_padded(row))
        if ids is None:
            return ABSENT
        if self._tokenizer is None:
            return str(ids.tolist())
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False))


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value.tolist()
    # a NonTensorData holds it; a lazy stack has given it already
    return getattr(value, "data", value)


def _reward(row: TensorDictBase) -> float | None:
    """The sum over a row's entries: a single one, or one per token."""
    reward = row.get(("next", "reward"), None)
    return float(reward.sum()) if isinstance(reward, torch.Tensor) else None


def _cell(value: object) -> str:
    if value is None:
        return ABSENT
    return f"{value:.4g}" if isinstance(value, float) else one_line(str(value), 40)


# -- the record of a collection ---------------------------------------------------------------------------------------


LIMIT = 10_000
POSTFIX = {
    "reward": "reward_mean",
    "age": "inference/staleness_mean",
    "groups in line": "collector/groups_in_line",
}
"""Labels beside the progress bar -> metrics, as far as a collector has them."""
NOT_KEPT = ("batches", "total_frames", "completed", "requested_frames_per_batch")
"""Metrics that are settings, or that repeat others of a batch."""


class CollectionRecord:
    """The batches of a collector, the newest :data:`LIMIT` of them, and its waits for them. Thread-safe.

    >>> record = CollectionRecord()
    >>> with record.wait():
    ...     pass
    >>> record.scalars()["collector/wait_for_batch"] >= 0
    True
    """

    def __init__(self, limit: int = LIMIT, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._lock = threading.Lock()
        self.batch: TensorDictBase | None = None
        self.batches = 0
        self.waited = 0.0
        self._waited_before = 0.0  # for the batches that were yielded
        self._rows: deque[dict[str, object]] = deque(maxlen=limit)

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Record how long the trainer waits in the context, however it ends."""
        began = self._clock()
        try:
            yield
        finally:
            with self._lock:
                self.waited += self._clock() - began

    def add(self, batch: TensorDictBase, metrics: Mapping[str, object]) -> None:
        """Record a batch that is yielded. It is kept, not copied, until the next one."""
        with self._lock:
            waited = self.waited - self._waited_before
            self._rows.append({"time": datetime.now(UTC), "batch": self.batches, "waited": waited, **metrics})
            self.batch, self.batches, self._waited_before = batch, self.batches + 1, self.waited

    @property
    def last(self) -> Mapping[str, object]:
        """The metrics of the last batch; empty before the first."""
        with self._lock:
            return self._rows[-1] if self._rows else {}

    def rows(self) -> list[dict[str, object]]:
        """Return the metrics of each batch: ``time`` (UTC), ``batch`` (from 0), ``waited`` (s), and those given."""
        with self._lock:
            return list(self._rows)

    def scalars(self) -> dict[str, float]:
        """Return the share of the time that the trainer waited, and the seconds."""
        seconds = max(self._clock() - self._began, 1e-9)
        return {"training/idle": self.waited / seconds, "collector/wait_for_batch": self.waited}


# -- what collectors have in common -----------------------------------------------------------------------------------


class ShowsSamples(BaseCollector):
    """Shows the samples of a collector that is here, or in another process."""

    def _local(self, method: str, *arguments: object) -> Any:
        """Call a method of the collector that has the samples."""
        return getattr(self, method)(*arguments)

    @renamed(colour="color")
    def show_samples(
        self,
        n: int = 4,
        characters: int = 160,
        *,
        color: Color | None = None,
        layer: int | None = None,
        tokens: int = MOST_TOKENS,
    ) -> None:
        """Show the newest samples of the last batch; as they were collected, before ``postproc``.

        Args:
            n: how many.
            characters: shown of a prompt and of an answer in the table; longer texts are cut in the middle.
            color: ``None``: a table, with reward, versions and texts of each sample. Else samples token by token, as
                :func:`torchrl_moe.render.show_samples` has them: ``"versions"``, ``"experts"``, ``"kept"`` or
                ``"log_probs"``.
            layer: of the experts.
            tokens: of each sample that are shown token by token.

        Raises:
            ValueError: a number is below 1, another color, or a layer without routes.
        """
        if color is not None:
            show_token_samples(self._local("token_samples", n, tokens), color, layer)
            return
        title, cells = self._local("sample_cells", n, characters)
        print_table(title, SampleReader.COLUMNS, cells, wide=SampleReader.WIDE)


class FreeRunning(ShowsSamples):
    """What TorchRL's trainers ask of a collector of ours that fills a buffer from a thread of its own."""

    init_random_frames = 0
    """For TorchRL's trainer."""
    _writer: threading.Thread | None

    @property
    def _failure(self) -> BaseException | None:
        """What ended the collection, if not a shutdown."""
        return None

    def _check_buffer(self) -> None:
        if self.replay_buffer is None:
            raise RuntimeError("start() fills a replay buffer: pass replay_buffer=, or iterate over the collector")

    def is_running(self) -> bool:
        """Whether :meth:`start` was called and its thread has not ended."""
        return self._writer is not None and self._writer.is_alive()

    def getattr_rb(self, attr: str) -> Any:
        """Return an attribute of the buffer.

        Raises:
            Exception: the error that ended the collection. TorchRL's trainer waits here for the first write.
        """
        if self._failure is not None:
            raise self._failure
        return getattr(self.replay_buffer, attr)

    def get_policy_version(self) -> int | None:
        """``policy_version``, as TorchRL has it for Ray."""
        return self.policy_version

    def update_policy_weights_(self, policy_or_weights: object = None, **kwargs: object) -> None:
        """Push weights with TorchRL's weight updater, if there is one; else the sync scheme's sender has done so."""
        if self.weight_updater is not None:
            self.weight_updater.push_weights(policy_or_weights, **kwargs)
        self.increment_version()


class Reports(ShowsSamples):
    """A mixin for reports. The collector's base comes after it: ``class MyCollector(Reports, LLMCollector)``.

    A collector calls :meth:`_begin_reports` once and :meth:`_report` with each batch that it yields. It waits for
    batches within ``self.record.wait()``; its loop runs within ``with self._progress:``.

    Attributes:
        record: its history.
    """

    record: CollectionRecord

    @property
    def first_failure(self) -> str | None:
        """The prompt and the error of the first group that failed, of a collector that goes on after one."""
        return None

    def _begin_reports(
        self, policy: object, settings: Mapping[str, object], total_dialog_turns: int, verbose: bool
    ) -> None:
        self.record = CollectionRecord()
        self._shown_settings = settings
        self._progress = CollectionProgress(total_dialog_turns, verbose)
        self._samples = SampleReader(policy)

    def _report(self, batch: TensorDictBase, frames: int) -> None:
        """Record a batch that is yielded; if it comes again after a Ctrl-C, it is recorded once."""
        if batch is not self.record.batch:
            now: dict[str, object] = {name: value for name, value in self.stats().items() if name not in NOT_KEPT}
            if self.first_failure is not None:
                now["first_failure"] = self.first_failure
            self.record.add(batch, {**self._samples.metrics(batch), **now, "frames": frames})
        last = self.record.last
        self._progress.show(frames, {label: last[name] for label, name in POSTFIX.items() if name in last})

    def stats(self) -> dict[str, int | float | bool]:
        """Return metrics by name, plain numbers for a logger: ``logger.log_metrics(collector.stats(), step)``."""
        return {**super().stats(), "batches": self.record.batches, **self.record.scalars()}

    def token_samples(self, n: int, tokens: int) -> list[TokenSample]:
        """Return what :meth:`show_samples` shows token by token: plain data, none before the first batch."""
        if self.record.batch is None:
            return []
        return read_samples(self.record.batch, n, tokens, policy=self._samples.policy)

    def sample_cells(self, n: int, characters: int) -> tuple[str, list[tuple[str, ...]]]:
        """Return what :meth:`show_samples` prints: title, and rows with a text for each of ``SampleReader.COLUMNS``."""
        check_number("n", n, 1, whole=True)
        rows = [] if self.record.batch is None else flat_samples(self.record.batch)
        title = (
            f"batch {self.record.batches - 1}, {min(n, len(rows))} of {len(rows)} samples" if rows else "no batch yet"
        )
        return title, [self._samples.cells(row, characters) for row in rows[-n:]]

    def to_pandas(self) -> pandas.DataFrame:
        """Return a pandas ``DataFrame`` with a row for each of the last 10 000 batches.

        Columns: ``time`` (UTC, when it was yielded), ``batch`` (from 0), ``rows``, ``groups``, ``tokens`` (generated),
        ``reward_mean`` and ``reward_std`` (over rows), ``waited`` (seconds for this batch), the :meth:`stats` at that
        time, and, once a group has failed, ``first_failure``.
        """
        return data_frame(self.record.rows())

    def __repr__(self) -> str:
        try:
            return self._summary()
        except AttributeError:  # its constructor has not come to its end
            return f"{type(self).__name__}(not made)"

    def _summary(self) -> str:
        settings = ", ".join(f"{name}={one_line(str(value), 40)}" for name, value in self._shown_settings.items())
        return f"{type(self).__name__}({self.record.batches} batches; {settings})"

    def _repr_html_(self) -> str:
        """Return settings and figures as a table, for notebooks. It asks no engine anything, and never fails."""
        if not hasattr(self, "record"):
            return html_table(repr(self), ("", "name", "value"), [])
        rows = [("setting", name, one_line(str(value), 80)) for name, value in self._shown_settings.items()]
        try:
            rows += [("metric", name, number_text(value)) for name, value in self.stats().items()]
        except Exception as error:  # noqa: BLE001  a collector that has ended, or a subclass's metric that fails, is still shown
            rows.append(("metric", "not known", one_line(repr(error), 80)))
        if self.first_failure is not None:
            rows.append(("metric", "first_failure", one_line(self.first_failure, 400)))
        return html_table(type(self).__name__, ("", "name", "value"), rows)
