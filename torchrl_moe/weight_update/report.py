"""What a weight update did, replica by replica."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, TypedDict

from torchrl_moe.render.tables import data_frame, html_table, one_line, plain_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

TIMES = ("fetched", "staged", "waited", "paused", "loaded")
HEADER = ("replica", *(f"{name} (s)" for name in TIMES), "tries", "outcome")
SHOWN_REPLICAS = 16
ERROR_CHARACTERS = 200


class Phase(TypedDict):
    """A row of :meth:`SyncReport.timeline`; seconds count from the start of publishing."""

    replica: int
    phase: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSync:
    """One replica's part."""

    replica: int
    asked_at: float = 0.0
    fetched: float = 0.0
    staged: float = 0.0
    swap_at: float = 0.0
    waited: float = 0.0
    paused: float = 0.0
    loaded: float = 0.0
    attempts: int = 0
    rejected: bool = False
    unproved: str = ""
    error: str | None = None

    @property
    def end(self) -> float:
        """When it was done, in seconds after the start of publishing."""
        return max(self.asked_at + self.fetched + self.staged, self.swap_at + self.waited + self.paused)


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One version on its way to all replicas.

    Attributes:
        version: what was sent.
        nbytes: bytes of all tensors.
        digest: of names, dtypes, shapes and bytes.
        published: seconds to write it.
        replicas: one entry each, in order.
    """

    version: int
    nbytes: int
    digest: str
    published: float
    replicas: tuple[ReplicaSync, ...] = field(default=())

    @property
    def failed(self) -> dict[int, str]:
        """Replicas that do not hold the version, and why."""
        return {entry.replica: entry.error for entry in self.replicas if entry.error is not None}

    @property
    def seconds(self) -> float:
        """Seconds from the start of publishing until the last replica was done."""
        return max([self.published, *(entry.end for entry in self.replicas)])

    def timeline(self) -> list[Phase]:
        """Return the phases as rows: ``replica`` (-1: the trainer), ``phase``, ``start`` and ``seconds``.

        Phases are ``publish``, ``fetch``, ``stage``, ``wait`` and ``pause``; those that took no time are left out.
        """
        rows: list[Phase] = [{"replica": -1, "phase": "publish", "start": 0.0, "seconds": self.published}]
        for entry in self.replicas:
            fetched, waited = entry.asked_at + entry.fetched, entry.swap_at + entry.waited
            for phase, start, seconds in (
                ("fetch", entry.asked_at, entry.fetched),
                ("stage", fetched, entry.staged),
                ("wait", entry.swap_at, entry.waited),
                ("pause", waited, entry.paused),
            ):
                if seconds > 0:
                    rows.append({"replica": entry.replica, "phase": phase, "start": start, "seconds": seconds})
        return rows

    def figure(self) -> Figure:
        """Draw :meth:`timeline`, a bar for each replica; a matplotlib figure."""
        from torchrl_moe.render.curves import timeline_figure

        return timeline_figure(self.timeline(), f"weights, version {self.version}")

    def to_pandas(self) -> DataFrame:
        """Return one row per replica as a pandas ``DataFrame``."""
        return data_frame([{"version": self.version, **asdict(entry)} for entry in self.replicas])

    def __repr__(self) -> str:
        paused = max((entry.paused for entry in self.replicas), default=0.0)
        good = len(self.replicas) - len(self.failed)
        return (
            f"SyncReport(version={self.version}, replicas={good}/{len(self.replicas)}, {self.nbytes / 1e6:.1f} MB, "
            f"{self.seconds:.3f} s, longest pause {paused:.3f} s, digest={self.digest[:8]})"
        )

    def __str__(self) -> str:
        rows = [_cells(entry) for entry in self.replicas]
        return "\n".join([plain_table(repr(self), HEADER, rows, wide=HEADER), *_remarks(self.replicas)])

    def _repr_html_(self) -> str:
        """Return a table of the first 16 replicas; those that do not hold the version come first."""
        shown = sorted(self.replicas, key=lambda entry: entry.error is None)
        hidden = len(shown) - SHOWN_REPLICAS
        rows = [_cells(entry, ERROR_CHARACTERS) for entry in shown[:SHOWN_REPLICAS]]
        notes = [*([f"and {hidden} more replicas"] if hidden > 0 else []), *_remarks(self.replicas)]
        return html_table(repr(self), HEADER, rows, note="; ".join(notes))


def _cells(entry: ReplicaSync, characters: int | None = None) -> tuple[str, ...]:
    """Return a text for each of :data:`HEADER`, the last of at most ``characters`` characters."""
    times = (getattr(entry, name) for name in TIMES)
    outcome = entry.error or "ok"
    if characters is not None:
        outcome = one_line(outcome, characters)
    return (str(entry.replica), *(f"{value:.3f}" for value in times), str(entry.attempts), outcome)


def _remarks(replicas: Iterable[ReplicaSync]) -> list[str]:
    """Return what else there is to say of replicas that hold the version: each remark once, and of which it is said."""
    said: dict[str, list[str]] = {}
    for entry in replicas:
        if entry.error is None and entry.unproved:
            said.setdefault(f"not checked, {entry.unproved}", []).append(str(entry.replica))
    return [f"replica {', '.join(of)}: {remark}" for remark, of in said.items()]
