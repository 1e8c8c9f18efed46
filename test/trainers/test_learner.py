"""The half of a run that trains: losses, scores and updates are those of the whole batch, whatever its parts."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn

from support.collecting import TOKENIZER
from support.ranks import run_as_ranks
from support.rollouts import BigramActor, byte_row, dense, ragged, samples
from support.routes import random_routes
from torchrl_moe import objectives
from torchrl_moe.errors import DivergedError
from torchrl_moe.modules import TransformersWrapper, vLLMWrapper
from torchrl_moe.modules.policies.scoring_model import ScoringModel
from torchrl_moe.modules.policies.unstack import LoraLayers
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM, make_tiny_moe
from torchrl_moe.trainers import learner as loss_building
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, LossConfig, ModelConfig, OptimConfig
from torchrl_moe.trainers.learner import (
    Learner,
    RolloutScores,
    TokenStepper,
    advantages,
    build_loss,
    build_reference,
    clip_gradients,
    learning_rate,
    micro_batches,
    micro_batches_of_ranks,
    minibatches,
)
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Placement, Ranks, join_ranks

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
    assert [round(share(step), 4) for step in (0, 1, 2, 3, 4, 6)] == shares and share(100) == shares[-1]


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
    """Answers with advantages that differ, one of which is 0."""
    batch = rollouts_of(learner.actor)
    for place, row in enumerate(batch.unbind(0)):
        row["advantage"] = torch.tensor([[1.0 - place]])
    return batch


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


@pytest.mark.parametrize(
    ("target", "replay"),
    [
        ("all", "R3"),
        ("", "R2"),
        ("experts", "none"),
        *(
            pytest.param(*pair, marks=pytest.mark.parity)
            for pair in itertools.product(["", "attention", "experts", "all"], ["R3", "R2", "none"])
            if pair not in (("all", "R3"), ("", "R2"), ("experts", "none"))
        ),
    ],
)
def test_parts_and_activation_checkpointing_change_no_gradient(target: str, replay: str) -> None:
    whole = gradients(learner_of(target, replay=replay))
    if target:
        assert all("lora_" in name for name in whole)
    for checkpointing, max_tokens in ((False, 14), (True, None), (True, 14)):
        assert_close(gradients(learner_of(target, checkpointing, replay, max_tokens=max_tokens)), whole)


@pytest.mark.parametrize("target", ["experts", "all"])
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
        batch = batch_of(learner)
        with torch.no_grad():
            learner.loss(batch)  # the first pass asks the model what it can do, by passes of its own
        count = [0]
        layer: Any = learner.actor.model.model.layers[1].self_attn  # type: ignore[union-attr]
        layer.register_forward_hook(lambda *_: count.__setitem__(0, count[0] + 1))
        loss = learner.loss(batch).loss_objective
        forward = count[0]
        loss.backward()
        return forward, count[0]

    assert calls(False) == (1, 1) and calls(True) == (1, 2)


def test_weights_move_as_adamw_moves_them() -> None:
    learner = learner_of(betas=[0.8, 0.9], weight_decay=0.1, max_grad_norm=None)
    weight: Any = learner.actor.model.lm_head.weight  # type: ignore[union-attr]
    before, grad = weight.detach().clone(), gradients(learner)["lm_head.weight"]
    learner.optimizer.zero_grad()
    metrics = learner.stepper.step(batch_of(learner))
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


def weights(*gradients: list[float]) -> list[Tensor]:
    found: list[Tensor] = []
    for gradient in gradients:
        found.append(nn.Parameter(torch.zeros(len(gradient))))
        found[-1].grad = torch.tensor(gradient)
    return found


def grads(of: list[Tensor]) -> list[list[float]]:
    return [weight.grad.tolist() for weight in of if weight.grad is not None]


class Others(Ranks):
    """Ranks whose norms differ by rounding, or of which one is not finite."""

    def __init__(self, *norms: float) -> None:
        self._norms = norms

    def gather(self, value: float) -> list[float]:  # type: ignore[override]
        return [value, *self._norms]


def test_all_ranks_scale_by_the_same_norm() -> None:
    own = weights([3.0, 4.0])
    assert clip_gradients(own, 1.0, Others(5.0, 10.0)) == 10.0
    assert [*chain(*grads(own))] == pytest.approx([0.3, 0.4], abs=1e-5)


@pytest.mark.parametrize(("mine", "theirs"), [(math.inf, 1.0), (1.0, math.nan), (math.nan, 1.0)])
def test_one_that_is_not_finite_anywhere_is_nobodys(mine: float, theirs: float) -> None:
    own = weights([mine])
    assert math.isnan(clip_gradients(own, 0.1, Others(theirs)))
    assert math.isnan(mine) or grads(own) == [[mine]]


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(1, 100))
def test_each_sample_is_in_one_part_and_no_part_of_several_is_too_large(lengths: list[int], limit: int) -> None:
    parts = micro_batches(lengths, limit)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    for part in parts:
        assert len(part) == 1 or len(part) * max(lengths[i] for i in part) <= limit


@pytest.mark.parametrize(
    ("lengths", "limit", "at_least", "parts"),
    [
        ([3, 9, 4], None, 0, [[0, 1, 2]]), ([], None, 0, []), ([], 5, 0, []),
        # more than memory needs
        ([], None, 2, [[], []]), ([], 4, 2, [[], []]),
        ([5, 9, 4, 8], 18, 2, [[1, 3], [0, 2]]), ([5, 9, 4, 8], 18, 3, [[1], [3], [0, 2]]),
        ([5, 9, 4, 8], 18, 4, [[1], [3], [0], [2]]), ([5, 9, 4, 8], 18, 6, [[1], [3], [0], [2], [], []]),
    ],
)  # fmt: skip
def test_parts(lengths: list[int], limit: int | None, at_least: int, parts: list[list[int]]) -> None:
    assert micro_batches(lengths, limit, at_least) == parts
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        micro_batches([1], 0)


class ThreeParts(Ranks):
    """Ranks that have three parts each."""

    def gather(self, value: Any) -> list[Any]:
        return [value, 3]


def test_ranks_have_as_many_parts_as_the_one_that_has_most() -> None:
    assert micro_batches_of_ranks([5, 9, 4, 8], 18, ThreeParts()) == [[1], [3], [0, 2]]
    assert micro_batches_of_ranks([9], 18, ThreeParts()) == [[0], [], []]
    assert len(micro_batches_of_ranks([9, 9, 9, 9], 9, ThreeParts())) == 4
    assert micro_batches_of_ranks([5, 9, 4, 8], 18, Ranks()) == micro_batches([5, 9, 4, 8], 18)


def numbered(count: int) -> TensorDict:
    return TensorDict({"sample": torch.arange(count)}, batch_size=[count])


def epoch(count: int, samples: int, ranks: Ranks | None = None) -> list[list[int]]:
    return [part["sample"].tolist() for part in minibatches(numbered(samples), count, ranks)]


def test_each_epoch_has_every_sample_once_in_another_order() -> None:
    assert epoch(1, 5) == [[0, 1, 2, 3, 4]]
    assert sorted(epoch(4, 2)) == [[0], [1]]  # no more parts than samples
    torch.manual_seed(0)
    first, second = epoch(3, 7), epoch(3, 7)
    for found in (first, second):
        assert [len(part) for part in found] == [3, 2, 2]
        assert sorted(i for part in found for i in part) == list(range(7))
    assert first != second


class Second(Ranks):
    """A rank that is told what to draw from."""

    rank, size = 1, 2

    def from_first(self, value: Any, phase: str) -> Any:
        return 17


def test_ranks_that_see_the_same_samples_split_them_alike() -> None:
    torch.manual_seed(0)
    first = epoch(3, 7, Second())
    torch.manual_seed(5)
    assert epoch(3, 7, Second()) == first


SIX_SHAPES = [(2, 3), (1, 7), (3, 2), (2, 5), (4, 1), (1, 4)]


def stepper_of(loss: GRPOLoss, max_tokens: int | None = None, **changes: Any) -> TokenStepper:
    optimizer = torch.optim.SGD(loss.actor_network.parameters(), lr=0.5)
    options: dict[str, Any] = {"max_grad_norm": None, "precision": nullcontext, **changes}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return TokenStepper(loss, optimizer, schedule, max_tokens=max_tokens, **options)


def gradient(max_tokens: int | None, batch: TensorDictBase, **loss: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    actor = BigramActor()
    metrics = stepper_of(GRPOLoss(actor, **loss), max_tokens).accumulate(batch)
    assert actor.logits.grad is not None
    return actor.logits.grad, metrics, len(actor.calls)


FAMILY = ("GRPOLoss", "DAPO", "GSPOLoss", "CISPOLoss", "SAPOLoss", "DPPOLoss")
AGGREGATIONS = ("token_mean", "prompt_mean", "sequence_mean", "fixed_length")


def gradients_of(ranks: Ranks, max_tokens: int | None) -> dict[tuple[str, str], Any]:
    """The gradient of each loss and aggregation, of this rank's half of a batch, or of all; averaged over ranks."""
    found = {}
    rollouts = samples(SIX_SHAPES)
    # halves with other numbers of tokens and of parts
    halves = [rollouts] if ranks.size == 1 else [rollouts[:2], rollouts[2:]]
    own = halves[ranks.rank]
    for name in FAMILY:
        for aggregation in AGGREGATIONS:
            fixed = {"fixed_length": 9} if aggregation == "fixed_length" else {}
            actor = BigramActor()
            loss = getattr(objectives, name)(actor, entropy_bonus=True, aggregation=aggregation, **fixed)
            stepper_of(loss, max_tokens, placement=Placement(ranks)).accumulate(ragged(own))
            assert actor.logits.grad is not None
            found[name, aggregation] = sum(ranks.gather(actor.logits.grad)) / ranks.size
    return found


