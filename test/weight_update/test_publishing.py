"""Publishing: what is written, by whom, and what an error leaves behind.

This file is also the program of each rank of a sharded trainer.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.weights import Fleet, note_made, weights
from torchrl_moe.modules.policies.unstack import checkpoint_tensors
from torchrl_moe.store import WeightStoreReader
from torchrl_moe.testing import make_tiny_moe
from torchrl_moe.weight_update.options import SourceOptions, StoreOptions
from torchrl_moe.weight_update.publishing import Publisher


def publisher(folder: Path, with_canary: bool = False, **store: Any) -> Publisher:
    return Publisher(StoreOptions(folder=folder, seen_as=folder, **store), SourceOptions(), with_canary)


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


@pytest.mark.parametrize("store", [{}, {"delta": True}])
def test_a_models_weights_are_written_as_they_are_now(tmp_path: Path, store: dict[str, Any]) -> None:
    model, writer = make_tiny_moe("deepseek_v3"), publisher(tmp_path, **store)
    writer.register(nn.ModuleDict({"model": model}))  # a wrapper
    for version in (1, 2):
        train(model)
        done = writer.publish(None, lambda number=version: number)
        assert done.manifest is not None
        assert done.version == done.manifest.version == version
        assert same(stored(tmp_path, version), checkpoint_tensors(model))
    # all of the head changed, and nothing else
    assert done.manifest.extent == (model.lm_head.weight.nbytes if store else done.manifest.nbytes)


@pytest.mark.parametrize("delta", [False, True])
def test_an_update_of_many_replicas_reads_its_manifest_once(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, delta: bool
) -> None:
    _, sender = fleet(16, delta=delta, folder=tmp_path)
    made = note_made(monkeypatch)
    for version in (1, 2):
        assert sender.update_weights(weights(version)).failed == {}
    # published, for its length and as it is, and first read
    assert [len(made[version]) <= 3 for version in (1, 2)] == [True, True]
