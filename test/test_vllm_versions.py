"""All that we use of vLLM is in each release that ``pyproject.toml`` allows.

The releases are read, not run. So this proves that names, members and parameters are there, and not that they do what
they did: `make install-check` runs them. The installed release is read in `make test`, all of them in `make compat`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from support import vllm_names
from support.releases import releases
from support.vllm_source import download, installed
from support.vllm_uses import OWN, Report, uses

ROOT = Path(__file__).parents[1]
CACHE = Path.home() / ".cache" / "torchrl_moe"
FAULT = """
from vllm.config import VllmConfig
def forced_routing_unavailable_reason(config: VllmConfig):
    return "" if config.model_config.enable_return_routed_experts else "the engine captures no routes"
"""
"""With this line no engine started on 0.31 or later, where the field is one of ``aux_output_config``."""

RELEASES = ["installed", *(pytest.param(version, marks=pytest.mark.compat) for version in releases())]


@functools.cache
def folder(version: str) -> Path:
    return installed() if version == "installed" else download(version, CACHE)


@functools.cache
def report(version: str) -> Report:
    return uses(ROOT, "torchrl_moe", folder(version))


@pytest.mark.parametrize("version", RELEASES)
def test_all_that_is_used_is_there(version: str) -> None:
    assert report(version).missing == []
    assert len(report(version).used) > 100


@pytest.mark.parametrize("version", RELEASES)
def test_what_cannot_be_looked_up_has_a_reason(version: str) -> None:
    assert report(version).unresolved == {}, "support/vllm_names.py says of which class these are, or why nobody can"


def test_the_tables_have_no_entry_that_nothing_needs() -> None:
    tables = (vllm_names.OBJECTS, vllm_names.FIELDS, vllm_names.UNRESOLVED, vllm_names.NOT_IN_EACH)
    assert {key for table in tables for key in table} - report("installed").named == set()


@pytest.mark.compat
def test_what_is_asked_for_first_is_in_one_of_the_releases() -> None:
    asked = [report(version).optional for version in releases()]
    absent = {name for name in set().union(*asked) if not any(one.get(name) for one in asked)}
    assert absent - {*vllm_names.NOT_IN_EACH} == set()


@pytest.mark.parametrize("version", RELEASES)
def test_the_field_that_moved_is_missing(version: str, tmp_path: Path) -> None:
    package = tmp_path / "torchrl_moe"
    package.mkdir()
    package.joinpath("_compat_routing.py").write_text(FAULT)
    found = uses(tmp_path, "torchrl_moe", folder(version), OWN)
    assert found.missing == ["_compat_routing.py:4: vllm.config.model.ModelConfig.enable_return_routed_experts"]
