"""Routes and kept tokens keep their values through every container they pass."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, TensorDict, lazy_stack, set_capture_non_tensor_stack, set_list_to_stack
from torchrl.data import LazyMemmapStorage, LazyStackStorage, ReplayBuffer

from torchrl_moe.data import KeptTokens, RoutedExperts


def through_memmap(data: Any, path: Path) -> Any:
    data.memmap(path)
    return type(data).load_memmap(path)


SAVED: dict[str, Callable[[Any, Path], Any]] = {
    "pickle": lambda data, path: pickle.loads(pickle.dumps(data)),
    "clone": lambda data, path: data.clone(),
    "to": lambda data, path: data.to("cpu"),
    "memmap": through_memmap,
}
"""The ways in which data are copied, saved and sent, each as a function of the data and a folder."""


def routes(num_tokens: int) -> RoutedExperts:
    """Of 3 layers, the first one dense; the last token has none."""
    full = torch.arange(num_tokens * 6, dtype=torch.int8).view(num_tokens, 3, 2) % 8
    full[:, 0] = full[-1] = -1
    return RoutedExperts(full=full)


def kept(ids: list[int], sizes: list[int]) -> KeptTokens:
    return KeptTokens(ids=torch.tensor(ids, dtype=torch.int32), sizes=torch.tensor(sizes, dtype=torch.int32))


SAMPLES: dict[str, list[Any]] = {
    "routes": [routes(3), routes(5), routes(4)],
    "kept tokens": [kept([4, 2, 1], [0, 2, 0, -1]), kept([3], [0, 1]), kept([], [0])],
}
KEY = ("sampling", "it")


@pytest.fixture(params=SAMPLES)
def samples(request: pytest.FixtureRequest) -> list[Any]:
    return [one.clone() for one in SAMPLES[request.param]]


@pytest.fixture(params=[(True, True), (True, False), (False, True), (False, False)], ids=str)
def stack_settings(request: pytest.FixtureRequest) -> Iterator[None]:
    """Both settings that TorchRL's LLM code asks its users to choose."""
    with ExitStack() as stack:
        stack.enter_context(set_list_to_stack(request.param[0]))
        stack.enter_context(set_capture_non_tensor_stack(request.param[1]))
        yield


def rollout(one: Any) -> TensorDict:
    """As the policy writes it."""
    sampling = TensorDict(temperature=torch.tensor(0.5), it=one)
    return TensorDict(sampling=sampling, tokens=torch.arange(3), finish_reason="stop")


def assert_same(got: Any, wanted: Any) -> None:
    assert type(got) is type(wanted)
    assert got.batch_size == wanted.batch_size
    if wanted.batch_size:
        for one, other in zip(got.unbind(0), wanted.unbind(0), strict=True):
            assert_same(one, other)
        return
    for key, value in wanted.to_tensordict().items():
        found = getattr(got, key)
        assert (found.dtype, found.tolist()) == (value.dtype, value.tolist())


@pytest.mark.parametrize("save", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("form", ["single", "dense", "ragged"])
@pytest.mark.usefixtures("stack_settings")
def test_what_was_saved_comes_back(
    samples: list[Any], save: Callable[[Any, Path], Any], form: str, tmp_path: Path
) -> None:
    ragged = lazy_stack(samples)
    data = {"single": samples[0], "dense": ragged.pad(), "ragged": ragged}[form]
    assert_same(save(data, tmp_path / "alone"), data)
    rows = rollout(data) if form == "single" else lazy_stack([rollout(one) for one in data.unbind(0)])
    loaded = save(rows, tmp_path / "nested")
    assert_same(loaded[KEY], data)
    assert loaded["sampling", "temperature"].unique().tolist() == [0.5]


@pytest.mark.usefixtures("stack_settings")
def test_stacks_and_indices(samples: list[Any]) -> None:
    a, b, _ = samples
    data = lazy_stack([rollout(a), rollout(b)])
    assert_same(data[KEY], lazy_stack([a, b]))
    assert_same(data[1][KEY], b)
    assert_same(data[[1, 0]][KEY], lazy_stack([b, a]))
    assert_same(data[torch.tensor([False, True])][KEY], lazy_stack([b]))
    assert_same(LazyStackedTensorDict.maybe_dense_stack([a, b]), lazy_stack([a, b]))
    assert_same(torch.cat([lazy_stack([a, b]), lazy_stack([b])]), lazy_stack([a, b, b]))
    assert_same(type(a).from_tensordict(a.to_tensordict()), a)
    data[KEY] = data[KEY].truncate(2)
    assert_same(data[1][KEY], b.truncate(2))
    assert_same(TensorDict(it=data[KEY].pad(), batch_size=[2])[0]["it"], a.truncate(2))
    plain = rollout(a)
    del plain[KEY]  # a sample without it stands beside another
    data = pickle.loads(pickle.dumps(lazy_stack([plain, rollout(b)])))
    assert data[0].get(KEY, None) is None
    assert_same(data[1][KEY], b)


@pytest.mark.usefixtures("stack_settings")
def test_replay_buffers(samples: list[Any], tmp_path: Path) -> None:
    buffer, loaded = (ReplayBuffer(storage=LazyStackStorage(10), batch_size=8) for _ in range(2))
    buffer.extend(lazy_stack([rollout(one) for one in samples[:2]]))
    buffer.add(rollout(samples[2]))
    assert_same(buffer[:][KEY], lazy_stack(samples))
    assert_same(pickle.loads(pickle.dumps(buffer))[:][KEY], lazy_stack(samples))
    buffer[:].memmap(tmp_path / "rows")
    loaded.extend(TensorDict.load_memmap(tmp_path / "rows"))
    assert_same(loaded[:][KEY], lazy_stack(samples))
    assert [one["finish_reason"] for one in loaded[:].unbind(0)] == ["stop"] * 3


def test_padded_samples_are_dumped_and_loaded_by_a_replay_buffer(samples: list[Any], tmp_path: Path) -> None:
    padded = lazy_stack(samples).pad()
    buffer, loaded = (ReplayBuffer(storage=LazyMemmapStorage(4), batch_size=2) for _ in range(2))
    buffer.extend(TensorDict(it=padded, batch_size=[3]))
    buffer.dumps(tmp_path)
    loaded.loads(tmp_path)
    assert_same(loaded[:]["it"], padded)
