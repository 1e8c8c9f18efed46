"""What may be imported without paying for an engine: vllm, ray and transformers stay unloaded.

One bare process imports the statements one after the other, cheapest first, and says after each what is loaded by then.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.sources import PACKAGE, ROOT

ENGINES = ("ray", "vllm")
HEAVY = (*ENGINES, "transformers")
FIGURE = f"from {PACKAGE}.render import training_figure as f; f([{{'step': 0, 'reward': 1.0}}]).savefig('run.png')"
LIGHT = {
    f"import {PACKAGE}": HEAVY,
    f"import {PACKAGE}.errors": HEAVY,
    f"import {PACKAGE}._compat, {PACKAGE}._compat_transformers": (*HEAVY, "torchrl"),
    f"from {PACKAGE}.render.tables import in_notebook; assert not in_notebook()": (*HEAVY, "IPython"),
    f"import {PACKAGE}.render.curves": (*HEAVY, "matplotlib"),
    FIGURE: (*HEAVY, "matplotlib.pyplot"),  # no display is needed, and no global state is touched
    f"from {PACKAGE}.data import *": HEAVY,
    f"from {PACKAGE}.ops import *": HEAVY,
    f"import {PACKAGE}.objectives.functional": HEAVY,
    f"import {PACKAGE}.http": HEAVY,
    f"from {PACKAGE}.modules import LoadBalancer, Lease": HEAVY,
    f"from {PACKAGE}.modules import AsyncVLLM": HEAVY,
    f"from {PACKAGE}.http import serve_http": ENGINES,  # a server loads vLLM once it is started
    f"from {PACKAGE}.modules import RouterReplay": ENGINES,
    "import types; sys.modules['ray'] = types.ModuleType('ray')": ("vllm",),
}
"""Statement -> what is not loaded after it; by the last one, a heavy import would be found."""

PROBE = """
import json, sys
loaded = {}
for statement in sys.argv[2:]:
    exec(statement)
    loaded[statement] = [name for name in json.loads(sys.argv[1]) if name in sys.modules]
print(json.dumps(loaded))
"""


def loaded_after(folder: Path, names: set[str], *statements: str) -> dict[str, list[str]]:
    bare = {"PATH": "", "HOME": str(folder), "MPLCONFIGDIR": str(folder), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROBE, json.dumps([*names]), *statements]
    run = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=bare)
    assert run.returncode == 0, run.stderr
    found: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    return loaded_after(tmp_path_factory.mktemp("bare"), set().union(*LIGHT.values()), *LIGHT)


@pytest.mark.parametrize("statement", LIGHT)
def test_it_loads_nothing_heavy(statement: str, loaded: dict[str, list[str]]) -> None:
    assert {*loaded[statement]} & {*LIGHT[statement]} == set()


def test_a_heavy_import_is_found(loaded: dict[str, list[str]]) -> None:
    *_, last = loaded.values()
    assert "ray" in last


def test_a_replicas_actor_in_ray_which_passes_messages_on_does_not_import_torch(tmp_path: Path) -> None:
    statement = f"from {PACKAGE}.modules.backends.ray.actor import ReplicaActor"
    assert loaded_after(tmp_path, {"torch", "transformers", "vllm"}, statement) == {statement: []}
