"""What we add to vLLM's worker, and its side of an update: vLLM's layerwise reload needs no engine."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from torch import Tensor, nn

from support.processes import toy_environment
from support.waiting import until
from torchrl_moe.errors import DigestMismatch, ManifestMismatch, WeightSyncError
from torchrl_moe.modules.backends.process import link
from torchrl_moe.modules.backends.vllm.worker import WorkerExtension
from torchrl_moe.store import Manifest, WeightStoreReader, WeightStoreWriter
from torchrl_moe.weight_update.transports.registry import MemmapReceiver


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
    from torchrl_moe.modules.backends.vllm.worker import InitInfo, WeightEngine

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
    store.publish(values(5.0).items(), 4)  # its slot is free
    load(worker, 4)
    assert worker.whole
    assert same(weights_of(model), values(5.0))


def test_tensors_stay_until_the_update_is_finished(worker: Any, store: WeightStoreWriter) -> None:
    """vLLM copies some of them only then."""
    for version in (1, 2):
        store.publish(values(1.0).items(), version)
    worker.start_weight_update()
    receive(worker, 1)
    store.publish(values(3.0).items(), 3)
    assert WeightStoreReader(store.folder).versions() == [1, 2, 3]
    worker.finish_weight_update()
    store.publish(values(4.0).items(), 4)
    assert WeightStoreReader(store.folder).versions() == [3, 4]


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


def test_a_model_that_stops_reading_is_found(worker: Any, model: Model, store: WeightStoreWriter) -> None:
    store.publish(values(1.0).items(), 1)
    model.stop_at = "second.a"
    worker.start_weight_update()
    with pytest.raises(WeightSyncError, match="the model took 3 of 4 tensors of version 1"):
        receive(worker, 1)


def test_a_transport_must_be_known_and_open(worker: Any, model: Model) -> None:
    from torchrl_moe.modules.backends.vllm.worker import InitInfo, WeightEngine

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


@pytest.mark.parametrize(
    "cases",
    [
        ("mixtral", "qwen3_moe:tied", "deepseek_v3:bf16"),
        pytest.param(("qwen3_moe", "olmoe", "deepseek_v3", "qwen3:tied"), marks=pytest.mark.parity),
    ],
    ids=" ".join,
)
def test_vllms_models_are_bitwise_what_a_start_would_have_made(cases: tuple[str, ...]) -> None:
    """Tied heads, packed and absorbed weights, correction biases; the same model many times."""
    command = [sys.executable, "-m", "support.reload_check", *cases]
    done = subprocess.run(command, env=toy_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {case: [] for case in cases}


# -- staging ----------------------------------------------------------------------------------------------------------


def begin(worker: Any, manifest: Manifest) -> bool:
    began: bool = worker.stage(manifest.to_json(), verify=False, threads=1)
    return began


def finished(worker: Any) -> dict[str, Any]:
    until(lambda: not worker.staged()["running"])
    return dict(worker.staged())


def test_staging_fetches_and_only_a_load_changes_the_model(worker: Any, model: Model, store: WeightStoreWriter) -> None:
    with pytest.raises(RuntimeError, match="nothing was staged"):
        worker.staged()
    for version in (1, 2, 3):
        before = weights_of(model)
        assert begin(worker, store.publish(values(10.0 * version).items(), version))
        report = finished(worker)
        assert (report["error"], worker.whole) == (None, True)
        assert same(weights_of(model), before)
    load(worker, 3)
    assert same(weights_of(model), values(30.0))


def test_the_manifest_that_was_staged_is_the_one_that_is_loaded(
    worker: Any, model: Model, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not every receiver can look one up."""
    monkeypatch.setattr(MemmapReceiver, "manifest", lambda *_: pytest.fail("it was staged"))
    assert begin(worker, store.publish(values(10.0).items(), 1))
    finished(worker)
    load(worker, 1)
    assert same(weights_of(model), values(10.0))


