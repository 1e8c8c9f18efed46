"""The half of a run that trains: losses, scores and updates are those of the whole batch, whatever its parts."""

from __future__ import annotations

import itertools
import math
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pytest import LogCaptureFixture, MonkeyPatch
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
from torchrl_moe.objectives import GRPOLoss, MoERouterLoss
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM, make_tiny_moe
from torchrl_moe.trainers import learner as learner_module
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

pytestmark = pytest.mark.usefixtures("one_thread")

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


# -- a learner, on a real model ---------------------------------------------------------------------------------------
def learner_of(target: str = "", checkpointing: bool = False, replay: str = "R3", **optim: Any) -> Learner:
    """Of a model that an adapter, if any, already changes: one begins with 0, where half of its gradient is 0."""
    lora = LoRAConfig(rank=2, target=target) if target else LoRAConfig()
    model_config = ModelConfig(lora=lora, activation_checkpointing=checkpointing)
    optim_config = OptimConfig(lr=1e-3, **optim)
    config = GRPOConfig(steps=4, model=model_config, loss=LossConfig(replay=replay), optim=optim_config)
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
    weights = learner.actor.model.named_parameters()
    return {name: one.grad.clone() for name, one in weights if one.requires_grad and one.grad is not None}


ALWAYS = [("all", "R3"), ("", "R2"), ("experts", "none")]
WIDE = itertools.product(["", "attention", "experts", "all"], ["R3", "R2", "none"])


@pytest.mark.parametrize(
    ("target", "replay"),
    [*ALWAYS, *(pytest.param(*pair, marks=pytest.mark.parity) for pair in WIDE if pair not in ALWAYS)],
)
def test_parts_and_activation_checkpointing_change_no_gradient(target: str, replay: str) -> None:
    whole = gradients(learner_of(target, replay=replay))
    assert max(float(grad.abs().max()) for grad in whole.values()) > 1e-2
    assert not target or all("lora_" in name for name in whole)
    for checkpointing, max_tokens in ((False, 14), (True, None), (True, 14)):
        found = gradients(learner_of(target, checkpointing, replay, max_tokens=max_tokens))
        assert found.keys() == whole.keys()
        for name, grad in whole.items():
            torch.testing.assert_close(found[name], grad, atol=1e-5, rtol=0, msg=name)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_layers_are_computed_again_in_the_backward_pass(checkpointing: bool) -> None:
    learner, count = learner_of(checkpointing=checkpointing), itertools.count(1)
    batch = batch_of(learner)
    with torch.no_grad():
        learner.loss(batch)  # the first pass asks the model what it can do, by passes of its own
    layer: Any = learner.actor.model.model.layers[1].self_attn  # type: ignore[union-attr]
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(next(count)))
    loss = learner.loss(batch).loss_objective
    assert calls == [1]
    loss.backward()
    assert calls == ([1, 2] if checkpointing else [1])


def test_the_schedule_knows_the_steps_of_the_run() -> None:
    learner = learner_of(schedule="linear", epochs=2, minibatches=2)
    rates = []
    for _ in range(16):
        rates.append(learner.stepper.lr)
        learner.stepper.schedule.step()
    assert rates == pytest.approx([1e-3 * (1 - step / 16) for step in range(16)])


# -- norms and parts --------------------------------------------------------------------------------------------------
class Others(Ranks):
    """This rank and others, of which each says a value of its own; rank 0 tells what to draw from."""

    size = 2

    def __init__(self, *values: Any) -> None:
        self._values = values

    def gather(self, value: Any) -> list[Any]:
        return [value, *self._values]

    def from_first(self, value: Any, phase: str) -> Any:
        return 17


