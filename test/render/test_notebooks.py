"""Whether there is a notebook."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from torchrl_moe.render.tables import in_notebook, show_html


@pytest.mark.parametrize(
    ("shell", "expected"), [(None, False), (SimpleNamespace(), False), (SimpleNamespace(kernel=object()), True)]
)
def test_a_notebook_has_a_kernel(shell: Any, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    assert in_notebook() is expected


def test_nothing_is_imported_to_know_it() -> None:
    code = "import sys; from torchrl_moe.render.tables import in_notebook as f; print(f(), 'IPython' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["False", "False"]


def test_html_is_shown_with_its_text(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    fake = SimpleNamespace(display=lambda data, raw: shown.append((data, raw)))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=fake))
    show_html("<b>a</b>", "a")
    assert shown == [({"text/html": "<b>a</b>", "text/plain": "a"}, True)]
