"""The worker's side on plain modules: vLLM's layerwise reload needs no engine. ``test_weights.py`` has real ones."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from support.waiting import until
from torchrl_moe import _compat
from torchrl_moe._errors import ManifestMismatch, SyncTimeout, WeightSyncError
from torchrl_moe.weight_update.store import Manifest, WeightStoreWriter
from torchrl_moe.weight_update.transports.memmap import MemmapReceiver
from torchrl_moe.weight_update.transports.nccl import NcclReceiver


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
    from torchrl_moe.modules.backends.vllm.weights.worker import InitInfo, WeightEngine

    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    worker = WeightEngine(SimpleNamespace(), config, torch.device("cpu"), model)
    worker.init_transfer_engine(InitInfo(transport="memmap", options={"folder": str(store.folder)}))
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
    assert not worker.whole
    store.publish(values(5.0).items(), 4)  # its slot is let go of
    load(worker, 4)
    assert worker.whole
    assert same(weights_of(model), values(5.0))


def test_tensors_stay_until_the_update_is_finished(
    worker: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM copies some of them only then."""
    for version in (1, 2):
        store.publish(values(1.0).items(), version)
    worker.start_weight_update()
    receive(worker, 1)
    monkeypatch.setattr(store, "_lock_seconds", 0.01)
    with pytest.raises(SyncTimeout, match=r"slot-1\.weights"):
        store.publish(values(3.0).items(), 3)
    worker.finish_weight_update()
    store.publish(values(3.0).items(), 3)


def test_a_version_that_is_not_there_leaves_the_model_whole_and_old(
    worker: Any, model: Model, store: WeightStoreWriter
) -> None:
    model.first.quant_method = method = SimpleNamespace(moe_kernel="old")  # type: ignore[assignment]
    store.publish(values(1.0).items(), 1)
    load(worker, 1)
    worker.start_weight_update()
    assert not worker.whole
    with pytest.raises(ManifestMismatch, match="version 9 is not in the store"):
        receive(worker, 9)
    assert worker.whole
    assert same(weights_of(model), values(1.0))
    assert method.moe_kernel == "old"
    load(worker, 1)
    assert same(weights_of(model), values(1.0))


def test_a_model_that_takes_no_tensor_stays_whole_and_old(worker: Any, model: Model, store: WeightStoreWriter) -> None:
    def refuse(weights: Any) -> None:
        raise ValueError("not today")

    store.publish(values(1.0).items(), 1)
    load(worker, 1)
    store.publish(values(5.0).items(), 2)
    model.load_weights = refuse  # type: ignore[method-assign]
    worker.start_weight_update()
    with pytest.raises(ValueError, match="not today"):
        receive(worker, 2)
    assert worker.whole
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
    with pytest.raises(WeightSyncError, match="the model took 3 of 4 tensors of version 1"):
        receive(worker, 1)


class Pushing(NcclReceiver):
    """In the place of NCCL: gives the model what it has, when it is asked to load."""

    def __init__(self, model: Model, tensors: dict[str, Tensor]) -> None:
        self.model, self.tensors = model, tensors

    def load(self, manifest: Any) -> int:
        self.model.load_weights(iter(self.tensors.items()))
        return len(self.tensors)


def test_a_receiver_that_loads_by_itself_is_let_do_so(worker: Any, model: Model, store: WeightStoreWriter) -> None:
    manifest = store.publish(values(1.0).items(), 1)
    worker._receiver = Pushing(model, values(1.0))
    assert worker.stage(manifest.to_json(), shadow=True, verify=False, threads=1)
    report = finished(worker)
    assert (report["stage"], report["reason"]) == ("plain", "nccl sends during the pause")
    load(worker, 1)
    assert same(weights_of(model), values(1.0))
    worker._receiver.tensors.pop("first.a")
    worker.start_weight_update()
    with pytest.raises(WeightSyncError, match="3 of 4 tensors of version 1 arrived"):
        receive(worker, 1)
    assert not worker.whole


def test_what_was_received_is_passed_on_by_a_receiver_that_can(worker: Any) -> None:
    with pytest.raises(WeightSyncError, match="what came by this transport cannot be passed on"):
        worker.pass_on({"place": 0})  # by the store
    orders: list[dict[str, Any]] = []
    worker._receiver = SimpleNamespace(pass_on=orders.append, close=lambda: None)
    worker.pass_on({"place": 1})
    assert orders == [{"place": 1}]


def test_a_transport_must_be_known_and_open(worker: Any, model: Model) -> None:
    from torchrl_moe.modules.backends.vllm.weights.worker import InitInfo, WeightEngine

    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; the worker has 'memmap'"):
        worker.init_transfer_engine(InitInfo(transport="carrier pigeon", options={}))
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