@pytest.mark.parametrize(
    ("mine", "others", "norm", "clipped"),
    [
        ([3.0, 4.0], (5.0, 10.0), 10.0, [0.3, 0.4]),  # all scale by the same: norms may differ by rounding
        ([math.inf], (1.0,), math.nan, [math.inf]),
        ([1.0], (math.nan,), math.nan, [1.0]),
        ([math.nan], (1.0,), math.nan, [math.nan]),
    ],
)
def test_ranks_clip_by_the_largest_norm(mine: Any, others: Any, norm: float, clipped: Any) -> None:
    weights = [nn.Parameter(torch.zeros(1)) for _ in mine]
    for weight, grad in zip(weights, mine, strict=True):
        weight.grad = torch.tensor([grad])
    assert clip_gradients(weights, 1.0, Others(*others)) == pytest.approx(norm, nan_ok=True)
    found = [float(weight.grad) for weight in weights if weight.grad is not None]
    assert found == pytest.approx(clipped, abs=1e-5, nan_ok=True)


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
        ([], None, 2, [[], []]), ([], 4, 2, [[], []]), ([9], 18, 3, [[0], [], []]),
        ([5, 9, 4, 8], 18, 2, [[1, 3], [0, 2]]), ([5, 9, 4, 8], 18, 3, [[1], [3], [0, 2]]),
        ([5, 9, 4, 8], 18, 4, [[1], [3], [0], [2]]), ([5, 9, 4, 8], 18, 6, [[1], [3], [0], [2], [], []]),
    ],
)  # fmt: skip
def test_ranks_have_equally_many_parts(lengths: list[int], limit: Any, at_least: int, parts: Any) -> None:
    assert micro_batches_of_ranks(lengths, limit, Others(at_least)) == parts
    with pytest.raises(ValueError, match="max_tokens must be at least 1, got 0"):
        micro_batches([1], 0)


def epoch(count: int, of: int, ranks: Ranks | None = None) -> list[list[int]]:
    batch = TensorDict({"sample": torch.arange(of)}, batch_size=[of])
    return [part["sample"].tolist() for part in minibatches(batch, count, ranks)]


def test_each_epoch_has_every_sample_once_in_another_order_on_ranks_that_see_the_same_alike() -> None:
    assert epoch(1, 5) == [[0, 1, 2, 3, 4]]
    assert sorted(epoch(4, 2)) == [[0], [1]]  # no more parts than samples
    torch.manual_seed(0)
    first, second, shared = epoch(3, 7), epoch(3, 7), epoch(3, 7, Others())
    for found in (first, second, shared):
        assert [len(part) for part in found] == [3, 2, 2]
        assert sorted(i for part in found for i in part) == list(range(7))
    assert first != second
    torch.manual_seed(5)
    assert epoch(3, 7, Others()) == shared
    for own, others in ((4, 3), (3, 4)):  # as many steps as the rank with fewest samples can make
        assert len(epoch(4, own, Others(others))) == 3


# -- steps, most of them on a model of bigrams ------------------------------------------------------------------------
SIX_SHAPES = [(2, 3), (1, 7), (3, 2), (2, 5), (4, 1), (1, 4)]


def stepper_of(loss: GRPOLoss | None = None, max_tokens: int | None = None, **changes: Any) -> TokenStepper:
    loss = loss or GRPOLoss(BigramActor(), entropy_bonus=False)
    optimizer = torch.optim.SGD(loss.actor_network.parameters(), lr=0.5)
    options: dict[str, Any] = {"max_grad_norm": None, "precision": nullcontext, **changes}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
    return TokenStepper(loss, optimizer, schedule, max_tokens=max_tokens, **options)


def six(unrewarded: slice = slice(0), shapes: Any = SIX_SHAPES) -> list[TensorDictBase]:
    """Rollouts, some of them without an advantage."""
    rollouts = samples(shapes)
    for rollout in rollouts[unrewarded]:
        rollout["advantage"] = torch.zeros_like(rollout["advantage"])
    return rollouts


def gradient(max_tokens: int | None, batch: TensorDictBase, **loss: Any) -> tuple[Tensor, dict[str, Tensor], int]:
    actor = BigramActor()
    metrics = stepper_of(GRPOLoss(actor, **{"entropy_bonus": False, **loss}), max_tokens).accumulate(batch)
    assert actor.logits.grad is not None
    return actor.logits.grad, metrics, len(actor.calls)


