"""Who gets which GPUs; that there are some is pretended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchrl_moe.modules.serving.launch import DeviceSets, devices_of_trainer, ranks_here, visible_devices


class Machine:
    """Says which devices there are, and which of them this process computes on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        self(0)

    def launch(self, ranks: int, here: int) -> None:
        """As torchrun does, which this process is then rank 0 of."""
        self._patch.setenv("WORLD_SIZE", str(ranks))
        self._patch.setenv("LOCAL_WORLD_SIZE", str(here))

    def __call__(self, count: int, named: str | None = None, current: int | None = None, filled: Any = ()) -> None:
        self._patch.setattr(torch.cuda, "device_count", lambda: count)
        self._patch.setattr(torch.cuda, "is_initialized", lambda: current is not None)
        self._patch.setattr(torch.cuda, "current_device", lambda: current)
        self._patch.setattr(torch.cuda, "memory_reserved", lambda index: 1 << 20 if index in filled else 0)
        if named is None:
            self._patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            self._patch.setenv("CUDA_VISIBLE_DEVICES", named)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


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
    machine: Machine, named: str | None, count: int, expected: list[str]
) -> None:
    machine(count, named)
    assert visible_devices() == expected


@pytest.mark.gpu
def test_a_machine_with_gpus_shows_them() -> None:
    assert len(visible_devices()) == torch.cuda.device_count() > 0


@pytest.mark.gpu
def test_a_trainer_that_has_filled_a_device_computes_on_it() -> None:
    kept = torch.zeros(8, device="cuda")
    assert kept.device.index in devices_of_trainer()


def of_all(sets: DeviceSets, num_replicas: int) -> list[str | None]:
    return [sets.of(index) for index in range(num_replicas)]


@pytest.mark.parametrize(
    ("count", "named", "num_replicas", "per_replica", "expected"),
    [
        (1, None, 1, 1, ["0"]),
        (4, None, 4, 1, ["0", "1", "2", "3"]),
        (4, None, 2, 2, ["0,1", "2,3"]),
        (4, None, 1, 4, ["0,1,2,3"]),
        (4, None, 1, 3, ["0,1,2"]),
        (3, "5,GPU-ab12,2", 2, 1, ["5", "GPU-ab12"]),
        (0, None, 3, 1, [None, None, None]),
        (0, None, 2, 8, [None, None]),
    ],
)
def test_each_replica_gets_devices_of_its_own(
    machine: Machine, count: int, named: str | None, num_replicas: int, per_replica: int, expected: list[str | None]
) -> None:
    machine(count, named)
    assert of_all(DeviceSets(None, num_replicas, per_replica), num_replicas) == expected


@pytest.mark.parametrize(("num_replicas", "per_replica", "needed"), [(3, 1, 3), (1, 3, 3), (2, 2, 4)])
def test_too_few_devices_are_counted_and_named(
    machine: Machine, num_replicas: int, per_replica: int, needed: int
) -> None:
    machine(2, "4,7")
    words = rf"{num_replicas} replicas of {per_replica} GPU\(s\) need {needed}, but 2 are visible \(4, 7\)\. Use fewer"
    with pytest.raises(ValueError, match=words):
        DeviceSets(None, num_replicas, per_replica)


def test_replicas_are_not_put_where_the_trainer_computes(machine: Machine) -> None:
    machine(4, "6,5,4,3", current=0, filled=(2,))
    assert devices_of_trainer() == [0, 2]
    assert of_all(DeviceSets(None, 2, 1), 2) == ["5", "3"]
    assert of_all(DeviceSets(None, 1, 2), 1) == ["5,3"]
    with pytest.raises(
        ValueError,
        match=r"3 replicas .* 4 are visible \(6, 5, 4, 3\), and the trainer computes on 6, 4\. .*devices=\[\[0\]",
    ):
        DeviceSets(None, 3, 1)


def test_ranks_of_this_machine_are_counted_if_there_are_several(machine: Machine) -> None:
    assert ranks_here() == 0
    for ranks, here, expected in ((1, 1, 0), (4, 4, 4), (16, 8, 8), (2, 1, 1)):
        machine.launch(ranks, here)
        assert ranks_here() == expected


