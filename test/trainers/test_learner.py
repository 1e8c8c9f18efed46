"""Learning rates; an update of a tiny MoE is that of the whole, whatever its parts and its memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor

from support.rollouts import byte_row
from support.routes import random_routes
from torchrl_moe.modules import TransformersWrapper
from torchrl_moe.modules.policies.unstack import LoraLayers
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.trainers.config import GRPOConfig, LoRAConfig, LossConfig, ModelConfig, OptimConfig
from torchrl_moe.trainers.learner import Learner, learning_rate
from torchrl_moe.trainers.policy_model import PolicyModel

SHAPES = [(3, 4), (2, 7), (5, 1), (1, 3)]
"""Tokens of prompt and answer."""


@pytest.mark.parametrize(
    ("schedule", "shares"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.75, 0.5, 0.0]),
        ("cosine", [0.5, 1.0, 1.0, 0.8536, 0.5, 0.0]),
    ],
)
def test_the_learning_rate_rises_and_falls(schedule: str, shares: list[float]) -> None:
    share = learning_rate(OptimConfig(schedule=schedule, warmup_steps=2), total=6)
    assert [round(share(step), 4) for step in (0, 1, 2, 3, 4, 6)] == shares
    assert share(100) == shares[-1]


@pytest.fixture(autouse=True)
def one_thread_each(one_thread: None) -> Iterator[None]:
    yield


def learner_of(target: str = "", checkpointing: bool = False, replay: str = "R3", **optim: Any) -> Learner:
    """Of a model that an adapter, if any, already changes: one begins with 0, where half of its gradient is 0."""
    lora = LoRAConfig(rank=2, target=target) if target else LoRAConfig()
    config = GRPOConfig(
        steps=4,
        model=ModelConfig(lora=lora, activation_checkpointing=checkpointing),
        loss=LossConfig(replay=replay),
        optim=OptimConfig(lr=1e-3, **optim),
    )
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=3)
    policy_model = PolicyModel.load(model, ByteTokenizer(), config.model)
    generator = torch.Generator().manual_seed(1)
    for name, weight in sorted(policy_model.trained.items()):
        if "lora_" in name:
            weight.data.copy_(0.05 * torch.randn(weight.shape, generator=generator))
    return Learner(TransformersWrapper(policy_model.model, replay=config.loss.replay), policy_model, config)  # type: ignore[arg-type]


def batch_of(learner: Learner) -> TensorDictBase:
    rows = []
    for place, (prompt, answer) in enumerate(SHAPES):
        total = prompt + answer
        row = byte_row(prompt, answer, place)
        sampled = -4.0 - torch.rand(total, generator=torch.Generator().manual_seed(100 + place))
        row["log_probs"] = {"full": sampled.masked_fill(~row["masks"]["all_assistant_mask"], math.nan)}
        row["advantage"] = torch.tensor([[1.0 - place]])
        if learner.actor.router_replay is not None:
            row["routed_experts"] = {"full": random_routes(learner.actor.router_replay, 1, total, seed=place)[0]}
        rows.append(TensorDict(row))
    return lazy_stack(rows)


def gradients(learner: Learner) -> dict[str, Tensor]:
    learner.optimizer.zero_grad()
    batch = batch_of(learner)
    learner.scores(batch, 0, False)
    learner.stepper.accumulate(batch)
    return {
        name: weight.grad.clone()
        for name, weight in learner.actor.model.named_parameters()
        if weight.requires_grad and weight.grad is not None
    }


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert max(float(grad.abs().max()) for grad in expected.values()) > 1e-2
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("target", ["", "attention", "experts", "all"])
@pytest.mark.parametrize("replay", ["R3", "R2", "none"])
def test_parts_and_activation_checkpointing_change_no_gradient(target: str, replay: str) -> None:
    whole = gradients(learner_of(target, replay=replay))
    if target:
        assert all("lora_" in name for name in whole)
    for checkpointing, max_tokens in ((False, 14), (True, None), (True, 14)):
        split = learner_of(target, checkpointing, replay, max_tokens=max_tokens)
        assert_close(gradients(split), whole)


@pytest.mark.parametrize("target", ["attention", "experts", "all"])
def test_the_gradient_of_an_adapter_is_the_chain_rule_of_the_whole(target: str) -> None:
    """``W + s B A``: ``dA = s Bᵀ dW`` and ``dB = s dW Aᵀ``, with dW of the model with the sum as its weights."""
    adapted = learner_of(target)
    found = gradients(adapted)
    model: Any = adapted.actor.model
    merged = learner_of()
    base = model.get_base_model()
    layers = LoraLayers(base)
    own = dict(layers.own_weights(base.state_dict()))
    with torch.no_grad():
        for name, weight in merged.actor.model.named_parameters():
            weight.copy_(layers.merged(name, own[name]) if name in layers else own[name])
    whole = gradients(merged)
    checked = 0
    for name, module in model.named_modules():
        if not hasattr(module, "lora_A") or "default" not in module.lora_A or not hasattr(module, "get_delta_weight"):
            continue
        a, b = module.lora_A["default"].weight, module.lora_B["default"].weight
        key = name.removeprefix("base_model.model.").replace(".base_layer", "")
        parameter = getattr(module, "parameter_name", "weight")
        if parameter != "weight":
            continue  # of experts: peft lays their factors out in its own way
        scale = module.scaling["default"]
        outer = whole[f"{key}.weight"]
        torch.testing.assert_close(found[f"{name}.lora_A.default.weight"], scale * b.T @ outer, atol=1e-5, rtol=0)
        torch.testing.assert_close(found[f"{name}.lora_B.default.weight"], scale * outer @ a.T, atol=1e-5, rtol=0)
        checked += 1
    assert checked == (0 if target == "experts" else 3 * 4)
    # of all factors: a small step changes the merged weights by as much as the chain rule says
    step = 1e-3
    expected = sum(float((grad * grad).sum()) for grad in found.values())
    before = {key: layers.merged(key, own[key]) for key in layers.in_use()}
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name in found:
                weight.add_(found[name], alpha=step)
    moved = {key: layers.merged(key, own[key]) - weight for key, weight in before.items()}
    by_weights = sum(float((whole[key] * change).sum()) for key, change in moved.items())
    assert by_weights == pytest.approx(step * expected, rel=2e-2)


def test_layers_are_computed_again_in_the_backward_pass() -> None:
    def calls(checkpointing: bool) -> tuple[int, int]:
        learner = learner_of(checkpointing=checkpointing)
        with torch.no_grad():
            learner.loss(batch_of(learner))  # the first pass asks the model what it can do, by passes of its own
        count = [0]
        layer: Any = learner.actor.model.model.layers[1].self_attn  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        loss = learner.loss(batch_of(learner)).loss_objective
        forward = count[0]
        loss.backward()
        return forward, count[0]

    assert calls(False) == (1, 1)
    assert calls(True) == (1, 2)


def test_recorded_experts_are_followed_when_layers_are_computed_again() -> None:
    """Without replay the gradient is another."""
    followed = gradients(learner_of(checkpointing=True))
    live = gradients(learner_of(checkpointing=True, replay="none"))
    assert max(float((followed[name] - live[name]).abs().max()) for name in followed) > 1e-3


def test_weights_move_as_adamw_moves_them() -> None:
    learner = learner_of(betas=[0.8, 0.9], weight_decay=0.1, max_grad_norm=None)
    weight: Any = learner.actor.model.lm_head.weight  # type: ignore[union-attr]
    before, grad = weight.detach().clone(), gradients(learner)["lm_head.weight"]
    learner.optimizer.zero_grad()
    metrics = learner.stepper.step(None, batch_of(learner))  # type: ignore[arg-type]
    # the first step of Adam: the sign of the gradient, nearly
    expected = before * (1 - 1e-3 * 0.1) - 1e-3 * grad / (grad.abs() + 1e-8)
    torch.testing.assert_close(weight.detach(), expected, atol=1e-6, rtol=0)
    assert float(metrics["lr"]) == pytest.approx(1e-3)


def test_the_schedule_knows_the_steps_of_the_run() -> None:
    learner = learner_of(schedule="linear", epochs=2, minibatches=2)
    rates = []
    for _ in range(16):
        rates.append(learner.stepper.lr)
        learner.stepper.schedule.step()
    assert rates == pytest.approx([1e-3 * (1 - step / 16) for step in range(16)])
    learner.shutdown()