@pytest.mark.parametrize("max_tokens", [None, 10, 1])
@pytest.mark.parametrize("form", ["contiguous", "padded"])
def test_a_dense_batch_has_the_gradient_of_its_rows(form: str, max_tokens: int | None) -> None:
    rollouts = six(slice(2, None), [(2, 3)] * 6)  # four are left out, so the default splits too
    batch = ragged(rollouts).contiguous() if form == "contiguous" else dense(rollouts, left=1, right=2)
    batch["tokens", "response"] = batch["tokens", "full"][:, -3:]
    wanted, found = gradient(None, ragged(rollouts))[0], gradient(max_tokens, batch)[0]
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=0)


def test_samples_without_an_advantage_are_not_computed_and_change_no_gradient_but_have_metrics() -> None:
    batch = ragged(six(slice(None, None, 2)))
    with_all, _, _ = gradient(None, batch, entropy_coeff=0.0, entropy_bonus=True)
    without, _, calls = gradient(6, batch)
    assert calls == 3
    torch.testing.assert_close(without, with_all, atol=1e-12, rtol=0)
    found, metrics, _ = gradient(None, ragged(six(slice(None), SIX_SHAPES[:2])))
    assert not found.any() and {"loss_objective", "kl_approx", "ESS"} <= metrics.keys()


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


@pytest.mark.parametrize("limit", [None, 1e-3])
def test_a_step_moves_the_weights_by_at_most_the_greatest_norm_and_the_learning_rate(limit: float | None) -> None:
    stepper = stepper_of(max_tokens=10, max_grad_norm=limit)
    weight: Any = stepper.loss.actor_network.logits
    before = weight.detach().clone()
    wanted = gradient(None, ragged(six()))[0]
    out = stepper.step(ragged(six()))
    moved = wanted if limit is None else wanted * (limit / wanted.norm())
    torch.testing.assert_close(weight.detach(), before - 0.5 * moved)
    torch.testing.assert_close(out["grad_norm"], wanted.norm().float())  # before it was scaled down
    assert (out["lr"].item(), stepper.lr) == (0.5, 0.25)
    metrics = stepper.take_metrics()
    assert metrics["loss"] == pytest.approx(out["loss_objective"].item())
    assert metrics["ess"] == pytest.approx(out["ESS"].item())
    assert stepper.take_metrics() == {}


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
    assert learner.optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_gradients_that_are_not_finite_are_skipped_and_many_end_the_run(caplog: LogCaptureFixture) -> None:
    stepper = stepper_of(max_bad_steps=2)
    weight: Any = stepper.loss.actor_network.logits
    before = weight.detach().clone()
    factors = iter((math.inf, 1.0, math.inf, math.nan))
    weight.register_hook(lambda grad: grad * next(factors))
    stepper.step(ragged(six()))
    assert torch.equal(weight, before) and (stepper.skipped, stepper.lr) == (1, 0.5) and weight.grad is None
    assert "the step is skipped, 1 so far" in caplog.text
    for _ in range(2):
        stepper.step(ragged(six()))
    with pytest.raises(DivergedError, match=r"optim\.max_bad_steps=2 gradients in a row are not finite"):
        stepper.step(ragged(six()))
    other = stepper_of()  # continues from its state
    other.load_state_dict(stepper.state_dict())
    assert (other.skipped, other.count, other.schedule.last_epoch) == (stepper.skipped, 4, 1) and other.skipped == 3


def test_weights_that_are_not_finite_end_the_run() -> None:
    stepper = stepper_of()
    weight = stepper.loss.actor_network.logits.detach()
    stepper.optimizer.register_step_post_hook(lambda *_: weight.__setitem__(0, math.inf))
    with pytest.raises(DivergedError, match="the weights are not finite after this step"):
        stepper.step(ragged(six()))


# -- the loss ---------------------------------------------------------------------------------------------------------
def config_of(rank: int = 0, **loss: Any) -> GRPOConfig:
    return GRPOConfig(loss=LossConfig(replay="none", **loss), model=ModelConfig(lora=LoRAConfig(rank=rank)))


def policy(config: GRPOConfig) -> tuple[TransformersWrapper, PolicyModel]:
    policy_model = PolicyModel.load(make_tiny_moe("qwen3_moe", num_hidden_layers=2), TOKENIZER, config.model)
    return TransformersWrapper(policy_model.model, replay="none"), policy_model


