"""Plain data as YAML, and without PyYAML the message says which extra has it."""

from __future__ import annotations

import importlib
import sys

import pytest

from torchrl_moe.trainers.config import yaml_text


def test_keys_keep_their_order() -> None:
    assert yaml_text({"steps": 2, "data": {"b": [1, None], "a": "x: y"}}) == (
        "steps: 2\ndata:\n  b:\n  - 1\n  - null\n  a: 'x: y'\n"
    )


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot represent an object"):
        yaml_text({"a": object()})


def test_without_yaml_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchrl_moe.trainers.config")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"configurations need PyYAML: pip install 'torchrl_moe\[train\]'"):
        importlib.import_module("torchrl_moe.trainers.config")


def test_configurations_come_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config", "yaml_text"):
        monkeypatch.delitem(sys.modules, f"torchrl_moe.trainers.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ImportError, match=r"torchrl_moe\[train\]"):
        importlib.import_module("torchrl_moe.trainers.config")
