"""vLLMWrapper in TorchRL's own pipeline: chat environment, collector, replay buffer, advantages. All of it is stock.

What comes out of the far end is compared with what the engine says of those tokens when it is asked again: routes that
had slipped by one row, or to another sample, would show there. ``test_policy_sampling.py`` compares with a forward.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDictBase, set_list_to_stack
from torch import Tensor
from torchrl.collectors.llm import LLMCollector
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv, DatasetChatEnv
from torchrl.objectives.llm import MCAdvantage

from support.collecting import NextQuestion
from support.strategies import Says
from torchrl_moe.data import RoutedExperts
from torchrl_moe.modules import vLLMWrapper
from torchrl_moe.testing import ByteTokenizer, FakeAsyncVLLM

GROUP, ENVS, NEW = 4, 8, 6
TEMPERATURE = 0.7


@pytest.fixture(autouse=True)
def lists_are_stacks() -> Iterator[None]:
    """As TorchRL's environments demand."""
    with set_list_to_stack(True):
        yield


class Questions:
    """An endless dataloader of questions, no two of the same length."""

    batch_size = 0

    def __init__(self) -> None:
        self.count = 0

    def __iter__(self) -> Questions:
        return self

    def __next__(self) -> dict[str, str]:
        self.count += 1
        return {"query": f"{'1+' * self.count}1="}


def reward_of(response: Tensor) -> float:
    """What anyone can verify: the mean byte."""
    return float(response.float().mean() / 256)


class MeanByte(Transform):
    """The reward, ``[*B, 1, 1]``."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        rewards = [reward_of(response) for response in tensordict.get(("tokens", "response"), as_list=True)]
        return next_tensordict.set("reward", torch.tensor(rewards).view(*tensordict.batch_size, 1, 1))


def make_env(mode: str, turns: int) -> EnvBase:
    source = {"tokenizer": ByteTokenizer(), "input_mode": mode}
    env = ChatEnv.from_dataloader(Questions(), batch_size=(ENVS,), repeats=GROUP, **source)
    assert isinstance(env, DatasetChatEnv)
    env = env.append_transform(MeanByte()).append_transform(StepCounter(max_steps=turns))
    return env.append_transform(NextQuestion()) if turns > 1 else env


def make_policy(engine: Any, mode: str = "history", **kwargs: Any) -> vLLMWrapper:
    sampling = {"max_new_tokens": NEW, "temperature": TEMPERATURE}
    return vLLMWrapper(engine, input_mode=mode, generate_kwargs=sampling, **kwargs)


def collect(policy: vLLMWrapper, **kwargs: Any) -> list[Any]:
    """Return two batches of the collector; its version is set to 3, which no engine here has."""
    collector = LLMCollector(
        make_env(policy.input_mode, turns=1),
        policy=policy,
        dialog_turns_per_batch=ENVS,
        total_dialog_turns=2 * ENVS,
        track_policy_version=True,
        **kwargs,
    )
    for _ in range(3):
        collector.increment_version()
    assert policy.collector is collector
    batches = list(collector)
    collector.shutdown()
    return batches


def make_buffer() -> ReplayBuffer:
    return ReplayBuffer(storage=LazyStackStorage(64), transform=MCAdvantage(grpo_size=GROUP), batch_size=ENVS)


def assert_aligned(item: TensorDictBase) -> None:
    """One value per token, and the types of the contract, whatever the item went through."""
    ids = item["tokens", "full"]
    assert isinstance(item["routed_experts"], RoutedExperts)
    assert item["routed_experts", "full"].dtype == torch.int8
    for key in ("routed_experts", "policy_versions", "log_probs"):
        assert len(item[key, "full"]) == len(ids), key
    for key in ("all_attention_mask", "all_assistant_mask"):
        assert item["masks", key].shape == ids.shape
    assert ids.equal(torch.cat([item["tokens", "prompt"], item["tokens", "response"]]))
    assert item["finish_reason"] in ("stop", "length")
    assert item["policy_versions", "full"][item["masks", "all_assistant_mask"]].eq(0).all()


def assert_advantages(items: list[TensorDictBase]) -> None:
    """Rewards less their group's mean, by its standard deviation, from the answers themselves."""
    groups: dict[str, list[TensorDictBase]] = {}
    for item in items:
        groups.setdefault(item["query"], []).append(item)
    assert {len(group) for group in groups.values()} == {GROUP}
    for group in groups.values():
        rewards = torch.tensor([reward_of(item["tokens", "response"]) for item in group])
        got = torch.stack([item["advantage"].reshape(()) for item in group])
        assert group[0]["advantage"].shape == group[0]["next", "reward"].shape == (1, 1)
        expected = (rewards - rewards.mean()) / rewards.std().clamp_min(1e-4)
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)


