"""The collector in Ray takes what TorchRL's takes, with its defaults."""

from __future__ import annotations

import inspect

from torchrl.collectors import llm

from support.signatures import parameters
from torchrl_moe.collectors import RayLLMCollector


def test_its_arguments_are_those_of_torchrls() -> None:
    ours = inspect.signature(RayLLMCollector).parameters
    theirs, local = parameters(llm.RayLLMCollector), parameters(llm.LLMCollector)
    assert set(ours) == {*theirs, *local}
    for name, parameter in {**theirs, **local}.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