def rank_gradients() -> dict[tuple[str, str], Any]:
    ranks = join_ranks(60.0)
    found = {key: gradient.numpy() for key, gradient in gradients_of(ranks, 8).items()}
    ranks.close()
    return found


def test_parts_of_two_ranks_have_the_gradient_of_one_batch_for_each_loss_and_aggregation() -> None:
    whole = gradients_of(Ranks(), None)
    assert len(whole) == 24 and all(gradient.abs().max() > 1e-3 for gradient in whole.values())
    for found in run_as_ranks(rank_gradients):
        gaps = {key: float((torch.from_numpy(found[key]) - gradient).abs().max()) for key, gradient in whole.items()}
        assert max(gaps.values()) <= 1e-6, gaps


@pytest.mark.parametrize("max_tokens", [None, 10, 1])
@pytest.mark.parametrize("form", ["contiguous", "padded"])
def test_a_dense_batch_has_the_gradient_of_its_rows(form: str, max_tokens: int | None) -> None:
    rollouts = samples([(2, 3)] * 6)
    for rollout in rollouts[2:]:
        rollout["advantage"] = torch.zeros_like(rollout["advantage"])  # left out, so the default splits too
    wanted, _, _ = gradient(None, ragged(rollouts), entropy_bonus=False)
    batch = ragged(rollouts).contiguous() if form == "contiguous" else dense(rollouts, left=1, right=2)
    batch["tokens", "response"] = batch["tokens", "full"][:, -3:]
    found, _, _ = gradient(max_tokens, batch, entropy_bonus=False)
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_samples_without_an_advantage_are_not_computed_and_change_no_gradient() -> None:
    rollouts = samples(SIX_SHAPES)
    for rollout in rollouts[::2]:
        rollout["advantage"] = torch.zeros_like(rollout["advantage"])
    with_all, _, _ = gradient(None, ragged(rollouts), entropy_coeff=0.0, entropy_bonus=True)
    without, _, calls = gradient(6, ragged(rollouts), entropy_bonus=False)
    assert calls == 3
    torch.testing.assert_close(without, with_all, atol=1e-12, rtol=0)


