"""Without rich, the message says which extra has it."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_without_rich_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torchrl_moe.trainers.rich_tables", raising=False)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(ImportError, match=r"the trainer's tables need rich: pip install 'torchrl_moe\[train\]'"):
        importlib.import_module("torchrl_moe.trainers.rich_tables")


@pytest.mark.parametrize("name", ["plan", "run_record", "script"])
def test_all_tables_come_from_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, f"torchrl_moe.trainers.{name}", raising=False)
    monkeypatch.delitem(sys.modules, "torchrl_moe.trainers.rich_tables", raising=False)
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(ImportError, match=r"torchrl_moe\[train\]"):
        importlib.import_module(f"torchrl_moe.trainers.{name}")
