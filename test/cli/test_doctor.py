"""``torchrl-moe doctor``: packages, machine, model and engine, each problem with its mend."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from support.engines import EngineShelf
from torchrl_moe import __version__
from torchrl_moe.cli import doctor
from torchrl_moe.cli.doctor import Machine, Package, Place
from torchrl_moe.cli.main import main
from torchrl_moe.errors import ReplicaDiedError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.testing import FakeAsyncVLLM

HEALTHY = Machine(
    system="Linux x86_64",
    python="3.11.7",
    cores=2,
    memory=32_000_000_000,
    free_memory=16_000_000_000,
    places=(Place("/tmp", "logs", 10**11, 10**12), Place("/dev/shm", "weights", 10**10, 10**10)),
    gpus=(),
    cuda=None,
)
NOT_FOUND = metadata.PackageNotFoundError
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
    monkeypatch.setattr(doctor, "metadata", SimpleNamespace(version=version, PackageNotFoundError=NOT_FOUND))
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
    def fail() -> list[Package]:
        raise metadata.PackageNotFoundError("torchrl_moe")

    monkeypatch.setattr(doctor, "installed_packages", fail)
    code, found = report(capsys)
    assert (code, found["problems"][0]["mend"]) == (1, "pip install -e . in its checkout")


def test_a_model_of_which_only_the_configuration_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, found = report(capsys, "Qwen/Qwen3-30B-A3B")
    assert code == 0
    assert found["model"] == {
        "name": "Qwen/Qwen3-30B-A3B",
        "architecture": "Qwen3MoeForCausalLM",
        "layers": 48,
        "replayable": True,
        "why": "",
        "routers": "softmax, normalised; 8 of 128 experts",
    }


def test_a_dense_model_is_a_problem_with_a_mend(shelf: EngineShelf, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(shelf.folder("qwen3"))]) == 1
    out = capsys.readouterr().out
    assert "can be replayed  no: it is a dense model" in out
    assert "has no experts: there is nothing to replay\n  train it with loss.replay=none" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--engine"], "--engine vllm needs a MODEL"),
        (["--engine", "./none"], "there is no folder './none'"),  # a model may follow the option
        (["tiny", "--engine", "sglang"], "--engine sglang: must be one of vllm, transformers"),
        ([""], "there is no folder ''"),  # of a shell variable that was not set
    ],
)
def test_bad_use(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err and out == ""


def lend(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AsyncVLLM, "from_pretrained", lambda *_, **__: contextlib.nullcontext(engine))


def test_a_real_engine_returns_routes(
    second_engine: AsyncVLLM, shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lend(second_engine, monkeypatch)
    code, found = report(capsys, str(shelf.folder("qwen3_moe")), "--engine", "transformers")
    assert (code, found["problems"]) == (0, [])
    rows, layers, top_k = found["model"]["engine"]["routes"]
    assert 5 <= rows <= 8 and (layers, top_k) == (4, 4)  # an answer of 1 to 4 tokens
    assert found["model"]["engine"]["log_probs"] and found["model"]["engine"]["follows"]
    assert "dtypes" not in found["model"]  # float32, as a trainer's weights


def test_what_an_engine_holds_in_less_than_a_trainers_float32_is_named(
    second_engine: AsyncVLLM, shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = {
        name: (torch.bfloat16 if "gate.weight" in name or name == "model.norm.weight" else dtype, shape)
        for name, (dtype, shape) in second_engine.get_model_metadata().items()
    }
    monkeypatch.setattr(second_engine, "get_model_metadata", lambda: held)
    lend(second_engine, monkeypatch)
    folder = str(shelf.folder("qwen3_moe"))
    assert main(["doctor", folder, "--engine", "transformers"]) == 0  # how it usually is: no problem
    lines = capsys.readouterr().out.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith("dtypes that differ"))
    assert lines[at + 1].split() == [
        "routers",
        "bfloat16",
        "float32",
        "3,",
        "such",
        "as",
        "model.layers.1.mlp.gate.weight",
    ]
    assert lines[at + 2].split()[:4] == ["norms", "and", "others", "bfloat16"]
    assert "router_dtype='float32' keeps them in an engine" in lines[at + 3]
    _, found = report(capsys, folder, "--engine", "transformers")
    assert found["model"]["dtypes"][0]["names"] == [f"model.layers.{layer}.mlp.gate.weight" for layer in (1, 2, 3)]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda output: dataclasses.replace(output, routed_experts=None), "returned no routes"),
        (lambda output: dataclasses.replace(output, routed_experts=np.zeros((3, 4, 2), np.uint8)), "3 rows of routes"),
        (lambda output: dataclasses.replace(output, logprobs=None), "returned no log-probs"),
    ],
)
def test_an_engine_that_returns_less_is_a_problem(
    change: Any, what: str, shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with FakeAsyncVLLM() as engine:
        generate = engine.generate

        def less(*args: Any, **kwargs: Any) -> Any:
            answer: Any = generate(*args, **kwargs)
            return dataclasses.replace(answer, outputs=[change(answer.outputs[0])])

        monkeypatch.setattr(engine, "generate", less)
        lend(engine, monkeypatch)
        code, found = report(capsys, str(shelf.folder("qwen3_moe")), "--engine", "transformers")
    assert code == 1 and what in found["problems"][0]["what"]


def test_an_engine_that_does_not_start_leaves_the_rest_to_be_seen(
    shelf: EngineShelf, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ReplicaDiedError("replica 0 did not start: no kernel\nits log")

    monkeypatch.setattr(AsyncVLLM, "from_pretrained", fail)
    code, found = report(capsys, str(shelf.folder("qwen3_moe")), "--engine", "transformers")
    assert code == 1 and "replica 0 did not start: no kernel" in found["problems"][0]["what"]
    assert found["packages"]
