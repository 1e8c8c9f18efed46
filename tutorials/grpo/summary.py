"""What a run reached, and how much of the mismatch between trainer and engine replay removed: one table."""

from __future__ import annotations

from collections.abc import Sequence

from records import Row
from rich.table import Table

PHASES = ("generate", "score", "train", "sync")
EDGE = 5
"""Steps at either end of a run whose mean reward is compared."""


def column(rows: Sequence[Row], name: str) -> list[float]:
    """Return the filled cells of a column."""
    return [float(row[name]) for row in rows if row.get(name, "") != ""]


def mean(values: Sequence[float]) -> float:
    """Return the mean of at least one number."""
    return sum(values) / len(values)


def summary(rows: Sequence[Row], held_out: float) -> Table:
    """Return the table of a run.

    Args:
        rows: of ``metrics.csv``, one at least.
        held_out: accuracy on held-out problems at the end.
    """
    table = Table(title="summary")
    table.add_column("what")
    table.add_column("value", justify="right")
    reward = column(rows, "reward")
    table.add_row(
        f"mean rollout reward, first and last {EDGE} steps", f"{mean(reward[:EDGE]):.2f} -> {mean(reward[-EDGE:]):.2f}"
    )
    start = "".join(f"{value:.2f} -> " for value in column(rows, "held_out_reward")[:1])
    table.add_row("held-out problems, greedy, start and end", f"{start}{held_out:.2f}")
    for phase in PHASES:
        table.add_row(f"seconds per step, {phase}", f"{mean(column(rows, f'seconds_{phase}')):.3f}")
    _add_mismatch(table, rows)
    return table


def _add_mismatch(table: Table, rows: Sequence[Row]) -> None:
    """Say what replay did on the rollouts of all steps; without replay there is nothing to say."""
    live, agreement = column(rows, "dlogp_live"), column(rows, "agreement")
    if not live or not agreement:
        return
    before, after = mean(live), mean(column(rows, "dlogp_mean"))
    removed = 1 - after / before if before else 0.0
    table.add_section()
    table.add_row("mean |log-prob, trainer - engine|, live router", f"{before:.1e}")
    table.add_row("... with the engine's experts replayed", f"{after:.1e}")
    table.add_row("rows where the live router agrees with the engine", f"{mean(agreement):.1%}")
    table.add_row(f"replay {'removes' if removed >= 0 else 'adds'}", f"{abs(removed):.0%} of the mismatch")