@pytest.fixture(scope="module")
def fake() -> Iterator[FakeAsyncVLLM]:
    with FakeAsyncVLLM(seed=1) as engine:
        yield engine


def engine_routes(engine: FakeAsyncVLLM, ids: Tensor) -> Tensor:
    """What the fake engine says of these tokens when it is asked again, MoE layers only."""
    completion = engine.generate(prompt_token_ids=ids[:-1].tolist(), sampling_params={"max_tokens": 1}, use_tqdm=False)
    return torch.from_numpy(completion.outputs[0].routed_experts.astype("int8"))[:, 1:]


@pytest.mark.parametrize("mode", ["history", "text"])
def test_what_is_collected_is_aligned_and_has_advantages(fake: FakeAsyncVLLM, mode: str) -> None:
    batches = collect(make_policy(fake, mode))
    assert [batch.batch_size for batch in batches] == [torch.Size([ENVS, 1])] * 2
    collected = torch.cat(batches)
    assert collected["policy_version"].unique().tolist() == [0]  # the engine's, at the root
    assert collected["next", "policy_version"].unique().tolist() == [3]
    buffer = make_buffer()
    assert collect(make_policy(fake, mode), replay_buffer=buffer) == [None, None]
    assert len(buffer) == 2 * ENVS
    assert_advantages(list(buffer[:].unbind(0)))
    sample = buffer.sample()
    assert isinstance(sample, LazyStackedTensorDict)
    for item in (*collected.reshape(-1).unbind(0), *sample.unbind(0)):
        assert_aligned(item)
        assert item["routed_experts", "full"][:-1, 1:].equal(engine_routes(fake, item["tokens", "full"]))
        assert item["next", "reward"].item() == pytest.approx(reward_of(item["tokens", "response"]))
    ids = sample.get(("tokens", "full"), as_padded_tensor=True, padding_side="left", padding_value=256)
    routes = sample["routed_experts"].pad().full
    assert routes.shape == (*ids.shape, 4, 2)
    assert routes[ids == 256].eq(-1).all()
    for row, item in zip(routes, sample.unbind(0), strict=True):
        assert row[-len(item["tokens", "full"]) :].equal(item["routed_experts", "full"])


class Names(Transform):
    """What an environment may say of its rollouts: sessions, groups of one question, and how urgent each is."""

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        for i, sample in enumerate(tensordict_reset.unbind(0)):
            sample.update({"session_id": f"rollout-{i}", "group_id": i // GROUP, "priority": -i})
        return tensordict_reset


def test_what_an_environment_says_of_its_rollouts_reaches_the_service_at_every_turn() -> None:
    with FakeAsyncVLLM(2, seed=1) as engine:
        ear = Says()
        engine.create_load_balancer(ear)
        env = make_env("history", turns=2).append_transform(Names())
        rollout = env.rollout(2, make_policy(engine), break_when_any_done=False)
        assert rollout.batch_size == torch.Size([ENVS, 2])
        sessions = [context.session_id for _, context in ear.asked]
        assert sessions == [f"rollout-{i}" for i in reversed(range(ENVS))] * 2  # by priority
        assert {engine.load_balancer.groups.version(str(group)) for group in range(ENVS // GROUP)} == {0}
        assert engine.load_balancer.groups.version(str(ENVS // GROUP)) is None
