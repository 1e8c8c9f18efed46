"""What a release does not have is found in our source, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from support.vllm_uses import Names, Report, uses

RELEASE = {
    "vllm/__init__.py": 'LAZY = {"LLM": ".entry:LLM"}\ndef __getattr__(name): ...\n',
    "vllm/envs.py": 'environment_variables = {"VLLM_FIRST": 1}\n',
    "vllm/config/__init__.py": "from .parts import ModelConfig\nfrom .whole import *\n",
    "vllm/config/parts.py": """
from dataclasses import dataclass
from enum import Enum
class Mode(Enum):
    FAST = 1
@dataclass
class ModelConfig:
    model: str
    mode: Mode = Mode.FAST
    def get_size(self) -> int: ...
    @property
    def other(self) -> "ModelConfig": ...
""",
    "vllm/config/whole.py": """
from vllm.config import parts
class VllmConfig:
    model_config: parts.ModelConfig | None = None
    by_name: dict[str, parts.ModelConfig]
""",
    "vllm/core.py": """
from typing import NamedTuple
from torch import nn
from vllm.config import ModelConfig, VllmConfig
try:
    import fast
except ImportError:
    fast = None
def helper(x, /, y, *, z=1): ...
def many(*args, **kwargs): ...
def kernel(x_ptr, y, SIZE: constexpr): ...
class Base:
    field: int
    def __init__(self, config: VllmConfig): self.config = config; self.inner = config.model_config
    def step(self, one, two=None) -> list[ModelConfig]: ...
    def rest(self): ...
class Pair(NamedTuple):
    one: int
class Net(nn.Module):
    def __init__(self): self.weight = 1
class Derived(Base):
    def own(self): other.elsewhere = 2
