"""A run's files, metrics and warnings, and what it shows its user."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pytest import CaptureFixture, LogCaptureFixture, MonkeyPatch
from rich.console import Console
from tensordict import NonTensorData, TensorDict
from torchrl.data.llm import History
from torchrl.modules.llm.policies import ChatHistory

from support.html_table import TableReader
from support.training import fake_config, rows_of
from torchrl_moe.errors import MissingEntryError
from torchrl_moe.trainers import run_record
from torchrl_moe.trainers.checkpoints import Checkpoints, exchange, recover
from torchrl_moe.trainers.config import ConfigError, GRPOConfig
from torchrl_moe.trainers.run_record import (
    COLUMNS,
    HealthMonitor,
    RunRecord,
    RunReports,
    locked_folder,
    make_loggers,
    open_record,
    refuse_older_run,
    summary,
)
from torchrl_moe.trainers.samples import batch_metrics, sample_rows


class Logger:
    def __init__(self) -> None:
        self.seen: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        self.seen.append((metrics, step))


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


def test_a_logger_that_fails_and_a_file_that_is_moved_cost_no_row(tmp_path: Path, caplog: LogCaptureFixture) -> None:
    class Unreachable(Logger):
        def log_metrics(self, metrics: dict[str, float], step: int) -> None:
            raise RuntimeError("the server is gone")

    record, logger = record_of(tmp_path, 1), Logger()
    record.loggers += [Unreachable(), logger]  # type: ignore[list-item]
    record.metrics.rename(tmp_path / "elsewhere.csv")
    record.add({"step": 1, "reward": 0.5})
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "1"] and len(logger.seen) == 1
    assert "Unreachable has not got step 1: RuntimeError('the server is gone')" in caplog.text


def test_samples_that_a_full_disk_did_not_take_come_with_the_next_ones(
    tmp_path: Path, monkeypatch: MonkeyPatch, caplog: LogCaptureFixture
) -> None:
    class Full:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> Full:
            return self

        def __exit__(self, *_: object) -> None:
            self.stream.close()

        def writelines(self, lines: list[str]) -> None:
            self.stream.write("".join(lines)[:10])
            raise OSError("No space left on device")

    record, open_file = record_of(tmp_path, 1), Path.open
    record.add_samples(0, answers("2"), 1)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, *how: Full(open_file(path, *how)))
        record.add_samples(1, answers("3"), 1)
    assert "No space left on device" in caplog.text
    record.add_samples(2, answers("4"), 1)
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [(line["step"], line["completion"]) for line in lines] == [(0, "2"), (1, "3"), (2, "4")]


def test_a_later_start_keeps_the_rows_before_its_step(tmp_path: Path) -> None:
    record_of(tmp_path, 5)
    record = RunRecord(tmp_path, "seed: 1\n", before=3)
    assert [row["step"] for row in record.rows] == [0, 1, 2] and record.column("lr") == [1e-5] * 3
    assert isinstance(record.rows[0]["step"], int)
    record.add({"step": 3})
    assert [row["step"] for row in rows_of(tmp_path)] == ["0", "1", "2", "3"]
    assert (tmp_path / "config.yaml").read_text() == "seed: 1\n"
    assert "torch" in json.loads((tmp_path / "versions.json").read_text())


def test_samples_are_the_first_answers_as_text_and_lines_that_a_kill_tore_are_dropped(tmp_path: Path) -> None:
    record_of(tmp_path, 2).add_samples(7, answers("2", "3", "4"), 2)
    for name, torn in (("metrics.csv", "2,0.7"), ("samples.jsonl", '{"step": 1, "rew')):
        with (tmp_path / name).open("a") as stream:
            stream.write(torn)
    record = RunRecord(tmp_path, "", before=9)
    record.begin()
    assert [row["step"] for row in record.rows] == [0, 1]
    lines = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 7, "reward": 1.0, "prompt": "1+1=", "completion": "2"},
        {"step": 7, "reward": 0.0, "prompt": "1+1=", "completion": "3"},
    ]
    # a run from the beginning begins its files again, with what came before its first step
    new = RunRecord(tmp_path, "")
    new.add_samples(0, answers("3"), 1)
    assert len(rows_of(tmp_path)) == 2
    new.add({"step": 0})
    assert len(rows_of(tmp_path)) == len((tmp_path / "samples.jsonl").read_text().splitlines()) == 1


def row(group: int, reward: float, tokens: int, version: int, *, done: bool = True, cut: bool = False) -> TensorDict:
    versions = torch.full((2 + tokens,), version, dtype=torch.int32)
    versions[:2] = -1
    return TensorDict(
        {
            "tokens": {"response": torch.zeros(tokens, dtype=torch.int64), "full": torch.zeros(2 + tokens)},
            "policy_versions": {"full": versions},
            "next": {"reward": torch.tensor([[reward]]), "done": torch.tensor([done])},
            "group_id": torch.tensor(group),
            "finish_reason": NonTensorData("length" if cut else "stop"),
            "rewards": {"exact": torch.tensor([reward])},
        }
    )


def test_rewards_are_of_samples_and_lengths_of_rows() -> None:
    turns = [row(5, 0.0, 3, 7, done=False), row(5, 1.0, 5, 7, cut=True)]  # of one sample
    others = [row(5, 0.0, 2, 6), row(9, 0.0, 4, 5), row(9, 0.0, 6, 7)]
    metrics = batch_metrics(sample_rows([*turns, *others]), version=7)
    # rewards 1, 0, 0, 0; ages: 8 tokens of 0, 2 of 1, 4 of 2, 6 of 0
    assert metrics == {
        "reward": 0.25, "reward_std": pytest.approx(0.1875**0.5), "uniform_groups": 0.5, "length": 4.0,
        "truncated": 0.2, "staleness": 0.5, "tokens": 20.0, "reward/exact": 0.2,
    }  # fmt: skip
    with pytest.raises(MissingEntryError, match=r"the rows have no reward: there is nothing at \('next', 'reward'\)"):
        sample_rows([TensorDict({"next": {"done": torch.tensor([True])}})])


def rows(**columns: list[Any]) -> list[dict[str, Any]]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"entropy": [2.0, "", 0.19]}, "the entropy fell from 2 to 0.19 nats"),
        ({"entropy": [2.0, "", 0.21]}, ""),
        ({"reward": [0.8] * 5 + [0.4] * 5}, "the reward fell from 0.80 to 0.40"),
        ({"reward": [0.8] * 5 + [0.42] * 5}, ""),
        ({"reward": [-1.0] * 5 + [-3.0] * 5}, ""),  # a share of what is not positive means nothing
        ({"grad_norm": [1.0] * 5 + [10.5]}, "the gradient has norm 10, usually 1"),
        ({"grad_norm": [1.0] * 5 + [9.5]}, ""),
        ({"truncated": [0.6] * 5}, "0.60 of the last answers were cut"),
        ({"truncated": [1.0] * 4}, ""),
        ({"uniform_groups": [0.9] * 5}, "in 0.90 of the last groups"),
        ({"uniform_groups": [0.8] * 5}, ""),
        ({"dlogp_live": [1e-3] * 5, "dlogp_mean": [2e-3] * 5}, "replay does not help here"),
        ({"dlogp_live": [3e-7] * 5, "dlogp_mean": [4e-7] * 5}, ""),
        ({"dlogp_live": ["", 1e-3] * 3, "dlogp_mean": ["", 2e-3] * 3}, ""),  # three of them
    ],
)
def test_a_sign_is_seen_and_what_is_near_it_is_not(columns: dict[str, list[Any]], message: str) -> None:
    found = HealthMonitor().check(rows(**columns))
    assert [message in text for text in found] == ([True] if message else [])


def test_a_sign_is_logged_once_and_again_after_it_had_gone(caplog: LogCaptureFixture) -> None:
    monitor = HealthMonitor()
    high, low = rows(truncated=[1.0] * 5), rows(truncated=[0.0] * 5)
    assert [len(monitor.check(part)) for part in (high, high, low, high)] == [1, 0, 0, 1]
    assert caplog.text.count("were cut at max_new_tokens") == 2


def step_row(step: int, **changes: Any) -> dict[str, Any]:
    seconds = {f"seconds_{phase}": 0.25 for phase in ("generate", "score", "train", "sync")}
    mismatch = {"dlogp_mean": 0.001, "dlogp_live": 0.004, "agreement": 0.9}
    return {"step": step, "reward": step / 10, "held_out_reward": "", **seconds, **mismatch, **changes}


def text_of(rows: list[dict[str, Any]], held_out: float | None = 0.75) -> str:
    stream = io.StringIO()
    Console(file=stream, width=120).print(summary(rows, held_out))
    return stream.getvalue()


def test_the_numbers_are_those_of_the_rows(capsys: CaptureFixture[str]) -> None:
    rows = [step_row(step) for step in range(10)]
    rows[0] |= {"held_out_reward": 0.5, "dlogp_live": 0.013, "agreement": 0.8}  # means 0.0049 and 0.89
    rows[4] |= {"held_out_reward": 0.6}
    text = text_of(rows)
    assert "0.20 -> 0.70" in text  # of 0, .1, .2, .3, .4 and of .5, .6, .7, .8, .9
    assert "0.50 -> 0.75" in text
    assert "4.9e-03" in text and "1.0e-03" in text and "89.0%" in text
    assert "replay removes" in text and "80% of the mismatch" in text  # 1 - 1 / 4.9
    # it is text where it is printed
    print(summary([step_row(0)], None))
    shown = capsys.readouterr().out
    assert "mean rollout reward, first and last 5 steps" in shown and "0.00 -> 0.00" in shown and "<rich" not in shown


def test_what_is_shown_depends_on_what_was_measured() -> None:
    text = text_of([step_row(0, dlogp_mean=0.006)])  # never evaluated but at the end
    assert "replay adds" in text and "50% of the mismatch" in text and "0.75" in text and "-> 0.75" not in text
    assert "held-out" not in text_of([step_row(0)], None)
    for missing in ("dlogp_live", "agreement"):  # without replay there is nothing to say about it
        assert "replay" not in text_of([step_row(step, **{missing: ""}) for step in range(3)])
    # where all experts agree, what differs is rounding
    text = text_of([step_row(0, agreement=1.0, dlogp_live=3.6e-7, dlogp_mean=3.8e-7)])
    assert "3.6e-07" in text and "3.8e-07" in text and "of the mismatch" not in text
    assert [line for line in text.splitlines() if "replay changes" in line and "nothing" in line]


class Run(RunReports):
    def __init__(self, *rows: dict[str, Any], out: str = "runs/a") -> None:
        self.record: Any = SimpleNamespace(rows=rows)
        self.config = GRPOConfig(out=out)
        self.policy_model: Any = SimpleNamespace(model=object())
        self.steps_done = len(rows)
        self.shown: list[Any] = []
        self.collector = SimpleNamespace(show_samples=lambda *args, **kwargs: self.shown.append((args, kwargs)))

    def evaluate(self) -> float | None:
        raise AssertionError("nothing to evaluate")


def test_in_a_notebook_the_last_step_is_a_table_and_samples_are_the_collectors() -> None:
    html = Run({"step": 0, "reward": 0.1}, {"step": 1, "reward": 0.51239, "empty": ""}, out="<script>1</script>")
    read = TableReader(html._repr_html_())
    assert read.rows["tbody"] == [["step", "1"], ["reward", "0.5124"]]
    assert "<script>1</script>" in read.other[0] and "<script" not in html._repr_html_()
    run = Run()
    assert TableReader(run._repr_html_()).other[-1] == "no step yet"
    with pytest.raises(RuntimeError, match="no step has run"):
        run.summary()
    run.show_samples(2, color="experts", layer=1)
    assert run.shown == [((2, 160), {"color": "experts", "layer": 1})]


# -- the run's folder -----------------------------------------------------------------------------------------------
@pytest.fixture
def config(tmp_path: Path) -> GRPOConfig:
    return fake_config(tmp_path / "run", 30)


def test_loggers_by_name(config: GRPOConfig, monkeypatch: MonkeyPatch) -> None:
    assert make_loggers(config) == []
    config.log.loggers = ["csv"]
    (logger,) = make_loggers(config)
    assert logger.exp_name.startswith("events/")

    def missing(*_: Any, **__: Any) -> Any:
        raise ImportError("No module named 'wandb'")

    monkeypatch.setattr(run_record, "get_logger", missing)
    config.log.loggers = ["wandb"]
    with pytest.raises(ConfigError, match=r"^log: No module named 'wandb'$"):
        make_loggers(config)


LEFT = ("checkpoints/step-000000000002/manifest.json", "model/config.json", "metrics.csv", "samples.jsonl")


@pytest.mark.parametrize("name", LEFT)
def test_a_folder_that_holds_a_run_is_refused_with_all_ways_out(config: GRPOConfig, tmp_path: Path, name: str) -> None:
    file = tmp_path / "run" / name
    file.parent.mkdir(parents=True)
    file.write_text("step\n0\n")
    ways = r"set resume=True to continue it, overwrite=True to replace it, or out to another folder"
    with pytest.raises(ConfigError, match=rf"out=.* holds a run \(.*{name.split('/')[0][:5]}.*\): {ways}"):
        locked_folder(config).__enter__()
    for way in ("resume", "overwrite"):
        setattr(config, way, True)
        with locked_folder(config):
            setattr(config, way, False)
    assert file.read_text() == "step\n0\n"


def test_a_model_in_the_folder_is_not_to_be_removed(config: GRPOConfig, tmp_path: Path) -> None:
    (tmp_path / "run" / "start-00000001").mkdir(parents=True)
    (tmp_path / "run" / "metrics.csv").write_text("step\n0\n")
    config.overwrite = True
    with pytest.raises(ConfigError, match=r"overwrite=True would remove the model .*start-00000001, which is in out="):
        refuse_older_run(config, tmp_path / "run" / "start-00000001")


@pytest.mark.parametrize("overwrite", [False, True])
def test_an_older_run_is_forgotten_by_the_first_step(config: GRPOConfig, tmp_path: Path, overwrite: bool) -> None:
    folder = tmp_path / "run"
    for name in ("checkpoints/step-000000000002", "start-0000001d", "start-0000003e", "model"):
        (folder / name).mkdir(parents=True)
    (folder / "metrics.csv").write_text("step\n0\n")
    config.overwrite = overwrite
    record = open_record(config, 0, folder / "start-0000003e")
    found = {path.name for path in folder.iterdir()}
    assert ("start-0000001d" in found) == ("checkpoints" in found) == ("config.yaml" not in found) == overwrite
    record.add({"step": 0})
    found = {path.name for path in folder.iterdir()}
    assert found == {"model", "start-0000003e", "config.yaml", "metrics.csv", "samples.jsonl", "versions.json"}
    assert "overwrite: false" in (folder / "config.yaml").read_text()  # a later start resumes


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_not_a_runs_stays(config: GRPOConfig, tmp_path: Path, overwrite: bool) -> None:
    mine = [tmp_path / "run" / name for name in ("checkpoints/mine/model.bin", "checkpoints/.git/x", "start-here/x")]
    for file in mine:
        file.parent.mkdir(parents=True)
        file.write_text("mine")
    config.overwrite = overwrite
    with locked_folder(config):
        pass
    Checkpoints(tmp_path / "run" / "checkpoints", cast(Any, None), {}, keep=1)
    open_record(config, 0, None).begin()
    assert [file.read_text() for file in mine] == ["mine"] * 3


@pytest.mark.parametrize("setting", ["overwrite", "resume", ""])
def test_a_file_that_no_run_has_written_is_not_replaced(config: GRPOConfig, tmp_path: Path, setting: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("steps: 3  # mine\n")
    if setting:
        setattr(config, setting, True)
    written = r"out=.*run holds config.yaml, which no run has written .*: rename it, or"
    with pytest.raises(ConfigError, match=written), locked_folder(config):
        pass


# -- it takes another's place, or that one is back ---------------------------------------------------------------------
def content(path: Path, text: str) -> Path:
    """A folder with one file."""
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.mark.parametrize("has_older", [False, True])
def test_a_draft_takes_the_place(tmp_path: Path, has_older: bool) -> None:
    if has_older:
        content(tmp_path / "run", "old")
    content(tmp_path / ".run.older", "left by a kill")
    exchange(content(tmp_path / ".draft", "new"), tmp_path / "run")
    assert (tmp_path / "run" / "file").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_a_kill_left_between_two_renamings_is_put_back(tmp_path: Path) -> None:
    recover(content(tmp_path / ".run.older", "the only copy"))
    recover(content(tmp_path / ".run.older", "replaced"))
    assert (tmp_path / "run" / "file").read_text() == "the only copy"


@pytest.mark.parametrize("older", ["run", ".run.older"])
def test_what_fails_leaves_the_older_one(tmp_path: Path, monkeypatch: MonkeyPatch, older: str) -> None:
    """Where a kill left it, too."""
    content(tmp_path / older, "old")
    draft, replace = content(tmp_path / ".draft", "new"), os.replace

    def fail(source: Any, target: Any) -> None:
        if Path(source) == draft:
            raise OSError("no such luck")
        replace(source, target)

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no such luck"):
        exchange(draft, tmp_path / "run")
    assert (tmp_path / "run" / "file").read_text() == "old"


def test_a_second_run_is_refused_until_the_first_ends(config: GRPOConfig, tmp_path: Path) -> None:
    with locked_folder(config), pytest.raises(ConfigError, match="is used by another run"), locked_folder(config):
        pass
    with locked_folder(config):
        assert not list((tmp_path / "run").iterdir())
    (tmp_path / "file").write_text("")
    config.out = str(tmp_path / "file" / "run")
    with pytest.raises(ConfigError, match=r"out=.*/file/run cannot be written to: Not a directory"):
        locked_folder(config).__enter__()