def test_a_batch_without_any_advantage_still_has_metrics() -> None:
    rollouts = samples(SIX_SHAPES[:2])
    for rollout in rollouts:
        rollout["advantage"] = torch.zeros_like(rollout["advantage"])
    found, metrics, _ = gradient(None, ragged(rollouts), entropy_bonus=False)
    assert not found.any() and {"loss_objective", "kl_approx", "ESS"} <= metrics.keys()


def test_a_step_moves_the_weights_and_the_learning_rate() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    stepper = stepper_of(loss, max_tokens=10)
    before = loss.actor_network.logits.detach().clone()
    wanted, _, _ = gradient(None, ragged(samples(SIX_SHAPES)), entropy_bonus=False)
    out = stepper.step(ragged(samples(SIX_SHAPES)))
    torch.testing.assert_close(loss.actor_network.logits.detach(), before - 0.5 * wanted)
    torch.testing.assert_close(out["grad_norm"], wanted.norm().float())
    assert (out["lr"].item(), stepper.lr) == (0.5, 0.25)
    metrics = stepper.take_metrics()
    assert metrics["loss"] == pytest.approx(out["loss_objective"].item())
    assert metrics["ess"] == pytest.approx(out["ESS"].item())
    assert stepper.take_metrics() == {}


def test_a_gradient_is_scaled_down_to_its_greatest_norm() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    before = loss.actor_network.logits.detach().clone()
    stepper_of(loss, max_grad_norm=1e-3).step(ragged(samples(SIX_SHAPES)))  # type: ignore[arg-type]
    assert (loss.actor_network.logits.detach() - before).norm().item() == pytest.approx(0.5e-3, rel=1e-3)


