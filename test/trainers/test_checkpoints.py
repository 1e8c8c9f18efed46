"""Checkpoints are whole or not there, fit the model or are refused, and continue on any number of ranks."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from pytest import LogCaptureFixture, MonkeyPatch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from support.ranks import run_as_ranks
from support.sharded import whole
from support.shared_training import MODEL, VERSION, grouped_batch, learner_of, possible, settings
from support.waiting import until
from torchrl_moe.testing import ByteTokenizer, make_tiny_moe
from torchrl_moe.testing.tiny_moe import save_tiny_moe
from torchrl_moe.trainers import checkpoints as checkpoints_module
from torchrl_moe.trainers.checkpoints import Checkpoints, RandomNumbers, TrainedState
from torchrl_moe.trainers.config import ConfigError, GRPOConfig, LoRAConfig, ModelConfig
from torchrl_moe.trainers.policy_model import PolicyModel
from torchrl_moe.trainers.ranks import Placement, Ranks, join_ranks, shares

pytestmark = pytest.mark.usefixtures("one_thread")


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


def checkpoints_of(folder: Path, model: nn.Module | None = None, keep: int = 1, **components: Any) -> Checkpoints:
    return Checkpoints(folder, TrainedState(model or nn.Linear(2, 2)), components, keep)


def save(checkpoints: Checkpoints, step: int = 1, score: float = 0.0) -> bool:
    checkpoints.save(step, score)
    return checkpoints.wait()


def names(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in checkpoints.rotation.checkpoints()]


def test_an_adapter_comes_back_and_nothing_else_is_kept(tmp_path: Path) -> None:
    model = model_of(2)
    disturb(model)
    saved = copied(model)
    checkpoints = checkpoints_of(tmp_path, model)
    checkpoints.save(3, 0.5)
    assert checkpoints.wait() and not checkpoints.wait()
    again = model_of(2)
    assert checkpoints_of(tmp_path, again).load()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in again.state_dict().items())
    for tied in (False, True):
        kept = TrainedState(model_of(2, tie_word_embeddings=tied)).tensors()
        assert kept and all("lora_" in name for name in kept)
        whole = TrainedState(model_of(tie_word_embeddings=tied)).tensors()
        assert {"model.layers.1.mlp.experts.down_proj", "lm_head.weight"} <= whole.keys()


def test_the_run_continues_while_weights_are_written(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """They are those of when it was asked for, and are not seen until they are whole."""
    model, go_on = nn.Linear(2, 2), threading.Event()
    saved = copied(model)
    write = torch.save

    def wait(*arguments: Any, **options: Any) -> None:
        assert threading.current_thread() is threading.main_thread() or go_on.wait(60)
        write(*arguments, **options)

    monkeypatch.setattr(torch, "save", wait)
    checkpoints = checkpoints_of(tmp_path, model)
    checkpoints.save(1, 0.0)
    disturb(model)
    assert names(checkpoints) == []
    go_on.set()
    assert checkpoints.wait()
    assert checkpoints_of(tmp_path, model).load()
    assert all(torch.equal(tensor, saved[name]) for name, tensor in model.state_dict().items())


def test_the_state_of_a_collector_and_random_numbers_come_back(tmp_path: Path) -> None:
    rollout = TensorDict({"tokens": torch.arange(3), "query": "1+1="})
    state = {"ready": [{"rows": [rollout], "position": 4}], "again": {2: {"query": "q2"}}, "begun": 7}
    again = Kept()
    with torch.random.fork_rng(devices=[]):
        save(checkpoints_of(tmp_path, collector=Kept(state)))
        expected = torch.rand(3)
        torch.manual_seed(5)
        checkpoints_of(tmp_path, collector=again).load()
        assert torch.equal(torch.rand(3), expected)
    (entry,) = again.state["ready"]
    assert (entry["position"], again.state["again"], again.state["begun"]) == (4, {2: {"query": "q2"}}, 7)
    assert entry["rows"][0]["tokens"].tolist() == [0, 1, 2] and entry["rows"][0]["query"] == "1+1="


@pytest.mark.parametrize("there", [0, 1, 4])
def test_random_numbers_of_gpus_continue_on_another_number_of_them(monkeypatch: MonkeyPatch, there: int) -> None:
    state, taken = RandomNumbers().state_dict(), []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: there)
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", taken.extend)
    RandomNumbers().load_state_dict(state | {"torch_cuda": [torch.tensor([1]), torch.tensor([2])]})
    assert [int(one) for one in taken] == [1, 2][:there]


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    value = Kept()
    checkpoints = checkpoints_of(tmp_path, keep=2, value=value)
    assert not checkpoints.load()
    # the last one takes the place of an older one of the same step
    for number, (step, score) in enumerate([(1, 0.1), (2, 0.9), (3, 0.3), (4, 0.4), (5, 0.2), (5, 0.2)], 1):
        value.state = number
        assert save(checkpoints, step, score)
    assert names(checkpoints) == [2, 4, 5] and len(list(tmp_path.iterdir())) == 3
    assert checkpoints.load() and value.state == 6
    assert checkpoints.load(checkpoints.rotation.best()) and value.state == 2


def test_a_hook_that_comes_after_newer_checkpoints_have_replaced_the_one_that_was_loaded_is_told(
    tmp_path: Path, caplog: LogCaptureFixture
) -> None:
    first = checkpoints_of(tmp_path)
    first.add("calls", Kept(7))
    save(first, 1)
    again = checkpoints_of(tmp_path)
    assert again.load()
    again.add("calls", early := Kept())
    assert early.state == 7
    late = checkpoints_of(tmp_path)
    assert late.load() and save(late, 2, 1.0) and names(late) == [2]
    late.add("calls", Kept())
    assert "the state of trainer_module.calls is not restored: newer checkpoints have replaced" in caplog.text


def test_what_a_kill_has_left_is_removed(tmp_path: Path) -> None:
    save(checkpoints_of(tmp_path, value=Kept(1)))
    for left in (".step-000000000002.draft", "..step-000000000002.draft.stage-0f"):
        shutil.copytree(tmp_path / "step-000000000001", tmp_path / left)
    again = Kept()
    checkpoints = checkpoints_of(tmp_path, value=again)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]
    assert checkpoints.load() and again.state == 1


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")]
)
def test_a_full_disk_costs_no_older_checkpoint(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, error: Exception, beside: bool
) -> None:
    """Whether the components did not fit, or the weights that are written beside the run."""
    value = Kept(1)
    checkpoints = checkpoints_of(tmp_path, value=value)
    save(checkpoints)
    write = torch.save

    def full(content: Any, path: Any, **options: Any) -> None:
        write(content, path, **options)
        if (threading.current_thread() is not threading.main_thread()) is beside:
            raise error

    value.state = 2
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        assert not save(checkpoints, 2)
    assert "no checkpoint of step 2, the older ones are intact" in caplog.text and str(error) in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000000001"]
    assert checkpoints.load() and value.state == 1
    assert save(checkpoints, 2)
    assert names(checkpoints) == [2]


@pytest.mark.parametrize("waits", [True, False])
def test_other_errors_are_raised_when_they_are_waited_for_and_else_logged_at_the_end(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture, waits: bool
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("a bug")

    checkpoints, value = checkpoints_of(tmp_path), Kept()
    monkeypatch.setattr(checkpoints.rotation, "prune", broken)
    monkeypatch.setattr(value, "state_dict", broken)
    with pytest.raises(RuntimeError, match="a bug"):  # of what is written at once
        checkpoints_of(tmp_path, broken=value).save(1, 0.0)
    assert list(tmp_path.iterdir()) == []
    checkpoints.save(1, 0.0)
    if waits:
        with pytest.raises(RuntimeError, match="a bug"):  # of what is written beside the run
            checkpoints.save(2, 0.0)
    checkpoints.close()
    checkpoints.close()
    logged = caplog.text.count("the last checkpoint was not written: RuntimeError('a bug')")
    assert logged == (0 if waits else 1)


@pytest.mark.parametrize(
    ("rank", "other", "message"),
    [
        (0, {"rank": 2}, ".* names differ, .* first"),
        (0, {"moe_intermediate_size": 16}, ".*experts.* is .* there and .* here"),
        (1, {"rank": 4}, ".*lora.* is .* there and .* here"),  # factors of rank 1 could be broadcast into these
    ],
)
def test_a_checkpoint_of_another_model_is_refused(
    tmp_path: Path, rank: int, other: dict[str, Any], message: str
) -> None:
    save(checkpoints_of(tmp_path, model_of(rank, target="attention")))
    model = model_of(**other, target="attention")
    before = copied(model)
    misfit = "resume=true, but .*step-000000000001 does not fit: the checkpoint is of another model: "
    with pytest.raises(ConfigError, match=misfit + message) as caught:
        checkpoints_of(tmp_path, model).load()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("files", ["components/**/*.pt", "shards/*.distcp", "shards/.metadata", "shards"])
def test_a_torn_checkpoint_and_one_without_shards_are_refused(tmp_path: Path, files: str) -> None:
    checkpoints = checkpoints_of(tmp_path, value=Kept("x" * 4096))
    save(checkpoints)
    torn = list((tmp_path / "step-000000000001").glob(files))
    assert torn
    for file in torn:
        if file.is_dir():
            shutil.rmtree(file)
        else:
            file.write_bytes(file.read_bytes()[:100])
    lacks = ": it holds no shards, like those of older versions" if files == "shards" else ""
    with pytest.raises(ConfigError, match=f"does not fit{lacks}") as caught:
        checkpoints.load()
    assert "\n" not in str(caught.value)


class Two(Ranks):
    """The first of two ranks, the second of which hangs."""

    size = 2


def test_the_end_waits_but_not_for_ranks_that_hang(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    model, released = nn.Linear(2, 2), threading.Event()
    checkpoints = Checkpoints(tmp_path, TrainedState(model), {}, 1, Two())
    monkeypatch.setattr(checkpoints_module, "CLOSE_SECONDS", 0.05)
    monkeypatch.setattr(TrainedState, "write", staticmethod(lambda *_: released.wait(60)))
    checkpoints.save(1, 0.0)
    checkpoints.close()
    assert not released.is_set() and names(checkpoints) == []
    checkpoints.close()
    released.set()
    until(lambda: names(checkpoints) == [1])
    monkeypatch.undo()
    monkeypatch.setattr(checkpoints_module, "CLOSE_SECONDS", 0.0)
    alone = checkpoints_of(tmp_path / "alone")
    alone.save(1, 0.0)
    alone.close()
    assert names(alone) == [1]


def see(folder: Path, shared: bool) -> str:
    ranks = join_ranks(60.0)
    own = folder if shared else folder / f"host-{ranks.rank}"
    try:
        Checkpoints(own / "checkpoints", TrainedState(nn.Linear(2, 2)), {}, 1, ranks).check_folder()
    except ConfigError as error:
        return str(error).replace(str(own), "HERE")
    finally:
        ranks.close()
    return "seen"


def test_a_folder_that_other_hosts_do_not_see_is_refused(tmp_path: Path) -> None:
    assert run_as_ranks(see, tmp_path, True) == ["seen", "seen"]
    assert not list((tmp_path / "checkpoints").iterdir())
    told = "out=HERE: rank(s) 1 do not see rank 0's folder: name a shared one"
    assert run_as_ranks(see, tmp_path, False) == [told, told]


@pytest.mark.parametrize("steps", [0, 2])
def test_weights_that_no_gradient_has_reached_are_saved_and_read_and_move_as_if_nothing_was_saved(
    steps: int, tmp_path: Path
) -> None:
    """As those of an indexer, which feeds a top-k only; or all, where each step so far was left out."""

    def begun() -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(3, 1), nn.Linear(3, 1)])
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

    def train(model: nn.ModuleList, optimizer: torch.optim.Optimizer, steps: int, used: int) -> None:
        for _ in range(steps):
            sum(layer(torch.ones(2, 3)).sum() for layer in model[:used]).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    model, optimizer = begun()
    train(model, optimizer, steps, used=1)
    write(TrainedState(model, optimizer), tmp_path / "saved", Ranks())
    again, of_again = begun()
    TrainedState(again, of_again).load(tmp_path / "saved", Ranks())
    for trained in ((model, optimizer), (again, of_again)):
        train(*trained, 2, used=2)
    expected, unsaved = begun()
    train(expected, unsaved, steps, used=1)
    train(expected, unsaved, 2, used=2)
    for found in (model, again):
        assert copied(found).keys() == copied(expected).keys()
        assert all(torch.equal(weight, copied(expected)[name]) for name, weight in copied(found).items())


def write(state: TrainedState, folder: Path, ranks: Ranks) -> None:
    state.write(state.copy(ranks), folder, ranks)


def test_buffers_are_kept_and_an_optimizer_continues(tmp_path: Path) -> None:
    def steps(layer: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            for weight in layer.parameters():
                weight.grad = weight.detach() * 2
            optimizer.step()

    layer, other = nn.BatchNorm1d(2), nn.BatchNorm1d(2)
    layer.running_mean = torch.tensor([3.0, 4.0])
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    steps(layer, optimizer, 3)
    write(TrainedState(layer, optimizer), tmp_path, Ranks())
    restored = torch.optim.AdamW([{"params": [weight]} for weight in other.parameters()], lr=0.7)
    TrainedState(other, restored).load(tmp_path, Ranks())
    assert other.running_mean is not None and other.running_mean.tolist() == [3.0, 4.0]
    assert [group["lr"] for group in restored.param_groups] == [0.1, 0.1]
    steps(layer, optimizer, 2)
    steps(other, restored, 2)
    for weight, twin in zip(layer.parameters(), other.parameters(), strict=True):
        assert torch.equal(weight, twin)


# -- on ranks ---------------------------------------------------------------------------------------------------------
WAYS: dict[str, dict[str, Any]] = {"FSDP2": {}}
PARALLEL: dict[str, dict[str, Any]] = {
    "adapter": {"model.lora.rank": 2, "model.lora.target": "all"},
    "EP": {"placement.expert_parallel": 2},
    "TP": {"placement.tensor_parallel": 2},
}
WIDE: dict[str, dict[str, Any]] = {
    "HSDP": {"placement.replicate": 2},
    "FSDP2, TP, EP": {"placement.tensor_parallel": 2, "placement.expert_parallel": 4},
}
"""On four ranks."""


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
        learner.stepper.step(share)
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
