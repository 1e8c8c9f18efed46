"""A user ends a run by hand: shuts it down early, in a forked process, or saves it in a hook."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.training import FakeFleet, fake_config, fake_fleet, fake_run, rows_of
from support.waiting import PATIENCE


@pytest.fixture
def fleet() -> Iterator[FakeFleet]:
    with fake_fleet() as service:
        yield service


def test_a_run_that_was_shut_down_says_so_when_it_is_to_train(fleet: FakeFleet, tmp_path: Path) -> None:
    trainer = fake_run(fleet, fake_config(tmp_path, 2))
    trainer.shutdown()
    with pytest.raises(RuntimeError, match="shut down or interrupted: continue with another trainer"):
        trainer.train()


def test_a_forked_process_shuts_nothing_down_and_does_not_wait(
    fleet: FakeFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = fake_config(tmp_path, 2)
    config.checkpoint.every = 1
    with fake_run(fleet, config) as trainer:
        is_written = threading.Event()
        monkeypatch.setattr(trainer.checkpoints, "_publish", lambda *_: is_written.wait(PATIENCE))
        trainer.checkpoints.save(0, 0.0)  # its thread is not there in the forked process
        if (child := os.fork()) == 0:
            try:
                trainer.shutdown()
                os._exit(0)
            finally:
                os._exit(1)
        ended = threading.Thread(target=os.waitpid, args=(child, 0))
        ended.start()
        ended.join(PATIENCE)
        assert not ended.is_alive()
        is_written.set()
        trainer.train()
        assert trainer.steps_done == 2


@pytest.mark.parametrize("place", ["post_steps", "post_optim", "post_steps_log"])
def test_a_checkpoint_in_a_hook_leaves_the_steps_seconds(fleet: FakeFleet, tmp_path: Path, place: str) -> None:
    config, began = fake_config(tmp_path, 2), time.perf_counter()
    config.checkpoint.every = 10
    with fake_run(fleet, config) as trainer:

        def hook(*_: object) -> None:
            time.sleep(0.2 if place == "post_optim" else 0.0)
            trainer.save_trainer(force_save=place != "post_optim")

        trainer.register_op(place, hook)
        trainer.train()
        assert trainer.steps_done == 2
    rows = rows_of(tmp_path)
    assert all(float(row["tokens_per_second"]) > 0 for row in rows)
    # what an optimizer step took is counted, and nothing is counted twice
    assert all(float(row["seconds_train"]) >= (0.2 if place == "post_optim" else 0.0) for row in rows)
    counted = sum(float(value) for row in rows for name, value in row.items() if name.startswith("seconds_") and value)
    assert counted <= time.perf_counter() - began
