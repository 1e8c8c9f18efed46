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
from torchrl_moe.store import Manifest, WeightStoreWriter
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
            loader = getattr(parameters[name], "weight_loader", lambda p, w: p.data.copy_(w))
            loader(parameters[name], tensor)


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
    made = weight_engine(model)
    open_memmap(made, store)
    return made


def weight_engine(model: Model) -> Any:
    from torchrl_moe.modules.backends.vllm.worker import WeightEngine

    config = SimpleNamespace(parallel_config=None, model_config=SimpleNamespace(dtype=torch.float32))
    return WeightEngine(SimpleNamespace(), config, torch.device("cpu"), model)


def open_memmap(worker: Any, store: WeightStoreWriter, transport: str = "memmap") -> None:
    from torchrl_moe.modules.backends.vllm.worker import InitInfo

    worker.init_transfer_engine(InitInfo(transport=transport, options={"folder": str(store.folder)}))


def receive(worker: Any, version: int) -> None:
    """``update_weights`` without its wait for an accelerator, which vLLM's CPU worker patches away."""
    worker.receive_weights(worker.parse_update_info({"version": version}))


def load(worker: Any, version: int) -> None:
    """As vLLM's worker does it."""
    worker.start_weight_update()
    receive(worker, version)
    worker.finish_weight_update()


def begin(worker: Any, manifest: Manifest) -> bool:
    began: bool = worker.stage(manifest.to_json(), verify=False, threads=1)
    return began


def finished(worker: Any) -> dict[str, Any]:
    until(lambda: not worker.staged()["running"])
    return dict(worker.staged())


@pytest.mark.parametrize("place", ["first.a", "first.b", "second.a", "second.b"])
def test_a_load_that_broke_off_anywhere_is_made_good_by_the_next_in_the_tensors_that_are_there(
    worker: Any, model: Model, store: WeightStoreWriter, place: str
) -> None:
    places = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    store.publish(values(1.0).items(), 1)
    load(worker, 1)
    assert same(weights_of(model), values(1.0))
    store.publish(values(5.0).items(), 2)
    model.break_at = place
    worker.start_weight_update()
    with pytest.raises(MemoryError, match=place):
        receive(worker, 2)
    assert not worker.whole
    model.stop_at = "second.a"  # it stops reading, and says nothing
    worker.start_weight_update()
    with pytest.raises(WeightSyncError, match="the model took 3 of 4 tensors of version 2"):
        receive(worker, 2)
    model.stop_at = None
    store.publish(values(5.0).items(), 4)  # its slot is free
    load(worker, 4)
    assert worker.whole
    assert same(weights_of(model), values(5.0))
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == places


