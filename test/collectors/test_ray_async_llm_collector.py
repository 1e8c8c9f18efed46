"""The collector in Ray takes what the local one takes, and Ray's arguments."""

from __future__ import annotations

import inspect

from torchrl_moe.collectors import AsyncLLMCollector, RayAsyncLLMCollector

OF_RAY = ["ray_init_config", "remote_config", "num_cpus", "num_gpus", "sync_iter"]


def test_its_arguments_are_those_of_the_local_one_and_rays() -> None:
    local, remote = (inspect.signature(kind).parameters for kind in (AsyncLLMCollector, RayAsyncLLMCollector))
    assert list(remote) == [*local, *OF_RAY]
    for name, parameter in local.items():
        assert remote[name] == parameter
