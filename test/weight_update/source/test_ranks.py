"""One process is rank 0; two ranks agree on the first one's value (see test_publishing for two)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from torchrl_moe.weight_update.source import agreed, dtypes_of_first, from_first, is_first


def test_a_process_by_itself_is_the_first() -> None:
    assert is_first() and from_first(7) == agreed(lambda: 7) == 7


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_a_group_of_one_has_its_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_first() and from_first(1 << 40) == agreed(lambda: 1 << 40) == 1 << 40
    dtypes = [torch.bfloat16, None, torch.float32, torch.float8_e4m3fn]
    assert dtypes_of_first(dtypes) == dtypes
    assert dtypes_of_first([torch.int32]) == [None]  # no floating one: as it is
    with pytest.raises(ZeroDivisionError):  # its own error, unchanged
        agreed(lambda: 1 // 0)
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    assert not is_first()
