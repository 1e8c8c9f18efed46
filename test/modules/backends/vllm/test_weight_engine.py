"""The worker's side on plain modules: vLLM's layerwise reload needs no engine. ``test_weights.py`` has real ones."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.data.weight_store import WeightStoreWriter


class Layer(nn.Module):
    """Two tensors that must both arrive before the layer is put together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))


class Model(nn.Module):
    """Loads as vLLM's models do, one tensor after another; ``break_at`` fails in the middle once."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Layer(), Layer()
        self.break_at: str | None = None
        self.stop_at: str | None = None

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in weights:
            if name == self.stop_at:
                return
            if name == self.break_at:
                self.break_at = None
                raise MemoryError(name)
            parameter = parameters[name]
            loader = getattr(parameter, "weight_loader", lambda p, w: p.data.copy_(w))
            loader(parameter, tensor)


def values(start: float) -> dict[str, Tensor]:
    names = ["first.a", "first.b", "second.a", "second.b"]
    return {name: torch.full((4,), start + i) for i, name in enumerate(names)}


def weights_of(model: Model) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def model() -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = Model()
    record_metadata_for_reloading(model)
    return model


@pytest.fixture
def store(tmp_path: Path) -> WeightStoreWriter:
    return WeightStoreWriter(tmp_path)


@pytest.fixture
def worker(model: Model, store: WeightStoreWriter) -> Any:
    """The engine of one worker, its transport open."""
    from torchrl_moe.modules.backends.vllm.weight_engine import InitInfo, WeightEngine

    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    worker = WeightEngine(SimpleNamespace(), config, torch.device("cpu"), model)
    worker.init_transfer_engine(InitInfo(transport="memmap", folder=str(store.folder)))
    return worker


def receive(worker: Any, version: int) -> None:
    """``update_weights`` without its wait for an accelerator, which vLLM's CPU worker patches away."""
    worker.receive_weights(worker.parse_update_info({"version": version}))


def load(worker: Any, version: int) -> None:
    """As vLLM's worker does it."""
    worker.start_weight_update()
    receive(worker, version)
    worker.finish_weight_update()


def test_versions_are_loaded_into_the_tensors_that_are_there(
    worker: Any, model: Model, store: WeightStoreWriter
) -> None:
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    for version in (1, 2, 3):
        store.publish(values(10.0 * version).items(), version)
        load(worker, version)
        assert same(weights_of(model), values(10.0 * version))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places


@pytest.mark.parametrize("place", ["first.a", "first.b", "second.a", "second.b"])
def test_a_load_that_broke_off_anywhere_is_made_good_by_the_next(
    worker: Any, model: Model, store: WeightStoreWriter, place: str
) -> None:
    store.publish(values(1.0).items(), 1)
    load(worker, 1)
    store.publish(values(5.0).items(), 2)
    model.break_at = place
    worker.start_weight_update()
    with pytest.raises(MemoryError, match=place):
        receive(worker, 2)
    load(worker, 2)
    assert same(weights_of(model), values(5.0))


def test_a_version_that_is_not_there_is_made_good_by_one_that_is(
    worker: Any, model: Model, store: WeightStoreWriter
) -> None:
    store.publish(values(1.0).items(), 1)
    worker.start_weight_update()
    with pytest.raises(ManifestMismatch, match="version 9 is not in the store"):
        receive(worker, 9)
    load(worker, 1)
    assert same(weights_of(model), values(1.0))


def test_an_update_without_weights_leaves_the_old_ones(worker: Any, model: Model, store: WeightStoreWriter) -> None:
    store.publish(values(1.0).items(), 1)
    load(worker, 1)
    worker.start_weight_update()
    worker.finish_weight_update()
    assert same(weights_of(model), values(1.0))


def test_a_model_that_stops_reading_is_found(worker: Any, model: Model, store: WeightStoreWriter) -> None:
    store.publish(values(1.0).items(), 1)
    model.stop_at = "second.a"
    worker.start_weight_update()
    with pytest.raises(RuntimeError, match="the model took 3 of 4 tensors of version 1"):
        receive(worker, 1)


def test_a_transport_must_be_known_and_open(worker: Any, model: Model) -> None:
    from torchrl_moe.modules.backends.vllm.weight_engine import InitInfo, WeightEngine

    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; the worker has 'memmap'"):
        worker.init_transfer_engine(InitInfo(transport="carrier pigeon", folder=""))
    fresh = WeightEngine(SimpleNamespace(), worker.vllm_config, torch.device("cpu"), model)
    fresh.start_weight_update()
    with pytest.raises(RuntimeError, match="the weight transport is not initialised"):
        receive(fresh, 1)


def test_on_cpu_packed_kernels_are_dropped_and_come_back_where_nothing_was_loaded(worker: Any, model: Model) -> None:
    model.first.quant_method = reloaded = SimpleNamespace(moe_kernel="old")
    model.second.quant_method = untouched = SimpleNamespace(moe_kernel="kept")
    worker.start_weight_update()
    assert (reloaded.moe_kernel, untouched.moe_kernel) == (None, None)
    reloaded.moe_kernel = "new"  # as vLLM packs it
    worker.finish_weight_update()
    assert (reloaded.moe_kernel, untouched.moe_kernel) == ("new", "kept")


def test_kernels_survive_an_update_that_broke_off(worker: Any, model: Model) -> None:
    model.first.quant_method = method = SimpleNamespace(moe_kernel="old")
    worker.start_weight_update()  # breaks off
    worker.start_weight_update()
    worker.finish_weight_update()
    assert method.moe_kernel == "old"
