"""The base class of strategies: what it asks of one, and what it does for one that asks for nothing."""

from __future__ import annotations

import pytest

from torchrl_moe.modules.serving.balancer import LoadBalancer
from torchrl_moe.modules.serving.candidates import Candidates, TableEntry
from torchrl_moe.modules.serving.strategies import RoutingContext, Strategy


class Diary(Strategy):
    """Has no opinion, and writes down what it is told."""

    name = "diary"

    def __init__(self) -> None:
        self.lines: list[object] = []

    def choose(self, candidates: Candidates, context: RoutingContext) -> None:
        self.lines.append((context.prompt, context.session_id, dict(context.request_context)))

    def placed(self, entry: TableEntry, context: RoutingContext) -> None:
        self.lines.append(entry.index)

    def finish_session(self, session_id: str) -> None:
        self.lines.append(session_id)


def test_a_strategy_must_choose() -> None:
    class Undecided(Strategy):
        name = "undecided"

    with pytest.raises(TypeError, match="choose"):
        Undecided()  # type: ignore[abstract]


def test_what_a_strategy_sees() -> None:
    diary = Diary()
    lb = LoadBalancer(["a", "b"], [diary, "requests"])
    lb.acquire("hi", "s", request_context={"k": 1})
    lb.finish_session("s")
    assert diary.lines == [("hi", "s", {"k": 1}), 0, "s"]
    assert RoutingContext().request_context == {}
