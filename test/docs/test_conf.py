"""Links of the site that leave ``docs/``: to pages of the site, or to the copies of sources in the site."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sphinx")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def conf() -> ModuleType:
    spec = spec_from_file_location("docs_conf", ROOT / "docs" / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("text", "linked"),
    [
        ("[a](../torchrl_moe/cli/services.py)", "[a](path:/../torchrl_moe/cli/services.py)"),
        ("[a](../Makefile#L3)", "[a](path:/../Makefile)"),
        ("[a](../tutorials/03_collectors.ipynb)", "[a](/notebooks/03_collectors.ipynb)"),
        ("[a](replay.md#a), [b](#c), [d](https://x.org/../y)", "[a](/replay.md#a), [b](#c), [d](https://x.org/../y)"),
    ],
)
def test_a_link_to_a_source_leads_to_the_copy_in_the_site(conf: ModuleType, text: str, linked: str) -> None:
    app: Any = SimpleNamespace(env=SimpleNamespace(doc2path=lambda page: str(ROOT / "docs" / f"{page}.md")))
    content = [text]
    conf.link_sources(app, "trainer", content)
    assert content == [linked]
