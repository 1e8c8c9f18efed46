"""``torchrl_moe/x/y.py`` is tested by ``test/x/test_y.py``, and each test file tests a file that exists.

Leading underscores fall away: ``_errors.py`` is tested by ``test_errors.py``. ``__init__`` files are tested here.

Helpers live in ``test/support``: elsewhere there are tests and ``conftest.py`` files, from which nobody imports.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import pytest

from support.sources import PACKAGE, ROOT, Function, Source, imports, python_sources, snippet

ACROSS: dict[str, str] = {
    "test_package.py": "metadata, extras, and the archives that are built",
    "test_readme.py": "the README's words",
    "test_pages.py": "the documentation's code, links, quotations and diagrams",
    "test_torchrl_page.py": "what has become of each parameter of TorchRL's, and the page that lists them",
    "test_vllm_versions.py": "what is used of vLLM, in each of its releases",
    "test_install_check.py": "what `make install-check` installs and writes",
    "collectors/test_collected_segments.py": "answers in several parts, by a real engine, through the collector",
    "collectors/test_torchrl_trainer.py": "TorchRL's trainer over the collectors",
    "collectors/test_tools.py": "TorchRL's tool transforms under the collector",
    "collectors/test_interruptions.py": "a collector that is interrupted, forked, forgotten, or continues elsewhere",
    "collectors/test_kill_and_resume.py": "a trainer's process that is killed, and continues from its checkpoint",
    "collectors/test_random_schedules.py": "no prompt lost or trained twice, whatever happens when",
    "modules/replay/test_families.py": "every MoE of transformers, and the page that lists them",
    "modules/policies/test_fidelity.py": "what replay is worth in bf16, with a real engine",
    "modules/backends/vllm/test_served_families.py": "every MoE of transformers in vLLM: which follow recorded experts",
    "modules/backends/test_conformance.py": "the replica protocol, for each kind of replica",
    "modules/serving/test_torchrl_takes_it.py": "TorchRL's own wrapper over an engine",
    "modules/policies/test_truncated_sampling.py": "what a real engine samples from less than all words, scored",
    "objectives/test_invariance.py": "no split of a batch changes a loss, for each of them",
    "modules/policies/test_ranks.py": "training on ranks that share a model, against one process",
    "trainers/test_run_on_ranks.py": "whole runs of several ranks, and how they end",
    "modules/policies/test_parity.py": "engine and policy together compute what transformers computes",
    "modules/serving/test_faults.py": "processes of real engines killed and stopped under requests",
    "modules/replay/test_composition.py": "replay with peft, torch.compile and FSDP2",
    "weight_update/test_weights_in_flight.py": "requests across a weight swap, over a real engine",
    "weight_update/test_ownership.py": "drivers that update one engine, one at a time",
    "weight_update/test_weight_adapters.py": "adapters sent to a real engine",
    "weight_update/test_weights_by_torchrl.py": "TorchRL's own updater over a real engine",
    "weight_update/test_weight_matrix.py": "families, pauses, caches and transports together, over real engines",
    "modules/policies/test_torchrl_pipeline.py": "the policy in TorchRL's environment, collector and replay buffer",
}
"""Test files of behaviour that no single file has -> what they are about."""

ELSEWHERE = {"architecture", "benchmarks", "docs", "support", "tutorials"}
"""Folders of tests that are not of the package."""


SUPPORT = "support"
LENT = re.compile(r"\.(test_\w+|conftest)\.")
"""A test file in the name of what is imported."""


FAKES = {"FakeReplica", "FakeWeightReplica", "FakeFleet", "ScriptedReplica"}


UNMIRRORED = {"__init__", "__main__"}
"""The first are tested here; the second call what a file beside them has."""


def mirror(module: PurePosixPath) -> PurePosixPath:
    return module.with_name(f"test_{module.name.lstrip('_')}")


def mismatches(modules: Iterable[PurePosixPath], tests: Iterable[PurePosixPath]) -> list[str]:
    """Both ways; the paths are relative to the package and to ``test/``."""
    tested = {mirror(module): module for module in modules if module.stem not in UNMIRRORED}
    own = {test for test in tests if test.parts[0] not in ELSEWHERE and str(test) not in ACROSS}
    untested = [f"{PACKAGE}/{tested[test]} wants test/{test}" for test in sorted(tested.keys() - own)]
    return untested + [f"test/{test} mirrors no file of {PACKAGE}/" for test in sorted(own - tested.keys())]


def strays(tests: Iterable[Source]) -> list[str]:
    """Helpers outside ``test/support``: files of their own, classes in a ``conftest.py``, what a test lends others."""
    found = []
    for source in tests:
        is_test, is_conftest = source.path.name.startswith("test_"), source.path.name == "conftest.py"
        if source.path.parts[1] != SUPPORT and not is_test and not is_conftest:
            found.append(f"{source.path}: a helper; it belongs into test/{SUPPORT}/")
        if is_conftest:
            classes = [node for node in ast.walk(source.tree) if isinstance(node, ast.ClassDef)]
            found += [f"{source.at(node)}: {node.name} belongs into test/{SUPPORT}/" for node in classes]
        lent = [item for item in imports(source) if LENT.search(f".{item.target}.")]
        found += [f"{source.at(item.node)}: {item.target} belongs into test/{SUPPORT}/" for item in lent]
    return found


def private_fakes(tests: Iterable[Source]) -> list[str]:
    """Replicas that a test file makes up: there is one fake replica, and one that takes weights."""
    found = []
    for source in tests:
        for node in ast.walk(source.tree):
            if source.path.parts[1] == SUPPORT or not isinstance(node, ast.ClassDef):
                continue
            bases = {ast.unparse(base).split(".")[-1] for base in node.bases}
            methods = {part.name for part in node.body if isinstance(part, Function)}
            if bases & FAKES or methods >= {"call", "wait_ready"}:
                found.append(f"{source.at(node)}: {node.name} is a fake replica of its own")
    return found


def files(folder: Path, pattern: str) -> list[PurePosixPath]:
    return [PurePosixPath(path.relative_to(folder)) for path in folder.rglob(pattern)]


def test_tests_mirror_the_package() -> None:
    assert mismatches(files(ROOT / PACKAGE, "*.py"), files(ROOT / "test", "test_*.py")) == []


def test_no_exception_outlives_its_file() -> None:
    assert [name for name in ACROSS if not (ROOT / "test" / name).exists()] == []


def test_helpers_live_in_support() -> None:
    assert strays(python_sources("test")) == []


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("test/engines.py", ""),
        ("test/modules/replay/cases.py", ""),
        ("test/modules/conftest.py", "class FakeEngine:\n    pass"),
        ("test/modules/test_a.py", "from modules.test_b import Helper"),
        ("test/modules/test_a.py", "def test_a():\n    from conftest import helper"),
    ],
)
def test_a_helper_elsewhere_is_found(path: str, text: str) -> None:
    assert len(strays([snippet(text, path)])) == 1


def test_no_test_makes_up_a_replica() -> None:
    assert private_fakes(python_sources("test")) == []


@pytest.mark.parametrize(
    "text",
    [
        "class Slow(FakeReplica): pass",
        "def test_a():\n    class Slow(fake_weights.FakeWeightReplica): pass",
        "class Replica:\n    def wait_ready(self, timeout): pass\n    def call(self, command): pass",
    ],
)
def test_a_replica_made_up_is_found(text: str) -> None:
    assert len(private_fakes([snippet(text, "test/modules/test_a.py")])) == 1
    assert private_fakes([snippet(text, "test/support/replicas.py")]) == []


def test_tests_fixtures_and_support_are_no_strays() -> None:
    paths = ["test/test_a.py", "test/modules/conftest.py", "test/support/engines.py", "test/support/test_engines.py"]
    text = "from support.engines import SMALL\nfrom torchrl_moe.testing import FakeAsyncVLLM\ndef pair(): pass"
    assert strays([snippet(text, path) for path in paths]) == []


def test_a_file_without_a_test_is_found() -> None:
    modules = [PurePosixPath("_errors.py"), PurePosixPath("data/packing.py"), PurePosixPath("data/__init__.py")]
    tests = [PurePosixPath("test_errors.py"), PurePosixPath("data/test_packing.py")]
    assert mismatches(modules, tests) == []
    assert mismatches(modules, tests[:1]) == ["torchrl_moe/data/packing.py wants test/data/test_packing.py"]
    assert mismatches(modules[:1], tests) == ["test/data/test_packing.py mirrors no file of torchrl_moe/"]
