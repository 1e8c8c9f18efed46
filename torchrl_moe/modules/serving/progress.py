"""The progress bar of a call."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from tqdm.auto import tqdm

from torchrl_moe.modules.backends.replica import Completion

__all__ = ["Progress"]


class Progress:
    """A bar with tokens per second.

    Args:
        total: requests.
        shown: whether to show it, on a terminal or in a notebook; a log file gets none.
        what: the bar's label.
    """

    def __init__(self, total: int, shown: bool, what: str = "generate") -> None:
        self._bar = tqdm(total=total, desc=what, unit="req", disable=None if shown else True)
        self._shown = not self._bar.disable
        self._tokens = 0
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def add(self, completion: Completion) -> None:
        """Count a finished request; from any thread, one at a time."""
        if not self._shown:
            return
        self._tokens += sum(len(output.token_ids) for output in completion.outputs)
        seconds = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{self._tokens / seconds:.0f} tok/s", refresh=False)
        self._bar.update()