@pytest.mark.parametrize("current", [None, 0])
def test_no_replica_ever_gets_a_ranks_device(machine: Machine, current: int | None) -> None:
    """Not one that is added later either; the other ranks may not have begun to fill theirs."""
    machine(8, current=current)
    machine.launch(4, 4)
    assert devices_of_trainer() == [0, 1, 2, 3]
    listed = [0, 1]
    sets = DeviceSets(None, 2, 1, lambda: listed)
    assert of_all(sets, 2) == ["4", "5"]
    for index, expected in [(2, "6"), (3, "7")]:
        assert sets.of(index) == expected
        listed.append(index)
    with pytest.raises(ValueError, match=r"5 replicas .* the trainer computes on 0, 1, 2, 3\."):
        sets.of(4)
    assert of_all(DeviceSets([[6], [4]], 2, 1), 2) == ["6", "4"]
    added = DeviceSets([[4]], 1, 1, lambda: [0])
    assert added.of(0) == "4" and added.of(1) == "5"  # not 1, which is rank 1's


def test_more_ranks_than_devices_leave_none(machine: Machine) -> None:
    machine(2)
    machine.launch(4, 4)
    with pytest.raises(ValueError, match="the trainer computes on 0, 1"):
        DeviceSets(None, 1, 1)


def test_a_single_device_is_shared_on_purpose_only(machine: Machine) -> None:
    machine(1, current=0)
    with pytest.raises(ValueError, match="1 are visible \\(0\\), and the trainer computes on 0"):
        DeviceSets(None, 1, 1)
    assert DeviceSets([[0]], 1, 1).of(0) == "0"
    machine(1)  # a trainer that computes on the CPU, or has not begun
    assert DeviceSets(None, 1, 1).of(0) == "0"


@pytest.mark.parametrize(
    ("devices", "per_replica", "expected"),
    [
        ([[1], [2]], 1, ["8", "7"]),
        ([1, 2], 1, ["8", "7"]),
        (["cuda:3", torch.device("cuda", 0)], 1, ["GPU-f", "9"]),
        (["GPU-f", [2]], 1, ["GPU-f", "7"]),
        ([(3, 1), (0, 2)], 2, ["GPU-f,8", "9,7"]),
        ([1, 1], 1, ["8", "8"]),  # two engines on one: their memory is their user's business
    ],
)
def test_devices_are_named_by_the_numbers_of_this_process_or_by_name(
    machine: Machine, devices: Any, per_replica: int, expected: list[str]
) -> None:
    machine(4, "9,8,7,GPU-f", current=0)
    assert of_all(DeviceSets(devices, 2, per_replica), 2) == expected


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([[0]], "has 1 entries, for 2 replicas"),
        ([[0], [1, 2]], r"replica 1 needs 1 different GPU\(s\) .*, got \[1, 2\]"),
        ([[0], []], r"replica 1 needs 1 different GPU\(s\)"),
        ("cuda:0", "devices='cuda:0': give a list with one entry per replica"),
        ([0, 3], "there is no 3; there are 'cuda:0' to 'cuda:2', in this process's own numbers"),
        ([0, -1], "there is no -1"),
        ([0, "cpu"], "there is no 'cpu'"),
        ([0, "cuda"], "there is no 'cuda'"),
        ([0, "8"], "there is no '8'"),  # a number as text: of whose counting?
        ([0, 1.5], r"there is no 1\.5"),
    ],
)
def test_devices_that_are_not_there_or_not_as_many_as_needed_are_refused(
    machine: Machine, devices: Any, words: str
) -> None:
    machine(3, "9,8,7")
    with pytest.raises(ValueError, match=words):
        DeviceSets(devices, 2, 1)


def test_a_replica_needs_as_many_different_ones_as_it_has_ranks(machine: Machine) -> None:
    machine(3)
    for devices in ([[1, 1]], [[1]], [1]):
        with pytest.raises(ValueError, match=r"replica 0 needs 2 different GPU\(s\)"):
            DeviceSets(devices, 1, 2)


def test_a_machine_without_gpus_has_none_to_name(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"devices=\[\[0\]\], but torch sees no CUDA device"):
        DeviceSets([[0]], 1, 1)


def test_one_that_is_added_gets_what_neither_the_trainer_nor_another_has(machine: Machine) -> None:
    machine(5, current=0)
    listed = [0]
    sets = DeviceSets([[2]], 1, 1, lambda: listed)
    assert sets.of(0) == "2"
    for index, expected in [(1, "1"), (2, "3"), (3, "4")]:
        assert sets.of(index) == expected
        listed.append(index)
    with pytest.raises(ValueError, match=r"5 replicas .* the trainer computes on 0"):
        sets.of(4)
    listed.remove(2)
    assert (sets.of(4), sets.of(1)) == ("3", "1")
