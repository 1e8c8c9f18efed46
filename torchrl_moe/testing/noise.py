"""Noise on a dial: the ways in which an engine differs from its trainer, each by itself or together, with a seed.

A float32 model of transformers that generates and scores has no mismatch but rounding. :class:`Noise` adds as much of
one kind as an experiment asks for: to the copy that generates (:class:`NoisyModel`), or to any forward pass, the
trainer's too (:meth:`Noise.on`).

Letters: N rows of a forward pass (one for each token), E experts, K experts of a row.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from torchrl_moe._checks import check_bool, check_instance, check_number, shown
from torchrl_moe._compat_transformers import lowered
from torchrl_moe.modules.policies.probe import is_router
from torchrl_moe.modules.replay.float32 import float32_routers
from torchrl_moe.modules.replay.interception import TopK
from torchrl_moe.modules.replay.router_replay import RouterReplay

Quantisation: TypeAlias = Literal["int8", "float8"]
LEVELS: dict[str, float] = {"int8": 127.0, "float8": 448.0}
"""The largest number that a kind can hold, after scaling; of float8, e4m3's."""
PRODUCTS = (torch.nn.functional.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
PRODUCTS_BY_NAME = ("linear", "matmul", "__matmul__", "bmm", "mm", "grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""What layers and experts multiply with: inputs first, a weight or a part of it second."""
EXPERTS_COMPUTED = ("eager", "grouped_mm")
IN_FULL = ("embed_tokens", "lm_head", "shared_expert_gate")
"""Parts whose weights engines do not quantise, beside routers and norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far an engine is from its trainer. All is off by default; what is set adds up.

    Args:
        flips: p, the share of (token, layer) rows whose K-th expert, the weakest, is another one. The router's scores
            stay, so an expert that is swapped in has the weight that its own score gives it: as rounding does it.
        nearest: whether that other expert is the first one left out, the (K + 1)-th, as rounding chooses it; else any
            of the E - K, each with probability ``1 / (E - K)``.
        router_std: s; a router's logits are ``z + s * e`` with ``e ~ N(0, 1)`` for each row and expert: choice and
            weights change.
        dtype: of the copy that generates, such as ``torch.bfloat16``.
        float32_routers: whether its routers stay float32, weights and logits.
        weights: fake-quantised weights of the copy, one scale for each output of a matrix: ``"int8"``: ``c * round(w /
            c)`` with ``c = max|w| / 127``; ``"float8"``: ``c * e4m3(w / c)`` with ``c = max|w| / 448``. Routers, norms,
            biases, convolutions, embeddings and head are not quantised.
        activations: likewise, with one scale for each row: the inputs of linear layers and experts; not those of
            routers and head, and no products of attention. Gradients pass as if nothing were rounded.
        stale: k; the copy has the trainer's weights of k updates ago.
        seed: of flips and of ``router_std``.

    Raises:
        ValueError: a value out of range.

    >>> Noise(flips=0.03, weights="int8").is_on
    True
    """

    flips: float = 0.0
    nearest: bool = True
    router_std: float = 0.0
    dtype: torch.dtype | None = None
    float32_routers: bool = False
    weights: Quantisation | None = None
    activations: Quantisation | None = None
    stale: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_number("flips", self.flips, 0, 1)
        check_bool("nearest", self.nearest)
        check_bool("float32_routers", self.float32_routers)
        check_number("router_std", self.router_std, 0)
        check_number("stale", self.stale, 0, whole=True)
        check_number("seed", self.seed, 0, whole=True)
        for name, kind in (("weights", self.weights), ("activations", self.activations)):
            if kind not in (None, *LEVELS):
                raise ValueError(f"{name} must be one of {', '.join(LEVELS)}, or None, got {shown(kind)}.")
        if self.dtype is not None and not (isinstance(self.dtype, torch.dtype) and self.dtype.is_floating_point):
            raise ValueError(f"dtype must be a floating torch.dtype, or None, got {shown(self.dtype)}.")

    @property
    def is_on(self) -> bool:
        """Whether there is any."""
        return self != Noise(nearest=self.nearest, seed=self.seed)

    @contextmanager
    def on(self, model: nn.Module, generator: torch.Generator | None = None) -> Iterator[None]:
        """Flip experts, add noise to router logits and quantise activations in all forward passes in the context.

        Recordings hold the flipped experts; rows that are replayed follow the recorded ones, and are not flipped.
        Weights are those of the model: see :class:`NoisyModel` for the rest.

        Args:
            model: with routers that :class:`~torchrl_moe.modules.RouterReplay` can replay.
            generator: of random numbers; default: a new one of ``seed``, so equal passes get equal noise.

        Raises:
            ValueError: flips are asked for, and every router chooses all of its experts; or quantised activations,
                and which products to quantise cannot be told.
        """
        if not self.flips and not self.router_std and self.activations is None:
            yield
            return
        sites = RouterReplay.of(model).sites
        if self.flips and all(site.top_k >= site.num_experts for site in sites):
            raise ValueError(f"flips={self.flips}: every router chooses all of its experts, so none is left to swap in")
        mode = _ForwardNoise(self, generator or torch.Generator().manual_seed(self.seed))
        if self.activations is not None:
            mode.weights = self._weights_of_products(model)
        with ExitStack() as stack:
            for site in sites:
                router = model.get_submodule(site.name)

                def begin(*_: object, sizes: tuple[int, int] = (site.num_experts, site.top_k)) -> None:
                    mode.sizes = sizes

                def end(*_: object) -> None:
                    mode.sizes = None

                stack.callback(router.register_forward_pre_hook(begin).remove)
                stack.callback(router.register_forward_hook(end, always_call=True).remove)
            # entered before a recording's own mode, and so asked after it: what is recorded is flipped
            stack.enter_context(mode)
            yield

    def _weights_of_products(self, model: nn.Module) -> set[int]:
        """Where the weights lie whose inputs are quantised."""
        for module in model.modules():
            computed = getattr(getattr(module, "config", None), "_experts_implementation", None)
            if computed not in (None, *EXPERTS_COMPUTED):
                raise ValueError(
                    f"activations={self.activations!r}: experts are computed with {computed!r}, whose products are not "
                    f"seen; call model.set_experts_implementation({EXPERTS_COMPUTED[0]!r}) first"
                )
        parts: dict[bool, set[int]] = {True: set(), False: set()}
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                parts[is_router(name) or any(part in IN_FULL for part in name.split("."))].add(_place(weight))
        if 0 in parts[False] or parts[True] & parts[False]:
            raise ValueError(
                f"activations={self.activations!r}: weights have no memory yet, or share it with routers, embeddings "
                "or head, so which products to quantise cannot be told"
            )
        return parts[False]


class _ForwardNoise(TorchFunctionMode):
    """Changes what one router's product with its weight and its ``topk`` over experts return, and products' inputs."""

    def __init__(self, noise: Noise, generator: torch.Generator) -> None:
        super().__init__()
        self._noise, self._generator = noise, generator
        self.sizes: tuple[int, int] | None = None
        """E and K of the router that runs; ``None`` outside of routers."""
        self.weights: set[int] = set()
        """Where the weights lie whose products have their inputs quantised."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if self._noise.activations is not None and getattr(func, "__name__", "") in PRODUCTS_BY_NAME:
            inputs, weight, *_ = (*args, *kwargs.values())
            if isinstance(weight, Tensor) and _place(weight) in self.weights:
                quantised = fake_quantised(inputs, self._noise.activations, -1)
                if args:
                    args = (quantised, *args[1:])
                else:
                    kwargs = {**kwargs, next(iter(kwargs)): quantised}
        result = func(*args, **kwargs)
        if self.sizes is None:
            return result
        experts, top_k = self.sizes
        if self._noise.router_std and func in PRODUCTS and result.shape[-1] == experts:
            drawn = torch.randn(result.shape, generator=self._generator)
            return result + (self._noise.router_std * drawn).to(result)
        if self._noise.flips and func in (torch.topk, Tensor.topk) and top_k < experts:
            scores: Tensor = args[0] if args else kwargs["input"]
            if (scores.shape[-1], result.indices.shape[-1]) == (experts, top_k):
                chosen = self._flipped(scores.detach(), result.indices)
                return TopK((scores.gather(-1, chosen), chosen))
        return result

    def _flipped(self, scores: Tensor, chosen: Tensor) -> Tensor:
        """Return the choice with another last expert in a share of rows."""
        rest = scores.float().scatter(-1, chosen, float("-inf"))
        left_out = rest.argsort(-1, descending=True)
        # routers of groups bar whole groups by -inf: none of those is chosen
        others = rest.isfinite().sum(-1).cpu()
        hit = (torch.rand(chosen.shape[:-1], generator=self._generator) < self._noise.flips) & (others > 0)
        place = torch.zeros(chosen.shape[:-1], dtype=torch.long)
        if not self._noise.nearest:
            place = (torch.rand(chosen.shape[:-1], generator=self._generator) * others).long()
        other = left_out.gather(-1, place[..., None].to(chosen.device))[..., 0]
        flipped = chosen.clone()
        flipped[..., -1] = torch.where(hit.to(chosen.device), other, chosen[..., -1])
        return flipped


def _place(values: Tensor) -> int:
    """Where a tensor lies; the same for its views."""
    return values.untyped_storage().data_ptr()


def fake_quantised(values: Tensor, kind: Quantisation, axis: int) -> Tensor:
    """Round to a kind's numbers and back, with one scale for all values along an axis; gradients pass straight on."""
    plain = values.detach().float()
    scale = plain.abs().amax(axis, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / LEVELS[kind]
    scaled = plain / scale
    levels = scaled.round() if kind == "int8" else scaled.to(torch.float8_e4m3fn).float()
    rounded = (levels * scale).to(values.dtype)
    return values + (rounded - values.detach()) if values.requires_grad else rounded


class NoisyModel:
    """The copy of a model that generates in the place of an engine, as far from it as its noise says.

    Args:
        model: the trainer's. It is not changed.
        noise: what separates the two.

    ``model`` is the copy; wrappers and ``generate`` take it like any model.

    Raises:
        ValueError: weights are to be quantised, and which axis of the experts has the outputs cannot be told.

    >>> from torchrl_moe.testing import make_tiny_moe
    >>> trainer = make_tiny_moe(num_hidden_layers=2)
    >>> rollouts = NoisyModel(trainer, Noise(flips=0.1, dtype=torch.bfloat16))
    >>> with rollouts.running(), torch.no_grad():
    ...     rollouts.model(torch.tensor([[72, 105]])).logits.dtype
    torch.bfloat16
    """

    def __init__(self, model: PreTrainedModel, noise: Noise) -> None:
        check_instance("noise", noise, Noise)
        self.noise = noise
        self.model: PreTrainedModel = copy.deepcopy(model).eval().requires_grad_(False)
        if noise.dtype is not None:
            lowered(self.model, noise.dtype)  # the frequencies of rotary embeddings stay as engines have them
        if noise.float32_routers:
            float32_routers(self.model)
        self._generator = torch.Generator().manual_seed(noise.seed)
        self._waiting: deque[dict[str, Tensor]] = deque()
        self.take_weights(model)

    @torch.no_grad()
    def take_weights(self, model: nn.Module) -> None:
        """Take the trainer's weights after an update: those of ``stale`` calls before, or the first there were."""
        self._waiting.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
        if len(self._waiting) > self.noise.stale + 1:
            self._waiting.popleft()
        state = self._waiting[0]
        for name, tensor in self.model.state_dict().items():
            tensor.copy_(self._quantised(name, state[name]))

    def _quantised(self, name: str, weight: Tensor) -> Tensor:
        kind = self.noise.weights
        parts = name.split(".")
        if kind is None or weight.ndim < 2 or is_router(name) or any(part in parts for part in IN_FULL):
            return weight
        owner = self.model.get_submodule(name.rpartition(".")[0])
        if parts[-1].endswith("bias") or isinstance(owner, nn.Conv1d):
            return weight
        # of fused experts, [E, ...], the class says which of the other two axes are inputs
        if weight.ndim == 3 and not hasattr(owner, "is_transposed"):
            raise ValueError(
                f"weights={kind!r}: {type(owner).__name__} computes its experts in code of its own, so which axis of "
                f"{name} has the outputs cannot be told"
            )
        inputs = -2 if weight.ndim == 3 and owner.is_transposed else -1
        return fake_quantised(weight, kind, inputs)

    @contextmanager
    def running(self) -> Iterator[PreTrainedModel]:
        """Run the copy with its noise; each forward pass draws other random numbers."""
        with self.noise.on(self.model, self._generator):
            yield self.model


def without_kept_tokens(batch: TensorDictBase) -> TensorDictBase:
    """Return rollouts ``[B]`` as an engine without masks would give them.

    With ``top_p`` or ``top_k`` a token was drawn from S, a part of the vocabulary, with probability ``p / sum of p over
    S``. A scorer that is not told S normalises over all of it, and is off by ``log sum of p over S``.
    """
    if not len(batch):
        return batch.copy()
    return lazy_stack([row.exclude(("sampling", "kept")) for row in batch.unbind(0)])
