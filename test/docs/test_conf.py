"""Links of the site that leave ``docs/``: to pages of the site, or to the sources where the project is published."""

from __future__ import annotations

import tomllib
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
        ("[a](../torchrl_moe/cli/top.py)", "[a](https://github.com/{name}/blob/{branch}/torchrl_moe/cli/top.py)"),
        ("[a](../Makefile#L3)", "[a](https://github.com/{name}/blob/{branch}/Makefile#L3)"),
        ("[a](../tutorials/03_collectors.ipynb)", "[a](/notebooks/03_collectors.ipynb)"),
        ("[a](ray.md#a), [b](#c), [d](https://x.org/../y)", "[a](/ray.md#a), [b](#c), [d](https://x.org/../y)"),
    ],
)
def test_a_link_to_a_source_leads_to_the_published_repository(conf: ModuleType, text: str, linked: str) -> None:
    shared = tomllib.loads((ROOT / "tutorials" / "notebooks.toml").read_text(encoding="utf-8"))
    name = shared["repository"].removeprefix("https://github.com/")
    app: Any = SimpleNamespace(env=SimpleNamespace(doc2path=lambda page: str(ROOT / "docs" / f"{page}.md")))
    content = [text]
    conf.link_sources(app, "trainer", content)
    wanted = (
        text.replace("(ray.md", "(/ray.md") if linked is None else linked.format(name=name, branch=shared["branch"])
    )
    assert content == [wanted]
