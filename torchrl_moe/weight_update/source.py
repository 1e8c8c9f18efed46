"""Where a version's tensors come from: a model whole or sharded over ranks, its adapters, its metadata."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from torchrl_moe.errors import ManifestMismatch, WeightSyncError
from torchrl_moe.modules.policies.unstack import (
    LoraLayers,
    ModelWeights,
    base_model,
    check_dense,
    has_adapters,
    model_metadata,
    whole,
)
from torchrl_moe.store import check_tensors
from torchrl_moe.store.content import send
from torchrl_moe.store.manifest import TensorKind
from torchrl_moe.store.reader import ADAPTER_FILES

# Trainers on several ranks: all read sharded weights together, rank 0 writes, and all learn the outcome.


FAILED = -1
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


def _has_ranks() -> bool:
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def is_first() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not _has_ranks() or torch.distributed.get_rank() == 0


def from_first(value: int) -> int:
    """Return rank 0's value; all ranks must call it."""
    return _gathered([value])[0][0]


def dtypes_of_first(dtypes: Sequence[torch.dtype | None]) -> list[torch.dtype | None]:
    """Return the floating dtypes of rank 0, which alone knows the engine's; all ranks must call it, with as many."""
    codes = _gathered([FLOATS.index(dtype) if dtype in FLOATS else FAILED for dtype in dtypes])[0]
    return [None if code == FAILED else FLOATS[code] for code in codes]


def agreed(compute: Callable[[], int]) -> int:
    """Let every rank compute a value, and return rank 0's; all must call it, and none waits for one that failed."""
    value = FAILED
    try:
        value = compute()
    finally:
        values = [found for (found,) in _gathered([value])]
    if FAILED in values:
        raise WeightSyncError(f"rank {values.index(FAILED)} could not begin to publish; see the error of that rank")
    return values[0]


def _gathered(values: Sequence[int]) -> list[list[int]]:
    """Return the values of all ranks; all must call it, with as many."""
    if not _has_ranks():
        return [list(values)]
    # NCCL takes no tensors of the CPU
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    boxes = torch.zeros(torch.distributed.get_world_size(), len(values), dtype=torch.int64, device=device)
    own = torch.tensor(values, dtype=torch.int64, device=device)
    torch.distributed.all_gather(list(boxes), own)
    found: list[list[int]] = boxes.tolist()
    return found


def get_model_metadata(model: nn.Module) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return checkpoint name -> (dtype, shape) of a transformers model's tensors, experts one by one.

    A wrapper with a ``model`` attribute (``TransformersWrapper``) is unwrapped.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> metadata = get_model_metadata(make_tiny_moe("mixtral"))
    >>> metadata["lm_head.weight"]
    (torch.float32, torch.Size([259, 64]))
    """
    return model_metadata(trained_model(model))


def trained_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside a wrapper or torch's data parallelism, or the model itself."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    inner = getattr(model, "model", None)
    if isinstance(inner, nn.Module) and hasattr(inner, "config") and not hasattr(model, "config"):
        return inner
    return model


def check_metadata(metadata: Kinds | None, expected: Kinds, model: ModelWeights | None = None) -> None:
    """Compare a user's metadata with the engine's tensors."""
    if metadata is None:
        return
    if set(metadata) == set(expected):
        check_tensors(metadata, expected)
    elif model is not None:
        if not model.keys <= set(metadata):
            raise ManifestMismatch(
                "metadata names neither the engine's checkpoint tensors nor the model's own: pass None, "
                "get_model_metadata(model) or engine.get_model_metadata()"
            )
    elif not any("experts" in name and name not in expected for name in metadata):
        raise ManifestMismatch(
            "metadata does not name the engine's checkpoint tensors: pass None, get_model_metadata(model) or "
            "engine.get_model_metadata(); a model's own stacked names need register_model(model) first"
        )


Kinds = Mapping[str, TensorKind]
Weights = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Dtypes = Sequence[torch.dtype | None]
"""Dtypes of tensors that are read one after another; ``None``: the tensor's own."""
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes


@dataclass(frozen=True, slots=True)
class Source:
    """Weights that can be sent."""

    kinds: Kinds
    tensors: Callable[..., Iterator[tuple[str, Tensor]]]
    is_sharded: bool = False
    changes: Callable[[], str] = str
    gathered_in: Callable[[Kinds], Dtypes] = lambda _: ()


def source_of(weights: Weights | None, model: ModelWeights | None, expected: Kinds | None) -> Source:
    """Return the source for the arguments of an update."""
    if isinstance(weights, nn.Module):
        model = ModelWeights(trained_model(weights), expected or ())
        weights = None
    if weights is None:
        if model is None:
            raise RuntimeError("publish: no model; call register_model(model) first, or pass weights")
        own = model
        own.check()
        read = partial(own.tensors, None)
        return Source(own.kinds, read, own.is_sharded, lambda: contents(own.state()), own.gathered_in)
    named = named_tensors(weights)
    is_sharded = any(hasattr(tensor, "full_tensor") for tensor in named.values())

    def changes() -> str:
        return contents(named.values())

    if model is not None and _has_own_names(named, model, expected, is_sharded):
        model.check(named)
        return Source(model.kinds, partial(model.tensors, named), is_sharded, changes, model.gathered_in)
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in named.items()}

    def tensors(dtypes: Dtypes = ()) -> Iterator[tuple[str, Tensor]]:
        for (name, tensor), dtype in zip(named.items(), chain(dtypes, repeat(None)), strict=False):
            yield name, whole(tensor.detach(), dtype)

    return Source(kinds, tensors, is_sharded, changes, lambda written: [written[name][0] for name in named])


