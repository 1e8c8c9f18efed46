"""One table: the results of a run, and how much of the mismatch between trainer and engine replay removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrl_moe.trainers.rich_tables import Table

__all__ = ["summary"]

PHASES = ("generate", "score", "train", "sync")
EDGE = 5
"""Steps at either end of a run whose mean reward is compared."""
Rows = Sequence[Mapping[str, Any]]


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
    first, last = _mean(reward[:EDGE]), _mean(reward[-EDGE:])
    table.add_row(f"mean rollout reward, first and last {EDGE} steps", f"{first:.2f} -> {last:.2f}")
    if held_out is not None:
        start = "".join(f"{value:.2f} -> " for value in _column(rows, "held_out_reward")[:1])
        table.add_row("held-out problems, greedy, start and end", f"{start}{held_out:.2f}")
    for phase in PHASES:
        if seconds := _column(rows, f"seconds_{phase}"):
            table.add_row(f"seconds per step, {phase}", f"{_mean(seconds):.3f}")
    _add_mismatch(table, rows)
    return table


def _add_mismatch(table: Table, rows: Rows) -> None:
    """Add the effect of replay on the rollouts of all measured steps; without replay, add nothing."""
    live, agreement = _column(rows, "dlogp_live"), _column(rows, "agreement")
    if not live or not agreement:
        return
    before, after = _mean(live), _mean(_column(rows, "dlogp_mean"))
    removed = 1 - after / before if before else 0.0
    table.add_section()
    table.add_row("mean |log-prob, trainer - engine|, live router", f"{before:.1e}")
    table.add_row("... with the engine's experts replayed", f"{after:.1e}")
    table.add_row("rows where the live router agrees with the engine", f"{_mean(agreement):.1%}")
    table.add_row(f"replay {'removes' if removed >= 0 else 'adds'}", f"{abs(removed):.0%} of the mismatch")


def _column(rows: Rows, name: str) -> list[float]:
    return [float(row[name]) for row in rows if row.get(name, "") != ""]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
