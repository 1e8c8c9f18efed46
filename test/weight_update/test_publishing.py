"""Publishing: what is written, by whom, and what an error leaves behind.

This file is also the program of each rank of a sharded trainer.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from torchrl_moe._errors import ManifestMismatch, WeightSyncError
from torchrl_moe.data.weight_store import WeightStoreReader
from torchrl_moe.modules.policies.unstack import checkpoint_tensors, model_metadata
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.testing.fake_weights import EXPECTED
from torchrl_moe.weight_update.canary import canary_of
from torchrl_moe.weight_update.options import SourceOptions, StoreOptions
from torchrl_moe.weight_update.publishing import Published, Publisher
from weight_update.fleet import weights


def publisher(folder: Path, with_canary: bool = False, **store: Any) -> Publisher:
    return Publisher(StoreOptions(folder=folder, seen_as=folder, **store), SourceOptions(), 5.0, with_canary)


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
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        done = writer.publish(None, version)
        assert done.manifest is not None
        assert done.version == done.manifest.version == version
        wanted, found = checkpoint_tensors(model), stored(tmp_path, version)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    written = sum(entry.nbytes for entry in done.manifest.entries if entry.base is None)
    assert written == (model.lm_head.weight.nbytes if store else done.manifest.nbytes)


def test_the_canary_is_that_of_the_model_that_is_sent_or_none(tmp_path: Path) -> None:
    model, writer = make_tiny_moe("mixtral"), publisher(tmp_path, with_canary=True)
    assert writer.publish(weights(), 1).canary is None
    writer.register(model)
    assert writer.publish(None, 2).canary == canary_of(model)
    assert writer.publish(weights(), 3).canary is None
    other = make_tiny_moe("mixtral", seed=1)
    assert writer.publish(other, 4).canary == canary_of(other) != canary_of(model)
    quiet = publisher(tmp_path / "quiet")
    quiet.register(model)
    assert quiet.publish(None, 1).canary is None


def test_what_is_not_the_engines_is_refused_before_a_byte_is_written(tmp_path: Path) -> None:
    writer = publisher(tmp_path / "store")
    writer.expect({"a": (torch.float32, torch.Size([2, 2]))}, None)
    with pytest.raises(ManifestMismatch, match=r"1 unknown to the engine \(b\)"):
        writer.publish(weights(), 1)
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


def test_a_publisher_that_is_closed_lets_the_next_one_in(tmp_path: Path) -> None:
    writer = publisher(tmp_path)
    writer.publish(weights(), 1)
    with pytest.raises(WeightSyncError, match="one trainer per folder"):
        publisher(tmp_path).publish(weights(), 2)
    writer.close()
    publisher(tmp_path).publish(weights(), 2)


def test_of_replicated_trainers_only_the_first_writes_or_one_with_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrl_moe.weight_update.publishing.is_first", lambda: False)
    writer = publisher(tmp_path / "store")
    assert writer.publish(weights(), 3) == Published(version=3, manifest=None)
    assert writer.publish_behind(weights(), 3).result(5.0) == Published(version=3, manifest=None)
    assert not (tmp_path / "store").exists()
    writer.expect(EXPECTED, None)
    assert writer.publish(weights(), 3).manifest is not None


# -- two ranks --------------------------------------------------------------------------------------------------------


def run_rank(folder: Path) -> None:
    """Publish a sharded model; then let rank 0 fail, and go on."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    rank, model, whole = dist.get_rank(), make_tiny_moe("deepseek_v3"), make_tiny_moe("deepseek_v3")
    wanted = checkpoint_tensors(whole)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    gathered: list[int] = []
    full_tensor = DTensor.full_tensor

    def count(self: Any, **kwargs: Any) -> Any:
        gathered.append(self.numel())
        return full_tensor(self, **kwargs)

    DTensor.full_tensor = count  # type: ignore[method-assign]
    writer = publisher(folder, with_canary=True)
    writer.register(model)
    assert writer.model is not None
    assert writer.model.is_sharded
    assert writer.model.kinds == model_metadata(whole)
    done = writer.publish(None, 7 if rank == 0 else 99)  # rank 0's number counts
    assert done.version == 7
    if rank == 0:
        assert done.canary is not None
        assert done.canary["log_probs"] == pytest.approx(canary_of(whole)["log_probs"], abs=1e-5)
    assert sorted(gathered) == sorted(parameter.numel() for parameter in whole.parameters())  # one at a time
    assert (done.manifest is not None) == (rank == 0)
    if rank == 0:
        found = stored(folder, 7)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        writer.expect({"another": (torch.float32, torch.Size([1]))}, None)
    try:
        writer.publish(None, 8)
        raise AssertionError("it was published")
    except WeightSyncError as error:
        assert isinstance(error, ManifestMismatch) == (rank == 0), error
        assert rank == 0 or "rank 0 could not publish version 8" in str(error)
    writer.expected = None
    assert writer.publish(model.state_dict(), 9).version == 9  # stacked, sharded, and by name
    if rank == 0:
        assert all(torch.equal(tensor, wanted[name]) for name, tensor in stored(folder, 9).items())
    try:
        writer.publish_behind(None, 10)
        raise AssertionError("it was published")
    except ValueError as error:
        assert "sharded weights are gathered by all ranks" in str(error)


def test_a_sharded_model_is_gathered_tensor_by_tensor_and_written_once(tmp_path: Path) -> None:
    environment = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path)],
            env={**environment, "RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=240)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], errors


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{sys.argv[1]}/rendezvous", rank=int(os.environ["RANK"]), world_size=2
    )
    run_rank(Path(sys.argv[1]) / "store")
    dist.destroy_process_group()
    sys.stderr.flush()
    os._exit(0)  # gloo's threads may outlive the interpreter, which then aborts at its end