def test_gradients_that_are_not_finite_are_skipped_and_too_many_in_a_row_end_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    weight = loss.actor_network.logits
    stepper, before = stepper_of(loss, max_bad_steps=2), weight.detach().clone()
    factors = iter((math.inf, 1.0, math.inf, math.nan))
    weight.register_hook(lambda grad: grad * next(factors))
    stepper.step(ragged(samples(SIX_SHAPES)))
    assert torch.equal(weight, before) and (stepper.skipped, stepper.lr) == (1, 0.5) and weight.grad is None
    assert "the step is skipped, 1 so far" in caplog.text
    for _ in range(2):
        stepper.step(ragged(samples(SIX_SHAPES)))
    with pytest.raises(DivergedError, match=r"optim\.max_bad_steps=2 gradients in a row are not finite"):
        stepper.step(ragged(samples(SIX_SHAPES)))
    assert stepper.skipped == 3


def test_weights_that_are_not_finite_end_the_run() -> None:
    loss = GRPOLoss(BigramActor(), entropy_bonus=False)
    stepper = stepper_of(loss)
    weight = loss.actor_network.logits.detach()
    stepper.optimizer.register_step_post_hook(lambda *_: weight.__setitem__(0, math.inf))
    with pytest.raises(DivergedError, match="the weights are not finite after this step"):
        stepper.step(ragged(samples(SIX_SHAPES)))


def test_it_continues_from_its_state() -> None:
    stepper = stepper_of(GRPOLoss(BigramActor(), entropy_bonus=False))
    stepper.step(ragged(samples(SIX_SHAPES)))
    stepper.skipped = 3
    other = stepper_of(GRPOLoss(BigramActor(), entropy_bonus=False))
    other.load_state_dict(stepper.state_dict())
    assert (other.skipped, other.schedule.last_epoch) == (3, 1)


def config_of(**loss: Any) -> GRPOConfig:
    return GRPOConfig(loss=LossConfig(replay="none", **loss))


def policy(config: GRPOConfig) -> tuple[TransformersWrapper, PolicyModel]:
    model = make_tiny_moe("qwen3_moe", num_hidden_layers=2)
    policy_model = PolicyModel.load(model, TOKENIZER, config.model)
    return TransformersWrapper(policy_model.model, replay="none"), policy_model


def loss_of(**loss: Any) -> GRPOLoss:
    config = config_of(**loss)
    return build_loss(policy(config)[0], config)


def clip_of(loss: GRPOLoss) -> list[float]:
    return [round(float(bound), 6) for bound in (loss.clip_epsilon_low, loss.clip_epsilon_high)]


@pytest.mark.parametrize("name", FAMILY)
def test_every_loss_by_its_name(name: str) -> None:
    loss = loss_of(name=name)
    assert type(loss) is getattr(objectives, name) and not loss.entropy_bonus
    assert loss_of(name=name, arguments={"entropy_bonus": True}).entropy_bonus


