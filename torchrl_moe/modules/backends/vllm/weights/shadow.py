"""The shadow: a second model, into which new weights are loaded while the first generates; then both are swapped.

Why a second model: a model cannot run while it is loaded, which takes seconds. With a shadow, only the swap needs the
pause. vLLM itself builds the second model, once; it holds memory only while a version waits in it. Loading it is what
vLLM does at start-up: checkpoint tensors into fresh parameters, then packing. A swap exchanges what the modules of the
two *hold*, never the modules or parameters themselves:

.. code-block:: text

                     before                       after
    serving module -> parameter -> old storage    serving module -> parameter -> new storage
    shadow module  -> parameter -> new storage    shadow module  -> parameter -> old storage

The storages of parameters and buffers and the packed handles of linear layers are exchanged. Whatever refers to a
module or parameter of the serving model (a tied head, a router's correction bias, the route capture, vLLM's registry of
layers) still refers to the model that generates. Exchanging the modules instead would leave each of these references at
the old weights.

After the swap the second model holds the old weights, so that a second swap undoes the first. What it holds, in order:

.. code-block:: text

    nothing -- load --> new weights -- swap --> old weights -- release --> nothing
                                    <-- undo --

Imported in vLLM's worker processes only.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchrl_moe import _compat
from torchrl_moe._errors import WeightSyncError
from torchrl_moe.weight_update.store.memory import MemoryReservation

__all__ = ["ShadowModel", "reason_against"]

MEMORY_MARGIN = 1.1
SHOWN_NAMES = 4


def reason_against(model: nn.Module, vllm_config: Any, device: torch.device) -> str:
    """Return why a model cannot have a shadow; an empty string if it can."""
    parallel = vllm_config.parallel_config
    if device.type != "cpu":
        return f"a shadow was proved on cpu only, not on {device.type}"
    if parallel.world_size_across_dp > 1:
        return f"a shadow was proved on one worker only, the engine has {parallel.world_size_across_dp}"
    if vllm_config.quant_config is not None:
        return "the model is quantised"
    if vllm_config.cache_config.cache_dtype.startswith("fp8"):
        return "the KV cache is quantised, and its scales are the engine's own"
    if vllm_config.lora_config is not None:
        return "the engine has LoRA adapters"
    if vllm_config.speculative_config is not None:
        return "the engine has a draft model"
    if not vllm_config.model_config.enforce_eager:
        return "the model may be compiled: start the engine with enforce_eager=True"
    return _compat.hidden_weights(model)


@dataclass(frozen=True, slots=True)
class _Blank:
    """A parameter of the second model before it is loaded."""

    parameter: nn.Parameter
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def allocate(self) -> None:
        self.parameter.data = torch.empty_strided(self.shape, self.stride, dtype=self.dtype)

    def free(self) -> None:
        self.parameter.data = torch.empty(0, dtype=self.dtype)


class ShadowModel:
    """The second model of a worker.

    Build it between two steps of the serving model, because it temporarily sets vLLM's process-wide state. The other
    methods may run in a thread, one at a time, except :meth:`swap`, during which no step may run.

    Args:
        live: the serving model, which generates.
        vllm_config: its configuration.
        device: where it is.

    Raises:
        WeightSyncError: the second model has other modules than the first.
    """

    def __init__(self, live: nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._device = device
        self.model, self._config = _compat.build_beside(vllm_config, device)
        self._live = dict(live.named_modules(remove_duplicate=False))
        self._shadow = dict(self.model.named_modules(remove_duplicate=False))
        if self._live.keys() != self._shadow.keys():
            raise WeightSyncError(f"the second model differs in {_some(self._live.keys() ^ self._shadow.keys())}")
        # a module may have two places
        pairs = {id(module): (module, self._shadow[place]) for place, module in self._live.items()}
        self._modules = list(pairs.values())
        self._tables = [(module, dict(module._parameters), dict(module._buffers)) for module in self.model.modules()]
        self._blanks = [_Blank(p, p.shape, p.stride(), p.dtype) for p in self.model.parameters()]
        self._exchanges: list[tuple[Tensor, Tensor]] = []
        self._packed: list[tuple[nn.Module, nn.Module]] = []
        self._reservation = MemoryReservation()
        self.release()

    @property
    def nbytes(self) -> int:
        """Bytes that a version needs while it waits."""
        return sum(blank.nbytes for blank in self._blanks)

    def reserve_memory(self) -> str:
        """Reserve the memory of a version; return why there is no room, or an empty string.

        Call :meth:`end_reservation` when the version is loaded, or dropped.
        """
        return self._reservation.reserve(int(self.nbytes * MEMORY_MARGIN))

    def end_reservation(self) -> None:
        """End the reservation: its memory now counts as used or as free. Idempotent."""
        self._reservation.end()

    @torch.no_grad()
    def load(self, tensors: Iterable[tuple[str, Tensor]]) -> str:
        """Load a version as vLLM does at start-up, and prepare the swap.

        Returns:
            Why the two cannot be swapped; an empty string if they can.
        """
        self.release()
        with ExitStack() as give_up:
            give_up.callback(self.release)
            for blank in self._blanks:
                blank.allocate()
            _compat.load_beside(self.model, self._config, self._device, iter(tensors))
            try:
                self._exchanges, self._packed = self._match(), self._match_packed()
            except WeightSyncError as error:
                return str(error)
            give_up.pop_all()
        return ""

    def _match(self) -> list[tuple[Tensor, Tensor]]:
        """Return the tensors that are exchanged, serving and shadow, each once."""
        pairs: dict[int, tuple[Tensor, Tensor]] = {}
        for place, live in self._live.items():
            ours, theirs = _tensors(live), _tensors(self._shadow[place])
            if ours.keys() != theirs.keys():
                raise WeightSyncError(f"{place} has {sorted(ours)} but was loaded as {sorted(theirs)}")
            for name, tensor in ours.items():
                other = theirs[name]
                if tensor is other or tensor.numel() == other.numel() == 0:  # shared constants, and what is packed
                    continue
                if (tensor.shape, tensor.stride(), tensor.dtype) != (other.shape, other.stride(), other.dtype):
                    raise WeightSyncError(
                        f"{place}.{name} is {list(tensor.shape)} {tensor.dtype}, "
                        f"but was loaded as {list(other.shape)} {other.dtype}"
                    )
                if pairs.setdefault(id(tensor), (tensor, other))[1] is not other:
                    raise WeightSyncError(f"{place}.{name} is tied in the serving model and was loaded untied")
        if len({id(other) for _, other in pairs.values()}) != len(pairs):
            raise WeightSyncError("tensors that differ in the serving model were loaded tied")
        return list(pairs.values())

    def _match_packed(self) -> list[tuple[nn.Module, nn.Module]]:
        """Return the layers that exchange packed weights, serving and shadow."""
        pairs = [(live, shadow) for live, shadow in self._modules if _compat.has_packed(live)]
        if not all(_compat.has_packed(shadow) for _, shadow in pairs):
            raise WeightSyncError("a layer is packed in the serving model and was loaded unpacked")
        return pairs

    def swap(self) -> None:
        """Swap the two models; a second call undoes it."""
        for live, shadow in self._exchanges:
            live.data, shadow.data = shadow.data, live.data
        for live_layer, shadow_layer in self._packed:
            _compat.exchange_packed(live_layer, shadow_layer)

    def release(self) -> None:
        """Drop what the second model holds."""
        self._exchanges, self._packed = [], []
        for module, parameters, buffers in self._tables:
            module._parameters = dict(parameters)
            module._buffers = dict(buffers)
            _compat.drop_packed(module)
        for blank in self._blanks:
            blank.free()


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    held = {**module._parameters, **module._buffers}
    return {name: tensor for name, tensor in held.items() if tensor is not None}


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:SHOWN_NAMES]) + (", ..." if len(listed) > SHOWN_NAMES else "")
