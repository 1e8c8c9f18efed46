"""TorchRL's own ``GRPOTrainer`` over collectors of ours, a real engine, weight sync and replay: it learns."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import ReplayBuffer
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import DatasetChatEnv
from torchrl.objectives.llm import MCAdvantage
from transformers import AutoModelForCausalLM

from support.collecting import TOKENIZER, Questions
from torchrl_moe.collectors import AsyncLLMCollector, LLMCollector
from torchrl_moe.modules import AsyncVLLM, TransformersWrapper, vLLMWrapper
from torchrl_moe.objectives import GRPOLoss
from torchrl_moe.weight_update import VLLMWeightSyncScheme

GROUP, BATCH, TOKENS = 8, 32, 8


class LowIds(Transform):
    """Rewards the share of an answer's tokens below 128: half of them at first."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        shares = [(row["tokens", "response"] < 128).float().mean() for row in tensordict.unbind(0)]
        return next_tensordict.set("reward", torch.stack(shares).reshape(-1, 1, 1))


class Buffer(ReplayBuffer):
    """Notes what is written."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(transform=MCAdvantage(grpo_size=GROUP), **kwargs)
        self.rewards: list[float] = []
        self.versions: list[list[int]] = []

    def extend(self, data: TensorDictBase, **kwargs: Any) -> Any:
        self.rewards.append(float(data["next", "reward"].mean()))
        self.versions.append(data["policy_version"].flatten().tolist())
        return super().extend(data, **kwargs)


def env_of() -> EnvBase:
    env = DatasetChatEnv.from_dataloader(Questions(64), repeats=GROUP, batch_size=(BATCH,), tokenizer=TOKENIZER)
    return env.append_transform(LowIds()).append_transform(StepCounter(max_steps=1))


def train(engine: AsyncVLLM, folder: Path, collector_of: Any, buffer: Buffer, batches: int, **kwargs: Any) -> Any:
    """Train from the folder's weights, and leave the engine with them."""
    from torchrl.trainers.algorithms.grpo import GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    actor = TransformersWrapper(model, tokenizer=TOKENIZER, replay="R3", temperature=1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sender = VLLMWeightSyncScheme(transport="memmap").create_sender()
    sender.register_model(actor)
    sender.init_all_workers_group(None, vllm_engine=engine)
    sender.update_weights()
    params = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    collector = collector_of(env_of(), policy=vLLMWrapper(engine, generate_kwargs=params))
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
            **kwargs,
        )
        trainer.train()
    model.load_state_dict(before)
    sender.update_weights()
    sender.shutdown()
    return trainer


def collectors(kind: str) -> Any:
    if kind == "LLMCollector":
        return lambda *args, buffer, **kwargs: LLMCollector(
            *args, dialog_turns_per_batch=BATCH, yield_completed_trajectories=True, replay_buffer=buffer, **kwargs
        )
    return lambda *args, buffer, **kwargs: AsyncLLMCollector(
        *args, group_size=GROUP, groups_per_batch=BATCH // GROUP, replay_buffer=buffer, max_staleness=1, **kwargs
    )
