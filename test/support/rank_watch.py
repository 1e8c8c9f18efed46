"""What ranks of a run with a real engine do, noted in the run's folder by hooks, ``support.rank_watch:watch`` say."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from support.processes import process_of
from support.sharded import whole
from torchrl_moe.data.packed import pack
from torchrl_moe.modules.policies.unstack import ModelWeights
from torchrl_moe.store import WeightStoreReader
from torchrl_moe.trainers import MoEGRPOTrainer

SYNCS = "syncs.jsonl"


def note_processes(trainer: MoEGRPOTrainer) -> None:
    """Note the processes of this rank and, if it has one, of its engine."""
    folder = Path(trainer.config.out)
    _write(folder / f"rank-{trainer.ranks.rank}.pid", os.getpid())
    if trainer.ranks.is_first:
        _write(folder / "replica.pid", process_of(trainer.rollout_engine.engine.replica_table[0].replica).pid)


def _write(file: Path, pid: int) -> None:
    draft = file.with_suffix(".tmp")
    draft.write_text(str(pid))
    draft.replace(file)


def watch(trainer: MoEGRPOTrainer) -> None:
    """Note this rank's share of the first batch and its gradients, and what each sync has sent."""
    folder, rank = Path(trainer.config.out), trainer.ranks.rank
    weights = ModelWeights(trainer.policy_model.model)
    first = folder / f"share-{rank}"

    def note_share(batch: TensorDictBase) -> None:
        if not first.exists():
            first.write_bytes(pack(batch))

    def note_gradients(*_: Any) -> None:
        file = folder / "gradients.pt"
        if trainer.steps_done == 0:
            gradients = {name: _whole_gradient(weight) for name, weight in trainer.policy_model.trained.items()}
            if rank == 0:
                torch.save(gradients, file)

    def note_sync() -> None:
        tensors = weights.tensors()
        if rank:
            for _ in tensors:  # reading them is a collective
                pass
            return
        sender = trainer.rollout_engine.sender
        reader = WeightStoreReader(sender.options.store.folder)
        manifest = reader.manifest(trainer.rollout_engine.version)
        with reader.reading(manifest, verify=True) as sent:
            differ = sum(not torch.equal(tensor.cpu(), sent[name]) for name, tensor in tensors)
        replicas = trainer.rollout_engine.engine.replica_table
        versions = [entry.version for entry in replicas]
        with (folder / SYNCS).open("a") as stream:
            stream.write(json.dumps({"tensors": len(manifest.entries), "differ": differ, "versions": versions}) + "\n")

    trainer.register_op("batch_process", note_share)
    trainer.learner.optimizer.register_step_pre_hook(note_gradients)
    trainer.register_op("post_steps", note_sync)


def _whole_gradient(weight: Tensor) -> Tensor:
    assert weight.grad is not None
    return whole(weight.grad).cpu().clone()


def syncs_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / SYNCS).read_text().splitlines()]


def by_ids(completion_ids: list[int]) -> float:
    """A reward that differs from answer to answer of a model that has learned nothing."""
    return float(sum(completion_ids) % 7)
