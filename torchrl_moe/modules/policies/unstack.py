"""A trainer's weights under checkpoint names: one tensor per expert, as vLLM and the hub have them.

transformers keeps the experts of a layer in one stacked tensor; checkpoints have one tensor per expert. The conversion
is transformers' own reverse conversion, which ``save_pretrained`` uses. It runs once, on tensors whose elements are
their own indices: the result shows where in its stacked tensor each checkpoint tensor lies. From then on these are
views. The few that are not slices (interleaved, or permuted in parts) are converted each time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, repeat
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from torchrl_moe.errors import ManifestMismatch
from torchrl_moe.ops.log_probs import LogitTransform

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


# LoRA adapters of peft, seen from their base weights: merged sums computed one tensor at a time, nothing changed.


def has_adapters(model: nn.Module) -> bool:
    """Whether peft has added adapters to a model's weights."""
    return hasattr(model, "get_base_model") or bool(getattr(model, "_hf_peft_config_loaded", False))


def base_model(model: nn.Module) -> nn.Module:
    """Return the transformers model inside peft's wrapper, or the model itself."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model  # type: ignore[operator]
    return base


class LoraLayers:
    """The layers of a base model that peft has replaced by ones with adapters."""

    def __init__(self, base: nn.Module) -> None:
        self._layers: dict[str, list[Any]] = {}  # state-dict key of the base weight -> layers that add to it
        self._saved: dict[str, Any] = {}  # modules that are trained beside the adapters, in a copy for each
        for name, module in base.named_modules():
            if hasattr(module, "modules_to_save") and hasattr(module, "original_module"):
                self._saved[name] = module
            if not hasattr(module, "base_layer"):
                continue
            if not hasattr(module, "get_delta_weight") or not hasattr(module, "lora_A"):
                raise TypeError(
                    f"{name} has an adapter that is not LoRA ({type(module).__name__}): call model.merge_and_unload() "
                    "and send the merged model"
                )
            layer: Any = module
            if getattr(layer, "lora_variant", None) or any(getattr(layer, "lora_bias", {}).values()):
                raise TypeError(
                    f"{name} has an adapter that is not a plain sum of weights (DoRA, or a bias): call "
                    "model.merge_and_unload() and send the merged model"
                )
            parameter = getattr(layer, "parameter_name", "weight")
            self._layers.setdefault(f"{_without_layers(name)}.{parameter}", []).append(layer)

    def own_weights(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield a state dict's base weights under the names that they have without adapters."""
        runs = {}  # looked up each time: set_adapter() changes it
        for name, module in self._saved.items():
            adapters = [adapter for adapter in module.active_adapters if adapter in module.modules_to_save]
            runs[name] = f"modules_to_save.{adapters[0]}" if adapters else "original_module"
        for key, tensor in state.items():
            if ".lora_" in key:
                continue
            for name, copy in runs.items():
                key = key.replace(f"{name}.{copy}.", f"{name}.")
            if ".original_module." not in key and ".modules_to_save." not in key:
                yield _without_layers(key), tensor

    def __contains__(self, key: str) -> bool:
        return key in self._layers

    def in_use(self) -> Iterator[str]:
        """Yield the state-dict keys of weights that an active adapter adds to."""
        return (key for key in self._layers if any(self._active(key)))

    def _active(self, key: str) -> Iterator[tuple[Any, str]]:
        for layer in self._layers[key]:
            for adapter in layer.active_adapters:
                if adapter in layer.scaling and adapter not in layer.merged_adapters:
                    yield layer, adapter

    @torch.no_grad()
    def merged(self, key: str, weight: Tensor) -> Tensor:
        """Return a weight with its active adapters added, as ``merge_and_unload`` would; ``weight`` is not changed.

        The sum is rounded once. peft does the same, except for embeddings, whose adapter it rounds first.
        """
        total = weight
        for layer, adapter in self._active(key):
            delta = whole(layer.get_delta_weight(adapter)).to(total.device)
            total = (total + delta).to(weight.dtype)
        return total


