"""The adapter of a peft model as the two files that peft would save, which is what vLLM loads."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from torchrl_moe._errors import ManifestMismatch
from torchrl_moe.modules.policies.adapters import LoraLayers, base_model, has_adapters
from torchrl_moe.weight_update.source.layout import Kinds
from torchrl_moe.weight_update.store.adapters import ADAPTER_FILES
from torchrl_moe.weight_update.store.flat import send

__all__ = ["adapter_files", "check_adapter", "check_shapes"]

ROOT = "base_model.model."  # prefix of every name in peft's files
ELSEWHERE = ("modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices", "layer_replication")
STARTS_ELSEWHERE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base weights too


def check_adapter(model: nn.Module) -> None:
    """Check that a model has one adapter, and that vLLM would compute with it as peft does.

    Raises:
        ValueError: it has none, or more than one that is active, or parts that vLLM leaves out.
        TypeError: the adapter is not a plain sum, ``W + scale * B A``.
    """
    if not has_adapters(model):
        raise ValueError(
            f"lora='adapter' sends the adapter of a peft model, got {type(model).__name__} without one: wrap it with "
            "peft.get_peft_model(model, config), or choose lora='merged'"
        )
    name = _active(model)
    config = _config(model, name)
    if config.peft_type != "LORA":
        raise ValueError(f"lora='adapter': adapter {name!r} is {config.peft_type.value}, vLLM knows LoRA only")
    if left := [field for field in ELSEWHERE if getattr(config, field, None)]:
        raise ValueError(
            f"lora='adapter': adapter {name!r} has {', '.join(left)}, which vLLM's LoRA leaves out: choose "
            "lora='merged'"
        )
    if str(config.init_lora_weights).startswith(STARTS_ELSEWHERE):
        raise ValueError(
            f"lora='adapter': init_lora_weights={config.init_lora_weights!r} changed the base weights, which the "
            "engine has as they were: choose lora='merged'"
        )
    LoraLayers(base_model(model))
    if any(hasattr(parameter, "full_tensor") for parameter in model.parameters()):
        raise ValueError("lora='adapter': the model is sharded (FSDP2), which is sent with lora='merged' only")


def check_shapes(model: nn.Module, expected: Kinds) -> None:
    """Check that a model's adapter has the shapes of the engine's weights, where names agree.

    A base that is quantised on either side may be stored under other names, which is not an error.

    Raises:
        ManifestMismatch: it does not.
    """
    tensors = _tensors(model)
    for key, down in tensors.items():
        module, part, _ = key.removeprefix(ROOT).partition(".lora_A.weight")
        up = tensors.get(f"{ROOT}{module}.lora_B.weight")
        found = expected.get(f"{module}.weight")
        if part and up is not None and found is not None and tuple(found[1]) != (len(up), down.shape[1]):
            raise ManifestMismatch(
                f"the adapter of {module} is for a weight of shape {[len(up), down.shape[1]]}, the engine's is "
                f"{list(found[1])}: start the engine from the model that is trained"
            )


def adapter_files(model: nn.Module) -> dict[str, bytes]:
    """Return file name -> content of a model's active adapter, as it is now.

    Raises:
        WeightSyncError: one of its numbers is NaN or infinite.
    """
    from safetensors.torch import save

    tensors = _tensors(model)
    for name, tensor in tensors.items():
        send(tensor, tensor.dtype, len, name)  # which looks at its numbers
    with tempfile.TemporaryDirectory() as folder:
        _config(model, _active(model)).save_pretrained(folder)
        config = (Path(folder) / ADAPTER_FILES[0]).read_bytes()
    return {ADAPTER_FILES[0]: config, ADAPTER_FILES[1]: save(tensors, {"format": "pt"})}


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=_active(model), save_embedding_layers=False)
    return {ROOT + key.removeprefix(ROOT): tensor.detach().cpu().contiguous() for key, tensor in state.items()}


def _active(model: Any) -> str:
    active = model.active_adapters
    names = active() if callable(active) else active
    if len(names) != 1:
        raise ValueError(f"lora='adapter' sends one adapter, and {len(names)} are active: {', '.join(names)}")
    return str(names[0])


def _config(model: Any, name: str) -> Any:
    return model.peft_config[name]
