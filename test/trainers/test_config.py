"""Settings that cannot be meant are refused, with their names."""

from __future__ import annotations

from typing import Any

import pytest

from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, as_dict


def changed(name: str, value: Any) -> GRPOConfig:
    config = GRPOConfig()
    *groups, last = name.split(".")
    target: Any = config
    for group in groups:
        target = getattr(target, group)
    setattr(target, last, value)
    return config


def test_the_defaults_can_be_meant() -> None:
    GRPOConfig().check()
    changed("model.lora", LoRAConfig(rank=8)).check()


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps=0 must be positive"),
        ("engine.num_replicas", 0, "engine.num_replicas=0 must be positive"),
        ("rollout.temperature", 0.0, "rollout.temperature=0.0 must be positive"),
        ("placement.timeout", float("inf"), "placement.timeout=inf must be positive and finite"),
        ("placement.timeout", float("nan"), "placement.timeout=nan must be positive and finite"),
        (
            "rollout.reward_timeout",
            float("inf"),
            "rollout.reward_timeout=inf must be positive and finite, or null for none",
        ),
        ("rollout.group_size", 1, "rollout.group_size=1 is too few"),
        ("rollout.top_p", 1.5, "rollout.top_p=1.5 must be above 0 and at most 1"),
        ("rollout.max_staleness", -1, "rollout.max_staleness=-1 must be 0 or more"),
        ("optim.minibatches", 3, "optim.minibatches=3 does not divide the 128 answers"),
        ("optim.betas", [0.9], "optim.betas=.* must be two numbers"),
        ("optim.schedule", "step", "optim.schedule=step must be one of constant, linear, cosine"),
        ("loss.replay", "R4", "loss.replay=R4 must be one of R3, R2, none"),
        ("loss.advantage", "gae", "loss.advantage=gae must be one of"),
        ("loss.reference", "host", "loss.reference=host must be one of auto, adapter, model, engine"),
        ("model.dtype", "float16", "model.dtype=float16 must be one of auto, float32, bfloat16"),
        ("model.lora", LoRAConfig(rank=-1), "model.lora.rank=-1 must be 0 or more"),
        ("model.lora", LoRAConfig(target="mlp"), "model.lora.target=mlp must be one of attention, experts, all"),
        ("optim.max_grad_norm", -1.0, "optim.max_grad_norm=-1.0 must be positive and finite, or null for none"),
        ("optim.max_tokens", 0, "optim.max_tokens=0 must be positive and finite, or null for none"),
        ("optim.betas", [2, 0.9], "optim.betas=.* must be two numbers, at least 0 and below 1"),
        ("optim.weight_decay", -0.1, "optim.weight_decay=-0.1 must be 0 or more"),
        ("loss.arguments", {"thresholds": object()}, "a value is not a plain number, text, list or dict"),
        ("log.loggers", ["tensorboard", "stdout"], "log.loggers=stdout must be of csv, tensorboard"),
        ("checkpoint.keep", 0, "checkpoint.keep=0 must be positive"),
        ("engine.kind", "sglang", "engine.kind=sglang must be one of vllm, transformers"),
    ],
)
def test_an_invalid_value_is_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        changed(name, value).check()


def test_an_engine_that_sleeps_while_the_trainer_trains_generates_nothing_beside() -> None:
    config = changed("engine.sleep", True)
    config.check()
    config.rollout.max_staleness = 1
    with pytest.raises(ConfigError, match=r"engine\.sleep=True needs rollout\.max_staleness=0"):
        config.check()
    config.rollout.max_staleness, config.engine.kind = 0, "transformers"
    with pytest.raises(ConfigError, match=r"engine\.sleep=True needs engine\.kind=vllm"):
        config.check()


def test_it_becomes_plain_data_and_names_lead_to_values() -> None:
    config = changed("model.lora", LoRAConfig(rank=3))
    assert as_dict(config)["model"]["lora"] == {"rank": 3, "alpha": 32.0, "target": "attention"}
    assert config.get("model.lora.rank") == 3