def test_arguments_as_yaml_has_them() -> None:
    loss = loss_of(arguments={"clip_epsilon": [0.1, 0.3], "correction": ["mis", "geo"], "thresholds": {"mis": 3.0}})
    assert clip_of(loss) == [0.1, 0.3] and loss.corrections.names == ("mis", "geo")
    assert loss.corrections.thresholds.mis == 3.0
    assert loss.corrections.thresholds.geo == objectives.Thresholds().geo


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "NoLoss"}, "loss.name=NoLoss must be one of CISPOLoss, DAPO, DPPOLoss, GRPOLoss, GSPOLoss, SAPOLoss"),
        ({"name": "GRPOAdvantage"}, "loss.name=GRPOAdvantage must be one of"),
        ({"arguments": {"clip": 0.2}}, "loss.arguments: GRPOLoss has no clip: did you mean"),
        ({"arguments": {"clip_epsilon": [0.2]}}, "loss.arguments: "),
        ({"arguments": {"thresholds": {"tsi": 3.0}}}, "loss.arguments.thresholds: Thresholds has no tsi: did you mean"),
        ({"router": {"top_k": 99}}, r"loss\.router\.top_k=99 is more than the \d+ experts of the model"),
        ({"router": {"coefficient": 1.0}}, "loss.router: MoERouterLoss has no coefficient: there are top_k"),
    ],
)
def test_what_a_loss_does_not_know_is_one_line(loss: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        loss_of(**loss)
    assert "\n" not in str(caught.value)


def test_a_router_loss_has_the_models_top_k() -> None:
    router_loss = loss_of(router={"load_balancing_coeff": 0.01}).router_loss
    assert router_loss is not None
    assert router_loss.top_k == 4  # of the tiny model
    given = loss_of(router={"load_balancing_coeff": 0.01, "top_k": 2}).router_loss
    assert given is not None and given.top_k == 2 and loss_of().router_loss is None


# -- advantages -------------------------------------------------------------------------------------------------------

REWARDS = {0: [1.0, 0.0, 0.0, 1.0], 1: [0.5, 0.5, 0.5, 2.5]}


def rows(rewards: dict[int, list[float]]) -> TensorDictBase:
    return lazy_stack(
        [
            TensorDict(
                {
                    "group_id": torch.tensor(group),
                    "next": {"reward": torch.full((1, 1), reward), "done": torch.ones(1, dtype=torch.bool)},
                }
            )
            for group, values in rewards.items()
            for reward in values
        ]
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        # means 0.5 and 1; unbiased deviations: sqrt(4 * 0.25 / 3) = 0.57735 and sqrt((3 * 0.25 + 2.25) / 3) = 1
        ("grpo", [0.866025, -0.866025, -0.866025, 0.866025, -0.5, -0.5, -0.5, 1.5]),
        # the others' mean: 1/3 or 2/3; 7/6 or 1/2
        ("rloo", [2 / 3, -2 / 3, -2 / 3, 2 / 3, -2 / 3, -2 / 3, -2 / 3, 2.0]),
        ("dr_grpo", [0.5, -0.5, -0.5, 0.5, -0.5, -0.5, -0.5, 1.5]),
        # of all eight: mean 0.75, squares 2 * 0.0625 + 2 * 0.5625 + 3 * 0.0625 + 3.0625 = 4.5, over 7: 0.801784
        ("reinforce_plus_plus", [0.311805, -0.935414, -0.935414, 0.311805, *[-0.311805] * 3, 2.182635]),
    ],
)
def test_advantages_are_those_of_the_formula(name: str, expected: list[float]) -> None:
    batch = advantages(name, rows(REWARDS), 8)
    found = torch.stack([row["advantage"] for row in batch.unbind(0)])
    assert found.shape == (8, 1, 1)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), atol=1e-5, rtol=0)
    assert [float(row["next", "reward"]) for row in batch.unbind(0)] == [*REWARDS[0], *REWARDS[1]]  # in their order


def test_reinforce_plus_plus_counts_samples_not_turns() -> None:
    turns = rows({0: [0.0, 1.0, 0.0, 3.0]})
    for place in (0, 2):
        turns[place]["next", "done"] = torch.zeros(1, dtype=torch.bool)
    batch = advantages("reinforce_plus_plus", turns, 2)
    found = [round(float(row["advantage"]), 5) for row in batch.unbind(0)]
    assert found == [-0.70711, -0.70711, 0.70711, 0.70711]  # returns 1 and 3: mean 2, deviation sqrt(2)


# -- the reference ----------------------------------------------------------------------------------------------------
def test_no_reference_where_the_loss_asks_for_none() -> None:
    config = config_of(reference="model")
    actor, policy_model = policy(config)
    reference, end = build_reference(actor, policy_model, config)
    assert reference is None
    end()
    assert build_loss(actor, config).reference == "key"


@pytest.mark.parametrize("arguments", [{"kl_to_ref_coeff": 0.1}, {"kl_mask_threshold": 0.5}])
@pytest.mark.parametrize("where", ["auto", "adapter"])
def test_an_adapter_is_switched_off_by_the_loss(arguments: dict[str, Any], where: str) -> None:
    config = config_of(arguments=arguments, reference=where)
    config.model = ModelConfig(lora=LoRAConfig(rank=2))
    actor, policy_model = policy(config)
    assert build_loss(actor, config).reference == "adapter"
    assert build_reference(actor, policy_model, config)[0] is None