""",
}
NAMES = Names(
    objects={"config": "vllm.config.VllmConfig", "_compat.py:base": "vllm.core.Base", "net": "vllm.core.Net"},
    mixed={"ours._compat.Mixin": "vllm.core.Derived"},
    fields={"_compat.py:TABLE": "vllm.config.ModelConfig"},
    unresolved={"_compat.py:noise": "a reason"},
    optional={"vllm.core.only_in_one": "a reason"},
)

Look = Callable[[str], Report]


@pytest.fixture
def look(tmp_path: Path) -> Look:
    for name, text in RELEASE.items():
        path = tmp_path / "release" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "ours").mkdir()

    def looked(text: str) -> Report:
        (tmp_path / "ours" / "_compat.py").write_text(text)
        return uses(tmp_path, "ours", tmp_path / "release", NAMES)

    return looked


THERE = [
    "from vllm import LLM",
    "from vllm.core import fast, helper",
    "from vllm.config import VllmConfig, parts",
    "import vllm.core",
    "NAME = 'vllm.core.helper'",
    "NAME = 'VLLM_FIRST'",
    "def f(config): return config.model_config.other.other.get_size()",
    "def f(config): config.model_config.mode = config.model_config.mode.FAST.value",
    "def f(config): return [one.model for one in config.by_name.values()]",
    "def f(config): return config.by_name['a'].model",
    "def f(base): return [one.model for one in base.step(1, two=2)]",
    "def f(base): return base.inner.model",
    "def f(self):\n    self.base = self.config.model_config",
    "def f(net): return net.weight, net.named_modules()",
    "from vllm.core import Pair\nx = Pair(1)._replace(one=2)",
    "def f(config: str): return config.anything",
    "def f(config): config._torchrl_moe_mark = 1",
    "from vllm.core import helper\nhelper(1, 2, z=3)\nhelper(*a, **b)",
    "from vllm.core import many\nmany(1, 2, z=3)",
    "from vllm.config import ModelConfig\nModelConfig('a', mode=1)\nModelConfig(**{'model': 1, **rest})",
    "from vllm.core import Base\nclass A(Base):\n    def step(self, *args, **kwargs): super().step(*args).pop().model",
    "from vllm.core import Base\nclass A(Base):\n    def mine(self): return self.mine() + self.field",
    "class Mixin:\n    def f(self): return self.inner.model, self.f",
    "TABLE = ('model', 'mode')",
    "from vllm.core import only_in_one",
    "def f(config): return [getattr(config.model_config, name) for name in ('model', 'mode')]",
    "PART = 'vllm'\ndef own(x, SIZE, z=1): ...\nKERNELS = {f'{PART}.core.kernel': own}",
    "from vllm.core import Net\ndef f(x):\n    if isinstance(x, Net): return x.weight",
]
MISSING = {
    "from vllm.core import gone": "vllm.core.gone",
    "from vllm.gone import a": "vllm.gone.a",
    "import vllm.gone": "vllm.gone",
    "def f():\n    from vllm import config\n    return config.gone": "vllm.config.gone",
    "NAME = 'vllm.core.gone'": "vllm.core.gone",
    "NAME = 'VLLM_GONE'": "the environment variable VLLM_GONE",
    "def f(config): return config.gone": "vllm.config.whole.VllmConfig.gone",
    "def f(config): return config.model_config.gone": "vllm.config.parts.ModelConfig.gone",
    "def f(config): config.model_config.gone = 1": "vllm.config.parts.ModelConfig.gone",
    "def f(config): del config.model_config.gone": "vllm.config.parts.ModelConfig.gone",
    "def f(config): return getattr(config.model_config, 'gone')": "vllm.config.parts.ModelConfig.gone",
    "def f(config):\n    one = config.model_config\n    return lambda: one.gone": "vllm.config.parts.ModelConfig.gone",
    "def f(config): return config.model_config.mode.SLOW": "vllm.config.parts.Mode.SLOW",
    "def f(config): return [one.gone for one in config.by_name.values()]": "vllm.config.parts.ModelConfig.gone",
    "def f(base): return base.step(1)[0].gone": "vllm.config.parts.ModelConfig.gone",
    "def f(base): return base.inner.gone": "vllm.config.parts.ModelConfig.gone",
    "class A:\n    def __init__(self, config): self._c = config\n    def f(self): self._c.gone": (
        "vllm.config.whole.VllmConfig.gone"
    ),
    "def f(net): return net.gone": "vllm.core.Net.gone",
    "from vllm.core import helper\nhelper(1, 2, w=3)": "vllm.core.helper(no w=)",
    "from vllm.core import helper\nhelper(1)": "vllm.core.helper(y= is required)",
    "from vllm.core import helper\nhelper(1, 2, 3)": "vllm.core.helper(2 positional arguments at most)",
    "def f(base): return base.step(three=3, one=1)": "vllm.core.step(no three=)",
    "from vllm.config import ModelConfig as M\nM(**{'gone': 1, **rest})": "vllm.config.parts.ModelConfig(no gone=)",
    "from vllm.config import ModelConfig\nModelConfig()": "vllm.config.parts.ModelConfig(model= is required)",
    "from vllm.core import Base\nclass A(Base):\n    def step(self, one): ...": (
        "ours._compat.A.step, which replaces vLLM's: no two"
    ),
    "from vllm.core import Base\nclass A(Base):\n    def unheard(self): ...": (
        "ours._compat.A.unheard, which replaces vLLM's"
    ),
    "from vllm.core import Base\nclass A(Base):\n    def rest(self): super().gone()": "ours._compat.A.gone",
    "class Mixin:\n    def f(self): return self.gone": "ours._compat.Mixin.gone",
    "ALL = ('model', 'gone')\ndef f(config): return [getattr(config.model_config, one) for one in ALL]": (
        "vllm.config.parts.ModelConfig.gone"
    ),
    "def f(config, base):\n    for a, b in ((base, 'step'), (config, 'gone')): setattr(a, b, 1)": (
        "vllm.config.whole.VllmConfig.gone"
    ),
    "PART = 'vllm'\nNAME = f'{PART}.gone'": "vllm.gone",
    "def own(x, z): ...\nKERNELS = {'vllm.core.kernel': own}": "vllm.core.kernel(z), which ours._compat.own needs",
    "TABLE: dict[str, int] = {'model': 1, 'gone': 2}": "vllm.config.ModelConfig.gone",
    "from vllm.core import Net\ndef f(x):\n    if isinstance(x, Net): return x.gone": "vllm.core.Net.gone",
}
UNRESOLVED = {
    "def f(x): return x.y.z": "x",
    "def f(x): return x.call()[0].z": "x",
    "def f(config): return getattr(config, name)": "getattr(config, name)",
    "def f() -> Any: ...\ndef g(): return f().y": "f()",
}


@pytest.mark.parametrize("text", THERE)
def test_what_is_there_is_not_reported(look: Look, text: str) -> None:
    assert look(text).missing == []


@pytest.mark.parametrize("text", MISSING)
def test_what_is_not_there_is_reported_once(look: Look, text: str) -> None:
    (line,) = look(text).missing
    assert line.split(": ", 1)[1] == MISSING[text]


@pytest.mark.parametrize("text", UNRESOLVED)
def test_what_is_not_known_is_listed(look: Look, text: str) -> None:
    found = look(text)
    assert (list(found.unresolved), found.missing) == ([f"_compat.py:{UNRESOLVED[text]}"], [])


def test_what_is_asked_for_first_may_be_missing(look: Look) -> None:
    found = look(
        "def f(config):\n    if hasattr(config, 'gone'): return config.gone, getattr(config, 'model_config', 1)"
    )
    assert found.missing == []
    there = {f"vllm.config.whole.VllmConfig.{name}": name != "gone" for name in ("gone", "model_config")}
    assert found.optional == there


def test_the_entries_that_were_needed_are_known(look: Look) -> None:
    assert look("TABLE = ()\ndef f(config, other): return config.by_name").named == {"config", "_compat.py:TABLE"}
    found = look("from vllm.core import only_in_one\ndef f(noise): return noise.x")
    assert (found.named, found.unresolved) == ({"vllm.core.only_in_one", "_compat.py:noise"}, {})
    assert found.optional == {"vllm.core.only_in_one": False}
