"""TorchRL's own ``GRPOTrainer`` over collectors of ours, with a real engine, weight sync and replay: it learns."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from torchrl.data import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.objectives.llm import MCAdvantage
from transformers import AutoModelForCausalLM

from support.collecting import TOKENIZER, Questions
from support.engines import EngineShelf
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.weight_update import VLLMWeightSyncScheme

GROUP, BATCH = 8, 32


class LowIds(Transform):
    """Rewards the share of an answer's tokens below 128: half of them at first."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        shares = [(row["tokens", "response"] < 128).float().mean() for row in tensordict.unbind(0)]
        return next_tensordict.set("reward", torch.stack(shares).reshape(-1, 1, 1))


class Buffer(ReplayBuffer):
    """Notes what is written."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(transform=MCAdvantage(grpo_size=GROUP), batch_size=BATCH, **kwargs)
        self.first_version = 0
        self.rewards: list[float] = []
        self.versions: list[list[int]] = []

    def extend(self, data: TensorDictBase, **kwargs: Any) -> Any:
        self.rewards.append(float(data["next", "reward"].mean()))
        self.versions.append([int(row["policy_version"]) for row in data.unbind(0)])
        return super().extend(data, **kwargs)


def synchronous(env: EnvBase, **kwargs: Any) -> LLMCollector:
    return LLMCollector(env, dialog_turns_per_batch=BATCH, yield_completed_trajectories=True, **kwargs)


def asynchronous(env: EnvBase, **kwargs: Any) -> AsyncLLMCollector:
    return AsyncLLMCollector(env, group_size=GROUP, groups_per_batch=BATCH // GROUP, max_staleness=1, **kwargs)


def train(engine: AsyncVLLM, folder: Path, collect: Callable[..., Any], buffer: Buffer, batches: int) -> Any:
    """Train from a folder's weights; the engine has them again afterwards."""
    from torchrl.trainers.algorithms.grpo import GRPOTrainer

    env = DatasetChatEnv.from_dataloader(Questions(64), repeats=GROUP, batch_size=(BATCH,), tokenizer=TOKENIZER)
    env = env.append_transform(LowIds()).append_transform(StepCounter(max_steps=1))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    actor = TransformersWrapper(model, tokenizer=TOKENIZER, replay="R3", temperature=1.0)
    sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
    sender.register_model(actor)
    sender.init_all_workers_group(None, vllm_engine=engine)
    sender.version = engine.replica_table.latest_version
    sender.update_weights()  # other tests have changed the engine's weights behind its table
    buffer.first_version = sender.version
    params = {"max_new_tokens": 8, "temperature": 1.0, "ignore_eos": True}
    collector = collect(env, policy=vLLMWrapper(engine, generate_kwargs=params), replay_buffer=buffer)
    sender.register_collector(collector)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the trainer says that it is experimental
        trainer = GRPOTrainer(
            collector=collector,
            total_frames=batches * BATCH,
            loss_module=GRPOLoss(actor, clip_epsilon=0.2, entropy_bonus=False),
            optimizer=torch.optim.AdamW(model.parameters(), lr=3e-3),
            replay_buffer=buffer,
            weight_sync_sender=sender,
            progress_bar=False,
            empty_replay_buffer_on_weight_update=True,
        )
        trainer.train()
    model.load_state_dict(before)
    sender.update_weights()
    sender.shutdown()
    return trainer


@pytest.mark.engine("qwen3_moe")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("collect", [synchronous, pytest.param(asynchronous, marks=pytest.mark.soak)])
def test_it_learns_with_a_batch_at_a_time(engine: AsyncVLLM, shelf: EngineShelf, collect: Callable[..., Any]) -> None:
    buffer = Buffer(storage=LazyStackStorage(BATCH), sampler=SamplerWithoutReplacement())
    steps = 8 if collect is synchronous else 16  # whose batches are older
    trainer = train(engine, shelf.folder("qwen3_moe"), collect, buffer, steps)
    assert trainer.optimization_stepper.optimizer_step_count == steps
    assert mean(buffer.rewards[-2:]) > mean(buffer.rewards[:2]) + 0.1
    if collect is synchronous:
        assert buffer.versions == [[buffer.first_version + step] * BATCH for step in range(8)]


@pytest.mark.soak
@pytest.mark.engine("qwen3_moe")
@pytest.mark.usefixtures("one_thread")
def test_it_learns_while_answers_are_generated(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    """With the trainer's asynchronous switch, by which it samples from what the buffer holds."""
    buffer = Buffer(storage=LazyStackStorage(2 * BATCH))
    trainer = train(
        engine, shelf.folder("qwen3_moe"), asynchronous, buffer, 16, async_collection=True, optim_steps_per_batch=1
    )
    assert trainer.optimization_stepper.optimizer_step_count >= 14
    assert mean(buffer.rewards[-3:]) > mean(buffer.rewards[:3]) + 0.1
    # batch i begins once there were i - 1 updates, so nothing in it is older
    assert all(min(versions) >= buffer.first_version + i - 1 for i, versions in enumerate(buffer.versions))
