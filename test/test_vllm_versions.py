"""What we use of vLLM, as far as imports and annotations say it, is in each release that ``pyproject.toml`` allows.

The releases are read, not run. So this proves that names, members and parameters are there, and not that they do what
they did: `make install-check` runs them. The installed release is read in `make test`, all of them in `make compat`.
"""

from __future__ import annotations

import functools
from pathlib import Path

import pytest

from support.sources import ROOT
from support.vllm_uses import FIELDS, OPTIONAL, Report, Search, download, installed, releases

CACHE = Path.home() / ".cache" / "torchrl_moe"
RELEASES = ["installed", *(pytest.param(version, marks=pytest.mark.compat) for version in releases())]


@functools.cache
def folder(version: str) -> Path:
    return installed() if version == "installed" else download(version, CACHE)


@functools.cache
def report(version: str) -> Report:
    return Search(ROOT, "torchrl_moe", folder(version)).report


@pytest.mark.parametrize("version", RELEASES)
def test_all_that_is_used_is_there(version: str) -> None:
    assert report(version).missing == []
    assert len(report(version).used) > 200


def test_the_tables_have_no_entry_that_nothing_needs() -> None:
    assert {*FIELDS, *OPTIONAL} - report("installed").named == set()


# -- a release made up ------------------------------------------------------------------------------------------------

RELEASE = {
    "vllm/__init__.py": 'LAZY = {"LLM": ".entry:LLM"}\ndef __getattr__(name): ...\n',
    "vllm/envs.py": 'environment_variables = {"VLLM_FIRST": 1}\n',
    "vllm/config/__init__.py": "from .parts import ModelConfig\nfrom .whole import *\n",
    "vllm/config/parts.py": """
class ModelConfig:
    model: str
    mode: int = 1
    @property
    def other(self) -> "ModelConfig": ...
""",
    "vllm/config/whole.py": """
from vllm.config import parts
class VllmConfig:
    model_config: parts.ModelConfig | None
""",
    "vllm/core.py": """
from torch import nn
from vllm.config import VllmConfig
try:
    import fast
except ImportError:
    fast = None
def helper(x, /, y, *, z=1): ...
def kernel(x_ptr, y, SIZE: constexpr): ...
class Base:
    def __init__(self, config: VllmConfig): self.config = config
    def step(self, one, two=None): ...
    def rest(self): ...
class Net(nn.Module):
    def __init__(self): self.weight = 1
""",
}
FROM = "from vllm.config import VllmConfig\nfrom vllm.core import Base, Net\n"
THERE = [
    "from vllm import LLM",
    "from vllm.core import fast, helper",
    "from vllm.config import VllmConfig, parts",
    "import vllm.core",
    "NAME = 'vllm.core.helper', 'VLLM_FIRST'",
    FROM + "def f(config: VllmConfig): return config.model_config.other.other.mode",
    FROM + "def f(base: Base): base.config.model_config.model = base._torchrl_moe_mark",
    FROM + "def f(net: Net): return net.named_modules()",  # of a package that is not read
    "from vllm.core import helper\nhelper(1, 2, z=3)\nhelper(*a, **b)",
    "from vllm.config import ModelConfig\nModelConfig('a', mode=1)",
    FROM + "class A(Base):\n    def step(self, one, two): ...\n    def mine(self): self.mine()",
    "PART = 'vllm'\ndef own(x, SIZE, z=1): ...\nKERNELS = {f'{PART}.core.kernel': own}",
]
MISSING = {
    "from vllm.core import gone": "vllm.core.gone",
    "import vllm.gone": "vllm.gone",
    "def f():\n    from vllm import config\n    return config.gone": "vllm.config.gone",
    "NAME = 'vllm.core.gone'": "vllm.core.gone",
    "PART = 'vllm'\nNAME = f'{PART}.gone'": "vllm.gone",
    "NAME = 'VLLM_GONE'": "the environment variable VLLM_GONE",
    # with this no engine started on 0.31 or later, where the field is one of aux_output_config
    FROM + "def f(config: VllmConfig): return config.model_config.enable_return_routed_experts": (
        "vllm.config.parts.ModelConfig.enable_return_routed_experts"
    ),
    FROM + "def f(base: Base): return base.config.gone": "vllm.config.whole.VllmConfig.gone",
    "from vllm.core import helper\nhelper(1, 2, w=3)": "vllm.core.helper(no w=)",
    "from vllm.core import helper\nhelper(1)": "vllm.core.helper(y= is required)",
    "from vllm.config import ModelConfig\nModelConfig()": "vllm.config.parts.ModelConfig(model= is required)",
    FROM + "class A(Base):\n    def step(self, one): ...": "ours.a.A.step, which replaces vLLM's: no two",
    FROM + "class A(Base):\n    def unheard(self): ...": "ours.a.A.unheard, which replaces vLLM's",
    "def own(x, z): ...\nKERNELS = {'vllm.core.kernel': own}": "vllm.core.kernel(z), which ours.a.own needs",
}


def look(text: str, folder: Path) -> list[str]:
    for name, content in {**RELEASE, "ours/a.py": text}.items():
        folder.joinpath(name).parent.mkdir(parents=True, exist_ok=True)
        folder.joinpath(name).write_text(content)
    return [line.split(": ", 1)[1] for line in Search(folder, "ours", folder).report.missing]


@pytest.mark.parametrize("text", THERE)
def test_what_is_there_is_not_reported(text: str, tmp_path: Path) -> None:
    assert look(text, tmp_path) == []


@pytest.mark.parametrize("text", MISSING)
def test_what_is_not_there_is_reported_once(text: str, tmp_path: Path) -> None:
    assert look(text, tmp_path) == [MISSING[text]]
