"""What may be imported without paying for an engine: vllm, ray and transformers stay unloaded.

One process imports the statements one after the other, cheapest first, and says after each what is loaded by then.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from support.sources import PACKAGE, ROOT

HEAVY = ("ray", "transformers", "vllm")
LIGHT = {
    f"import {PACKAGE}": "__init__.py",
    f"import {PACKAGE}.errors": "errors.py",
    f"from {PACKAGE}.data import *": "data/__init__.py",
    f"from {PACKAGE}.ops import *": "ops/__init__.py",
    f"import {PACKAGE}.objectives.functional": "objectives/functional.py",
    f"import {PACKAGE}.http": "http/__init__.py",
    f"from {PACKAGE}.modules import LoadBalancer, Lease": "modules/serving/balancer.py",
    f"from {PACKAGE}.modules import AsyncVLLM": "modules/serving/async_vllm.py",
}
"""Statement -> the file without which there is nothing to check."""

PROBE = """
import json, sys
loaded = {}
for statement in sys.argv[1:]:
    exec(statement)
    loaded[statement] = [name for name in HEAVY if name in sys.modules]
print(json.dumps(loaded))
"""


def loaded_after(*statements: str, heavy: tuple[str, ...] = HEAVY) -> dict[str, list[str]]:
    code = f"HEAVY = {heavy!r}\n{PROBE}"
    run = subprocess.run([sys.executable, "-c", code, *statements], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


BUILT = [statement for statement, file in LIGHT.items() if (ROOT / PACKAGE / file).exists()]


@pytest.fixture(scope="module")
def loaded() -> dict[str, list[str]]:
    return loaded_after(*BUILT)


@pytest.mark.parametrize("statement", BUILT)
def test_it_loads_nothing_heavy(statement: str, loaded: dict[str, list[str]]) -> None:
    assert loaded[statement] == []


def test_a_server_loads_vllm_once_it_is_started() -> None:
    statement = f"from {PACKAGE}.http import serve_http"
    assert loaded_after(statement, heavy=("ray", "vllm")) == {statement: []}


def test_a_replicas_actor_in_ray_which_passes_messages_on_does_not_import_torch() -> None:
    statement = f"from {PACKAGE}.modules.backends.ray.actor import ReplicaActor"
    assert loaded_after(statement, heavy=("torch", "transformers", "vllm")) == {statement: []}


def test_a_heavy_import_is_found() -> None:
    fake = "import types; sys.modules['ray'] = types.ModuleType('ray')"
    assert loaded_after("import json", fake) == {"import json": [], fake: ["ray"]}
