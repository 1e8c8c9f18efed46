"""``HealthMonitor``: warns when a run looks as if it is about to collapse, or learns nothing."""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["HealthMonitor"]

LOG = logging.getLogger(__name__)

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
        """Return the signs that are new, and log them.

        Args:
            rows: of ``metrics.csv``, all of the run.
        """
        found = {name: text for name, sign in SIGNS.items() if (text := sign(rows))}
        new = [text for name, text in found.items() if name not in self._shown]
        self._shown = set(found)
        for text in new:
            LOG.warning("%s", text)
        return new


def _values(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name, "") not in ("", None)]


def _recent(rows: Rows, name: str) -> float | None:
    """Return the mean of the last steps, once there are enough of them."""
    values = _values(rows, name)[-RECENT:]
    return statistics.mean(values) if len(values) == RECENT else None


def _entropy(rows: Rows) -> str:
    values = _values(rows, "entropy")
    if len(values) < 2 or not values[-1] < ENTROPY_SHARE * values[0]:
        return ""
    return (
        f"the entropy fell from {values[0]:.2g} to {values[-1]:.2g} nats: the policy no longer explores; "
        "lower the learning rate, or add an entropy bonus"
    )


def _reward(rows: Rows) -> str:
    values = _values(rows, "reward")
    windows = [statistics.mean(values[i : i + RECENT]) for i in range(len(values) - RECENT + 1)]
    if len(values) < 2 * RECENT or max(windows) <= 0 or windows[-1] > REWARD_SHARE * max(windows):
        return ""
    return f"the reward fell from {max(windows):.2f} to {windows[-1]:.2f}: go back to an earlier checkpoint"


def _gradient(rows: Rows) -> str:
    values = _values(rows, "grad_norm")
    if len(values) <= RECENT:
        return ""
    usual = statistics.median(values[:-1])
    if not values[-1] > NORM_FACTOR * usual > 0:
        return ""
    return f"the gradient has norm {values[-1]:.2g}, usually {usual:.2g}"


def _truncated(rows: Rows) -> str:
    share = _recent(rows, "truncated")
    if share is None or share <= TRUNCATED_SHARE:
        return ""
    return f"{share:.2f} of the last answers were cut at max_new_tokens: raise it, or the policy learns to be cut"


def _uniform(rows: Rows) -> str:
    share = _recent(rows, "uniform_groups")
    if share is None or share < UNIFORM_SHARE:
        return ""
    return (
        f"in {share:.2f} of the last groups all answers have the same reward, and no advantage: the prompts are "
        "too easy or too hard, or the reward is always the same"
    )


def _replay(rows: Rows) -> str:
    live, replayed, age = (_recent(rows, name) for name in ("dlogp_live", "dlogp_mean", "staleness"))
    if live is None or replayed is None or age:  # the age of tokens changes both
        return ""
    if not replayed > MARGIN * live > 1e-6:  # below that, the difference is rounding
        return ""
    return f"trainer and engine are {replayed:.1e} apart with replay and {live:.1e} without: replay does not help here"


SIGNS: dict[str, Callable[[Rows], str]] = {
    "entropy": _entropy,
    "reward": _reward,
    "gradient": _gradient,
    "truncated": _truncated,
    "uniform": _uniform,
    "replay": _replay,
}
