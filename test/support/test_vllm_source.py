"""What is not in a release's source is not found there."""

from __future__ import annotations

from pathlib import Path

import pytest

from test.support.vllm_source import VLLMSource

FILES = {
    "vllm/__init__.py": 'LAZY = {"LLM": ".entry:LLM"}\ndef __getattr__(name): ...\n',
    "vllm/a/__init__.py": "from .b import Base as Root\nfrom vllm.a.b import helper\n",
    "vllm/a/b.py": """
try:
    import fast
except ImportError:
    fast = None
def helper(x, /, y, *, z): ...
class Base:
    field: int
    def __init__(self): self.inner = 1
    def method(self, one): ...
class Derived(Base):
    def own(self): other.elsewhere = 2
""",
}


@pytest.fixture
def source(tmp_path: Path) -> VLLMSource:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return VLLMSource(tmp_path)


@pytest.mark.parametrize(
    ("module", "name", "there"),
    [
        ("vllm", "LLM", True),
        ("vllm", "Other", False),
        ("vllm.a", "Root", True),
        ("vllm.a", "Base", False),
        ("vllm.a", "b", True),
        ("vllm.a.b", "fast", True),
        ("vllm.a.b", "method", False),
        ("vllm.a.c", "", False),
        ("vllm.a.b", "", True),
    ],
)
def test_a_name_of_a_module(source: VLLMSource, module: str, name: str, there: bool) -> None:
    assert source.has(module, name) is there


def test_members_are_of_the_body_of_self_and_of_bases(source: VLLMSource) -> None:
    assert source.members("vllm.a.b", "Derived") == {"own", "field", "__init__", "inner", "method"}
    assert source.members("vllm.a", "Root") == {"field", "__init__", "inner", "method"}
    assert source.members("vllm.a.b", "Missing") == set()


def test_parameters_of_functions_and_of_inherited_methods(source: VLLMSource) -> None:
    assert source.parameters("vllm.a", "helper") == {"x", "y", "z"}
    assert source.parameters("vllm.a.b", "Derived.method") == {"self", "one"}
    assert source.parameters("vllm.a.b", "Derived.missing") == set()
    assert source.parameters("vllm.a.b", "Missing") == set()