def loss_of(**loss: Any) -> Any:
    config = config_of(**loss)
    return build_loss(policy(config)[0], config)


def test_every_loss_by_its_name() -> None:
    config = config_of()
    actor, _ = policy(config)
    for name in FAMILY:
        config.loss.name = name
        loss: Any = build_loss(actor, config)
        assert type(loss) is getattr(objectives, name)
        assert not loss.entropy_bonus and loss.router_loss is None


def test_arguments_as_yaml_has_them_and_a_router_loss_with_the_models_top_k() -> None:
    loss = loss_of(arguments={"clip_epsilon": [0.1, 0.3], "correction": ["mis", "geo"], "thresholds": {"mis": 3.0}})
    assert [float(loss.clip_epsilon_low), float(loss.clip_epsilon_high)] == pytest.approx([0.1, 0.3])
    assert loss_of(arguments={"entropy_bonus": True}).entropy_bonus
    assert loss.corrections.names == ("mis", "geo") and loss.corrections.thresholds.mis == 3.0
    assert loss.corrections.thresholds.geo == objectives.Thresholds().geo
    assert loss_of(router={"load_balancing_coeff": 0.01}).router_loss.top_k == 4  # of the tiny model
    assert loss_of(router={"load_balancing_coeff": 0.01, "top_k": 2}).router_loss.top_k == 2


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "GRPOAdvantage"}, "loss.name=GRPOAdvantage must be one of CISPOLoss, DAPO, DPPOLoss, GRPOLoss, GSP"),
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


# -- advantages -------------------------------------------------------------------------------------------------------
def rewarded(*samples: tuple[int, list[float]]) -> TensorDictBase:
    """Samples of a group each, a row for each of their turns."""
    rows = [
        {"group_id": group, "next": {"reward": torch.full((1, 1), reward), "done": [turn == len(turns) - 1]}}
        for group, turns in samples
        for turn, reward in enumerate(turns)
    ]
    return lazy_stack([TensorDict(row) for row in rows])


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [0.7071, -0.7071, -0.7071, -0.7071, 0.7071]),  # deviations sqrt(0.5) and sqrt(8)
        ("rloo", [1.0, -1.0, -4.0, -4.0, 4.0]),
        ("dr_grpo", [0.5, -0.5, -2.0, -2.0, 2.0]),
        # of all four: mean 1.25, squares 0.0625 + 2 * 1.5625 + 7.5625 = 10.75, over 3: 1.89297
        ("reinforce_plus_plus", [-0.1321, -0.6603, -0.6603, -0.6603, 1.4527]),
    ],
)
def test_advantages_are_those_of_the_formula_for_samples_and_not_turns(name: str, expected: list[float]) -> None:
    batch = advantages(name, rewarded((0, [1.0]), (0, [0.0]), (1, [0.0, 0.0]), (1, [4.0])), 4)
    found = torch.stack([row["advantage"] for row in batch.unbind(0)])
    assert found.shape == (5, 1, 1) and found.flatten().tolist() == pytest.approx(expected, abs=1e-4)
    assert [float(row["next", "reward"]) for row in batch.unbind(0)] == [1.0, 0.0, 0.0, 0.0, 4.0]  # in their order


# -- the reference ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("arguments", "where", "rank", "expected"),
    [
        ({}, "model", 0, "key"),  # the loss asks for none
        ({"kl_to_ref_coeff": 0.1}, "auto", 2, "adapter"),
        ({"kl_mask_threshold": 0.5}, "adapter", 2, "adapter"),
    ],
)
def test_the_loss_asks_for_no_reference_or_switches_an_adapter_off(
    arguments: Any, where: str, rank: int, expected: str
) -> None:
    config = config_of(rank, arguments=arguments, reference=where)
    actor, policy_model = policy(config)
    reference, end = build_reference(actor, policy_model, config)
    end()
    assert reference is None and build_loss(actor, config).reference == expected


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


