"""Where do engine and trainer part? One prompt through both, compared operation by operation.

The model in the engine's workers and the trainer's get hooks on what has the same name in both. The trainer follows the
engine's experts, so a difference is one of arithmetic or of weights; whether its own router would choose others, given
its own hidden states, is a line of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from torchrl_moe._checks import check_instance
from torchrl_moe.data.routed_experts import routes_from_vllm
from torchrl_moe.errors import EngineError
from torchrl_moe.modules.replay.router_replay import RouterReplay, evaluating, owner_of
from torchrl_moe.render.tables import html_table, plain_table

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from torchrl_moe.modules.serving.service import GenerationService


Outputs: TypeAlias = Mapping[str, NDArray[np.float32]]
"""Operation -> what left it, ``[rows, width]``, in order of execution."""

EMBEDDING = "embed_tokens"
ALIASES = {
    "block_sparse_moe": "mlp",
    "feed_forward": "mlp",
    "attn": "self_attn",
    "embedding": EMBEDDING,
    "logits_processor": "lm_head",
}
"""vLLM's names -> transformers'."""
COMPARED = (EMBEDDING, "self_attn", "gate", "router", "mlp", "shared_experts", "lm_head")
"""Modules that are compared, besides norms and whole layers."""
ROUTERS = ("gate", "router")
AS_LOG_PROBS = (*ROUTERS, "lm_head")
"""Some families return a router's logits, others its probabilities: as log-probs they are the same."""
CHOICE = "experts chosen"
SUMMED = " and residual"
"""Most of vLLM's layers return their output and the residual stream apart: this is the sum, under a name of its own."""
HEADER = ("operation", "relative", "greatest", "equal bits")

LIMITS: Mapping[torch.dtype, tuple[float, float]] = {
    torch.float32: (1e-4, 0.05),
    torch.float16: (5e-2, 0.3),
    torch.bfloat16: (2e-1, 0.5),
}
"""Dtype -> what is more than the rounding of a deep model: a relative difference, and a share of rows that choose other
experts."""
JUMP = 30.0
"""An operation that multiplies the differences before it by this much differs itself, however little."""

