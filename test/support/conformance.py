"""Checks run over engines that are right, and over engines with one fault."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedModel

from support.conforming_engine import QUICK, small_moe
from support.faulty_engines import FAULTS
from torchrl_moe.modules.replay.router_replay import RouterReplay
from torchrl_moe.testing.conformance import CHECKS, CheckResult, check


@cache
def shared_moe() -> PreTrainedModel:
    """The model of all engines here, found fit for replay once. Nobody changes it."""
    model = small_moe()
    RouterReplay(model)
    return model


def result(name: str, adapter: Any) -> CheckResult:
    """What one check says of an engine."""
    return check(adapter, shared_moe(), only=[name], settings=QUICK)[name]


def faults_of(functions: tuple[str, ...]) -> Any:
    """A test's parameters: each fault that the checks of some functions must see."""
    names = [one.name for one in CHECKS if one.name.split("[")[0] in functions]
    return pytest.mark.parametrize(("name", "fault"), [(name, fault) for name in names for fault in FAULTS[name]])
