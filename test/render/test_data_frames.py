"""Rows become a table, and without pandas the message says which extra has it."""

from __future__ import annotations

import sys

import pytest

from torchrl_moe.render.tables import data_frame


def test_each_row_is_a_row() -> None:
    table = data_frame([{"step": 0, "reward": 0.5}, {"step": 1, "reward": 0.75}])
    assert table.to_dict("list") == {"step": [0, 1], "reward": [0.5, 0.75]}


def test_without_pandas_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"tables need pandas: pip install 'torchrl_moe\[render\]'"):
        data_frame([{"step": 0}])
