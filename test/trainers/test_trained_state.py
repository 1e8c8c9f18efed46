"""Weights and optimizer come back on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDictBase
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from support.ranks import run_as_ranks
from support.sharded import whole
from support.shared_training import MODEL, VERSION, grouped_batch, learner_of, possible, settings
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers.checkpoints import TrainedState
from torchrl_moe.trainers.config import GRPOConfig, LoRAConfig, ModelConfig
from torchrl_moe.trainers.placement import Placement
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Ranks, join_ranks, shares

pytestmark = pytest.mark.usefixtures("one_thread")


def write(state: TrainedState, folder: Path, ranks: Ranks) -> None:
    state.write(state.copy(ranks), folder, ranks)


@pytest.mark.parametrize("tied", [False, True])
def test_of_an_adapter_only_the_adapter_is_kept(tied: bool) -> None:
    def state(rank: int) -> TrainedState:
        model = make_tiny_moe("qwen3_moe", num_hidden_layers=2, tie_word_embeddings=tied)
        config = ModelConfig(lora=LoRAConfig(rank=rank, target="all"))
        return TrainedState(PolicyModel.load(model, ByteTokenizer(), config).model)

    kept = state(2).tensors()
    assert kept and all("lora_" in name for name in kept)
    assert {"model.layers.1.mlp.experts.down_proj", "lm_head.weight"} <= state(0).tensors().keys()


def test_buffers_are_kept(tmp_path: Path) -> None:
    model, again = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    model.running_mean = torch.tensor([3.0, 4.0])
    write(TrainedState(model), tmp_path, Ranks())
    TrainedState(again).load(tmp_path, Ranks())
    assert again.running_mean is not None and again.running_mean.tolist() == [3.0, 4.0]


def test_an_optimizer_continues(tmp_path: Path) -> None:
    def steps(layer: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            for weight in layer.parameters():
                weight.grad = weight.detach() * 2
            optimizer.step()

    layer, other = nn.Linear(2, 3), nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    steps(layer, optimizer, 3)
    write(TrainedState(layer, optimizer), tmp_path, Ranks())
    restored = torch.optim.AdamW([{"params": [weight]} for weight in other.parameters()], lr=0.7)
    TrainedState(other, restored).load(tmp_path, Ranks())
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.1]
    steps(layer, optimizer, 2)
    steps(other, restored, 2)
    for weight, twin in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, twin)


# -- on ranks ---------------------------------------------------------------------------------------------------------


def sharded(config: GRPOConfig) -> None:
    pass


def adapted(config: GRPOConfig) -> None:
    config.model.lora.rank, config.model.lora.target = 2, "all"


def expert_parallel(config: GRPOConfig) -> None:
    config.placement.expert_parallel = 2


def tensor_parallel(config: GRPOConfig) -> None:
    config.placement.tensor_parallel = 2


WAYS: dict[str, Any] = {"FSDP2": sharded}


def replicated(config: GRPOConfig) -> None:
    config.placement.replicate = 2


def all_three(config: GRPOConfig) -> None:
    config.placement.tensor_parallel, config.placement.expert_parallel = 2, 4


WIDE: dict[str, Any] = {"HSDP": replicated, "FSDP2, TP, EP": all_three}
"""On four ranks."""
PARALLEL: dict[str, Any] = {"adapter": adapted, "EP": expert_parallel, "TP": tensor_parallel}


def train(folder: Path, batch: TensorDictBase, way: str, read: Path | None, left: Path | None) -> dict[str, Any]:
    """Continue from a checkpoint, make two steps, and leave another."""
    ranks = join_ranks(60.0)
    config = settings(folder, {**WAYS, **PARALLEL, **WIDE}[way])
    if ranks.size == 1:
        config.placement = GRPOConfig().placement
    placement = Placement.of(ranks, config)
    torch.manual_seed(0)
    learner, policy_model = learner_of(config, placement)
    state = TrainedState(policy_model.model, learner.optimizer)
    if read is not None:
        state.load(read, ranks)
    share = placement.to_ranks(shares(batch, placement.data_size))[ranks.rank].clone()
    learner.scores(share, VERSION, False)
    for _ in range(2):
        learner.stepper.step(None, share)  # type: ignore[arg-type]
    if left is not None:
        write(state, left, ranks)
    moments = {
        f"{name} {key}": whole(value).numpy().copy()
        for name, weight in policy_model.trained.items()
        for key, value in learner.optimizer.state[weight].items()
    }
    found = {name: whole(weight.detach()).numpy().copy() for name, weight in policy_model.trained.items()}
    ranks.close()
    return found | moments


def trains(folder: Path, batch: TensorDictBase, turns: dict[str, tuple[Path | None, Path | None]]) -> list[Any]:
    return [train(folder, batch, way, read, left) for way, (read, left) in turns.items()]


def check(tmp_path: Path, ways: dict[str, Any], size: int = 2) -> None:
    """Several ranks continue from what one process left, and one process from what they left."""
    folder, batch = save_tiny_moe(tmp_path / "tiny", **MODEL), grouped_batch()
    paths: dict[str, dict[str, Path]] = {
        way: {name: tmp_path / f"{way}, {name}" for name in ("one", "two")} for way in ways
    }
    first = {way: train(folder, batch.clone(), way, None, paths[way]["one"]) for way in ways}
    second = {way: train(folder, batch.clone(), way, paths[way]["one"], None) for way in ways}
    turns = ({way: (None, paths[way]["two"]) for way in ways}, {way: (paths[way]["one"], None) for way in ways})
    begun, gone_on = (run_as_ranks(trains, folder, batch, turn, world_size=size) for turn in turns)
    for number, way in enumerate(ways):
        back = train(folder, batch.clone(), way, paths[way]["two"], None)
        for rank in range(size):
            assert_same(begun[rank][number], first[way])
            assert_same(gone_on[rank][number], second[way])
        assert_same(back, second[way])
        assert any(np.abs(second[way][name] - first[way][name]).max() > 1e-3 for name in first[way])


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """AdamW moves what has no gradient but for rounding by the sign of that: such elements count for nothing."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        counts = np.ones_like(value, dtype=bool)
        if f"{name} exp_avg_sq" in expected:
            counts = expected[f"{name} exp_avg_sq"] > 1e-12
        assert np.abs(np.where(counts, found[name] - value, 0)).max() <= 2e-5, name