def _has_own_names(named: Mapping[str, Tensor], model: ModelWeights, expected: Kinds | None, is_sharded: bool) -> bool:
    """Whether tensors come under the model's own names: all of those, or one that no checkpoint has.

    Sharded ones always do, if they have all: ranks without the engine do not know ``expected``.
    """
    checkpoint = set(expected or model.kinds)
    if model.keys <= set(named):
        return is_sharded or set(named) != checkpoint
    return not (model.keys - checkpoint).isdisjoint(named)


def named_tensors(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Return tensors by name, of a mapping, a TensorDict or pairs; refuse what is no tensor."""
    flatten = getattr(weights, "flatten_keys", None)  # of a TensorDict
    if flatten is not None:
        weights = dict(flatten(".").items())
    pairs = weights.items() if isinstance(weights, Mapping) else weights
    if isinstance(pairs, Iterable) and not isinstance(pairs, str | bytes | Tensor):
        pairs = list(pairs)
    if not isinstance(pairs, list) or not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise TypeError(
            f"weights must be a model, a TensorDict, or names and tensors, got {type(weights).__name__}: pass "
            "model.state_dict(), or pairs of a name and a tensor"
        )
    for name, tensor in pairs:
        check_dense(name, tensor)
    named = dict(pairs)
    if len(named) != len(pairs):
        raise ManifestMismatch("the weights name a tensor twice")
    return named


def contents(tensors: Iterable[Tensor]) -> str:
    """Return a digest of what tensors hold; a write through ``.data`` or numpy changes it too, which torch counts not.

    Those of a GPU are summed there, as integers.
    """
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        if tensor.is_cpu:
            found = send(tensor, tensor.dtype)
        else:
            found = str(int(tensor.detach().reshape(-1).view(INTEGERS[tensor.dtype.itemsize]).sum()))
        digest.update(f"{tensor._version} {found};".encode())
    return str(digest.hexdigest())


def cast_kinds(
    kinds: Kinds, dtype: str | torch.dtype, expected: Kinds | None, engine_dtype: torch.dtype | None
) -> dict[str, TensorKind]:
    """Return the dtypes and shapes in which tensors are written."""
    cast = {}
    for name, (own, shape) in kinds.items():
        target = own
        if isinstance(dtype, torch.dtype):
            target = dtype if own.is_floating_point else own
        elif dtype == "engine" and expected is not None and engine_dtype is not None and name in expected:
            # the engine may keep a tensor in its checkpoint's wider dtype; a narrower one is cast there
            pair = engine_dtype, expected[name][0]
            is_quantised = 1 in (pair[0].itemsize, pair[1].itemsize)  # torch promotes none of those
            widest = max(pair, key=lambda one: one.itemsize) if is_quantised else torch.promote_types(*pair)
            if own.is_floating_point and widest.is_floating_point and widest.itemsize < own.itemsize:
                target = widest
        cast[name] = (target, shape)
    return cast


# The adapter of a peft model as the two files that peft would save, which is what vLLM loads.


ROOT = "base_model.model."  # prefix of every name in peft's files
ELSEWHERE = ("modules_to_save", "rank_pattern", "alpha_pattern", "trainable_token_indices", "layer_replication")
STARTS_ELSEWHERE = ("pissa", "olora", "corda", "loftq", "lora_ga")  # initialisations that change the base weights too


def check_adapter(model: nn.Module, expected: Kinds | None = None) -> None:
    """Check that a model has one adapter, that vLLM would compute with it as peft does, and that it fits an engine."""
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
    if expected is None:
        return
    tensors = _tensors(model)
    for key, down in tensors.items():
        module, part, _ = key.removeprefix(ROOT).partition(".lora_A.weight")
        up = tensors.get(f"{ROOT}{module}.lora_B.weight")
        # a base that is quantised on either side may be stored under other names, which is not an error
        found = expected.get(f"{module}.weight")
        if part and up is not None and found is not None and tuple(found[1]) != (len(up), down.shape[1]):
            raise ManifestMismatch(
                f"the adapter of {module} is for a weight of shape {[len(up), down.shape[1]]}, the engine's is "
                f"{list(found[1])}: start the engine from the model that is trained"
            )


def adapter_files(model: nn.Module) -> dict[str, bytes]:
    """Return file name -> content of a model's active adapter, as it is now."""
    from safetensors.torch import save

    tensors = _tensors(model)
    for name, tensor in tensors.items():
        send(tensor, tensor.dtype, name=name)  # which looks at its numbers
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
