"""Checkpoints are whole or not there, hold what training changes, and fit the model or are refused."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.trainers.checkpoints import Checkpoints, NothingKept, TrainedWeights
from torchrl_moe.trainers.config import ConfigError, LoRAConfig, ModelConfig
from torchrl_moe.trainers.policy_model import PolicyModel


class Kept:
    """A component that keeps what it is given."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"state": self.state}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state = state_dict["state"]


def model_of(rank: int = 0, seed: int = 0, target: str = "all", **hf_config: Any) -> Any:
    model = make_tiny_moe("qwen3_moe", seed=seed, num_hidden_layers=2, **hf_config)
    return PolicyModel.load(model, ByteTokenizer(), ModelConfig(lora=LoRAConfig(rank=rank, target=target))).model


def copied(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@torch.no_grad()
def disturb(model: nn.Module) -> None:
    for weight in model.parameters():
        if weight.requires_grad:
            weight.add_(1.0)


def names(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints.rotation.checkpoints()]


@pytest.mark.parametrize("rank", [0, 2])
def test_weights_come_back(tmp_path: Path, rank: int) -> None:
    model = model_of(rank)
    disturb(model)
    saved = copied(model)
    Checkpoints(tmp_path, {"policy": TrainedWeights(model)}, 1).save(3, 0.5)
    again = model_of(rank)
    assert Checkpoints(tmp_path, {"policy": TrainedWeights(again)}, 1).load()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())


@pytest.mark.parametrize("tied", [False, True])
def test_of_an_adapter_only_the_adapter_is_kept(tied: bool) -> None:
    kept = TrainedWeights(model_of(2, tie_word_embeddings=tied)).state_dict()
    assert kept and all("lora_" in name for name in kept)
    whole = TrainedWeights(model_of(tie_word_embeddings=tied)).state_dict()
    assert "model.layers.1.mlp.experts.down_proj" in whole


def test_buffers_are_kept(tmp_path: Path) -> None:
    model = nn.BatchNorm1d(2)
    model.running_mean = torch.tensor([3.0, 4.0])
    Checkpoints(tmp_path, {"policy": TrainedWeights(model)}, 1).save(1, 0.0)
    again = nn.BatchNorm1d(2)
    Checkpoints(tmp_path, {"policy": TrainedWeights(again)}, 1).load()
    assert again.running_mean is not None and again.running_mean.tolist() == [3.0, 4.0]


