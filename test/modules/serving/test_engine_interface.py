"""What TorchRL's code asks of an engine: on fake replicas, and on a real one where vLLM's own answer counts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from support.engines import EngineShelf
from torchrl_moe._errors import EngineError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.serving.engine_interface import EngineInterface
from torchrl_moe.testing import FakeAsyncVLLM
from torchrl_moe.testing.fake_engine import FakeReplica

USES: dict[str, Callable[[EngineInterface], Any]] = {
    "get_tp_size": lambda e: e.get_tp_size(),
    "get_model_metadata": lambda e: e.get_model_metadata(),
    "save_model_params": lambda e: e.save_model_params(),
    "validate_model_params": lambda e: e.validate_model_params(lambda saved, model: True),
}
ALWAYS: set[str] = set()


def test_every_public_name_is_tried_below() -> None:
    assert {name for name in vars(EngineInterface) if not name.startswith("_")} == USES.keys() | ALWAYS


@pytest.mark.parametrize("name", USES)
def test_use_before_start_and_after_shutdown_is_refused(name: str) -> None:
    with pytest.raises(RuntimeError, match="the service is not running"):
        USES[name](EngineInterface([FakeReplica()]))
    engine = FakeAsyncVLLM()
    engine.shutdown()
    with pytest.raises(RuntimeError, match="the service is not running"):
        USES[name](engine)


# -- vLLM -------------------------------------------------------------------------------------------------------------


@pytest.mark.engine("qwen3_moe")
def test_a_check_of_the_users_runs_in_every_worker(engine: AsyncVLLM) -> None:
    def names(saved: Any, model: Any) -> tuple[int, bool]:
        same = all(torch.equal(tensor, model.get_parameter(name)) for name, tensor in saved.items())
        return len(saved), same and type(model).__name__ == "Qwen3MoeForCausalLM"

    engine.save_model_params()
    (((count, same),),) = engine.validate_model_params(names)
    assert count > 30
    assert same

    def fail(saved: Any, model: Any) -> None:
        raise RuntimeError("the weights are not mine")

    with pytest.raises(EngineError, match="the weights are not mine"):
        engine.validate_model_params(fail)
    assert len(engine.generate([65], {"max_tokens": 4, "ignore_eos": True}, use_tqdm=False).outputs[0].token_ids) == 4


@pytest.mark.engine("qwen3_moe")
def test_the_models_tensors_are_named_as_in_the_checkpoint(engine: AsyncVLLM, shelf: EngineShelf) -> None:
    from safetensors import safe_open

    with safe_open(shelf.folder("qwen3_moe") / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 # not a mapping
    metadata = engine.get_model_metadata()
    assert metadata == {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    assert metadata["model.layers.1.mlp.experts.15.gate_proj.weight"] == (torch.float32, torch.Size([32, 64]))
