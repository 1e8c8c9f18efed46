"""Imports go one way. This file is the statement of it; a line may import what it names, and all that lies below.

``vllm``, ``ray`` and ``transformers`` are each imported in named places only, at the top of a file or inside a
function; ``TYPE_CHECKING`` imports of them are free. Between our own rooms a typing import is a dependency like any.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter

import pytest

from support.sources import PACKAGE, Source, imports, package_sources, snippet

BELOW: dict[str, set[str]] = {
    "cli": {"trainers", "http", "testing"},
    # testing only by name, "module:function"
    "trainers": {"collectors", "objectives", "_compat_memory", "_compat_transformers"},
    "http": {"collectors"},
    "collectors": {"weight_update", "modules.backends.ray"},  # a collector in Ray joins the cluster as an engine does
    "weight_update": {"modules"},
    # both ends: the sender's, which calls an engine by its verbs, and the workers'
    "weight_update.transports": {"store", "modules.backends.engine"},
    "store": {"data"},
    "testing": {"modules"},
    "objectives": {"data", "ops"},  # never modules: tensordict keys are the interface
    # the public face, and any file straight in it
    "modules": {"modules.policies", "modules.backends.vllm", "modules.backends.transformers"},
    "modules.policies": {"modules.serving", "modules.replay", "_compat_transformers"},
    "modules.serving": {"modules.backends"},
    "modules.backends.ray": {"modules.backends.process"},  # an actor hosts an engine process, of whatever engine
    # a worker replays as the trainer does
    "modules.backends.vllm": {"modules.backends.process", "modules.replay"},
    "modules.backends.transformers": {"modules.backends.process", "modules.replay", "_compat_transformers"},
    "modules.backends.process": {"modules.backends"},
    "modules.backends": {"ops", "modules.backends.engine", "weight_update.transports"},  # workers receive weights
    "modules.backends.engine": {"modules.backends.replica"},  # an engine's verbs
    "modules.backends.replica": {"data"},  # what travels between a service and an engine
    "modules.replay": {"data", "ops"},
    "data": {"render", "_checks", "_compat", "_lazy"},
    "ops": {"render", "_checks", "_compat", "_lazy"},
    "render": {"_checks", "_compat", "_lazy"},  # takes plain data, so anyone may import it
    "_checks": {"errors"},
    "_compat": {"errors"},
    "_compat_memory": set(),
    "_compat_transformers": set(),
    "errors": set(),
    "_lazy": set(),
    "": set(),  # the package's own __init__: it loads nothing, so anyone may import it
}
ONLY_IN_FUNCTIONS = {
    ("modules.serving", f"modules.backends.{room}") for room in ("process", "ray", "transformers", "vllm")
}
"""An engine constructs its replicas: on vLLM, transformers or Ray if it is asked to, and loads none of them if not."""

PLACES: dict[str, tuple[str, ...]] = {
    "vllm": (
        "modules.backends.vllm",
        "http",  # its own server code, over our service
        "_compat",
        "weight_update.transports.nccl",  # both ends of vLLM's own weight transfer
    ),
    "ray": (  # they place actors
        *(f"modules.backends.ray.{file}" for file in ("actor", "ray_replica", "cluster")),
        "collectors.ray_collectors",
    ),
    "transformers": (
        "modules.policies",
        "modules.replay",
        "modules.backends.transformers",
        "modules.backends.checkpoint",
        "testing",
        "trainers.ranks",  # how they share what it loads
        "trainers.policy_model",
        "trainers.plan",
        "cli.models",  # the model that a command is given
    ),
}
COMPAT = {"_compat", "_compat_memory", "_compat_transformers", "modules.backends.vllm"}
"""Files that may touch private names of vLLM, TorchRL and transformers."""
PURE: dict[str, set[str]] = {
    "ops": {"torch"},
    "objectives.functional": {"torch"},
    "objectives.load_balancing": {"torch"},
}
"""Rooms that compute and nothing else, with all they may import from outside."""


def inner(name: str) -> str:
    """A module's name inside the package: ``torchrl_moe.data.x`` -> ``data.x``."""
    return name.removeprefix(PACKAGE).removeprefix(".")


def lies_in(name: str, room: str) -> bool:
    return name == room or name.startswith(f"{room}.")


@functools.cache
def room_of(name: str) -> str:
    """The innermost room that a module, or a name in one, lies in."""
    return max((room for room in BELOW if lies_in(name, room)), key=len, default="")


@functools.cache
def reachable(room: str) -> set[str]:
    return {room}.union(*(reachable(below) for below in BELOW[room]))


