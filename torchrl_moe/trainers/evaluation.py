"""``Evaluation``: runs held-out prompts while a step runs, on the weights that the engine has until the next sync."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["Evaluation"]

LOG = logging.getLogger(__name__)


class Evaluation:
    """Runs evaluations in a background thread, one at a time.

    Args:
        evaluate: returns the mean reward of held-out prompts, or ``None`` where there are none.

    Attributes:
        scores: step -> mean reward of the evaluation before that step.
    """

    def __init__(self, evaluate: Callable[[], float | None]) -> None:
        self.scores: dict[int, float] = {}
        self._evaluate = evaluate
        self._thread = ThreadPoolExecutor(1, "torchrl_moe-evaluation")
        self._running: Future[float | None] | None = None

    def begin(self) -> None:
        """Begin one."""
        self._running = self._thread.submit(self._evaluate)

    def end(self, step: int, is_of_the_newest: bool) -> dict[str, float | None]:
        """Wait for the running evaluation, if there is one; a reward that raises costs only that evaluation.

        Args:
            step: how many are done.
            is_of_the_newest: whether the engine has the weights after that step; otherwise no checkpoint is rated by
                it.

        Returns:
            A column of the run's record, if there was an evaluation.
        """
        running, self._running = self._running, None
        if running is None:
            return {}
        error = running.exception()
        if error is not None:
            LOG.warning("no evaluation at step %d: %r", step, error)
            return {}
        score = running.result()
        if score is not None and is_of_the_newest:
            self.scores[step] = score
        return {"held_out_reward": score}

    def close(self) -> None:
        """Start no further evaluation, and wait for none. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
