"""A run's files: what they hold, and what of them a later start keeps."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from torchrl_moe.trainers.run_record import COLUMNS, RunRecord


class Logger:
    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.seen.append((metrics, step))


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def record_of(folder: Path, steps: int) -> RunRecord:
    record = RunRecord(folder, "seed: 0\n")
    record.begin()
    for step in range(steps):
        record.add({"step": step, "reward": step / 4, "lr": 1e-5})
    return record


def answers(*texts: str) -> Any:
    chats = [[{"role": "user", "content": "1+1="}, {"role": "assistant", "content": text}] for text in texts]
    return TensorDict(
        {
            "history": ChatHistory(full=History.from_chats(chats)),
            "next": {"reward": [[[float(text == "2")]] for text in texts]},
        },
        batch_size=[len(texts)],
    )


def test_a_row_goes_to_the_file_and_every_figure_to_the_loggers(tmp_path: Path) -> None:
    record, logger = record_of(tmp_path, 0), Logger()
    record.loggers.append(logger)  # type: ignore[arg-type]
    record.add({"step": 3, "reward": 0.5, "reward/exact": 0.25, "version": 4})
    assert logger.seen == [({"reward": 0.5, "reward/exact": 0.25, "version": 4.0}, 3)]
    (row,) = rows_of(tmp_path)
    assert tuple(row) == COLUMNS
    assert {name: value for name, value in row.items() if value} == {"step": "3", "reward": "0.5", "version": "4"}
    assert next(name for name in row if "reward" in name) == "reward"
    assert record.column("reward") == [0.5] and record.column("mismatch_kl") == []


def test_a_logger_that_fails_and_a_file_that_is_moved_cost_no_row(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreachable(Logger):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise RuntimeError("the server is gone")

    record, logger = record_of(tmp_path, 1), Logger()
    record.loggers += [Unreachable(), logger]  # type: ignore[list-item]
    record.metrics.rename(tmp_path / "elsewhere.csv")
    record.add({"step": 1, "reward": 0.5})
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "1"] and len(logger.seen) == 1
    assert "Unreachable has not got step 1: RuntimeError('the server is gone')" in caplog.text


def test_a_later_start_keeps_the_rows_before_its_step(tmp_path: Path) -> None:
    record_of(tmp_path, 5)
    record = RunRecord(tmp_path, "seed: 1\n", before=3)
    assert [row["step"] for row in record.rows] == [0, 1, 2]
    assert record.column("lr") == [1e-5] * 3
    assert isinstance(record.rows[0]["step"], int)
    record.add({"step": 3})
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "1", "2", "3"]
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    assert "torch" in json.loads((tmp_path / "versions.json").read_text())


def test_a_new_run_in_an_old_folder_begins_again(tmp_path: Path) -> None:
    record_of(tmp_path, 2).add_samples(0, answers("2"), 1)
    record = RunRecord(tmp_path, "")
    record.add_samples(0, answers("3"), 1)
    assert len(rows_of(tmp_path)) == 2 and (tmp_path / "samples.jsonl").read_text() != ""
    record.begin()
    assert rows_of(tmp_path) == [] and (tmp_path / "samples.jsonl").read_text() == ""
    record.add({"step": 0})
    assert len(rows_of(tmp_path)) == len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1


def test_the_files_of_a_run_without_a_step_are_empty(tmp_path: Path) -> None:
    RunRecord(tmp_path, "").begin()
    assert rows_of(tmp_path) == [] and (tmp_path / "samples.jsonl").read_text() == ""


def test_lines_that_a_kill_tore_are_dropped(tmp_path: Path) -> None:
    record_of(tmp_path, 2).add_samples(0, answers("2"), 1)
    for name, torn in (("metrics.csv", "2,0.7"), ("samples.jsonl", '{"step": 1, "rew')):
        with (tmp_path / name).open("a") as stream:
            stream.write(torn)
    record = RunRecord(tmp_path, "", before=9)
    record.begin()
    assert [row["step"] for row in record.rows] == [0, 1]
    assert len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1


def test_samples_are_the_first_answers_as_text(tmp_path: Path) -> None:
    record_of(tmp_path, 0).add_samples(7, answers("2", "3", "4"), 2)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 7, "reward": 1.0, "prompt": "1+1=", "completion": "2"},
        {"step": 7, "reward": 0.0, "prompt": "1+1=", "completion": "3"},
    ]


def test_what_is_no_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="step"):
        record_of(tmp_path, 0).add({"reward": 1.0})