def test_a_second_engine_scores_the_reference(monkeypatch: MonkeyPatch) -> None:
    started = []

    def start(path: str, **arguments: Any) -> FakeAsyncVLLM:
        started.append((path, arguments))
        return FakeAsyncVLLM()

    monkeypatch.setattr(learner_module.AsyncVLLM, "from_pretrained", start)
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
    end()
    with pytest.raises(RuntimeError):
        reference.model.generate("after the end", use_tqdm=False)


def test_totals_of_an_earlier_minibatch_are_not_those_of_a_later_one_with_the_same_answers() -> None:
    actor = actor_of("none")
    router_loss = MoERouterLoss(actor, top_k=4, load_balancing_coeff=1.0, z_coeff=1.0)
    loss = GRPOLoss(actor, entropy_bonus=False, router_loss=router_loss)
    batch = rollouts_of(actor)
    stepper = stepper_of(loss, max_tokens=max(len(row["tokens", "full"]) for row in batch))

    def gradients() -> list[Tensor]:
        actor.model.zero_grad()
        stepper.accumulate(batch[[0]])  # a part, which needs no totals
        return [weight.grad.clone() for weight in actor.model.parameters() if weight.grad is not None]

    fresh = gradients()
    stepper.accumulate(batch)  # several
    assert all(torch.equal(one, other) for one, other in zip(gradients(), fresh, strict=True))


# -- scores -----------------------------------------------------------------------------------------------------------
@pytest.fixture
def calls(monkeypatch: MonkeyPatch) -> list[tuple[int, ...]]:
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
        row = byte_row(prompt, answer, place)
        row["policy_versions"] = {"full": torch.where(row["masks"]["all_assistant_mask"], 2, -1).int()}
        row["advantage"] = torch.ones(1, 1)
        if actor.router_replay is not None:
            routes = random_routes(actor.router_replay, 1, prompt + answer, seed=place)[0].to(torch.int8)
            routes[-1] = -1
            row["routed_experts"] = {"full": routes}
        rows.append(TensorDict(row))
    noise = torch.Generator().manual_seed(9)
    for row, log_probs in zip(rows, by_hand(actor, rows), strict=True):
        sampled = log_probs + shift * (2 * torch.rand(log_probs.shape, generator=noise) - 1)
        sampled[: len(row["tokens", "prompt"])] = math.nan
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


@torch.no_grad()
def chosen(actor: TransformersWrapper, row: TensorDictBase) -> Tensor:
    """The experts that the live router chooses."""
    assert actor.router_replay is not None
    with actor.router_replay.record() as recording:
        actor.model(row["tokens", "full"][None])
    return recording.routed_experts[0]


def scores_of(actor: TransformersWrapper, reference: Any = None, max_tokens: int | None = None, **loss: Any) -> Any:
    loss_module = GRPOLoss(actor, entropy_bonus=False, **loss)
    return RolloutScores(actor, loss_module, reference, max_tokens=max_tokens, precision=nullcontext)


def gaps(actor: TransformersWrapper, batch: TensorDictBase, live: bool = False) -> Tensor:
    rows = list(batch.unbind(0))
    own = torch.cat(by_hand(actor, rows, live))
    found = own - torch.cat([row["log_probs", "full"] for row in rows])
    return found[found.isfinite()]