# -- shadows ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def shadowed(worker: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A worker whose model, which holds 0, can have a shadow."""
    monkeypatch.setattr("torchrl_moe.modules.backends.vllm.weights.worker.reason_against", lambda *_: "")
    monkeypatch.setattr(_compat, "build_beside", lambda config, device: (Model(), config))
    monkeypatch.setattr(_compat, "load_beside", lambda model, config, device, tensors: model.load_weights(tensors))
    return worker


def stage(worker: Any, store: WeightStoreWriter, version: int, shadow: bool = True) -> dict[str, Any]:
    manifest = store.publish(values(10.0 * version).items(), version)
    begin(worker, manifest, shadow)
    return finished(worker)


def begin(worker: Any, manifest: Manifest, shadow: bool = True) -> None:
    until(lambda: worker.stage(manifest.to_json(), shadow=shadow, verify=False, threads=1))


def finished(worker: Any) -> dict[str, Any]:
    until(lambda: not worker.staged()["running"])
    return dict(worker.staged())


def test_a_staged_version_changes_places_with_the_old_one_and_back(
    shadowed: Any, model: Model, store: WeightStoreWriter
) -> None:
    for version in (1, 2, 3):
        before = weights_of(model)
        report = stage(shadowed, store, version)
        assert (report["stage"], report["reason"], report["error"]) == ("shadow", "", None)
        assert same(weights_of(model), before)
        shadowed.change_places(version)
        assert same(weights_of(model), values(10.0 * version))
        shadowed.change_places(version)
        assert same(weights_of(model), before)
        shadowed.change_places(version)
        shadowed.drop()
    assert same(weights_of(model), values(30.0))
    assert shadowed.whole


def test_a_version_that_was_staged_and_not_used_is_dropped_by_the_next(
    shadowed: Any, model: Model, store: WeightStoreWriter
) -> None:
    stage(shadowed, store, 1)
    stage(shadowed, store, 2)
    with pytest.raises(RuntimeError, match="version 2 is in the shadow, and not 1"):
        shadowed.change_places(1)
    shadowed.change_places(2)
    assert same(weights_of(model), values(20.0))


