"""What we add to vLLM's worker, and that it can be added."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch

from torchrl_moe import _compat
from torchrl_moe.modules.backends.process import wire
from torchrl_moe.modules.backends.vllm.worker import WorkerExtension
from torchrl_moe.weight_update.store import WeightStoreWriter


def test_router_layers_are_those_of_the_model_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    model = object()
    asked: list[Any] = []
    monkeypatch.setattr(_compat, "router_layer_ids", lambda it: asked.append(it) or [1, 3])
    worker = WorkerExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    assert worker.torchrl_moe_router_layers() == [1, 3]
    assert asked == [model]


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
    return wire.decode(frames[0], frames[1:])


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
