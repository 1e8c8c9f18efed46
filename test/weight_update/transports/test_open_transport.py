"""A scheme's transport, by name."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

from torchrl_moe.testing.fake_weights import FakeWeightReplica
from torchrl_moe.weight_update import VLLMDoubleBufferSyncScheme, VLLMWeightSyncScheme
from torchrl_moe.weight_update.transports.memmap import MemmapTransport
from torchrl_moe.weight_update.transports.open_transport import COLLECTIVE, open_transport


def test_memmap_is_told_the_folder_as_the_engines_see_it(tmp_path: Path) -> None:
    transport = open_transport(VLLMDoubleBufferSyncScheme(tmp_path / "a", tmp_path / "b"))
    assert isinstance(transport, MemmapTransport)
    assert transport.folder == tmp_path / "b"


def test_adapters_lie_in_the_same_folder_and_replicas_are_told_what_they_are(tmp_path: Path) -> None:
    replica = FakeWeightReplica()
    open_transport(VLLMWeightSyncScheme(lora="adapter", folder=tmp_path)).open(replica, 5.0)
    assert (replica.reader, replica._adapters) == (None, tmp_path)


@pytest.mark.parametrize("name", ["gloo", "nccl"])
@pytest.mark.parametrize("address", [None, "10.0.0.1"])
def test_a_collective_meets_on_loopback_unless_told_otherwise(
    name: str, address: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []
    module: Any = types.ModuleType(name)
    setattr(module, COLLECTIVE[name], lambda folder, **options: made.append((folder, options)))
    monkeypatch.setitem(sys.modules, f"torchrl_moe.weight_update.transports.{name}", module)
    open_transport(VLLMWeightSyncScheme(name, folder=tmp_path, master_address=address))  # type: ignore[arg-type]
    assert made == [(tmp_path, {"address": address or "127.0.0.1"})]
