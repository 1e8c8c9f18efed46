"""What we use of vLLM is in each release that ``pyproject.toml`` allows.

The releases are read, not run. So this proves that names, members and parameters are there, and not that they do what
they did: `make install-check` runs them. Tests with real engines hold the installed release; `make compat` reads all.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from support.sources import PACKAGE, ROOT
from support.vllm_uses import complaints, download, installed, not_in, releases

CACHE = Path.home() / ".cache" / "torchrl_moe"


@pytest.mark.needs_vllm
def test_what_our_texts_name_is_in_the_installed_release() -> None:
    assert list(not_in(installed())) == []


@pytest.fixture(scope="module")
def here() -> Counter[str]:
    return complaints(ROOT / PACKAGE, installed())


@pytest.mark.compat
@pytest.mark.parametrize("version", releases())
def test_all_that_is_used_is_in_every_release(version: str, here: Counter[str]) -> None:
    release = download(version, CACHE)
    assert list(not_in(release)) == []
    assert [*(complaints(ROOT / PACKAGE, release) - here)] == []


RELEASE = """
class ModelConfig:
    model: str
    def __init__(self, model: str, *, mode: int = 1) -> None: ...
class Base:
    config: ModelConfig
    def step(self, one: int, two: int = 0) -> None: ...
def helper() -> None: ...
"""
OURS = """
from vllm.core import Base, ModelConfig, helper
from vllm.envs import FLAG
class Own(Base):
    def step(self, one: int, two: int = 0) -> None: ...
def f(base: Base) -> str:
    return ModelConfig(base.config.model, mode=FLAG).model
"""
CHANGES = {
    "    model: str": ("    name: str", '"ModelConfig" has no attribute "model"'),
    "mode: int": ("how: int", 'Unexpected keyword argument "mode"'),
    "two: int = 0": ("two: int = 0, three: int = 0", 'incompatible with supertype "vllm.core.Base"'),
    "helper": ("helped", 'Module "vllm.core" has no attribute "helper"'),
}


@pytest.mark.compat
def test_what_a_release_has_no_more_is_reported(tmp_path: Path) -> None:
    files = {"vllm/core.py": RELEASE, "vllm/envs.py": "FLAG = 1", "vllm/__init__.py": "", "ours/a.py": OURS}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    assert complaints(tmp_path / "ours", tmp_path) == {}
    text = RELEASE
    for old, (new, _) in CHANGES.items():
        text = text.replace(old, new)
    (tmp_path / "vllm" / "core.py").write_text(text)
    (tmp_path / "vllm" / "envs.py").unlink()
    said = complaints(tmp_path / "ours", tmp_path)
    for words in ["vllm.envs", *(words for _, words in CHANGES.values())]:
        assert sum(words in line for line in said) == 1