@pytest.mark.parametrize("why", ["no such version", "no tensor is taken"])
def test_a_load_that_fails_before_its_first_tensor_leaves_the_model_whole_and_old(
    worker: Any, model: Model, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    def refuse(weights: Any) -> None:
        raise ManifestMismatch("no tensor is taken")

    model.first.quant_method = method = SimpleNamespace(moe_kernel="old")  # type: ignore[assignment]
    store.publish(values(1.0).items(), 1)
    load(worker, 1)
    if why == "no tensor is taken":
        store.publish(values(5.0).items(), 9)
        monkeypatch.setattr(model, "load_weights", refuse)
    worker.start_weight_update()
    assert not worker.whole
    with pytest.raises(ManifestMismatch, match=r"version 9 is not in the store|no tensor is taken"):
        receive(worker, 9)
    assert worker.whole
    assert same(weights_of(model), values(1.0))
    assert method.moe_kernel == "old"
    monkeypatch.undo()
    load(worker, 1)
    assert same(weights_of(model), values(1.0))


def test_a_transport_must_be_known_and_open(worker: Any, model: Model, store: WeightStoreWriter) -> None:
    with pytest.raises(ValueError, match="unknown transport 'carrier pigeon'; the worker has 'memmap'"):
        open_memmap(worker, store, "carrier pigeon")
    fresh = weight_engine(model)
    fresh.start_weight_update()
    with pytest.raises(RuntimeError, match="the weight transport is not initialised"):
        receive(fresh, 1)
    with pytest.raises(RuntimeError, match="nothing was staged"):
        fresh.staged()


def test_on_cpu_packed_kernels_are_dropped_and_come_back_where_nothing_was_loaded(worker: Any, model: Model) -> None:
    model.first.quant_method = reloaded = SimpleNamespace(moe_kernel="old")
    model.second.quant_method = untouched = SimpleNamespace(moe_kernel="kept")
    worker.start_weight_update()  # breaks off
    worker.start_weight_update()
    assert (reloaded.moe_kernel, untouched.moe_kernel) == (None, None)
    reloaded.moe_kernel = "new"  # as vLLM packs it
    worker.finish_weight_update()
    assert (reloaded.moe_kernel, untouched.moe_kernel) == ("new", "kept")


@pytest.mark.parity
def test_more_of_vllms_models_are_bitwise_what_a_start_would_have_made() -> None:
    cases = ("qwen3_moe", "olmoe", "mixtral", "deepseek_v3", "qwen3:tied")
    command = [sys.executable, "-m", "support.reload_check", *cases]
    done = subprocess.run(command, env=toy_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {case: [] for case in cases}


# -- staging ----------------------------------------------------------------------------------------------------------
def test_staging_fetches_and_only_a_load_changes_the_model(
    worker: Any, model: Model, store: WeightStoreWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fetch(*_: Any, **__: Any) -> str:
        raise DigestMismatch("bytes of first.a")

    before = weights_of(model)
    for version, error in ((1, None), (2, "DigestMismatch: bytes of first.a"), (3, None)):
        with monkeypatch.context() as patched:
            if error:
                patched.setattr(MemmapReceiver, "fetch", fetch)
            assert begin(worker, store.publish(values(10.0 * version).items(), version))
            assert (finished(worker)["error"], worker.whole) == (error, True)
        assert same(weights_of(model), before)
    load(worker, 3)
    assert same(weights_of(model), values(30.0))


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
    assert [begin(worker, one) for _ in range(3)] == [True] * 3
    assert started.wait(60.0)
    release.set()
    assert (finished(worker)["error"], fetches) == (None, [1])
    release.clear()
    # another number, and one that was given up
    assert [begin(worker, wanted) for wanted in (one, again, one)] == [True, False, False]
    release.set()
    finished(worker)
    assert fetches == [1, 1]
    assert begin(worker, again)
    finished(worker)
    assert fetches == [1, 1, 2]
    # one is not left to a transport that was closed
    release.clear()
    assert begin(worker, one)
    open_memmap(worker, store)
    assert not begin(worker, one)
    release.set()
    finished(worker)


# -- the extension -----------------------------------------------------------------------------------------------------
def test_a_check_sees_the_parameters_as_they_were_and_the_model_as_it_is() -> None:
    model = torch.nn.Linear(2, 1)
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)

    def check(saved: Any, model: torch.nn.Linear) -> dict[str, float]:
        return {name: (model.get_parameter(name) - tensor).abs().sum().item() for name, tensor in saved.items()}

    def said() -> Any:
        return link.decode(worker.torchrl_moe_validate(cloudpickle.dumps(check)))

    assert said() == {}  # nothing was saved yet
    assert worker.torchrl_moe_save_params() == 2
    with torch.no_grad():
        model.bias += 3.0
    assert said() == {"weight": 0.0, "bias": 3.0}


@pytest.mark.parametrize("place", ["cpu_worker.CPUWorker", "gpu_worker.Worker"])
def test_it_shares_no_name_with_vllms_workers_which_vllm_would_refuse(place: str) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    ours = {name for name in vars(WorkerExtension) if not name.startswith("__")}
    assert ours == {name for name in ours if name.startswith("torchrl_moe_")}
    assert not ours & set(dir(resolve_obj_by_qualname(f"vllm.v1.worker.{place}")))


# -- a process of its own ----------------------------------------------------------------------------------------------
RELOADED = ("qwen3_moe:tied", "deepseek_v3:bf16")
ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM has its own kernels here")

PROGRAM = """
import json, os, sys
from torchrl_moe.modules.backends.vllm import cpu_kernels
light = not any(name.partition(".")[0] == "vllm" for name in sys.modules)
import vllm.config.vllm as config
from vllm.platforms import current_platform

def asked_for(value):
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = value
    cpu_kernels.register()
    return config.HAS_TRITON

v1 = asked_for("0")
os.environ.pop("VLLM_USE_V2_MODEL_RUNNER")
cpu_kernels.register()
cpu_kernels.register()
import vllm.v1.worker.gpu.cp_utils as early
current_platform.register_triton_kernel_overrides()
import vllm.v1.worker.gpu.mm.rope as late
from vllm.v1.worker.gpu import input_batch
from vllm.v1.worker.gpu.sample import gumbel

def error(kernel):
    try:
        kernel[(1,)](1, 2, BLOCK_SIZE=3)
    except NotImplementedError as caught:
        return str(caught)

found = {
    "light": light, "v1": v1, "v2": config.HAS_TRITON,
    "early": error(early._dcp_local_seq_lens_kernel), "late": error(late._prepare_rope_positions_kernel),
    "again": cpu_kernels.install() is None,
    "ours": all(type(getattr(m, n)).__name__ == "KernelOverride" for m, n in (
        (input_batch, "_post_update_kernel"), (gumbel, "_temperature_kernel"))),
    "not_kernels": [input_batch.post_update.__module__, gumbel.apply_temperature.__module__],
}
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
import torch
from support import reload_check
from torchrl_moe import _compat

torch.set_num_threads(1)
_compat.inspect_models_here()  # as an engine's process does: no other process imports vLLM for each family
print(json.dumps(found | {"reloads": {case: reload_check.check(case) for case in sys.argv[1:]}}))
"""


@pytest.fixture(scope="module")
def installed() -> dict[str, Any]:
    """What a process says that installs the kernels, and reloads vLLM's models: it changes torch and vLLM for good."""
    command = [sys.executable, "-c", PROGRAM, *RELOADED]
    done = subprocess.run(command, env=toy_environment(), capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_vllms_models_are_bitwise_what_a_start_would_have_made(installed: dict[str, Any]) -> None:
    """Tied heads, packed and absorbed weights, correction biases; the same model many times."""
    assert installed["reloads"] == {case: [] for case in RELOADED}


@ON_CPU
def test_the_kernels_are_installed_once_and_lightly_and_leave_v1_alone(installed: dict[str, Any]) -> None:
    """Others fail with their names, in modules that were imported before that, and in those that come later."""
    assert [installed[name] for name in ("light", "v1", "v2", "ours", "again")] == [True, False, True, True, True]
    assert installed["not_kernels"] == ["vllm.v1.worker.gpu.input_batch", "vllm.v1.worker.gpu.sample.gumbel"]
    others = {"early": "cp_utils._dcp_local_seq_lens_kernel", "late": "mm.rope._prepare_rope_positions_kernel"}
    for when, kernel in others.items():
        assert f"vLLM's Triton kernel vllm.v1.worker.gpu.{kernel} has no CPU version in torchrl_moe" in installed[when]
        assert "run on a GPU" in installed[when]