def sequence() -> TensorDictBase:
    ids = torch.tensor([72, 105, 33, 10, 65])
    mask = torch.ones(5, dtype=torch.bool)
    row = {"tokens": {"full": ids, "prompt": ids[:2], "response": ids[2:]}, "masks": {"all_attention_mask": mask}}
    return lazy_stack([TensorDict({**row, "sampling": {"temperature": torch.tensor(1.0)}})])


@pytest.mark.parametrize("where", ["auto", "model"])
def test_a_second_model_keeps_the_weights_of_the_start(where: str) -> None:
    config = config_of(arguments={"kl_to_ref_coeff": 0.1}, reference=where)
    actor, policy_model = policy(config)
    before = actor.score(sequence())[0].detach()
    reference, end = build_reference(actor, policy_model, config)
    assert reference is not None
    with torch.no_grad():
        for weight in policy_model.trained.values():
            weight.mul_(0.9)
    batch = sequence()
    reference(batch)
    torch.testing.assert_close(batch[0]["ref_log_probs", "full"], before[0], atol=1e-6, rtol=0)
    assert "log_probs" not in batch[0].keys()  # noqa: SIM118  the engine's would be overwritten
    assert (actor.score(sequence())[0] - before).abs().max() > 1e-2
    end()


def test_a_second_engine_scores_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    def start(path: str, **arguments: Any) -> FakeAsyncVLLM:
        started.append((path, arguments))
        return FakeAsyncVLLM()

    monkeypatch.setattr(loss_building.AsyncVLLM, "from_pretrained", start)
    config = config_of(arguments={"kl_to_ref_coeff": 0.1}, reference="engine")
    config.engine.arguments = {"max_model_len": 64}
    actor, policy_model = policy(config)
    with pytest.raises(ConfigError, match=r"loss\.reference=engine needs a model"):
        build_reference(actor, policy_model, config)
    assert not started
    there = PolicyModel(policy_model.model, TOKENIZER, "some/folder", policy_model.dtype)
    reference, end = build_reference(actor, there, config)
    assert started == [("some/folder", {"engine": "vllm", "max_model_len": 64})]
    assert isinstance(reference, vLLMWrapper)
    batch = sequence()
    reference(batch)
    assert batch[0]["ref_log_probs", "full"].shape == (5,)
    engine = reference.model
    end()
    with pytest.raises(RuntimeError):
        engine.generate("after the end", use_tqdm=False)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of the forward passes."""
    seen: list[tuple[int, ...]] = []
    forward = ScoringModel.__call__

    def counted(self: ScoringModel, inputs: Any, *rest: Any) -> Any:
        seen.append(tuple(inputs["input_ids"].shape))
        return forward(self, inputs, *rest)

    monkeypatch.setattr(ScoringModel, "__call__", counted)
    return seen


def actor_of(replay: Any = "R3") -> TransformersWrapper:
    return TransformersWrapper(make_tiny_moe("qwen3_moe", num_hidden_layers=2), replay=replay, pad_model_input=True)


def rollouts_of(actor: TransformersWrapper, shift: float = 0.1) -> TensorDictBase:
    """Rollouts with experts of their own if the actor replays, and log-probs of an engine off by up to ``shift``."""
    rows = []
    for place, (prompt, answer) in enumerate(SHAPES):
        total = prompt + answer
        row = byte_row(prompt, answer, place)
        row["policy_versions"] = {"full": torch.where(row["masks"]["all_assistant_mask"], 2, -1).int()}
        row["advantage"] = torch.ones(1, 1)
        if actor.router_replay is not None:
            routes = random_routes(actor.router_replay, 1, total, seed=place)[0].to(torch.int8)
            routes[-1] = -1
            row["routed_experts"] = {"full": routes}
        rows.append(TensorDict(row))
    noise = torch.Generator().manual_seed(9)
    for row, log_probs in zip(rows, by_hand(actor, rows), strict=True):
        prompt = len(row["tokens", "prompt"])
        sampled = log_probs + shift * (2 * torch.rand(log_probs.shape, generator=noise) - 1)
        sampled[:prompt] = math.nan
        row["log_probs"] = TensorDict({"full": sampled})
    return lazy_stack(rows)


@torch.no_grad()
def by_hand(actor: TransformersWrapper, rows: list[TensorDictBase], live: bool = False) -> list[Tensor]:
    """Log-probs of each row's tokens, by a forward pass of its own; 0 of the first."""
    found = []
    for row in rows:
        ids = row["tokens", "full"][None]
        context: Any = nullcontext()
        if actor.replay == "R3" and not live:
            assert actor.router_replay is not None
            context = actor.router_replay.replay(row["routed_experts", "full"][None].long())
        with context:
            logits = actor.model(ids).logits
        log_probs = logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
        found.append(torch.cat([torch.zeros(1), log_probs]))
    return found