def test_a_staging_that_failed_leaves_the_old_weights_and_the_next_is_good(
    worker: Any, model: Model, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> str:
        raise DigestMismatch("bytes of first.a")

    with monkeypatch.context() as patched:
        patched.setattr(MemmapReceiver, "fetch", fetch)
        assert begin(worker, store.publish(values(10.0).items(), 1))
        assert finished(worker)["error"] == "DigestMismatch: bytes of first.a"
    assert same(weights_of(model), {name: torch.zeros(4) for name in values(0.0)})
    assert begin(worker, store.publish(values(20.0).items(), 2))
    assert finished(worker)["error"] is None
    load(worker, 2)
    assert same(weights_of(model), values(20.0))


def test_a_version_that_is_being_staged_continues_however_often_it_is_asked_for(
    worker: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
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
        assert begin(worker, one)
    assert started.wait(60.0)
    release.set()
    report = finished(worker)
    assert (report["error"], fetches) == (None, [1])
    release.clear()
    assert begin(worker, one)
    for wanted in (again, one):  # another number, and one that was given up
        assert not begin(worker, wanted)
    release.set()
    finished(worker)
    assert fetches == [1, 1]
    assert begin(worker, again)
    finished(worker)
    assert fetches == [1, 1, 2]


def test_a_version_is_not_left_to_a_transport_that_was_given_up(
    worker: Any, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchrl_moe.modules.backends.vllm.worker import InitInfo

    release = threading.Event()
    monkeypatch.setattr(MemmapReceiver, "fetch", lambda *_, **__: "" if release.wait(60.0) else "late")
    version = store.publish(values(1.0).items(), 1)
    assert begin(worker, version)
    worker.init_transfer_engine(InitInfo(transport="memmap", options={"folder": str(store.folder)}))
    assert not begin(worker, version)
    release.set()
    finished(worker)


# -- the extension -----------------------------------------------------------------------------------------------------


def test_an_adapter_is_loaded_and_its_modules_that_are_not_adapted_are_named() -> None:
    loras = {"layers.0.attn.qkv_proj": 0, "layers.0.mlp.up_proj": 0, "layers.1.experts.base_layer": 0, "lm_head": 0}
    adapters: dict[int, Any] = {}
    manager = SimpleNamespace(
        list_adapters=lambda: adapters,
        modules={"layers.0.attn.qkv_proj": 0, "layers.1.experts": 0},
    )
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    worker.add_lora = lambda lora: bool(adapters.update({lora.lora_int_id: SimpleNamespace(loras=loras)}))
    fields = {"lora_name": "tiny", "lora_int_id": 7, "lora_path": "somewhere"}
    assert worker.torchrl_moe_load_adapter(fields) == ["layers.0.mlp.up_proj", "lm_head"]


def test_the_weight_engine_is_asked_by_name(tmp_path: Path) -> None:
    asked: list[Any] = []

    class Engine:
        whole = False

        def __getattr__(self, name: str) -> Any:
            return lambda *args, **kwargs: asked.append((name, args, kwargs)) or name

    manifest = WeightStoreWriter(tmp_path).publish([("w", torch.ones(1))], 4)
    worker = WorkerExtension()
    worker.weight_transfer_engine = Engine()
    assert worker.torchrl_moe_stage(manifest.to_json(), False, 2) == "stage"
    assert worker.torchrl_moe_staged() == "staged"
    assert worker.torchrl_moe_whole() is False
    assert asked == [
        ("stage", (manifest.to_json(),), {"verify": False, "threads": 2}),
        ("staged", (), {}),
    ]


def told(frames: list[bytes]) -> Any:
    return link.decode(frames)


def test_a_check_sees_the_parameters_as_they_were_and_the_model_as_it_is() -> None:
    model = torch.nn.Linear(2, 1)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)

    def check(saved: Any, model: torch.nn.Linear) -> dict[str, float]:
        return {name: (model.get_parameter(name) - tensor).abs().sum().item() for name, tensor in saved.items()}

    ask = cloudpickle.dumps(check)
    assert told(worker.torchrl_moe_validate(ask)) == {}  # nothing was saved yet
    assert worker.torchrl_moe_save_params() == 2
    with torch.no_grad():
        model.bias += 3.0
    assert told(worker.torchrl_moe_validate(ask)) == {"weight": 0.0, "bias": 3.0}


@pytest.mark.parametrize("place", ["cpu_worker.CPUWorker", "gpu_worker.Worker"])
def test_it_shares_no_name_with_vllms_workers_which_vllm_would_refuse(place: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    ours = {name for name in vars(WorkerExtension) if not name.startswith("__")}
    assert ours == {name for name in ours if name.startswith("torchrl_moe_")}
    assert not ours & set(dir(resolve_obj_by_qualname(f"vllm.v1.worker.{place}")))


@pytest.mark.engine("qwen3_moe")
def test_the_engines_workers_have_it(engine: Any) -> None:
    assert engine.collective_rpc("torchrl_moe_router_layers") == [[[1, 2, 3]]]