@pytest.mark.parametrize("replay", ["R3", "R2", "none"])
def test_mismatch_and_entropy_are_those_of_forward_passes_one_by_one(replay: str) -> None:
    actor = actor_of(replay)
    batch = rollouts_of(actor)
    gap = gaps(actor, batch)
    found = scores_of(actor)(batch, 2, True)
    assert len(gap) == sum(answer for _, answer in SHAPES)
    assert found["mismatch_kl"] == pytest.approx(float((gap.exp() - 1 - gap).mean()), abs=1e-6)
    assert found["dlogp_mean"] == pytest.approx(float(gap.abs().mean()), abs=1e-5)
    assert found["dlogp_max"] == pytest.approx(float(gap.abs().max()), abs=1e-5)
    assert found["extreme_fraction"] == 0.0
    assert ("dlogp_live" in found) == (replay == "R3")
    if replay == "R3":
        unaided = gaps(actor, batch, live=True)
        assert found["dlogp_live"] == pytest.approx(float(unaided.abs().mean()), abs=1e-5)
        assert found["dlogp_live"] > found["dlogp_mean"]
        return
    entropies = []
    for row in batch.unbind(0):
        with torch.no_grad():
            log_probs = actor.model(row["tokens", "full"][None]).logits[0].log_softmax(-1)
        spread = -(log_probs.exp() * log_probs).sum(-1)  # of the next token
        entropies.append(spread[len(row["tokens", "prompt"]) - 1 : -1])
    assert found["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), abs=1e-5)


def test_a_mismatch_that_lasts_is_warned_of_once(caplog: LogCaptureFixture) -> None:
    actor = actor_of()
    scores, near, far = (scores_of(actor), rollouts_of(actor), rollouts_of(actor, shift=4.0))

    def warnings_after(batch: TensorDictBase) -> int:
        scores(batch, 2, True)
        return sum("far apart" in record.message for record in caplog.records)

    assert [warnings_after(batch) for batch in (near, far, far, far, near, far)] == [0, 1, 1, 1, 1, 2]


def test_agreement_is_the_share_of_rows_that_the_live_router_chooses_too() -> None:
    actor = actor_of()
    batch = rollouts_of(actor)
    every = scores_of(actor)
    assert every(batch, 2, True)["agreement"] < 0.5  # experts were drawn
    for row in batch.unbind(0):
        row["routed_experts", "full"] = chosen(actor, row).to(torch.int8)
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
    assert found == pytest.approx(whole, abs=2e-6)
    keys = [("prox", "full"), ("ref_log_probs", "full")]
    keys += [("train_routed_experts", "full")] if replay == "R2" else []
    for row, other in zip(batch.unbind(0), in_parts.unbind(0), strict=True):
        for key in keys:
            torch.testing.assert_close(other[key], row[key], atol=2e-6, rtol=0)


def test_the_loss_reads_the_log_probs_of_policy_and_reference_that_are_written() -> None:
    actor = actor_of()
    reference = actor.reference(make_tiny_moe("qwen3_moe", num_hidden_layers=2, seed=5))
    writer = reference.get_new_version(log_probs_key="ref_log_probs")
    scores = scores_of(actor, writer, proximal_policy="recomputed", kl_to_ref_coeff=1.0)
    batch = rollouts_of(actor)
    assert scores(batch, 2, False) == {}
    rows = list(batch.unbind(0))
    for row, expected in zip(rows, by_hand(actor, rows), strict=True):
        torch.testing.assert_close(row["prox", "full"], expected, atol=1e-5, rtol=0)
        assert not row["prox", "full"].requires_grad
    assert all(weight.grad is None for weight in actor.model.parameters())
    out = scores.loss(batch)
    assert float(out.kl_approx) != 0.0  # to the engine
    assert float(out.loss_objective) == pytest.approx(-1.0, abs=1e-5)  # ratio 1 to itself, advantage 1
    known = torch.cat([torch.arange(len(row["tokens", "full"])) >= len(row["tokens", "prompt"]) for row in rows])
    gap = (torch.cat(by_hand(reference, rows)) - torch.cat(by_hand(actor, rows)))[known].clamp(max=20)
    k3 = (gap.exp() - 1 - gap).clamp(-10, 10).mean()
    assert float(out.loss_kl_to_ref) == pytest.approx(float(k3), rel=1e-4)


RECOMPUTED = {"proximal_policy": "recomputed"}


@pytest.mark.parametrize(
    ("replay", "due", "loss", "passes"),
    [
        ("R3", True, {}, 2),  # with replay and without
        ("none", True, {}, 1), ("R2", True, {}, 1), ("R2", False, {}, 1),
        ("R3", False, RECOMPUTED, 1), ("none", False, RECOMPUTED, 1),
        ("R3", False, {"proximal_policy": "interpolated"}, 0), ("R3", False, {}, 0),
    ],
)  # fmt: skip
def test_forward_passes(calls: list[Any], replay: str, due: bool, loss: dict[str, Any], passes: int) -> None:
    actor = actor_of(replay)
    batch = rollouts_of(actor)
    calls.clear()
    scores_of(actor, **loss)(batch, 2, due)
    assert calls == [(4, 9)] * passes