def test_another_number_of_ranks_continues(tmp_path: Path) -> None:
    check(tmp_path, WAYS)


@pytest.mark.parity
def test_another_number_of_ranks_continues_where_they_split_layers_or_experts(tmp_path: Path) -> None:
    check(tmp_path, possible(PARALLEL))
    check(tmp_path, possible(WIDE), 4)


def test_a_restored_state_is_the_saved_one_to_the_last_bit(tmp_path: Path) -> None:
    folder, batch = save_tiny_moe(tmp_path / "tiny", **MODEL), grouped_batch()
    saved = run_as_ranks(trains, folder, batch, {"FSDP2": (None, tmp_path / "two")})
    config = settings(folder)
    learner, policy_model = learner_of(config, Placement())
    TrainedState(policy_model.model, learner.optimizer).load(tmp_path / "two", Ranks())
    for name, weight in policy_model.trained.items():
        assert np.array_equal(weight.detach().numpy(), saved[0][0][name])
        for key, value in learner.optimizer.state[weight].items():
            assert np.array_equal(value.numpy(), saved[1][0][f"{name} {key}"])


class OnGpus(nn.Module):
    """Half of a weight, as ranks with GPUs have it whose weights are offloaded; there are none here."""

    part: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        shape = DTensor.from_local(torch.empty(2, 3, device="meta"), mesh, [Shard(0)])
        self.register_buffer("part", torch.full_like(shape, 3.0, device="cpu"))


def copy_of_gpus(folder: Path) -> tuple[str, str, list[float]]:
    ranks = join_ranks(60.0)
    copy = TrainedState(OnGpus()).copy(ranks)
    TrainedState.write(copy, folder, ranks)
    part: Any = copy["policy"]["part"]
    return part.device_mesh.device_type, part.to_local().device.type, part.to_local().flatten().tolist()


def test_a_copy_of_what_gpus_share_stays_in_the_hosts_memory(tmp_path: Path) -> None:
    """torch brings a part that is made of a tensor on the CPU back to its mesh's GPU."""
    assert run_as_ranks(copy_of_gpus, tmp_path) == [("cuda", "cpu", [3.0] * 6)] * 2
    whole = FileSystemReader(tmp_path).read_metadata().state_dict_metadata["policy.part"]
    assert tuple(whole.size) == (4, 3)  # type: ignore[union-attr]