def scores_of(actor: TransformersWrapper, reference: Any = None, max_tokens: int | None = None, **loss: Any) -> Any:
    loss_module = GRPOLoss(actor, entropy_bonus=False, **loss)
    return RolloutScores(actor, loss_module, reference, max_tokens=max_tokens, precision=nullcontext)


def gaps(actor: TransformersWrapper, batch: TensorDictBase, live: bool = False) -> Tensor:
    rows = list(batch.unbind(0))
    parts = [row["log_probs", "full"] for row in rows]
    found = torch.cat([own - sampled for own, sampled in zip(by_hand(actor, rows, live), parts, strict=True)])
    return found[found.isfinite()]


@pytest.mark.parametrize("replay", ["R3", "R2", "none"])
def test_the_mismatch_is_that_of_forward_passes_one_by_one(replay: str) -> None:
    actor = actor_of(replay)
    batch = rollouts_of(actor)
    gap = gaps(actor, batch)
    found = scores_of(actor)(batch, 2, True)
    assert len(gap) == sum(answer for _, answer in SHAPES)
    assert found["mismatch_kl"] == pytest.approx(float((gap.exp() - 1 - gap).mean()), abs=1e-6)
    assert found["dlogp_mean"] == pytest.approx(float(gap.abs().mean()), abs=1e-5)
    assert found["dlogp_max"] == pytest.approx(float(gap.abs().max()), abs=1e-5)
    assert found["extreme_fraction"] == 0.0
    if replay == "R3":
        unaided = gaps(actor, batch, live=True)
        assert found["dlogp_live"] == pytest.approx(float(unaided.abs().mean()), abs=1e-5)
        assert found["dlogp_live"] > found["dlogp_mean"]
    else:
        assert "dlogp_live" not in found


def test_a_mismatch_that_lasts_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    actor = actor_of()
    scores, near, far = (scores_of(actor), rollouts_of(actor), rollouts_of(actor, shift=4.0))

    def warnings_after(batch: TensorDictBase) -> int:
        scores(batch, 2, True)
        return sum("far apart" in record.message for record in caplog.records)

    assert [warnings_after(batch) for batch in (near, far, far, far, near, far)] == [0, 1, 1, 1, 1, 2]


