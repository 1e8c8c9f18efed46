"""Placements that cannot be are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.placement import check_placement


def config_of(**changes: Any) -> GRPOConfig:
    config = GRPOConfig()
    for name, value in changes.items():
        group, key = name.rsplit("__", 1)
        setattr(config.get(group.replace("__", ".")), key, value)
    return config


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (
            1,
            {"placement__tensor_parallel": 2},
            r"placement\.tensor_parallel=2 needs several ranks: start it by torchrun",
        ),
        (1, {"placement__expert_parallel": 2}, r"placement\.expert_parallel=2 needs several ranks"),
        (1, {"placement__replicate": 2}, r"placement\.replicate=2 needs several ranks"),
        (1, {"placement__cpu_offload": True}, r"placement\.cpu_offload=True is FSDP2's, which needs several ranks"),
        (3, {"placement__tensor_parallel": 2}, "3 ranks are no multiple of tensor_parallel=2 times replicate=1"),
        (4, {"placement__replicate": 4}, r"placement\.replicate=4 leaves 1 rank\(s\) for a copy"),
        (4, {"placement__replicate": 2, "placement__tensor_parallel": 2}, "leaves 2 rank.* at least 4 are needed"),
        (4, {"placement__expert_parallel": 3}, r"expert_parallel=3 must be .* divides the 4 ranks of a copy"),
        (
            4,
            {"placement__expert_parallel": 2, "placement__tensor_parallel": 4, "optim__max_tokens": None},
            r"expert_parallel=2 must be a multiple of tensor_parallel=4",
        ),
        (4, {"placement__expert_parallel": 4, "placement__replicate": 2}, "divides the 2 ranks of a copy"),
        (2, {"placement__cpu_offload": True, "placement__tensor_parallel": 2}, "cpu_offload=True is FSDP2's: give it"),
        (2, {"placement__cpu_offload": True}, "cpu_offload=True needs GPUs to offload from"),
        (2, {"placement__expert_parallel": 2, "model__lora__rank": 4}, r"model\.lora\.rank goes with plain FSDP2"),
        (2, {"placement__tensor_parallel": 2, "optim__max_tokens": 100}, r"needs optim\.max_tokens=null"),
        (2, {"engine__sync": {"lora": "adapter"}}, r"engine\.sync\.lora=adapter is for one rank"),
        (2, {"placement__collective_timeout": 120.0}, r"collective_timeout=120 must be above .*timeout_seconds=120"),
        (2, {"engine__sync": {"timeout_seconds": 600}}, r"collective_timeout=600 must be above .*timeout_seconds=600"),
        (2, {"engine__sleep": True}, r"engine\.sleep=True is for one GPU"),
        (32, {}, r"rollout\.prompts_per_step=16 is too few: each of 32 shares of a batch has a whole group"),
        (16, {"optim__minibatches": 16}, r"optim\.minibatches=16 is too many: a rank has 8 answers of a step"),
    ],
)
def test_what_cannot_be_is_refused(
    monkeypatch: pytest.MonkeyPatch, size: int, changes: dict[str, Any], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=message):
        check_placement(size, config_of(**changes))


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (1, {"optim__max_tokens": 100, "engine__sleep": True}),
        (1, {"placement__collective_timeout": 1.0}),
        (2, {"placement__collective_timeout": 61.0, "engine__sync": {"timeout_seconds": 60}}),
        (8, {"optim__max_tokens": 100, "model__lora__rank": 4}),
        (8, {"placement__expert_parallel": 8}),
        (8, {"placement__expert_parallel": 4, "placement__tensor_parallel": 2, "optim__max_tokens": 100}),
        (8, {"placement__replicate": 2, "placement__expert_parallel": 4, "placement__tensor_parallel": 2}),
        (8, {"placement__tensor_parallel": 8, "optim__max_tokens": None}),
        (32, {"placement__tensor_parallel": 2, "optim__minibatches": 8}),
    ],
)
def test_what_can_be(monkeypatch: pytest.MonkeyPatch, size: int, changes: dict[str, Any]) -> None:
    check_placement(size, config_of(**changes))
    if size > 1:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        if config_of(**changes).placement.tensor_parallel < size:
            check_placement(size, config_of(**changes, placement__cpu_offload=True))
