"""What `make docs-check` reads from a site's files, and what it says where it cannot start."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from urllib.request import urlopen

import pytest

SCRIPT = Path(__file__).parents[2] / "docs" / "check.py"


@pytest.fixture
def check() -> ModuleType:
    spec = spec_from_file_location("docs_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "deep").mkdir()
    (tmp_path / "index.html").write_text(
        "<h1 id='top'>A</h1><a href='#top'></a><a href='#gone'></a><a href='deep/b.html#here%20too'></a>"
        "<a href='https://example.org/x#y'></a><a href='mailto:a@b'></a><img src='missing.png'>"
    )
    (tmp_path / "deep" / "b.html").write_text("<p id='here too'><a href='../index.html#nowhere'>x</a>")
    return tmp_path


def test_dead_links_and_anchors_are_named(check: ModuleType, site: Path) -> None:
    assert [*check.dead_links(site)] == [
        "deep/b.html: ../index.html#nowhere has no such anchor",
        "index.html: #gone has no such anchor",
        "index.html: missing.png leads nowhere",
    ]


def test_the_site_is_served_on_a_free_port(check: ModuleType, site: Path) -> None:
    with check.served(site) as address, urlopen(f"{address}/deep/b.html") as answer:
        assert b"here too" in answer.read()


def test_without_chromium_one_line_says_what_to_install(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert check.main() == 2
    assert capsys.readouterr().err == "make docs-check: no Chromium on the PATH: apt-get install chromium\n"


def test_without_a_site_one_line_says_what_to_run(
    check: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "chromium").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(check, "SITE", tmp_path / "html")
    assert check.main() == 2
    assert capsys.readouterr().err == "make docs-check: no site in docs/_build/html: make docs\n"
