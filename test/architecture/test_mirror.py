"""``torchrl_moe/x/y.py`` is tested by ``test/x/test_y.py``, and each test file tests a file that exists.

Leading underscores fall away: ``_errors.py`` is tested by ``test_errors.py``. ``__init__`` files are tested here.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path, PurePosixPath

from architecture.sources import PACKAGE, ROOT

ACROSS: dict[str, str] = {
    "test_readme.py": "the README's words",
    "test_reference.py": "what the reference of the parity tests does at a tie",
    "modules/replay/test_families.py": "every MoE of transformers, and the page that lists them",
    "modules/policies/test_fidelity.py": "what replay is worth in bf16, with a real engine",
    "modules/backends/test_conformance.py": "the replica protocol, for each kind of replica",
    "modules/serving/test_connect.py": "a service in a Ray cluster, and its drivers",
    "objectives/test_invariance.py": "no split of a batch changes a loss, for each of them",
    "modules/policies/test_parity.py": "engine and policy together compute what transformers computes",
    "modules/serving/test_faults.py": "processes of real engines killed and stopped under requests",
    "modules/replay/test_composition.py": "replay with peft, torch.compile and FSDP2",
    "weight_update/test_weights_in_flight.py": "requests across a weight swap, over a real engine",
    "weight_update/test_weight_adapters.py": "adapters sent to a real engine",
    "weight_update/test_weight_matrix.py": "families, pauses, caches and transports together, over real engines",
    "modules/policies/test_torchrl_pipeline.py": "the policy in TorchRL's environment, collector and replay buffer",
}
"""Test files of behaviour that no single file has -> what they are about."""

ELSEWHERE = {"architecture", "tutorials"}
"""Folders of tests that are not of the package."""


def mirror(module: PurePosixPath) -> PurePosixPath:
    return module.with_name(f"test_{module.name.lstrip('_')}")


def mismatches(modules: Iterable[PurePosixPath], tests: Iterable[PurePosixPath]) -> list[str]:
    """Both ways; the paths are relative to the package and to ``test/``."""
    tested = {mirror(module): module for module in modules if module.stem != "__init__"}
    own = {test for test in tests if test.parts[0] not in ELSEWHERE and str(test) not in ACROSS}
    untested = [f"{PACKAGE}/{tested[test]} wants test/{test}" for test in sorted(tested.keys() - own)]
    return untested + [f"test/{test} mirrors no file of {PACKAGE}/" for test in sorted(own - tested.keys())]


def files(folder: Path, pattern: str) -> list[PurePosixPath]:
    return [PurePosixPath(path.relative_to(folder)) for path in folder.rglob(pattern)]


def test_tests_mirror_the_package() -> None:
    assert mismatches(files(ROOT / PACKAGE, "*.py"), files(ROOT / "test", "test_*.py")) == []


def test_no_exception_outlives_its_file() -> None:
    assert [name for name in ACROSS if not (ROOT / "test" / name).exists()] == []


def test_a_file_without_a_test_is_found() -> None:
    modules = [PurePosixPath("_errors.py"), PurePosixPath("data/packing.py"), PurePosixPath("data/__init__.py")]
    tests = [PurePosixPath("test_errors.py"), PurePosixPath("data/test_packing.py")]
    assert mismatches(modules, tests) == []
    assert mismatches(modules, tests[:1]) == ["torchrl_moe/data/packing.py wants test/data/test_packing.py"]
    assert mismatches(modules[:1], tests) == ["test/data/test_packing.py mirrors no file of torchrl_moe/"]
