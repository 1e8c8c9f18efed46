"""The loss, the advantages and the reference are those that a configuration names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack

from support.collecting import TOKENIZER
from torchrl_moe import objectives
from torchrl_moe.modules import TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.testing import FakeAsyncVLLM, make_tiny_moe
from torchrl_moe.trainers import learner as loss_building
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, LossConfig, ModelConfig
from torchrl_moe.trainers.learner import advantages, build_loss, build_reference
from torchrl_moe.trainers.policy_model import PolicyModel


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


@pytest.mark.parametrize("name", ["GRPOLoss", "DAPO", "GSPOLoss", "CISPOLoss", "SAPOLoss", "DPPOLoss"])
def test_every_loss_by_its_name(name: str) -> None:
    loss = loss_of(name=name)
    assert type(loss) is getattr(objectives, name)
    assert not loss.entropy_bonus
    assert loss_of(name=name, arguments={"entropy_bonus": True}).entropy_bonus


def test_dapo_clips_higher() -> None:
    assert clip_of(loss_of(name="DAPO")) == [0.2, 0.28]


def test_arguments_as_yaml_has_them() -> None:
    loss = loss_of(arguments={"clip_epsilon": [0.1, 0.3], "correction": ["mis", "geo"], "thresholds": {"mis": 3.0}})
    assert clip_of(loss) == [0.1, 0.3]
    assert loss.corrections.names == ("mis", "geo")
    assert loss.corrections.thresholds.mis == 3.0
    assert loss.corrections.thresholds.geo == objectives.Thresholds().geo


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        ({"name": "NoLoss"}, "loss.name=NoLoss must be one of CISPOLoss, DAPO, DPPOLoss, GRPOLoss, GSPOLoss, SAPOLoss"),
        ({"name": "MoERouterLoss"}, "loss.name=MoERouterLoss must be one of"),
        ({"name": "GRPOAdvantage"}, "loss.name=GRPOAdvantage must be one of"),
        ({"arguments": {"clip": 0.2}}, "loss.arguments: GRPOLoss has no clip: did you mean"),
        ({"arguments": {"aggregation": "median"}}, "loss.arguments: aggregation must be one of"),
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
    assert given is not None and given.top_k == 2
    assert loss_of().router_loss is None


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
    batch = advantages(name, rows(REWARDS))
    found = torch.stack([row["advantage"] for row in batch.unbind(0)])
    assert found.shape == (8, 1, 1)
    torch.testing.assert_close(found.flatten(), torch.tensor(expected), atol=1e-5, rtol=0)
    assert [float(row["next", "reward"]) for row in batch.unbind(0)] == [*REWARDS[0], *REWARDS[1]]  # in their order


def test_reinforce_plus_plus_counts_samples_not_turns() -> None:
    turns = rows({0: [0.0, 1.0, 0.0, 3.0]})
    for place in (0, 2):
        turns[place]["next", "done"] = torch.zeros(1, dtype=torch.bool)
    batch = advantages("reinforce_plus_plus", turns)
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
    with pytest.raises(ConfigError, match=r"loss\.reference=engine needs a model that is in a folder or on the hub"):
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
