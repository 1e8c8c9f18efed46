"""What a ``RouterReplay`` found, and what its last context did, layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_moe.modules.replay.discovery import RouterSite
from torchrl_moe.render.numbers import number_text, share_text
from torchrl_moe.render.tables import html_table
from torchrl_moe.render.text_tables import one_line, plain_table

__all__ = ["ReplayReport", "routers_table"]

HEADER = ("layer", "replayed rows", "live rows", "refused rows", "agreement")
ROUTERS = ("layer", "module", "experts", "top-k", "scoring")
LAYERS = 64
CHARACTERS = 60


class ReplayReport(dict[int, dict[str, Any]]):
    """A mapping, layer -> what :meth:`RouterReplay.report` says of it, that is printed as a table.

    >>> ReplayReport({3: {"replayed": 14, "live": 4, "refused": 0, "agreement": None}})
    replay of 1 layers
    layer  replayed rows  live rows  refused rows  agreement
        3             14          4             0          –
    """

    @property
    def _title(self) -> str:
        known = [row["agreement"] for row in self.values() if row["agreement"] is not None]
        mean = f", mean agreement {share_text(sum(known) / len(known))}" if known else ""
        return f"replay of {len(self)} layers{mean}" if self else "replay: no context has come to its end yet"

    def _rows(self) -> list[tuple[str, ...]]:
        rows = [
            (
                str(layer),
                *(number_text(row[name]) for name in ("replayed", "live", "refused")),
                share_text(row["agreement"]),
            )
            for layer, row in list(self.items())[:LAYERS]
        ]
        return rows + [(f"… {len(self) - LAYERS} more", "", "", "", "")] * (len(self) > LAYERS)

    def __repr__(self) -> str:
        return plain_table(self._title, HEADER, self._rows()) if self else self._title

    def _repr_html_(self) -> str:
        note = "agreement: replayed rows in which the router by itself chooses the same experts; – if not measured"
        return html_table(self._title, HEADER, self._rows(), note=note if self else "")


def routers_table(title: str, sites: Sequence[RouterSite]) -> str:
    """Return routers as a table for notebooks, one row each, of the first layers."""
    rows = [
        (
            str(site.layer),
            one_line(site.name, CHARACTERS),
            str(site.num_experts),
            str(site.top_k),
            one_line(site.scoring, CHARACTERS),
        )
        for site in sites[:LAYERS]
    ]
    rows += [(f"… {len(sites) - LAYERS} more", "", "", "", "")] * (len(sites) > LAYERS)
    return html_table(title, ROUTERS, rows)
