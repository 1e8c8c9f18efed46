"""What TorchRL's code asks of an engine: on fake replicas, and on a real one where vLLM's own answer counts."""

from __future__ import annotations

import pickle
import socket
import subprocess
import sys
from typing import Any

import pytest
import torch

from support.engines import EngineShelf
from support.processes import PYTHONPATH
from torchrl_moe.errors import EngineError
from torchrl_moe.modules import AsyncVLLM
from torchrl_moe.modules.serving import balancer as actors
from torchrl_moe.testing import FakeAsyncVLLM

COUNTS = """
import sys
from torchrl_moe.testing import FakeAsyncVLLM
engine = FakeAsyncVLLM()
assert isinstance(engine, FakeAsyncVLLM) and engine.__class__ is FakeAsyncVLLM
assert not {"torchrl", "vllm", "ray"} & set(sys.modules), "an engine loads none of these"
from torchrl.modules.llm.backends.vllm import RLvLLMEngine
assert isinstance(engine, RLvLLMEngine)
assert issubclass(FakeAsyncVLLM, RLvLLMEngine)
assert RLvLLMEngine.__abstractmethods__ <= set(dir(engine))
print("counts")
"""


def test_an_engine_counts_as_torchrls_without_loading_torchrl() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COUNTS], env={"PYTHONPATH": PYTHONPATH}, capture_output=True, text=True, timeout=100
    )
    assert run.stdout.splitlines()[-1:] == ["counts"], run.stderr


def test_torchrls_wrapper_refuses_an_engine_by_its_type() -> None:
    from torchrl.modules.llm.policies import vLLMWrapper

    with FakeAsyncVLLM() as engine, pytest.raises(ValueError, match=r"model must be .* Got <class '.*FakeAsyncVLLM'>"):
        vLLMWrapper(engine, input_mode="tokens")


def test_a_group_of_the_users_own_has_a_place_to_meet() -> None:
    with FakeAsyncVLLM() as engine:
        assert engine.get_master_address() == "127.0.0.1"
        port = engine.get_master_port()
        assert engine.get_master_port() == port
        with socket.socket() as mine:
            mine.bind(("127.0.0.1", port))


def test_torchrls_updaters_need_a_sender_of_ours() -> None:
    with FakeAsyncVLLM() as engine:
        with pytest.raises(
            RuntimeError, match=r"init_weight_update_group: no sender has this engine\. Make one: VLLMW"
        ):
            engine.init_weight_update_group()
        given: list[Any] = []
        engine.register_weight_sync(None, given.append)
        engine.init_weight_update_group()
        engine.update_weights(iter([("w", 1)]))
        assert given == [[("w", 1)]]


@pytest.mark.parametrize("method", ["load_weights_from_storage", "init_weight_update_group", "update_weight_broadcast"])
def test_weights_do_not_come_by_a_workers_method(method: str) -> None:
    with FakeAsyncVLLM() as engine, pytest.raises(ValueError, match=rf"'{method}'\): {actors.WEIGHTS[:20]}"):
        engine.collective_rpc(method)


def test_an_engine_of_this_process_is_not_pickled() -> None:
    words = "FakeAsyncVLLM cannot be pickled: .*backend='ray'.*policy_factory"
    with FakeAsyncVLLM() as engine, pytest.raises(TypeError, match=words):
        pickle.dumps(engine)


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
