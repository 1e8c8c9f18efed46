"""Garbage collection is paused by an import, and is afterwards as it was."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from torchrl_moe._lazy import without_collections


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    yield
    gc.enable()


def test_collections_pause_and_continue() -> None:
    with without_collections():
        assert not gc.isenabled()
        with without_collections():
            pass
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_import_that_fails_leaves_it_on() -> None:
    with pytest.raises(ImportError), without_collections():
        raise ImportError("no such package")
    assert gc.isenabled()


def test_where_it_is_off_it_stays_off() -> None:
    gc.disable()
    with without_collections():
        assert not gc.isenabled()
    assert not gc.isenabled()
