"""A kind of engine is found by the name of its module, on any machine."""

from __future__ import annotations

import pytest

from support import toy_kind
from torchrl_moe.modules.backends.engine_kind import find_kind


def test_a_kind_is_found_by_its_modules_name() -> None:
    assert find_kind("support.toy_kind") is toy_kind
    assert find_kind(toy_kind.__name__).PROGRAM == "support.toy_program"


def test_a_kind_that_is_not_there_is_an_import_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_engine"):
        find_kind("torchrl_moe.modules.backends.no_such_engine")