def violations(source: Source) -> list[str]:
    here = inner(source.name)
    room = room_of(here)
    is_face = source.path.stem == "__init__"
    found = []
    for item in imports(source):
        where = source.at(item.node)
        top = item.target.split(".")[0]
        if lies_in(item.target, f"{PACKAGE}.weight_update.transports.nccl") and item.scope == "module":
            found.append(f"{where}: this loads vllm: import it where NCCL was chosen, in a function")
        if top == PACKAGE:
            target = room_of(inner(item.target))
            lazily = item.scope == "function" and (room, target) in ONLY_IN_FUNCTIONS
            if target not in reachable(room) | {""} and not lazily and not (is_face and lies_in(target, here)):
                found.append(f"{where}: {room or PACKAGE} may not import {item.target}")
            continue
        is_transport = lies_in(here, "weight_update.transports") and here != "weight_update.transports.nccl"
        if top == "vllm" and is_transport and item.scope == "module":
            found.append(f"{where}: the trainer imports this file, and needs no vllm: import it in a function")
        if item.scope != "typing" and top in PLACES and not any(lies_in(here, place) for place in PLACES[top]):
            found.append(f"{where}: {top} is imported only in {PLACES[top] or 'no file yet'}")
        for pure, allowed in PURE.items():
            if lies_in(here, pure) and top not in allowed | sys.stdlib_module_names:
                found.append(f"{where}: {pure} imports {sorted(allowed)} and the standard library, not {top}")
        private = any(part.startswith("_") and not part.startswith("__") for part in item.target.split("."))
        if private and top in {"torchrl", "vllm"} and here not in COMPAT:
            found.append(f"{where}: {item.target} is private: only _compat*.py may touch it")
    return found


def test_imports_go_one_way() -> None:
    assert [line for source in package_sources() for line in violations(source)] == []


def test_every_file_lies_in_a_room() -> None:
    assert [s.name for s in package_sources() if not room_of(inner(s.name)) and s.name != PACKAGE] == []


def test_the_rooms_form_a_dag() -> None:
    for room, below in BELOW.items():
        assert all(room not in reachable(lower) for lower in below), room


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("data/x.py", "from ..modules import serving"),
        ("data/x.py", "def f():\n    import torchrl_moe.objectives.functional"),
        ("trainers/x.py", "from torchrl_moe.testing import make_tiny_moe"),
        ("objectives/grpo.py", "if TYPE_CHECKING:\n    from torchrl_moe.modules.replay import RouterReplay"),
        ("modules/serving/x.py", "from torchrl_moe.modules.backends.vllm.local import LocalReplica"),  # in functions
        ("modules/backends/transformers/x.py", "from torchrl_moe.modules.backends.vllm.engine_args import PROGRAM"),
        ("weight_update/transports/x.py", "def f():\n    import vllm"),
        ("weight_update/x.py", "import torchrl_moe.weight_update.transports.nccl"),
        ("modules/serving/x.py", "def f():\n    from vllm import SamplingParams"),
        ("modules/serving/x.py", "import_module('vllm.outputs')"),
        ("modules/backends/vllm/x.py", "import ray"),
        ("ops/x.py", "import numpy"),
        ("objectives/functional/x.py", "from tensordict import TensorDict"),
        ("collectors/x.py", "from torchrl.collectors import _private"),
        ("__init__.py", "from torchrl_moe.data import RoutedExperts"),
        ("errors.py", "from torchrl_moe._checks import check_rank"),
    ],
)
def test_a_wrong_import_is_found(path: str, text: str) -> None:
    assert len(violations(snippet(text, f"torchrl_moe/{path}"))) == 1


def files_needed(sources: Mapping[str, Source]) -> dict[str, set[str]]:
    """Each file -> the files that it imports, in functions and for types too; a package's face stands for its files."""
    faces = {
        f"{source.name}.{item.target.rpartition('.')[2]}": item.target.rpartition(".")[0]
        for source in sources.values()
        if source.path.stem == "__init__"
        for item in imports(source)
        if item.target.startswith(PACKAGE)
    }

    def file_of(target: str) -> str:
        target = faces.get(target, target)
        return target if target in sources else target.rpartition(".")[0]

    return {
        name: {file_of(item.target) for item in imports(source) if item.target.startswith(f"{PACKAGE}.")} & set(sources)
        for name, source in sources.items()
        if source.path.stem != "__init__"
    }


def first_cycle(sources: list[Source]) -> list[str]:
    try:
        TopologicalSorter(files_needed({source.name: source for source in sources})).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def test_no_file_needs_itself() -> None:
    assert first_cycle(package_sources()) == []


def test_a_cycle_is_found_through_functions_and_faces() -> None:
    a = snippet("def f():\n    from torchrl_moe.data import B", "torchrl_moe/a.py")
    face = snippet("if TYPE_CHECKING:\n    from torchrl_moe.data.b import B as B", "torchrl_moe/data/__init__.py")
    b = snippet("import torchrl_moe.data.c", "torchrl_moe/data/b.py")
    assert first_cycle([a, face, b]) == []
    c = snippet("from torchrl_moe.a import f", "torchrl_moe/data/c.py")
    assert set(first_cycle([a, face, b, c])) == {"torchrl_moe.a", "torchrl_moe.data.b", "torchrl_moe.data.c"}
