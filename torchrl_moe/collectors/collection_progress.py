"""The progress bar of a collection."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

__all__ = ["CollectionProgress"]


class CollectionProgress:
    """A progress bar over answers. As a context manager it closes at the end and on an error; a Ctrl-C leaves it open.

    Args:
        total: number of answers; below 0 if there is no end.
        shown: whether to show it; otherwise nothing is created or printed.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total if total >= 0 else None
        self._shown = shown
        self._bar: Any = None

    def begin(self, answers: int) -> None:
        """Show it, with the progress so far, unless it is shown already."""
        if self._shown and self._bar is None:
            self._bar = tqdm(total=self._total, initial=answers, desc="collect", unit="answer", dynamic_ncols=True)

    def show(self, answers: int, metrics: Mapping[str, float]) -> None:
        """Show how many answers there are; the same call again changes nothing.

        Args:
            answers: all of them so far.
            metrics: shown beside it, rounded.
        """
        self.begin(answers)
        if self._bar is not None:
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
