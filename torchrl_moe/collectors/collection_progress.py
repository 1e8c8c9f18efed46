"""The bar that shows how far a collection is."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from tqdm.auto import tqdm

__all__ = ["CollectionProgress"]


class CollectionProgress:
    """A bar over answers. As a context it ends with the collection, also by an error; a Ctrl-C leaves it where it is.

    Args:
        total: answers; below 0 if there is no end.
        shown: whether it is seen; otherwise nothing is made or printed.
    """

    def __init__(self, total: int, shown: bool) -> None:
        self._total = total if total >= 0 else None
        self._shown = shown
        self._bar: Any = None

    def begin(self, answers: int) -> None:
        """Show it, with what was done before, unless it is seen already."""
        if self._shown and self._bar is None:
            self._bar = tqdm(total=self._total, initial=answers, desc="collect", unit="answer", dynamic_ncols=True)

    def show(self, answers: int, figures: Mapping[str, float]) -> None:
        """Show how many answers there are; the same call again changes nothing.

        Args:
            answers: all of them so far.
            figures: shown beside it, rounded.
        """
        self.begin(answers)
        if self._bar is not None:
            self._bar.set_postfix(figures, refresh=False)
            self._bar.update(answers - self._bar.n)

    def close(self) -> None:
        """End it for good, and leave its last line. Idempotent."""
        self._shown = False
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or issubclass(kind, Exception):  # else it may go on: a Ctrl-C, or a generator that is closed
            self.close()