def test_the_entropy_is_the_mean_over_sampled_tokens() -> None:
    actor = actor_of("none")
    batch = rollouts_of(actor)
    with torch.no_grad():
        entropies = []
        for row in batch.unbind(0):
            log_probs = actor.model(row["tokens", "full"][None]).logits[0].log_softmax(-1)
            spread = -(log_probs.exp() * log_probs).sum(-1)  # of the next token
            entropies.append(spread[len(row["tokens", "prompt"]) - 1 : -1])
    assert scores_of(actor)(batch, 2, True)["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-5)


def test_agreement_is_the_share_of_rows_that_the_live_router_chooses_too() -> None:
    actor = actor_of()
    batch = rollouts_of(actor)
    assert actor.router_replay is not None
    own = []
    for row in batch.unbind(0):
        with actor.router_replay.record() as recording, torch.no_grad():
            actor.model(row["tokens", "full"][None])
        own.append(recording.routed_experts[0].to(torch.int8))
    every = scores_of(actor)
    assert every(batch, 2, True)["agreement"] < 0.5  # experts were drawn
    for row, routes in zip(batch.unbind(0), own, strict=True):
        row["routed_experts", "full"] = routes
    found = every(batch, 2, True)
    assert found["agreement"] == 1.0 and found["dlogp_live"] == pytest.approx(found["dlogp_mean"], abs=1e-5)


@pytest.mark.parametrize(("replay", "max_tokens"), [("R3", 1), ("R2", 14), ("none", 18)])
def test_parts_change_nothing(replay: str, max_tokens: int) -> None:
    def run(limit: int | None) -> tuple[dict[str, float], TensorDictBase]:
        actor = actor_of(replay)
        batch = rollouts_of(actor)
        reference = actor.reference().get_new_version(log_probs_key="ref_log_probs")
        loss = {"proximal_policy": "recomputed", "kl_to_ref_coeff": 0.1}
        return scores_of(actor, reference, limit, **loss)(batch, 2, True), batch

    whole, batch = run(None)
    found, in_parts = run(max_tokens)
    assert found.keys() == whole.keys()
    for name, value in found.items():
        assert value == pytest.approx(whole[name], abs=2e-6), name
    keys = [("prox", "full"), ("ref_log_probs", "full")]
    keys += [("train_routed_experts", "full")] if replay == "R2" else []
    for row, other in zip(batch.unbind(0), in_parts.unbind(0), strict=True):
        for key in keys:
            torch.testing.assert_close(other[key], row[key], atol=2e-6, rtol=0)


def test_proximal_log_probs_are_those_of_the_policy_and_the_loss_reads_them() -> None:
    actor = actor_of()
    scores = scores_of(actor, proximal_policy="recomputed")
    batch = rollouts_of(actor)
    assert scores(batch, 2, False) == {}
    for row, expected in zip(batch.unbind(0), by_hand(actor, list(batch.unbind(0))), strict=True):
        torch.testing.assert_close(row["prox", "full"], expected, atol=1e-5, rtol=0)
        assert not row["prox", "full"].requires_grad
    assert all(weight.grad is None for weight in actor.model.parameters())
    out = scores.loss(batch)
    assert float(out.kl_approx) != 0.0  # to the engine
    assert float(out.loss_objective) == pytest.approx(-1.0, abs=1e-5)  # ratio 1 to itself, advantage 1


def test_the_loss_reads_the_reference_that_is_written() -> None:
    actor = actor_of()
    reference = actor.reference(make_tiny_moe("qwen3_moe", num_hidden_layers=2, seed=5))
    scores = scores_of(actor, reference.get_new_version(log_probs_key="ref_log_probs"), kl_to_ref_coeff=1.0)
    batch = rollouts_of(actor)
    scores(batch, 2, False)
    rows = list(batch.unbind(0))
    known = torch.cat([torch.arange(len(row["tokens", "full"])) >= len(row["tokens", "prompt"]) for row in rows])
    gap = (torch.cat(by_hand(reference, rows)) - torch.cat(by_hand(actor, rows)))[known].clamp(max=20)
    k3 = (gap.exp() - 1 - gap).clamp(-10, 10).mean()
    assert float(scores.loss(batch).loss_kl_to_ref) == pytest.approx(float(k3), rel=1e-4)


def test_experts_are_recorded_once(calls: list[Any]) -> None:
    actor = actor_of("R2")
    batch = rollouts_of(actor)
    for row in batch.unbind(0):
        assert "train_routed_experts" not in row.keys()  # noqa: SIM118
    scores_of(actor)(batch, 2, False)
    assert len(calls) == 1 and actor.router_replay is not None
    for row in batch.unbind(0):
        with actor.router_replay.record() as recording, torch.no_grad():
            actor.model(row["tokens", "full"][None])
        mine, expected = row["train_routed_experts", "full"], recording.routed_experts[0]
        assert torch.equal(mine.sort(-1).values.long(), expected.sort(-1).values.long())
    kept = [row["train_routed_experts", "full"].clone() for row in batch.unbind(0)]
    with torch.no_grad():
        for weight in actor.model.parameters():
            weight.mul_(0.7)
    actor.score(batch)  # with a gradient: it replays
    for row, routes in zip(batch.unbind(0), kept, strict=True):
        assert torch.equal(row["train_routed_experts", "full"], routes)


@pytest.mark.parametrize(
    ("replay", "due", "loss", "passes"),
    [
        ("R3", True, {}, 2),  # with replay and without
        ("none", True, {}, 1),
        ("R2", True, {}, 1),
        ("R2", False, {}, 1),
        ("R3", False, {"proximal_policy": "recomputed"}, 1),
        ("none", False, {"proximal_policy": "recomputed"}, 1),
        ("R3", False, {"proximal_policy": "interpolated"}, 0),
        ("R3", False, {}, 0),
    ],
)
def test_forward_passes(calls: list[Any], replay: str, due: bool, loss: dict[str, Any], passes: int) -> None:
    actor = actor_of(replay)
    batch = rollouts_of(actor)
    calls.clear()
    scores_of(actor, **loss)(batch, 2, due)
    assert calls == [(4, 9)] * passes
