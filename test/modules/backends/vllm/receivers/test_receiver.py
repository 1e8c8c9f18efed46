"""Which name stands for which receiver."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchrl_moe.modules.backends.vllm.receivers.memmap import MemmapReceiver
from torchrl_moe.modules.backends.vllm.receivers.receiver import open_receiver


def test_a_transport_is_opened_by_its_name(tmp_path: Path) -> None:
    assert isinstance(open_receiver("memmap", {"folder": str(tmp_path)}), MemmapReceiver)


def test_an_unknown_transport_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; the worker has 'memmap'"):
        open_receiver("carrier pigeon", {})


def test_other_options_than_its_own_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="port"):
        open_receiver("memmap", {"folder": str(tmp_path), "port": 1})
