"""A trainer in a process of its own: it trains an epoch, saves checkpoints, and may be killed at any moment."""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from support.collecting import Questions, chat, policy_of, queries
from torchrl_moe.collectors import AsyncLLMCollector
from torchrl_moe.modules.backends.replica import Request
from torchrl_moe.testing import FakeAsyncVLLM

PROMPTS = 24
"""In an epoch."""
DONE = "done"


def token_seconds(request: Request) -> float:
    """1 to 5 ms, by the prompt."""
    assert request.prompt_token_ids is not None
    return 1e-3 * (1 + int(request.prompt_token_ids.sum()) % 5)


def checkpoint(folder: Path) -> dict[str, Any]:
    """What was saved last: prompts that were trained, and the collector's state."""
    path = folder / "checkpoint"
    return torch.load(path, weights_only=False) if path.exists() else {"trained": [], "collector": None}


def train(folder: Path, order: Any, progress: Connection) -> None:
    """Train until the epoch has ended; say what was done, and about to be done."""
    saved = checkpoint(folder)
    trained, rng = saved["trained"], random.Random(len(saved["trained"]))
    with FakeAsyncVLLM(2, token_seconds=token_seconds, layout=None) as engine:
        collector = AsyncLLMCollector(
            chat(2),
            policy=policy_of(engine),
            dataloader=Questions(PROMPTS),
            group_size=2,
            groups_per_batch=2,
            max_staleness=2,
            order=order,
        )
        if saved["collector"] is not None:
            collector.load_state_dict(saved["collector"])

        def save() -> None:
            progress.send("about to write")
            torch.save({"trained": trained, "collector": collector.state_dict()}, folder / "unfinished")
            progress.send("written")
            os.replace(folder / "unfinished", folder / "checkpoint")
            progress.send("saved")

        batches = iter(collector)
        while len(trained) < PROMPTS:
            trained += queries(next(batches))[::2]
            progress.send("trained")
            if rng.random() < 0.5:
                save()
        save()
        progress.send(DONE)
        collector.shutdown()


@contextmanager
def life(folder: Path, order: str) -> Iterator[tuple[BaseProcess, Connection]]:
    """Start a trainer; yields its process, and what it says. It is a fork, so nothing is imported again."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=train, args=(folder, order, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        yield process, ours
    finally:
        process.kill()
        process.join()
        ours.close()