def test_memory_is_given_back_beside_the_loop_and_before_the_next_version(
    shadowed: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_moe.modules.backends.vllm.weights.shadow import ShadowModel

    release, gone = threading.Event(), ShadowModel.release
    stage(shadowed, store, 1)
    shadowed.change_places(1)

    def slow(self: Any) -> None:
        assert release.wait(60.0)
        gone(self)

    monkeypatch.setattr(ShadowModel, "release", slow)
    shadowed.drop()  # returns at once
    manifest = store.publish(values(20.0).items(), 2)
    assert not shadowed.stage(manifest.to_json(), shadow=True, verify=False, threads=1)
    release.set()
    begin(shadowed, manifest)
    assert finished(shadowed)["stage"] == "shadow"


def test_what_goes_wrong_as_memory_is_given_back_is_reported_by_the_next_staging(
    shadowed: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_moe.modules.backends.vllm.weights.shadow import ShadowModel

    stage(shadowed, store, 1)
    shadowed.change_places(1)
    with monkeypatch.context() as patched:
        patched.setattr(ShadowModel, "release", broken)
        shadowed.drop()
        with pytest.raises(ZeroDivisionError, match="no release"):
            stage(shadowed, store, 2)
    assert stage(shadowed, store, 4)["stage"] == "shadow"


def broken(shadow: Any) -> None:
    raise ZeroDivisionError("no release")


def test_a_plain_version_after_one_that_was_not_used_gives_its_memory_back(
    shadowed: Any, store: WeightStoreWriter
) -> None:
    stage(shadowed, store, 1)
    parameters = list(shadowed._shadow.model.parameters())
    assert sum(parameter.numel() for parameter in parameters) == 16
    assert stage(shadowed, store, 2, shadow=False)["reason"] == "plain was asked for"
    assert sum(parameter.numel() for parameter in parameters) == 0


def test_what_is_not_in_the_shadow_cannot_be_swapped_in(shadowed: Any, model: Model, store: WeightStoreWriter) -> None:
    with pytest.raises(RuntimeError, match="version 1 is not in the shadow"):
        shadowed.change_places(1)
    with pytest.raises(RuntimeError, match="nothing was staged"):
        shadowed.staged()
    report = stage(shadowed, store, 1, shadow=False)
    assert (report["stage"], report["reason"]) == ("plain", "plain was asked for")
    with pytest.raises(RuntimeError, match="version 1 is not in the shadow"):
        shadowed.change_places(1)
    stage(shadowed, store, 2)
    shadowed.drop()
    with pytest.raises(RuntimeError, match="version 2 is not in the shadow"):
        shadowed.change_places(2)
    assert same(weights_of(model), {name: torch.zeros(4) for name in values(0.0)})


def test_a_plain_update_after_shadows_and_a_shadow_after_a_plain_one(
    shadowed: Any, model: Model, store: WeightStoreWriter
) -> None:
    places = {name: id(parameter) for name, parameter in model.named_parameters()}
    stage(shadowed, store, 1)
    shadowed.change_places(1)
    stage(shadowed, store, 2, shadow=False)
    load(shadowed, 2)
    assert same(weights_of(model), values(20.0))
    stage(shadowed, store, 3)
    shadowed.change_places(3)
    assert same(weights_of(model), values(30.0))
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == places


def test_a_staging_that_failed_leaves_the_old_weights_and_the_next_is_good(
    shadowed: Any, model: Model, store: WeightStoreWriter
) -> None:
    bad = {**values(10.0), "second.a": torch.ones(7)}
    begin(shadowed, store.publish(bad.items(), 1))
    assert "size of tensor" in finished(shadowed)["error"]
    assert same(weights_of(model), {name: torch.zeros(4) for name in bad})
    assert stage(shadowed, store, 2)["error"] is None
    shadowed.change_places(2)
    assert same(weights_of(model), values(20.0))


def test_an_earlier_staging_that_still_runs_is_stopped_first(
    shadowed: Any, model: Model, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    started, release = threading.Event(), threading.Event()

    def fetch(self: Any, *_: Any, **__: Any) -> None:
        started.set()
        assert release.wait(60.0)

    monkeypatch.setattr(MemmapReceiver, "fetch", fetch)
    one, two = (store.publish(values(10.0 * version).items(), version) for version in (1, 2))
    assert shadowed.stage(one.to_json(), shadow=True, verify=False, threads=1)
    assert started.wait(60.0)
    assert not shadowed.stage(two.to_json(), shadow=True, verify=False, threads=1)
    release.set()
    assert finished(shadowed)["error"] == "WeightSyncError: another version was staged meanwhile"
    assert shadowed.stage(two.to_json(), shadow=True, verify=False, threads=1)
    assert finished(shadowed)["stage"] == "shadow"


def test_a_version_that_is_being_staged_continues_however_often_it_is_asked_for(
    shadowed: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As often as another worker of the engine answers that it has to be asked again."""
    started, release = threading.Event(), threading.Event()
    fetches: list[int] = []

    def fetch(self: Any, manifest: Any, **_: Any) -> None:
        fetches.append(manifest.version)
        started.set()
        assert release.wait(60.0)

    monkeypatch.setattr(MemmapReceiver, "fetch", fetch)
    one, again = (store.publish(values(1.0).items(), version) for version in (1, 2))
    assert one.digest == again.digest
    for _ in range(3):
        assert shadowed.stage(one.to_json(), shadow=True, verify=False, threads=1)
    assert started.wait(60.0)
    release.set()
    report = finished(shadowed)
    assert (report["error"], report["stage"], fetches) == (None, "shadow", [1])
    release.clear()
    assert shadowed.stage(one.to_json(), shadow=True, verify=False, threads=1)
    for wanted, shadow in ((one, False), (again, True), (one, True)):  # another way, another number, one given up
        assert not shadowed.stage(wanted.to_json(), shadow=shadow, verify=False, threads=1)
    release.set()
    assert finished(shadowed)["error"] == "WeightSyncError: another version was staged meanwhile"


def test_a_version_is_not_left_to_a_transport_that_was_given_up(
    shadowed: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_moe.modules.backends.vllm.weights.worker import InitInfo

    release = threading.Event()
    monkeypatch.setattr(MemmapReceiver, "fetch", lambda *_, **__: "" if release.wait(60.0) else "late")
    version = store.publish(values(1.0).items(), 1)
    assert shadowed.stage(version.to_json(), shadow=True, verify=False, threads=1)
    shadowed.init_transfer_engine(InitInfo(transport="memmap", options={"folder": str(store.folder)}))
    assert not shadowed.stage(version.to_json(), shadow=True, verify=False, threads=1)
    release.set()
    finished(shadowed)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (("worker.reason_against", lambda *_: "it is quantised"), "it is quantised"),
        (("shadow.ShadowModel.reserve_memory", lambda _: "9.0 GB are needed"), "9.0 GB are needed"),
    ],
)
def test_where_there_can_be_no_shadow_the_reason_is_reported(
    shadowed: Any, model: Model, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    monkeypatch.setattr(f"torchrl_moe.modules.backends.vllm.weights.{change[0]}", change[1])
    for version in (1, 2):
        report = stage(shadowed, store, version)
        assert (report["stage"], report["reason"]) == ("plain", reason)
        load(shadowed, version)
        assert same(weights_of(model), values(10.0 * version))


def test_a_model_that_cannot_be_built_twice_is_asked_once(
    shadowed: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def build(*_: Any) -> Any:
        asked.append(1)
        raise ValueError("Duplicate layer name: x")

    monkeypatch.setattr(_compat, "build_beside", build)
    for version in (1, 2):
        report = stage(shadowed, store, version)
        assert report["reason"] == "no second model can be built: Duplicate layer name: x"
    assert asked == [1]
