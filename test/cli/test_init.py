"""``torchrl-moe init``: the folder that it writes trains as it is, and nothing of yours is overwritten."""

from __future__ import annotations

import csv
import json
import shlex
import sys
from pathlib import Path

import pytest

from support.engines import EngineShelf
from torchrl_moe.cli.main import main
from torchrl_moe.trainers import load_config

FILES = ["config.yaml", "data.jsonl", "reward.py", "README.md"]


def test_it_writes_four_files_and_says_what_is_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "my first" / "run"
    assert main(["init", str(folder), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["folder"], said["files"]) == (str(folder), FILES)
    assert shlex.split(said["next"]) == ["cd", str(folder), "&&", "torchrl-moe", "train", "--config", "config.yaml"]
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    rows = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    assert len(rows) == 100 and {"prompt": "7+8=", "answer": "15"} in rows


def test_the_commands_of_its_readme_can_follow_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder takes one run: each command has another, or continues with it."""
    assert main(["init", str(tmp_path / "run")]) == 0
    monkeypatch.chdir(tmp_path / "run")
    lines = Path("README.md").read_text().splitlines()
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("torchrl-moe train")]
    new = [command for command in commands if "resume=true" not in command]
    folders = [load_config(Path(file), changes).out for _, _, _, file, *changes in new]
    assert len(commands) == 4
    assert len(set(folders)) == len(folders) == 3


def test_a_folder_with_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["init", str(tmp_path)]) == 2
    assert main(["init", str(tmp_path / "mine.txt")]) == 2
    said = capsys.readouterr().err.splitlines()
    assert all("is there already, and not an empty folder: name another, or remove it" in line for line in said)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_model_of_yours_is_in_the_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "moe").mkdir()
    (tmp_path / "moe" / "config.json").write_text("{}")
    for model, source in (("moe", str(tmp_path / "moe")), ("owner/name: x", "owner/name: x")):
        name = f"run of {Path(model).name}"
        assert main(["init", name, "--model", model]) == 0
        config = load_config(tmp_path / name / "config.yaml")
        assert (config.model.source, config.model.arguments) == (source, {})
    assert main(["init", "third", "--model", "./none"]) == 2 and not (tmp_path / "third").exists()


@pytest.mark.needs_vllm
@pytest.mark.engine
def test_the_folder_trains_as_it_is(shelf: EngineShelf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf.clear()
    assert main(["init", str(tmp_path / "run")]) == 0
    monkeypatch.chdir(tmp_path / "run")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "reward", raising=False)
    assert main(["train", "--config", "config.yaml", "steps=1"]) == 0
    with open("run/metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["0"]
    assert all(0 < float(row["reward"]) < 1 for row in rows)  # half taught: neither all right nor all wrong
    assert (tmp_path / "run" / "run" / "model" / "config.json").is_file()
