"""Publishing: what is written, by whom, and what an error leaves behind.

This file is also the program of each rank of a sharded trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from support.manifests import note_made
from support.ranks import run_as_ranks
from support.weights import weights
from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.modules.policies.unstack import checkpoint_tensors, model_metadata
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.fake_weights import EXPECTED, FakeFleet
from torchrl_moe.weight_update import VLLMWeightSyncScheme
from torchrl_moe.weight_update.options import SourceOptions, StoreOptions, canary_of
from torchrl_moe.weight_update.publishing import Published, Publisher
from torchrl_moe.weight_update.sender import VLLMWeightSender
from torchrl_moe.weight_update.store import WeightStoreReader

Fleet = Callable[..., tuple[FakeFleet, VLLMWeightSender]]


def publisher(folder: Path, with_canary: bool = False, **store: Any) -> Publisher:
    return Publisher(StoreOptions(folder=folder, seen_as=folder, **store), SourceOptions(), 5.0, with_canary)


@torch.no_grad()
def train(model: Any, step: float = 1.0) -> None:
    model.lm_head.weight.add_(step)


def same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def stored(folder: Path, version: int) -> dict[str, Tensor]:
    reader = WeightStoreReader(folder)
    manifest = reader.manifest(version)
    reader.verify(manifest)
    with reader.reading(manifest) as tensors:
        return {name: tensor.clone() for name, tensor in tensors.items()}


@pytest.mark.parametrize("store", [{}, {"layout": "versions", "delta": True}])
def test_a_models_weights_are_written_as_they_are_now(tmp_path: Path, store: dict[str, Any]) -> None:
    model, writer = make_tiny_moe("deepseek_v3"), publisher(tmp_path, **store)
    writer.register(model)
    for version in (1, 2):
        train(model)
        done = writer.publish(None, lambda number=version: number)
        assert done.manifest is not None
        assert done.version == done.manifest.version == version
        assert same(stored(tmp_path, version), checkpoint_tensors(model))
    written = sum(entry.nbytes for entry in done.manifest.entries if entry.base is None)
    assert written == (model.lm_head.weight.nbytes if store else done.manifest.nbytes)


@pytest.mark.parametrize("layout", ["slots", "versions"])
def test_an_update_of_many_replicas_reads_its_manifest_once(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    _, sender = fleet(16, layout=layout, folder=tmp_path)
    made = note_made(monkeypatch)
    for version in (1, 2):
        assert sender.update_weights(weights(version)).failed == {}
    assert [len(made[version]) for version in (1, 2)] == [2, 2]  # when it was published, and when it was first read


@pytest.mark.parametrize("store", [{}, {"layout": "versions", "delta": True}, {"layout": "versions"}])
def test_an_older_version_is_published_again_with_its_canary(tmp_path: Path, store: dict[str, Any]) -> None:
    model, writer = make_tiny_moe("mixtral"), publisher(tmp_path, with_canary=True, **store)
    writer.register(model)
    contents, done = {}, {}
    for version in (1, 2):
        train(model, version)
        done[version] = writer.publish(None, lambda number=version: number)
        contents[version] = {name: tensor.clone() for name, tensor in checkpoint_tensors(model).items()}
    again = writer.republish(1, lambda: 3)
    assert again.manifest is not None
    assert (again.version, again.canary) == (3, done[1].canary)
    assert again.report().digest == done[1].report().digest != done[2].report().digest
    assert same(stored(tmp_path, 3), contents[1])
    writer.publish(None, lambda: 4)
    assert same(stored(tmp_path, 3), contents[1])
    with pytest.raises(ManifestMismatch, match="version 2 is not there"):
        writer.republish(2, lambda: 5)


def test_the_canary_is_that_of_the_model_that_is_sent_or_none(tmp_path: Path) -> None:
    model, writer = make_tiny_moe("mixtral"), publisher(tmp_path, with_canary=True)
    assert writer.publish(weights(), lambda: 1).canary is None
    writer.register(model)
    assert writer.publish(None, lambda: 2).canary == canary_of(model)
    assert writer.publish(weights(), lambda: 3).canary is None
    other = make_tiny_moe("mixtral", seed=1)
    assert writer.publish(other, lambda: 4).canary == canary_of(other) != canary_of(model)
    quiet = publisher(tmp_path / "quiet")
    quiet.register(model)
    assert quiet.publish(None, lambda: 1).canary is None


def test_what_is_not_the_engines_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    writer = publisher(tmp_path / "store")
    writer.expect({"a": (torch.float32, torch.Size([2, 2]))}, None)
    with pytest.raises(ManifestMismatch, match=r"1 unknown to the engine \(b\)"):
        writer.publish(weights(), lambda: 1)
    assert not (tmp_path / "store").exists()


def test_a_model_may_come_before_or_after_the_engine(tmp_path: Path) -> None:
    model = make_tiny_moe("qwen3_moe", tie_word_embeddings=True)
    expected = {**model_metadata(model), "lm_head.weight": (torch.float32, model.lm_head.weight.shape)}
    before, after = publisher(tmp_path / "x"), publisher(tmp_path / "y")
    before.register(model)
    before.expect(expected, None)
    after.expect(expected, None)
    after.register(model)
    for writer in (before, after):
        assert writer.model is not None
        assert writer.model.kinds.keys() == expected.keys()


def test_of_replicated_trainers_only_the_first_writes_or_one_with_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_moe.weight_update.publishing.is_first", lambda: False)
    writer = publisher(tmp_path / "store")
    assert writer.publish(weights(), lambda: 3) == Published(version=3, manifest=None)
    assert writer.publish_behind(weights(), 3).result(60.0) == Published(version=3, manifest=None)
    assert not (tmp_path / "store").exists()
    writer.expect(EXPECTED, None)
    assert writer.publish(weights(), lambda: 3).manifest is not None


def sharded(family: str, **changes: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    model = make_tiny_moe(family, **changes)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def run_rank(folder: Path) -> None:
    """Publish a sharded model; then let rank 0 fail, and continue."""
    from torch.distributed.tensor import DTensor

    rank, model, whole = dist.get_rank(), sharded("deepseek_v3"), make_tiny_moe("deepseek_v3")
    wanted = checkpoint_tensors(whole)
    gathered: list[int] = []
    nbytes: list[int] = []
    full_tensor = DTensor.full_tensor

    def count(self: Any, **kwargs: Any) -> Any:
        gathered.append(self.numel())
        nbytes.append(self.numel() * self.dtype.itemsize)
        return full_tensor(self, **kwargs)

    DTensor.full_tensor = count  # type: ignore[method-assign]
    writer = publisher(folder, with_canary=True)
    writer.register(model)
    assert writer.model is not None
    assert writer.model.is_sharded
    assert writer.model.kinds == model_metadata(whole)
    done = writer.publish(None, lambda: 7 if rank == 0 else 99)  # rank 0's number counts
    assert done.version == 7
    if rank == 0:
        assert done.canary is not None
        assert done.canary["log_probs"] == pytest.approx(canary_of(whole)["log_probs"], abs=1e-5)
    assert sorted(gathered) == sorted(parameter.numel() for parameter in whole.parameters())  # one at a time
    assert (done.manifest is not None) == (rank == 0)
    if rank == 0:
        assert same(stored(folder, 7), wanted)
        writer.expect({"another": (torch.float32, torch.Size([1]))}, None)
    words = "" if rank == 0 else "rank 0 could not begin to publish; see the error of that rank"
    with pytest.raises(WeightSyncError, match=words) as caught:
        writer.publish(None, lambda: 8)
    assert isinstance(caught.value, ManifestMismatch) == (rank == 0)
    writer.expected = None
    assert writer.publish(model.state_dict(), lambda: 9).version == 9  # stacked, sharded, and by name
    if rank == 0:
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in stored(folder, 9).items())
    with pytest.raises(ValueError, match="sharded weights are gathered by all ranks"):
        writer.publish_behind(None, 10)
    writer.close()
    publish_narrow(folder / "narrow", model, nbytes)
    publish_tied(folder / "tied", gathered)
    fail_in_turn(folder / "failing", model)


def publish_narrow(folder: Path, model: Any, nbytes: list[int]) -> None:
    """Publish for an engine of bfloat16, whose checkpoint has one tensor in float32: parts are cast before they are
    gathered, and what is written is, bit for bit, what one process writes that casts the whole."""
    whole, norm = make_tiny_moe("deepseek_v3"), "model.norm.weight"
    expected = {name: (torch.bfloat16, shape) for name, (_, shape) in model_metadata(whole).items()}
    expected[norm] = torch.float32, expected[norm][1]
    digests = []
    for registered, given in ((model, None), (model, model.state_dict()), (whole, None)):
        writer = publisher(folder / str(len(digests)))
        writer.register(registered)
        if dist.get_rank() == 0:
            writer.expect(expected, torch.bfloat16)
        nbytes.clear()
        digests.append(writer.publish(given, lambda: 1).digest)
        numbers = sum(parameter.numel() for parameter in whole.parameters()) + expected[norm][1].numel()
        assert sum(nbytes) == (2 * numbers if registered is model else 0)
        writer.close()
    assert len(set(digests)) == 1


def publish_tied(folder: Path, gathered: list[int]) -> None:
    """Publish a model with a tied weight, which only rank 0 knows to be wanted under both names."""
    rank, model = dist.get_rank(), sharded("qwen3_moe", tie_word_embeddings=True)
    whole = make_tiny_moe("qwen3_moe", tie_word_embeddings=True)
    writer = publisher(folder)
    writer.register(model)
    if rank == 0:
        head = {"lm_head.weight": (torch.float32, whole.lm_head.weight.shape)}
        writer.expect(model_metadata(whole) | head, None)
    for given, version in ((None, 1), (model.state_dict(), 2)):
        gathered.clear()
        assert writer.publish(given, lambda number=version: number).version == version
        assert len(gathered) == len(list(whole.parameters()))
        if rank == 0:
            assert torch.equal(stored(folder, version)["lm_head.weight"], whole.lm_head.weight)
    writer.close()


def fail_in_turn(folder: Path, model: Any) -> None:
    """Let one rank fail before anything is gathered: the other hears of it, and both can continue."""
    rank, sender = dist.get_rank(), VLLMWeightSyncScheme(folder=folder).create_sender()
    sender.register_model(model)
    newest = sender._publisher.newest

    def broken() -> int:
        raise OSError("no such disk")

    for failing, update in ((0, sender.update_weights), (0, sender.publish), (1, sender.publish)):
        sender._publisher.newest = broken if rank == failing else newest  # type: ignore[method-assign]
        words = "no engine" if update == sender.update_weights else "no such disk"
        if rank != failing:
            words = f"rank {failing} could not begin to publish; see the error of that rank"
        with pytest.raises((RuntimeError, OSError) if rank == failing else WeightSyncError, match=words):
            update()
    sender._publisher.newest = newest  # type: ignore[method-assign]
    assert sender.publish() == 1
    sender.shutdown()


def test_a_sharded_model_is_gathered_tensor_by_tensor_and_written_once(tmp_path: Path) -> None:
    run_as_ranks(run_rank, tmp_path / "store")
