"""A balancing strategy that answers as it is told."""

from __future__ import annotations

from typing import Any

from torchrl_moe.modules.serving.replica_table import Candidates, TableEntry
from torchrl_moe.modules.serving.strategies import RoutingContext, Strategy


class Says(Strategy):
    """Gives an answer, or what a function gives; remembers what it was asked, and the placements it learned."""

    def __init__(self, answer: Any = None, name: str = "says") -> None:
        self.answer = answer
        self.name = name
        self.asked: list[tuple[list[int], RoutingContext]] = []
        self.learnt: list[int] = []

    def choose(self, candidates: Candidates, context: RoutingContext) -> Any:
        self.asked.append(([entry.index for entry in candidates], context))
        return self.answer() if callable(self.answer) else self.answer

    def placed(self, entry: TableEntry, context: RoutingContext) -> None:
        self.learnt.append(entry.index)
