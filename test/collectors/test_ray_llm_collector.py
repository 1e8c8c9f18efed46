"""The collector in Ray takes what TorchRL's takes, with its defaults."""

from __future__ import annotations

import inspect

from torchrl.collectors import llm

from torchrl_moe.collectors import RayLLMCollector


def test_its_arguments_are_those_of_torchrls() -> None:
    ours, theirs, local = (
        inspect.signature(kind).parameters for kind in (RayLLMCollector, llm.RayLLMCollector, llm.LLMCollector)
    )
    assert set(ours) == {*theirs, *local}
    for name, parameter in {**theirs, **local}.items():
        assert (ours[name].default, ours[name].kind) == (parameter.default, parameter.kind)
