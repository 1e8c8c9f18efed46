"""Checks run over engines that are right, and over engines with one fault."""

from __future__ import annotations

from functools import cache
from typing import Any

from transformers import PreTrainedModel

from support.conforming_engine import QUICK, small_moe
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing.conformance import CheckResult, check


@cache
def shared_moe() -> PreTrainedModel:
    """The model of all engines here, found fit for replay once. Nobody changes it."""
    model = small_moe()
    RouterReplay(model)
    return model


def result(name: str, adapter: Any) -> CheckResult:
    """What one check says of an engine."""
    return check(adapter, shared_moe(), only=[name], settings=QUICK)[name]