CAUSES: Mapping[str, str] = {
    EMBEDDING: "the embedding's weights",
    CHOICE: "the routing rule: scoring, correction bias, groups, top-k, or the router's weights if it has no line",
    "gate": "the router's weights, and the dtype it computes in",
    "router": "the router's weights, and the dtype it computes in",
    "self_attn": "attention: weights, rotary embedding, mask, scaling",
    "shared_experts": "the weights of the shared experts",
    "mlp": "the experts: weights, activation, how their outputs are weighted and summed",
    "lm_head": "the head's weights, and a scaling of logits",
    "norm": "the norm's weight and epsilon, and the residual sum that it reads",
}
"""The end of an operation's name -> what to look at if it is the first to differ."""
RESIDUAL = "the residual sum"
"""The same of a whole layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperationGap:
    """How far the outputs of one operation are apart.

    Attributes:
        name: of the module as transformers names it, from ``layers`` on; ``"layers.N.experts chosen"`` is a router's
            choice.
        relative: ``|engine - trainer| / |trainer|``, root mean squares; of a choice: the share of rows in which the
            trainer's router, by itself, chooses other experts.
        greatest: the greatest absolute difference; NaN of a choice. Both of routers and the head: of their log-probs.
        equal: the share of elements that are equal to the bit; of a choice, of rows.
    """

    name: str
    relative: float
    greatest: float
    equal: float

    @property
    def is_choice(self) -> bool:
        """Whether it is a router's choice."""
        return self.name.endswith(CHOICE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bisection:
    """What :func:`bisect_mismatch` found. Printed, it is a table with a verdict.

    Attributes:
        operations: one gap for each operation, in order of execution.
        first: the first operation that differs by more than rounding; ``None``: engine and trainer agree.
        first_inexact: the first whose outputs are not equal to the bit; ``None``: all are.
        tokens: of the prompt.
        dtypes: what the engine and the trainer compute in, as torch names them.
        not_compared: kinds of operations that only one of the two has, or in another layout.
    """

    operations: tuple[OperationGap, ...]
    first: OperationGap | None
    first_inexact: OperationGap | None
    tokens: int
    dtypes: tuple[str, str]
    not_compared: tuple[str, ...] = ()

    @property
    def verdict(self) -> str:
        """Where the two part, in a sentence or two."""
        sizes = [one for one in self.operations if not one.is_choice]
        if self.first_inexact is None:
            return "Engine and trainer are equal to the bit."
        if self.first is None:
            worst = max(sizes, key=lambda one: one.relative)
            return (
                f"Engine and trainer agree to rounding: at most {worst.relative:.1e} apart, in {worst.name}. The first "
                f"that is not equal to the bit is {self.first_inexact.name}."
            )
        before = [one.relative for one in self.operations[: self.operations.index(self.first)] if not one.is_choice]
        apart = f"{self.first.relative:.1%} of rows" if self.first.is_choice else f"{self.first.relative:.1e} apart"
        cause = next((what for end, what in CAUSES.items() if self.first.name.endswith(end)), RESIDUAL)
        if EMBEDDING in self.not_compared and self.first.name.startswith("layers.0"):
            cause = f"the scaling of the embedding, and {cause}"
        return (
            f"The first to differ is {self.first.name}: {apart}, and what comes before it at most "
            f"{max(before, default=0.0):.1e}. Look at {cause}."
        )

    def to_dict(self) -> dict[str, object]:
        """Return plain data."""
        found = asdict(self) | {"verdict": self.verdict}
        return found | {name: found[name] and found[name]["name"] for name in ("first", "first_inexact")}

    @property
    def _title(self) -> str:
        return f"{self.tokens} tokens; engine in {self.dtypes[0]}, trainer in {self.dtypes[1]}"

    def _rows(self) -> list[tuple[str, ...]]:
        return [
            (
                f"{'-> ' if one is self.first else ''}{one.name}",
                f"{one.relative:.1e}",
                "" if one.is_choice else f"{one.greatest:.1e}",
                f"{one.equal:.1%}",
            )
            for one in self.operations
        ]

    def __str__(self) -> str:
        left_out = f"\nNot compared: {', '.join(self.not_compared)}." if self.not_compared else ""
        return f"{plain_table(self._title, HEADER, self._rows(), wide=HEADER[:1])}\n\n{self.verdict}{left_out}"

    def _repr_html_(self) -> str:
        return f"{html_table(self._title, HEADER, self._rows())}<p>{self.verdict}</p>"


def bisect_mismatch(
    engine: GenerationService, model: PreTrainedModel, tokens: Sequence[int], *, actor_index: int = 0
) -> Bisection:
    """Run a prompt through a replica and through the trainer's model, and say at which operation they part.

    The trainer follows the engine's experts. The replica must have no other request meanwhile, and no compiled model,
    which calls no hooks. With several workers, outputs are those of the first that has the operation.

    Args:
        engine: over vLLM, with ``enforce_eager=True``, that returns routes.
        model: the trainer's, a transformers MoE with the same weights. It is not changed.
        tokens: ids of the prompt ``[T]``, T >= 2, that the replica's prefix cache does not have.
        actor_index: the replica. The others are left alone.

    Raises:
        ValueError: fewer than two tokens.
        IndexError: there is no such replica.
        EngineError: the engine is not vLLM's, returns no routes, runs a compiled model, or read other rows meanwhile;
            or no operation has the same name on both sides.

    What leaves each operation is copied to the driver in float32: about ``30 * T * L * hidden`` bytes.
    """
    return EngineTrace.of(engine, tokens, actor_index=actor_index).against(model)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineTrace:
    """What an engine computed for a prompt: keep it, end the engine, and load the trainer's model in its place.

    Attributes:
        tokens: ids of the prompt, ``[T]``.
        outputs: operation -> float32 ``[T, width]``, in order of execution; of the head, ``[1, V]``.
        routes: the experts of each token, ``[T, L, K]``, -1 in dense layers.
        dtype: what the engine computes in.
    """

    tokens: tuple[int, ...]
    outputs: Outputs
    routes: NDArray[np.integer]
    dtype: str

    @classmethod
    def of(cls, engine: GenerationService, tokens: Sequence[int], *, actor_index: int = 0) -> EngineTrace:
        """Run a prompt through a replica; see :func:`bisect_mismatch`."""
        ids = [int(one) for one in tokens]
        if len(ids) < 2:
            raise ValueError(f"a prompt of two tokens at least, got {len(ids)}")
        if engine.routing_layout is None:
            raise EngineError("the engine returns no routes: enable_return_routed_experts must not be False")
        on_workers = partial(engine.validate_model_params, actor_index=actor_index)
        try:
            on_workers(partial(_watch, rows=len(ids)))
        except (EngineError, ValueError) as error:  # not vLLM's, for one
            raise EngineError(f"the operations of this engine cannot be watched: {error}") from error
        try:
            asked = {"max_tokens": 1, "temperature": 0.0}
            answer = engine.generate(ids, asked, actor_index=actor_index, use_tqdm=False)
        except BaseException:
            with suppress(EngineError):  # the first error says more
                on_workers(_seen)
            raise
        (workers,) = on_workers(_seen)
        outputs: dict[str, NDArray[np.float32]] = {}
        for of_worker in workers:
            outputs = {**of_worker["outputs"], **outputs}
        if len(workers) > 1:  # each has a part of the sum over tensor ranks
            outputs = {name: rows for name, rows in outputs.items() if not name.endswith("shared_experts")}
        read = {len(rows) for name, rows in outputs.items() if _is_layer(name)}
        if not read:
            raise EngineError(
                "no layer of the engine's model was seen: it is compiled (start it with enforce_eager=True), or its "
                "layers have other names than model.layers.N"
            )
        if read != {len(ids)}:
            raise EngineError(
                f"the engine read {sorted(read)} rows for a prompt of {len(ids)} tokens: it had other requests, or its "
                "prefix cache had the prompt; ask an idle engine, with another prompt"
            )
        # norms of heads may have a row for each of them
        outputs = {
            name: rows.reshape(len(ids), -1) if len(rows) % len(ids) == 0 else rows for name, rows in outputs.items()
        }
        rows = answer.outputs[0].routed_experts  # type: ignore[union-attr]  # of one prompt
        routes = routes_from_vllm(rows, len(ids) + 1, engine.routing_layout)[: len(ids)]
        return cls(tokens=tuple(ids), outputs=outputs, routes=routes, dtype=workers[0]["dtype"])

    def against(self, model: PreTrainedModel) -> Bisection:
        """Run the prompt through the trainer's model, and compare."""
        check_instance("model", model, nn.Module)
        dtypes = self.dtype, str(model.dtype).removeprefix("torch.")
        was_free = owner_of(model) is None
        replay = RouterReplay.of(model)
        ids = torch.tensor([self.tokens], device=model.device)
        routes = torch.from_numpy(self.routes.astype(np.int64))[None]
        watch = _Watch(model, len(self.tokens))
        try:
            with torch.no_grad(), evaluating(model), replay.replay(routes, measure=True):
                logits = model(input_ids=ids, use_cache=False).logits[0, -1:]
            report = replay.report()
        finally:
            trained = watch.end()
            if was_free:
                replay.remove()
        trained["lm_head"] = logits.float().cpu().numpy()  # scaled and capped, as the engine's are
        gaps: list[OperationGap] = []
        for name, theirs in trained.items():
            layer, _, operation = name.removeprefix("layers.").partition(".")
            # the router is part of the MLP: the share of rows in which it chooses the same experts
            share = report[int(layer)]["agreement"] if operation == "mlp" and int(layer) in report else None
            if share is not None:
                gaps.append(
                    OperationGap(name=f"layers.{layer}.{CHOICE}", relative=1 - share, greatest=math.nan, equal=share)
                )
            ours = [self.outputs[one] for one in (name, name + SUMMED) if one in self.outputs]
            found = [gap for one in ours if (gap := _gap(name, one, theirs[-len(one) :])) is not None]
            if found:
                gaps.append(min(found, key=lambda gap: gap.relative))
        compared = {gap.name for gap in gaps if not gap.is_choice}
        if not compared:
            raise EngineError(f"no operation of {type(model).__name__} has a counterpart in the engine")
        # kinds of operations: their names without the numbers of layers
        others = [name for name in self.outputs.keys() | trained.keys() if name.removesuffix(SUMMED) not in compared]
        kinds = {".".join(part for part in name.split(".") if not part.isdigit()) for name in others}
        narrower = max((getattr(torch, one) for one in dtypes), key=lambda one: torch.finfo(one).eps)
        return Bisection(
            operations=tuple(gaps),
            first=_first(gaps, narrower),
            first_inexact=next((gap for gap in gaps if gap.equal < 1), None),
            tokens=len(self.tokens),
            dtypes=dtypes,
            not_compared=tuple(sorted(kinds)),
        )


# Hooks on a model, in a worker of the engine or here.


class _Watch:
    """Keeps what leaves the operations of a model, from its construction to :meth:`end`."""

    def __init__(self, model: nn.Module, rows: int) -> None:
        self._most, self._is_full = rows, False
        self._outputs: dict[str, list[Tensor]] = {}
        self._handles: list[RemovableHandle] = []
        for name, module in model.named_modules():
            operation = _operation(name)
            if operation:
                self._handles.append(module.register_forward_hook(partial(self._keep, operation)))

    def _keep(self, operation: str, _module: nn.Module, _given: object, output: Any) -> None:
        parts = output if isinstance(output, tuple | list) else (output,)
        tensors = [part for part in parts if isinstance(part, Tensor)]
        if not tensors:
            return
        found = tensors[0]
        if _is_layer(operation) and len(tensors) > 1 and tensors[1].shape == found.shape:
            self._note(operation + SUMMED, found + tensors[1])
        if operation.endswith(ROUTERS):  # some return the scores of the chosen experts first, zero elsewhere
            alike = [one for one in tensors if one.shape == found.shape]
            found = max(alike, key=lambda one: int(one.count_nonzero()))
        self._note(operation, found)

    def _note(self, operation: str, output: Tensor) -> None:
        if self._is_full:
            return
        # a copy: vLLM adds to its tensors in place
        kept = self._outputs.setdefault(operation, [])
        kept.append(output.detach().float().cpu().clone())
        # others' rows come too, perhaps until the next driver ends this: one step of them says so, more cost memory
        self._is_full = _is_layer(operation) and sum(map(len, kept)) > self._most

    def end(self) -> dict[str, NDArray[np.float32]]:
        """Remove the hooks; return the outputs, ``[rows, width]``. Those of an unknown layout are left out."""
        for handle in self._handles:
            handle.remove()
        found = {}
        for operation, calls in self._outputs.items():
            rows = [call[0] if call.dim() > 2 and len(call) == 1 else call for call in calls]  # a batch of one
            if all(call.dim() > 1 and call.shape[1:] == rows[0].shape[1:] for call in rows):
                found[operation] = torch.cat(rows).flatten(1).numpy()
        return found


_WATCHES: WeakKeyDictionary[nn.Module, _Watch] = WeakKeyDictionary()
"""In a worker of the engine: its model -> what watches it."""


def _watch(saved: Mapping[str, Tensor], model: nn.Module, rows: int) -> None:
    """Begin, in a worker."""
    del saved
    if (forgotten := _WATCHES.pop(model, None)) is not None:  # of a driver that has died
        forgotten.end()
    _WATCHES[model] = _Watch(model, rows)


def _seen(saved: Mapping[str, Tensor], model: nn.Module) -> dict[str, object]:
    """End, in a worker; return what was seen."""
    del saved
    watch = _WATCHES.pop(model, None)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {"outputs": {} if watch is None else watch.end(), "dtype": dtype}


def _operation(name: str) -> str:
    """Return the name of an operation that is compared, the same in engine and trainer; "" for another module.

    >>> [_operation(name) for name in ("model.layers.3.block_sparse_moe.gate", "model.layers.3", "model.norm")]
    ['layers.3.mlp.gate', 'layers.3', 'norm']
    >>> _operation("model.layers.3.mlp.experts.act_fn"), _operation("logits_processor")
    ('', 'lm_head')
    """
    parts = [ALIASES.get(part, part) for part in name.split(".")]
    parts = parts[parts.index("layers") :] if "layers" in parts else parts[-1:]
    found = ".".join(parts)
    wanted = _is_layer(found) or parts[-1] in COMPARED or parts[-1].endswith("norm")
    # vLLM has a module for attention inside its attention
    return found if wanted and "experts" not in parts and parts.count("self_attn") < 2 else ""


def _is_layer(operation: str) -> bool:
    return operation.count(".") == 1 and operation.startswith("layers.")


# Comparing.


def _gap(name: str, ours: NDArray[np.float32], theirs: NDArray[np.float32]) -> OperationGap | None:
    """Compare an operation's outputs; ``None`` if they are laid out differently."""
    if name.endswith("lm_head"):  # an engine may pad its vocabulary
        width = min(ours.shape[1], theirs.shape[1])
        ours, theirs = ours[:, :width], theirs[:, :width]
    if ours.shape != theirs.shape:
        return None
    if name == EMBEDDING:  # families scale it within it, or after it: then one is the other times a number
        factor = float((ours * theirs).sum() / max(float(np.square(theirs).sum()), 1e-30))
        if abs(factor - 1) > 1e-2 and np.allclose(ours, factor * theirs, rtol=1e-2, atol=1e-6):
            return None
    equal = float((ours == theirs).mean())
    if name.endswith(AS_LOG_PROBS):
        ours, theirs = _log_probs(ours), _log_probs(theirs)
    apart = ours.astype(np.float64) - theirs
    size = math.sqrt(float(np.square(theirs, dtype=np.float64).mean()))
    distance = math.sqrt(float(np.square(apart).mean()))
    relative = distance / size if size else (math.inf if distance else 0.0)
    return OperationGap(name=name, relative=relative, greatest=float(np.abs(apart).max()), equal=equal)


def _log_probs(values: NDArray[np.float32]) -> NDArray[np.float32]:
    rows = torch.tensor(values)
    are_probs = bool((rows >= 0).all() and (rows.sum(-1) - 1).abs().max() < 1e-2)
    return (rows.clamp_min(1e-30).log() if are_probs else rows.log_softmax(-1)).numpy()


def _first(gaps: Iterable[OperationGap], dtype: torch.dtype) -> OperationGap | None:
    """Return the first gap that is more than rounding in this dtype, the narrower of the two."""
    limit, share = LIMITS.get(dtype, LIMITS[torch.float32])
    before = torch.finfo(dtype).eps
    for gap in gaps:
        if gap.is_choice:
            if gap.relative > share:
                return gap
        elif not gap.relative <= min(limit, JUMP * before):  # NaN is no rounding either
            return gap
        else:
            before = max(before, gap.relative)
    return None