def test_an_optimizer_goes_on(tmp_path: Path) -> None:
    def steps(weight: nn.Parameter, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            weight.grad = weight.detach() * 2
            optimizer.step()

    weight, other = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    steps(weight, optimizer, 3)
    Checkpoints(tmp_path, {"optimizer": optimizer}, 1).save(3, 0.0)
    other.data.copy_(weight)
    restored = torch.optim.AdamW([other], lr=0.7)
    Checkpoints(tmp_path, {"optimizer": restored}, 1).load()
    assert restored.param_groups[0]["lr"] == 0.1
    steps(weight, optimizer, 2)
    steps(other, restored, 2)
    assert torch.equal(weight, other)


def test_the_state_of_a_collector_comes_back(tmp_path: Path) -> None:
    rollout = TensorDict({"tokens": torch.arange(3), "query": "1+1="})
    state = {"ready": [{"rows": [rollout], "position": 4}], "again": {2: {"query": "q2"}}, "begun": 7}
    Checkpoints(tmp_path, {"collector": Kept(state), "none": NothingKept()}, 1).save(1, 0.0)
    again = Kept()
    Checkpoints(tmp_path, {"collector": again, "none": NothingKept()}, 1).load()
    (entry,) = again.state["ready"]
    assert (entry["position"], again.state["again"], again.state["begun"]) == (4, {2: {"query": "q2"}}, 7)
    assert entry["rows"][0]["tokens"].tolist() == [0, 1, 2]
    assert entry["rows"][0]["query"] == "1+1="


def test_random_numbers_go_on(tmp_path: Path) -> None:
    with torch.random.fork_rng(devices=[]):
        checkpoints = Checkpoints(tmp_path, {}, 1)
        checkpoints.save(1, 0.0)
        expected = torch.rand(3)
        torch.manual_seed(5)
        checkpoints.load()
        assert torch.equal(torch.rand(3), expected)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    value = Kept()
    checkpoints = Checkpoints(tmp_path, {"value": value}, 2)
    assert not checkpoints.load()
    for step, score in enumerate([0.1, 0.9, 0.3, 0.4, 0.2], 1):
        value.state = step
        assert checkpoints.save(step, score)
    assert names(checkpoints) == [2, 4, 5]
    value.state = None
    assert checkpoints.load() and value.state == 5
    best = checkpoints.rotation.best()
    assert checkpoints.load(best) and value.state == 2


def test_what_a_kill_has_left_is_removed(tmp_path: Path) -> None:
    Checkpoints(tmp_path, {"value": Kept(1)}, 2).save(1, 0.0)
    shutil.copytree(tmp_path / "step-000000000001", tmp_path / ".step-000000000002.stage-0f")
    again = Kept()
    checkpoints = Checkpoints(tmp_path, {"value": again}, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]
    assert checkpoints.load() and again.state == 1


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")]
)
def test_a_full_disk_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    value = Kept(1)
    checkpoints = Checkpoints(tmp_path, {"value": value}, 1)
    checkpoints.save(1, 0.0)
    save = torch.save

    def full(content: Any, path: Any, **options: Any) -> None:
        save(content, path, **options)
        raise error

    value.state = 2
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert not checkpoints.save(2, 0.0)
    assert "no checkpoint of step 2, the older ones are whole" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]
    assert checkpoints.load() and value.state == 1
    assert checkpoints.save(2, 0.0)
    assert names(checkpoints) == [2]


def test_other_errors_are_raised(tmp_path: Path) -> None:
    class Broken(Kept):
        def state_dict(self) -> dict[str, Any]:
            raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug"):
        Checkpoints(tmp_path, {"broken": Broken()}, 1).save(1, 0.0)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"rank": 2}, "the checkpoint is of another model: .* names differ, .* first"),
        ({"moe_intermediate_size": 16}, "the checkpoint is of another model: .*experts.* is .* there and .* here"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    Checkpoints(tmp_path, {"policy": TrainedWeights(model_of())}, 1).save(1, 0.0)
    model = model_of(**other)
    before = copied(model)
    with pytest.raises(ConfigError, match=f"resume=true, but .*step-000000000001 does not fit: {message}") as caught:
        Checkpoints(tmp_path, {"policy": TrainedWeights(model)}, 1).load()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_an_adapter_of_another_rank_is_refused(tmp_path: Path) -> None:
    """Factors of rank 1 could be broadcast into those of any rank."""
    Checkpoints(tmp_path, {"policy": TrainedWeights(model_of(1, target="attention"))}, 1).save(1, 0.0)
    with pytest.raises(ConfigError, match="the checkpoint is of another model"):
        Checkpoints(tmp_path, {"policy": TrainedWeights(model_of(4, target="attention"))}, 1).load()


def test_a_torn_checkpoint_is_refused(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, {"value": Kept("x" * 4096)}, 1)
    checkpoints.save(1, 0.0)
    for file in (tmp_path / "step-000000000001" / "components").rglob("*.pt"):
        file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ConfigError, match="does not fit") as caught:
        checkpoints.load()
    assert "\n" not in str(caught.value)


def test_another_runs_are_forgotten(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "run", {"value": Kept(1)}, 1)
    checkpoints.save(1, 0.0)
    Checkpoints.forget(tmp_path / "run")
    assert not checkpoints.load()
    Checkpoints.forget(tmp_path / "no-such-run")
