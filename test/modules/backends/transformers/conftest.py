"""One tiny MoE for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def plain_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a Qwen3-MoE with a dense first layer, and of its tokenizer."""
    from support.plain import save

    return save(tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="session")
def lasting_plain(plain_folder: Path) -> Any:
    """That model, loaded as an engine process does; use ``plain``."""
    from support.plain import loaded

    return loaded(plain_folder)


@pytest.fixture
def plain(lasting_plain: Any) -> Iterator[Any]:
    """That model, with nothing in its batch; leave its weights as they are."""
    lasting_plain.decoder.empty()
    lasting_plain.decoder.sampler.seed(0)
    yield lasting_plain
    lasting_plain.decoder.empty()