def whole(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a sharded tensor gathered, for which all ranks must call; any other tensor is returned as it is."""
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if dtype is not None and tensor.is_floating_point() and dtype.itemsize < tensor.dtype.itemsize:
        tensor = tensor.to(dtype)
    gathered: Tensor = tensor.full_tensor()
    return gathered


def _without_layers(key: str) -> str:
    while ".base_layer" in key:
        key = key.replace(".base_layer", "")
    return key


# A language model's head as a sum of matrix products: a linear layer, alone or with LoRA adapters.
#
# peft's layers are recognised by their attributes; peft is not imported.


def obstacle(module: nn.Module) -> str:
    """Return why a head is not a sum of matrix products; empty if it is one."""
    head = _active(module)
    linear = _base(head)
    # tensor parallelism replaces the forward of a linear layer whose weight is a DTensor: that is supported
    shared = head is linear and hasattr(getattr(linear, "weight", None), "device_mesh")
    if not shared and ("forward" in head.__dict__ or "forward" in linear.__dict__):
        return "its forward is replaced, for example by a hook that moves its weights"
    if not isinstance(linear, nn.Linear) or type(linear).forward is not nn.Linear.forward:
        return f"it ends in {type(linear).__name__}, which is not a linear layer"
    for name in _adapters(head):
        if name in getattr(head, "lora_variant", {}):
            return f"its adapter {name!r} is {type(head.lora_variant[name]).__name__}, not plain LoRA"
        if head.lora_B[name].bias is not None:
            return f"its adapter {name!r} has a bias"
    return ""


def linear_parts(module: nn.Module, hidden: Tensor) -> tuple[list[Tensor], list[Tensor], Tensor | None]:
    """Return inputs ``[N, H_i]``, weights ``[V, H_i]`` and a bias whose products add up to ``head(hidden)``.

    Under tensor parallelism weight and bias are DTensors.

    A LoRA adapter ``scale * B A`` is the part with input ``scale * A hidden`` and weight ``B``: the product ``B A``,
    which is as large as the head, is never computed, and a frozen head gets no gradient.
    """
    head = _active(module)
    # the base layer is one product, each active adapter another
    linear = _base(head)
    if getattr(head, "merged", False) and head.disable_adapters:
        head.unmerge()  # as its own forward does
    hiddens, weights = [hidden], [linear.weight]
    for name in _adapters(head):
        down, up = head.lora_A[name], head.lora_B[name]
        narrow = down(head.lora_dropout[name](hidden.to(down.weight.dtype)))
        hiddens.append(narrow * head.scaling[name])
        weights.append(up.weight)
    return hiddens, weights, linear.bias


def logit_transform(config: PreTrainedConfig | None) -> LogitTransform:
    """Return the transform that a model applies to its head's output, from the known config keys of transformers."""
    if config is not None and hasattr(config, "get_text_config"):
        config = config.get_text_config()
    scale = 1.0
    for name in ("logit_scale", "lm_head_multiplier"):
        scale *= _positive(config, name) or 1.0
    scale /= _positive(config, "logits_scaling") or 1.0
    return LogitTransform(scale=scale, soft_cap=_positive(config, "final_logit_softcapping"))


def _positive(config: PreTrainedConfig | None, name: str) -> float | None:
    value = getattr(config, name, None)
    return float(value) if isinstance(value, int | float) and 0 < value < float("inf") else None


def _active(head: Any) -> Any:
    """Return the module that runs: if peft trains the whole head, its copy, or the original if that is switched off."""
    copies = getattr(head, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict):
        return head
    names = [] if head.disable_adapters else [name for name in head.active_adapters if name in copies]
    return copies[names[0]] if names else head.original_module


def _base(head: Any) -> Any:
    return getattr(head, "base_layer", head) if hasattr(head, "lora_A") else head


def _adapters(head: Any) -> list[str]:
    """Return the LoRA adapters that currently add to the head's output."""
    if not hasattr(head, "lora_A") or head.disable_adapters or head.merged:
        return []
    return [name for name in head.active_adapters if name in head.lora_A]


TensorKind = tuple[torch.dtype, torch.Size]
SHOWN_NAMES = 4


@dataclass(frozen=True, slots=True)
class Slice:
    """The position of a checkpoint tensor in a contiguous tensor of the model's state dict."""

    name: str
    key: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return its view."""
        return tensor.as_strided(self.shape, self.stride, tensor.storage_offset() + self.offset)


class ModelWeights:
    """A transformers model's weights and persistent buffers, as ``save_pretrained`` would write them, but live.

    Sharded tensors (FSDP2) are gathered one at a time, in a narrower dtype if requested; LoRA adapters are added to
    their weights one at a time.
    """

    def __init__(self, model: nn.Module, also: Iterable[str] = ()) -> None:
        from transformers.modeling_utils import remove_tied_weights_from_state_dict

        bare: nn.Module = getattr(model, "_orig_mod", model)  # of torch.compile
        self._base = base_model(bare)
        if not hasattr(self._base, "config") and any(hasattr(part, "config") for part in self._base.modules()):
            raise TypeError(
                f"the model must be one of transformers, or compiled or wrapped by peft, got a {type(model).__name__} "
                "around one: pass what is inside"
            )
        self._lora = LoraLayers(self._base) if has_adapters(bare) else None
        # which tensors are sent: tied ones once, under the name that files have
        state = self._state(keep_vars=True)
        local = {name: tensor.to_local() if hasattr(tensor, "to_local") else tensor for name, tensor in state.items()}
        untied: Mapping[str, object] = remove_tied_weights_from_state_dict(local, self._base)
        kept = {name: state[name] for name in state if name in untied}
        owners = {id(state[name]): name for name in kept}
        tied = {name: id(tensor) for name, tensor in state.items() if name not in kept}
        self._twins = {name: owners[tensor] for name, tensor in tied.items() if tensor in owners}  # -> the name kept
        # where each of them lies in the model's own tensors
        slices, self._converted, kinds = _layout(self._base, kept)
        # tied names are slices of the kept one, so all ranks gather the same tensors, whichever asks for more names
        slices += [_whole_slice(name, self._twins[name], state[name]) for name in also if name in self._twins]
        self._slices: dict[str, list[Slice]] = {}  # by the key that they are slices of
        for piece in slices:
            self._slices.setdefault(piece.key, []).append(piece)
        self._own: dict[str, TensorKind] = {key: (state[key].dtype, state[key].shape) for key in self.keys}
        self.kinds: dict[str, TensorKind] = {
            piece.name: (state[key].dtype, torch.Size(piece.shape))
            for key, pieces in self._slices.items()
            for piece in pieces
        }
        self.kinds |= {name: kind for name, kind in kinds.items() if name not in self.kinds}
        self._views: dict[str, tuple[int, list[tuple[str, Tensor]]]] = {}
        self._check_adapters()

    def _check_adapters(self) -> None:
        """Check that no adapter's sum is lost, nor added to a tied weight that has no adapter."""
        # a tied weight is sent once, so a sum for one of its names would change the other
        mergeable = self.keys.difference(self._twins.values())
        for key in self._lora.in_use() if self._lora is not None else ():
            if key not in mergeable:
                module = key.rpartition(".")[0]
                raise TypeError(
                    f"{module} has an adapter, which cannot be added to {key}: that is tied to another weight, or no "
                    f"weight of the checkpoint. Leave {module} out of target_modules, or untie it "
                    "(tie_word_embeddings=False)"
                )

    def check(self, given: Mapping[str, Tensor] | None = None) -> None:
        """Check that tensors are like the model's when it was registered, from whose places in it others are cut."""
        state = self._state() if given is None else given
        whose = "register_model() saw" if given is None else "the registered model has"
        # a TensorDict of a module has its non-persistent buffers too
        known = {*self._own, *self._twins, *(name for name, _ in self._base.named_buffers())}
        missing = sorted(self._own.keys() - state.keys())
        unknown = [] if given is None else sorted(given.keys() - known)
        for names, what in ((missing, "the weights lack"), (unknown, "the registered model does not have")):
            if names:
                more = f" and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else ""
                raise ManifestMismatch(
                    f"{what} {', '.join(names[:SHOWN_NAMES])}{more}: send model.state_dict(), or register_model() the "
                    "model as it is now"
                )
        for key, (dtype, shape) in self._own.items():
            tensor = state[key]
            check_dense(key, tensor)
            if tensor.shape != shape:
                raise ManifestMismatch(f"{key} has shape {list(tensor.shape)}, {whose} {list(shape)}")
            if tensor.dtype != dtype and not (tensor.is_floating_point() and dtype.is_floating_point):
                raise ManifestMismatch(f"{key} is {tensor.dtype}, {whose} {dtype}")
        for name, key in self._twins.items():
            if given is None or name not in given:
                continue
            check_dense("a tied weight", given[name])
            one, other = (t.to_local() if hasattr(t, "to_local") else t for t in (given[name], given[key]))
            if one.data_ptr() != other.data_ptr() and not torch.equal(one, other):
                raise ManifestMismatch(
                    f"{name} and {key} are one weight in the registered model, and came with different values"
                )

    @property
    def is_sharded(self) -> bool:
        """Whether other ranks hold parts of the model, so that all must read it together."""
        return any(hasattr(tensor, "full_tensor") for tensor in self._state().values())

    def state(self) -> Iterable[Tensor]:
        """Return all tensors that what is sent is computed from, adapters included."""
        return self._base.state_dict().values()

    def gathered_in(self, kinds: Mapping[str, TensorKind]) -> list[torch.dtype | None]:
        """Return, in order, the dtype in which each tensor is read, if all of its slices are written in one dtype.

        Casting parts and gathering them equals gathering and casting the whole, bit for bit. ``None`` stands for a
        tensor's own dtype, which is also used for tensors that are converted instead of sliced.
        """
        written = ({kinds[piece.name][0] for piece in pieces} for pieces in self._slices.values())
        return [*(dtypes.pop() if len(dtypes) == 1 else None for dtypes in written), *[None] * len(self._converted)]

    def tensors(
        self, state: Mapping[str, Tensor] | None = None, dtypes: Sequence[torch.dtype | None] = ()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield name and tensor, layer by layer, in the order of ``kinds``. Treat the tensors as read-only."""
        own = state is None
        if own:
            self._check_adapters()
        source = self._state() if state is None else state
        for key, dtype in zip(self._slices, chain(dtypes, repeat(None)), strict=False):
            tensor = source[key].detach()
            # views hold a tensor's memory, so they are not kept of one on a GPU, which the model may leave
            as_it_is = tensor.is_contiguous() and not hasattr(tensor, "full_tensor") and tensor.device.type == "cpu"
            stays = own and as_it_is and not (self._lora is not None and key in self._lora)
            if not stays:
                self._views.pop(key, None)
                yield from self._cut(key, self._complete(key, tensor, own, dtype))
                continue
            pointer, views = self._views.get(key, (0, []))
            if pointer != tensor.data_ptr() or not views:
                views = self._cut(key, tensor)
                self._views[key] = tensor.data_ptr(), views
            yield from views
        for keys in self._converted:
            tensors = {key: self._complete(key, source[key].detach(), own) for key in keys}
            yield from _convert(self._base, tensors).items()

    def _complete(self, key: str, tensor: Tensor, own: bool, dtype: torch.dtype | None = None) -> Tensor:
        if own and self._lora is not None and key in self._lora:
            return self._lora.merged(key, whole(tensor))
        return whole(tensor, dtype)

    def _cut(self, key: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        tensor = tensor.contiguous()
        return [(piece.name, piece.of(tensor)) for piece in self._slices[key]]

    def _state(self, keep_vars: bool = False) -> dict[str, Tensor]:
        state = self._base.state_dict(keep_vars=keep_vars)
        return state if self._lora is None else dict(self._lora.own_weights(state))

    @property
    def keys(self) -> set[str]:
        """The model's own names of the tensors that are sent."""
        return set(self._slices).union(*self._converted)


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return checkpoint name -> tensor of every weight and persistent buffer that ``save_pretrained`` would write.

    Tied weights come once. They are views of the model's tensors: treat all as read-only. Buffers count: a router's
    correction bias is one. peft's LoRA adapters are added in.
    """
    return dict(ModelWeights(model).tensors())


def model_metadata(model: nn.Module) -> dict[str, TensorKind]:
    """Return checkpoint name -> (dtype, shape) of what :func:`checkpoint_tensors` gives."""
    return ModelWeights(model).kinds


def check_dense(name: object, value: object) -> None:
    """Check that a value is a tensor whose bytes can be read."""
    if not isinstance(name, str):
        raise ManifestMismatch(f"a tensor is named by a str, got {name!r}")
    if not isinstance(value, Tensor):
        raise ManifestMismatch(
            f"{name} is of type {type(value).__name__}, not a tensor: torch.as_tensor(value) makes one"
        )
    local = value.to_local() if hasattr(value, "to_local") else value
    if local.is_meta:
        raise ManifestMismatch(
            f"{name} is on the meta device and has no values: load it, or bring it back from where it was offloaded"
        )
    if type(local).__torch_dispatch__ != Tensor.__torch_dispatch__ or local.is_neg():  # it is not what lies in memory
        raise ManifestMismatch(
            f"{name} is a {type(local).__name__} without memory of its own: send a copy of its values"
        )
    if local.layout is not torch.strided or local.is_quantized or local.is_nested:
        raise ManifestMismatch(
            f"{name} is {local.layout} of {local.dtype}, and only dense tensors can be sent: use .to_dense() or "
            ".dequantize()"
        )


# -- where the tensors lie --------------------------------------------------------------------------------------------


def _layout(base: nn.Module, state: Mapping[str, Tensor]) -> tuple[list[Slice], list[list[str]], dict[str, TensorKind]]:
    """Find the position of each checkpoint tensor: renamed tensors first, then stacked ones, a layer at a time.

    Return the slices, groups of keys that are converted together instead, and the kinds of what results.
    """
    hollow = {key: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for key, tensor in state.items()}
    owners = {id(tensor): key for key, tensor in hollow.items()}
    # names and shapes of the checkpoint, without computing anything
    wanted = _convert(base, dict(hollow))
    found = [_whole_slice(name, owners[id(tensor)], tensor) for name, tensor in wanted.items() if id(tensor) in owners]
    renamed = {piece.key for piece in found}
    # what is left is stacked: grouped by layer, so that one conversion answers for equal layers
    layers: dict[str, list[str]] = {}
    for key in state:
        if key not in renamed:
            layer = re.match(r".*?\.\d+\.", key)
            layers.setdefault(layer.group() if layer else key, []).append(key)
    names, converted = {piece.name for piece in found}, []
    first: dict[tuple[object, ...], tuple[str, dict[str, Slice | None]]] = {}  # of layers with equal structure
    for prefix, keys in layers.items():
        looks = tuple((key.removeprefix(prefix), state[key].shape) for key in keys)
        known = first.get(looks)
        # a layer of known structure needs no conversion of its own
        places = {} if known is None else _moved(*known, prefix)
        if not places or any(name not in wanted for name in places):
            places = _numbered(base, {key: state[key].shape for key in keys})
            first.setdefault(looks, (prefix, places))
        names |= set(places)
        slices = [place for place in places.values() if place is not None]
        if len(slices) == len(places):
            found += slices
        else:
            converted.append(keys)
    if names != set(wanted):
        raise TypeError(
            f"the layers of {type(base).__name__} cannot be un-stacked one by one: pass weights with checkpoint names"
        )
    order = {key: position for position, key in enumerate(state)}
    kinds = {name: (tensor.dtype, tensor.shape) for name, tensor in wanted.items()}
    return sorted(found, key=lambda piece: order[piece.key]), converted, kinds


def _convert(base: nn.Module, state: dict[str, Tensor]) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(base, state)


def _whole_slice(name: str, key: str, tensor: Tensor) -> Slice:
    shape = tuple(tensor.shape)
    return Slice(name, key, shape, torch.empty(shape, device="meta").stride(), 0)


def _moved(places_of: str, places: Mapping[str, Slice | None], prefix: str) -> dict[str, Slice | None]:
    """Return one layer's positions, derived from those of a layer with the same structure."""
    old, new = (re.sub(r".*\.(\d+)\.", r".\1.", name) for name in (places_of, prefix))
    moved: dict[str, Slice | None] = {}
    for name, place in places.items():
        name = name.replace(old, new, 1)
        moved[name] = place and replace(place, name=name, key=prefix + place.key.removeprefix(places_of))
    return moved


def _numbered(base: nn.Module, shapes: Mapping[str, torch.Size]) -> dict[str, Slice | None]:
    """Convert tensors whose elements are their own indices, and read the positions from the result."""
    starts, numbered, start = {}, {}, 0
    dtype = torch.int32 if sum(shape.numel() for shape in shapes.values()) < 1 << 31 else torch.int64
    for key, shape in shapes.items():
        starts[key] = start
        numbered[key] = torch.arange(start, start + shape.numel(), dtype=dtype).view(shape)
        start += shape.numel()
    converted = _convert(base, dict(numbered))
    return {name: _place(name, tensor, starts, numbered) for name, tensor in converted.items()}


def _place(name: str, numbers: Tensor, starts: Mapping[str, int], numbered: Mapping[str, Tensor]) -> Slice | None:
    if not numbers.numel():
        return None
    first = int(numbers.flatten()[0])
    key = max((key for key in starts if starts[key] <= first), key=lambda key: starts[key])
    # the step along each axis, read from the numbers themselves
    stride = [
        int(numbers.select(axis, 1).flatten()[0]) - first if size > 1 else 1 for axis, size in enumerate(numbers.shape)
    ]
    place = Slice(name, key, tuple(numbers.shape), tuple(stride), first - starts[key])
    # only a view that gives exactly these numbers is right
    last = place.offset + sum((size - 1) * step for size, step in zip(place.shape, stride, strict=True))
    fits = min(stride, default=0) >= 0 and last < numbered[key].numel()
    return place if fits and torch.equal(place.of(numbered[key]), numbers) else None
