"""``torchrl-moe conformance``: engines that are started, adapters by name, servers by address."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from support.conformance import shared_moe
from support.conforming_engine import ConformingEngine
from support.engines import EngineShelf
from support.sources import ROOT
from torchrl_moe.cli.command import BadUse
from torchrl_moe.cli.conformance import adapter_by_name
from torchrl_moe.cli.main import main
from torchrl_moe.testing.conformance import CHECKS


class Right(ConformingEngine):
    """One without a fault."""

    def __init__(self) -> None:
        super().__init__(shared_moe())


class Late(Right):
    """Its rows are those of the token before."""

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        groups = super().generate(*args, **kwargs)
        return [
            [replace(one, routed_experts=np.roll(one.routed_experts, 1, axis=0)) for one in group] for group in groups
        ]


READY = SimpleNamespace(generate=lambda prompts, sampling, request_ids=None: [])


def fails() -> Any:
    raise TypeError("of its own")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model of the engines here."""
    path = tmp_path_factory.mktemp("model")
    shared_moe().save_pretrained(path)
    return str(path)


def test_an_adapter_is_an_object_or_what_makes_one_whose_errors_are_its_own() -> None:
    assert adapter_by_name(f"{__name__}:READY") is READY
    assert type(adapter_by_name(f"{__name__}:Late")).__name__ == "Late"
    with pytest.raises(TypeError, match="of its own"):
        adapter_by_name(f"{__name__}:fails")
    with pytest.raises(BadUse, match="a NoneType has no generate"):
        adapter_by_name("builtins:print")  # which makes none


def test_checks_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(maxsplit=1) for line in lines] == [[one.name, one.meaning] for one in CHECKS]
    assert main(["conformance", "--list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {one.name: one.meaning for one in CHECKS}


def test_an_adapter_that_is_right_and_one_that_is_late(folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    checks = ["--only", "rows, native_routes", "--json"]
    assert main(["conformance", folder, "--adapter", f"{__name__}:Right", *checks]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["holds"], [one["verdict"] for one in found["checks"]]) == (True, ["holds", "holds"])
    assert main(["conformance", folder, "--adapter", f"{__name__}:Late", *checks]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [one["verdict"] for one in found["checks"]] == ["holds", "does not hold"]


def test_where_no_check_holds_nothing_was_proved(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["conformance", "--adapter", f"{__name__}:Right", "--only", "rows"]) == 1
    assert "conforming: 0 hold, 0 do not hold, 1 not offered" in capsys.readouterr().out


def test_a_started_engine_takes_updates(shelf: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    engine = ["--engine", "transformers", "--only", "rows,update"]
    assert main(["conformance", str(shelf.folder("qwen3_moe")), *engine, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(one["name"], one["verdict"]) for one in found["checks"]] == [("rows", "holds"), ("update", "holds")]


BAD = [
    ([], "name the MODEL that the engine serves"),
    (["./none"], "there is no folder './none'"),
    (["tiny", "--only", ","], "--only '': it names no check"),
    (["tiny", "--only", "rows,speed"], "--only speed: no such check; --list names them"),
    (["tiny", "--tolerance", "-1"], "tolerance must be positive"),
    (["tiny", "--tie", "nan"], "tie must not be negative"),
    (["tiny", "--engine-arg", "x"], "write it as KEY=VALUE"),
    (["tiny", "--adapter", "json"], "write it as module:name"),
    (["tiny", "--adapter", "no_such_module:Adapter"], "cannot import 'no_such_module': there is no no_such_module.py"),
    (["tiny", "--adapter", "json:none"], "json has no 'none'"),
    (["tiny", "--adapter", "json:loads"], "it needs arguments (missing a required argument: 's'): name an adapter"),
    (["tiny", "--adapter", "json:__name__"], "a str has no generate"),
]


def test_bad_use_is_found_before_anything_heavy_is_loaded() -> None:
    code = (
        "import json, sys\nfrom torchrl_moe.cli.main import main\n"
        "codes = [[main(['conformance', *words]), 'torch' in sys.modules] for words in json.loads(sys.argv[1])]\n"
        "print(json.dumps(codes))"
    )
    command = [sys.executable, "-c", code, json.dumps([words for words, _ in BAD])]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert [said in line for line, (_, said) in zip(lines, BAD, strict=True)] == [True] * len(BAD), lines
    assert json.loads(done.stdout) == [[2, False]] * len(BAD)
