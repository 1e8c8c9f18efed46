"""Exclusive sets of GPUs, cut from those that this process may see."""

from __future__ import annotations

import pytest
import torch

from torchrl_moe.modules.serving.devices import device_sets, visible_devices


@pytest.mark.parametrize(
    ("visible", "num_replicas", "per_replica", "expected"),
    [
        (["0"], 1, 1, ["0"]),
        (["0", "1", "2", "3"], 4, 1, ["0", "1", "2", "3"]),
        (["0", "1", "2", "3"], 2, 2, ["0,1", "2,3"]),
        (["0", "1", "2", "3"], 1, 4, ["0,1,2,3"]),
        (["0", "1", "2", "3"], 1, 3, ["0,1,2"]),
        (["5", "GPU-ab12", "2"], 2, 1, ["5", "GPU-ab12"]),
        ([], 3, 1, [None, None, None]),
        ([], 2, 8, [None, None]),
    ],
)
def test_each_replica_gets_devices_of_its_own(
    visible: list[str], num_replicas: int, per_replica: int, expected: list[str | None]
) -> None:
    assert device_sets(visible, num_replicas, per_replica) == expected


@pytest.mark.parametrize(("num_replicas", "per_replica", "needed"), [(3, 1, 3), (1, 3, 3), (2, 2, 4)])
def test_too_few_devices_are_counted_and_named(num_replicas: int, per_replica: int, needed: int) -> None:
    words = rf"{num_replicas} replicas of {per_replica} GPU\(s\) need {needed}, but 2 are visible \(4, 7\)\. Use fewer"
    with pytest.raises(ValueError, match=words):
        device_sets(["4", "7"], num_replicas, per_replica)


@pytest.mark.parametrize(
    ("named", "count", "expected"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("", 0, []),
        ("-1", 0, []),
        ("3, 5", 2, ["3", "5"]),
        ("GPU-ab12,GPU-cd34", 2, ["GPU-ab12", "GPU-cd34"]),
        ("1,-1,0", 1, ["1"]),  # CUDA stops reading at the first bad name
    ],
)
def test_devices_have_the_names_that_the_driver_knows(
    monkeypatch: pytest.MonkeyPatch, named: str | None, count: int, expected: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if named is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_devices() == expected


@pytest.mark.gpu
def test_a_machine_with_gpus_shows_them() -> None:
    assert len(visible_devices()) == torch.cuda.device_count() > 0
