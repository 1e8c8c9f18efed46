"""The command line as a whole: light help, one line for every error, and no traceback unless it is asked for."""

from __future__ import annotations

import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
import warnings
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

from support.sources import ROOT
from torchrl_moe.cli import main as module
from torchrl_moe.cli.command import Command, Output
from torchrl_moe.cli.main import COMMANDS, main

HEAVY = ("torch", "vllm", "ray", "transformers", "torchrl", "tensordict", "numpy", "hydra", "rich")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def run_python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)


def test_help_loads_nothing_heavy() -> None:
    code = f"""
import contextlib, io, json, sys
from torchrl_moe.cli.main import main
for arguments in (["--help"], ["doctor", "--help"], ["train", "--help"], ["train", "--list"], ["--version"]):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()):
        main(arguments)
loaded = [name for name in {HEAVY!r} if name in sys.modules]
with contextlib.redirect_stdout(io.StringIO()):
    main(["conformance", "--list"])
print(json.dumps([loaded, [name for name in {HEAVY!r} if name in sys.modules]]))
"""
    done = run_python(code)
    assert (done.returncode, done.stderr) == (0, "")
    # "train --list" finds the folder of configurations by their room, whose face is lazy
    assert json.loads(done.stdout) == [[], ["numpy"]]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_command_has_help_with_examples_that_can_be_typed(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main([command.name, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert all(line in shown for line, _ in command.examples) and len(command.examples) >= 3
    assert "--json" in shown and "--traceback" in shown and "exit codes: 0 fine" in shown
    for line, _ in command.examples:
        words = line.split()
        words = words[words.index("torchrl_moe.cli") + 1 :] if words[0] == "torchrun" else words[1:]
        assert module._parser().parse_args(words).command == command.name


SERVE = [
    (["--host", "0.0.0.0"], "pass api_key="),
    (["--port", "99999"], "port"),
    (["--engine-arg", "max_model_length=3"], "max_model_len"),
    (["--engine-arg", "model=other"], "MODEL"),
    (["--tool-call-parser", "hermess"], "hermes"),
    (["--reasoning-parser", "qwen-3"], "qwen3"),
]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], ""),
        (["dance"], "invalid choice: 'dance'"),
        (["doctor", "--fast"], "doctor does not know --fast: see torchrl-moe doctor --help"),
        (["doctor", "tiny", "more"], "doctor does not know more"),
        (["probe"], "the following arguments are required: MODEL"),
        (["probe", "tiny", "--dtype", "int4"], "invalid choice: 'int4'"),
        (["conformance", "tiny", "--engine", "vllm", "--adapter", "a:b"], "not allowed with argument"),
        (["doctor", "--engine"], "--engine vllm needs a MODEL"),
        (["doctor", "tiny", "--engine-arg", "seed=1"], "--engine-arg: no engine is started without --engine"),
        (["conformance", "--adapter", "a:b", "--engine-arg", "seed=1"], "--engine-arg: --adapter a:b starts no engine"),
        (["doctor", "--engine", "./none"], "there is no folder './none'"),  # a model may follow the option
        (["doctor", "tiny", "--engine", "sglang"], "--engine sglang: must be one of vllm, transformers"),
        (["doctor", ""], "there is no folder ''"),  # of a shell variable that was not set
        (["top", "--interval", "0"], "--interval 0: it must be above 0 seconds and at most a day, 86400"),
        (["top", "--interval", "nan"], "--interval nan: it must be above 0"),
        (["top", "--interval", "1e300"], "--interval 1e+300: it must be above 0"),
        (["top", "mine", "--url", "http://x"], "not both"),
        (["top", "--url", ""], "begins with http://"),
        *(pytest.param(["serve", "x", *words], said, marks=pytest.mark.needs_vllm) for words, said in SERVE),
    ],
)
def test_bad_use_has_exit_code_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: Any = main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert code == 2 and said in err and (out == "") == bool(arguments)  # without any, help


Act = Callable[[Callable[[], int]], None]


@pytest.fixture
def acting(monkeypatch: pytest.MonkeyPatch) -> Act:
    """Has ``doctor`` do something else."""

    def act(what: Callable[[], int]) -> None:
        def run(options: Namespace, output: Output) -> int:
            return what()

        commands = [dataclasses.replace(one, run=run) if one.name == "doctor" else one for one in COMMANDS]
        monkeypatch.setattr(module, "COMMANDS", tuple(commands))

    return act


def test_an_error_is_one_line_unless_its_traceback_is_asked_for(
    acting: Act, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> int:
        raise KeyError("gone")

    acting(fail)
    assert main(["doctor"]) == 1
    line = "torchrl-moe doctor: KeyError: 'gone' (--traceback shows where it comes from)\n"
    assert capsys.readouterr() == ("", line)
    assert main(["doctor", "--traceback"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback") and err.endswith(line)


def test_an_interrupt_is_one_line_and_json_is_all_there_is_on_stdout(
    acting: Act, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> int:
        print("a library says hello")
        raise KeyboardInterrupt

    acting(interrupted)
    assert main(["doctor", "--json"]) == 130
    said = "a library says hello\ntorchrl-moe doctor: interrupted; nothing was left running\n"
    assert capsys.readouterr() == ("", said)


def test_what_libraries_warn_of_is_hidden_and_logging_is_as_before(
    acting: Act, caplog: pytest.LogCaptureFixture
) -> None:
    def warn() -> int:
        warnings.warn("old", DeprecationWarning, stacklevel=1)
        logging.getLogger("other").warning("odd")
        logging.getLogger("other").error("bad")
        return 0

    acting(warn)
    with warnings.catch_warnings(record=True) as seen:
        assert main(["doctor"]) == 0 and seen == []
        assert main(["doctor", "--traceback"]) == 0
        assert len(seen) == 1
    assert [record.message for record in caplog.records] == ["bad", "odd", "bad"]
    assert logging.root.manager.disable == logging.NOTSET


def test_a_reader_that_goes_away_is_no_error() -> None:
    command = f"{sys.executable} -m torchrl_moe.cli train --cfg | head -n 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, cwd=ROOT, env=ENVIRONMENT)
    assert len(done.stdout.splitlines()) == 1 and done.stderr == ""


def test_a_full_standard_output_is_named() -> None:
    """And no other place for temporary files, which would not help."""
    words = [sys.executable, "-m", "torchrl_moe.cli", "train", "--list"]
    for more in ([], ["--json"]):
        with open("/dev/full", "w") as full:
            done = subprocess.run([*words, *more], stdout=full, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        assert done.returncode == 1
        said = "standard output cannot be written to (No space left on device): redirect it to a place with room"
        assert done.stderr == f"torchrl-moe train: {said}\n"


def test_a_result_is_text_or_json() -> None:
    text, data = io.StringIO(), io.StringIO()
    Output(text, is_json=False).show("two words", {"words": 2})
    Output(data, is_json=True).show("two words", {"words": 2, 3: [float("inf"), (1.5, float("nan"))], "none": None})
    assert text.getvalue() == "two words\n"
    assert json.loads(data.getvalue()) == {"words": 2, "3": [None, [1.5, None]], "none": None}
