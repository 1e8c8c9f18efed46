"""The experts that each token of a sequence was routed to, as a TensorClass.

:class:`RoutedExperts` is what sits at the tensordict key ``"routed_experts"``; :func:`routes_from_vllm` is its fast
path without a tensordict, for engine processes. They serve Rollout Routing Replay, R3 (arXiv 2510.11370).

Letters: T tokens of one sequence, L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorClass, TensorDictBase, lazy_stack

from torchrl_moe import _checks
from torchrl_moe.data.routing_layout import UNSET_EXPERT, RoutingLayout
from torchrl_moe.errors import RouteShapeError, RouteValueError

P = ParamSpec("P")
T = TypeVar("T", bound=TensorDictBase | None)

MaskRows: TypeAlias = "torch.Tensor | Sequence[MaskRows]"
"""A mask ``[*B, T]``, or a (nested) list of one ``[T]`` per sample."""

_MODEL = "Check that the RoutingLayout is that of the model that made these routes."
_CUT = "A sample has a row per token, the last token included: check that routes and tokens were cut at the same place."


def routes_from_vllm(
    rows: npt.NDArray[np.integer] | None, num_tokens: int, layout: RoutingLayout
) -> npt.NDArray[np.integer]:
    """Turn the rows vLLM returned for one sequence into routes.

    Args:
        rows: unsigned (or non-negative) integers ``[num_tokens - 1, L, K]``, zero on dense layers: row t is what token
            t was routed to as input; the last sampled token, never forwarded, has none. May be read-only; is copied.
            None: nothing is known.
        num_tokens: prompt and response tokens of the sequence.
        layout: the routers of the model that was served.

    Returns:
        A new array ``[num_tokens, L, K]`` of ``layout.numpy_dtype``, columns as given; last row and dense layers -1.

    Raises:
        RouteShapeError: wrong rank, row count, layer count or width.
        RouteValueError: not integers, an id outside ``0..E-1``, or an id on a dense layer.

    >>> layout = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)
    >>> routes_from_vllm(np.array([[[0, 0], [5, 3]]], dtype=np.uint8), 2, layout)[:, 1].tolist()
    [[5, 3], [-1, -1]]
    """
    _checks.check_number("num_tokens", num_tokens, most=_checks.MOST_TOKENS, whole=True)
    if num_tokens < 1:
        raise RouteShapeError(f"num_tokens must be at least 1, got {num_tokens}: count prompt and response tokens.")
    routes = np.full((num_tokens, layout.num_layers, layout.top_k), UNSET_EXPERT, dtype=layout.numpy_dtype)
    if rows is None:
        return routes
    rows = np.asarray(rows)
    # The engine has no row for the last token, and zeros on dense layers, where 0 would read as an expert.
    _checks.check_engine_rows(rows, routes.shape, layout.num_experts, layout.dense_layers)
    routes[:-1] = rows
    if layout.dense_layers:
        routes[:, layout.dense_layers] = UNSET_EXPERT
    return routes


class RoutedExperts(TensorClass["nocast"]):  # type: ignore[name-defined] # mypy takes "nocast" for a type
    """The experts that each token was routed to.

    Row t of a sample holds the experts that token t was routed to *as input*, in the engine's column order (compare
    rows as sets). A row of -1 (``UNSET_EXPERT``) means that no route is known: the last sampled token, layers without a
    router, pads, tokens the engine never saw. Expert 0 is a real expert. Nothing is checked on construction:
    :meth:`validate` does it.

    A cast that would change ids raises ``RouteValueError``, also one of a TensorDict that holds them, such as
    ``td.to(torch.bfloat16)``.

    Samples of unequal T are a lazy stack: ``lazy_stack([a, b])``. Its ``full`` cannot be read: index it, :meth:`pad`
    it, or use ``td.get(("routed_experts", "full"), as_list=True)``. Two other ways fill with 0, which is an expert:
    ``tensordict.pad``, and ``get(..., as_padded_tensor=True)`` without ``padding_value=-1``. Write the key
    ``"routed_experts"``: a tensor written to ``("routed_experts", "full")`` first makes a plain TensorDict of it
    (``RoutedExperts.from_tensordict`` turns that back).

    TorchRL's ``LazyStackStorage`` has no ``dumps``, and its ``state_dict`` forgets TensorClass types. Save
    ``buffer[:].memmap(path)`` and ``extend`` a new buffer with ``TensorDict.load_memmap(path)``.

    Shapes:
        full: ``[*B, T, L, K]``, int8 if E <= 128 else int16.

    >>> layout = RoutingLayout(num_layers=2, moe_layers=(1,), top_k=2, num_experts=8)
    >>> rows = np.array([[[0, 0], [5, 3]], [[0, 0], [1, 7]]], dtype=np.uint8)
    >>> routes = RoutedExperts.from_vllm(rows, num_tokens=3, layout=layout).validate(layout)
    >>> routes
    RoutedExperts(shape=[T=3, L=2, K=2], dtype=int8, coverage=66.7%, nbytes=12)
    >>> lazy_stack([routes, routes.truncate(2)]).pad().full[:, :, 1].tolist()
    [[[5, 3], [1, 7], [-1, -1]], [[-1, -1], [5, 3], [1, 7]]]
    """

    _own_doc = __doc__
    full: torch.Tensor

    @classmethod
    def from_vllm(
        cls, rows: npt.NDArray[np.integer] | None, *, num_tokens: int, layout: RoutingLayout
    ) -> RoutedExperts:
        """Routes of one sequence, ``full [num_tokens, L, K]``; arguments and errors: :func:`routes_from_vllm`."""
        return cls(full=torch.from_numpy(routes_from_vllm(rows, num_tokens, layout)))

    def validate(
        self,
        layout: RoutingLayout,
        *,
        num_tokens: int | Sequence[int] | None = None,
        attention_mask: MaskRows | None = None,
    ) -> RoutedExperts:
        """Check shapes and every value; return self.

        Args:
            layout: the routers of the model that made the routes.
            num_tokens: tokens of every sample, or a count per sample; with a mask, pads do not count.
            attention_mask: ``[*B, T]``, or a (nested) list of one ``[T]`` per sample. Rows where it is False are pads
                and must be -1.

        Raises:
            RouteShapeError: wrong rank, layer count, width or row count, or a mask that does not fit.
            RouteValueError: wrong dtype, or a row that holds an id outside ``-1..E-1``, is partly -1, names one expert
                twice, is all zeros (K >= 2: an engine that did not capture), or is set on a dense layer or a pad. The
                message names the first one: sample, token, layer, values.
        """
        # Shapes and dtypes first: of a dense batch one sample speaks for all.
        samples = self._samples()
        names = _checks.RowNames(self._dims()[:-3], [len(sample) for sample in samples])
        for i, sample in enumerate(samples[:1] if self._is_dense() else samples):
            name = names.of("routed_experts", i)
            wanted = ("T", layout.num_layers, layout.top_k)
            _checks.check_shape(name, sample.shape, wanted, error=RouteShapeError, hint=_MODEL)
            _checks.check_route_dtype(name, sample.dtype, layout.dtype, layout.num_experts)
        # Then the number of rows, without pads.
        keep = None if attention_mask is None else _split_mask(attention_mask, names)
        if num_tokens is not None:
            got = names.lengths if keep is None else [int(mask.sum()) for mask in keep]
            counts: list[int] = list(num_tokens) if np.ndim(num_tokens) else [num_tokens] * len(samples)  # type: ignore
            _checks.check_rows("num_tokens", len(counts), len(samples), hint="Give an int, or a count per sample.")
            for count in counts:
                _checks.check_number("num_tokens", count, 0, whole=True)
            for i, count in enumerate(counts):
                _checks.check_rows(names.of("routed_experts", i), got[i], count, hint=_CUT)
        # Then every value, of all samples at once.
        if samples:
            full = self.full.flatten(0, -3) if self._is_dense() else torch.cat(samples)
            pads = None if keep is None else torch.cat(keep)
            _checks.check_routes(full, layout.moe_layers, layout.num_experts, keep=pads, where=names.row)
        return self

    def truncate(self, num_tokens: int) -> RoutedExperts:
        """Keep the first ``num_tokens`` rows of each sample (shorter samples stay whole); a view, not a copy.

        The last row kept stays valid: the engine did forward its token. Truncate before padding on the left.

        Raises:
            RouteShapeError: ``num_tokens`` is below 1.
        """
        _checks.check_number("num_tokens", num_tokens, whole=True)
        if num_tokens < 1:
            raise RouteShapeError(f"num_tokens must be at least 1, got {num_tokens}: a sample keeps a token.")
        if self._is_dense():
            return self._with(self.full[..., :num_tokens, :, :])
        return lazy_stack([part.truncate(num_tokens) for part in self.unbind(0)])

    def pad(self, length: int | None = None, side: Literal["left", "right"] = "left") -> RoutedExperts:
        """Make every sample ``length`` rows long with rows of -1; the result is a dense copy.

        Args:
            length: rows of each sample afterwards. None: those of the longest sample.
            side: where the rows are added. Left is the convention of TorchRL's policies.

        Raises:
            RouteShapeError: a sample is longer than ``length``.
            ValueError: ``side`` is neither ``"left"`` nor ``"right"``, or ``length`` is no count of tokens.
        """
        _checks.check_number("length", length, 0, _checks.MOST_TOKENS, whole=True, none=True)
        if side not in ("left", "right"):
            raise ValueError(f"side must be 'left' or 'right', got {side!r}.")
        *batch, _, layers, top_k = self._dims()
        samples = self._samples()
        longest = max((len(sample) for sample in samples), default=0)
        length = longest if length is None else length
        if longest > length:
            raise RouteShapeError(f"cannot pad to {length} rows, the longest sample has {longest}: truncate() first.")
        padded = []
        for sample in samples:
            rows = length - len(sample)
            widths = (0, 0, 0, 0, rows, 0) if side == "left" else (0, 0, 0, 0, 0, rows)
            padded.append(torch.nn.functional.pad(sample, widths, value=UNSET_EXPERT))
        # Of a lazy stack without samples nothing says the dtype.
        if not padded:
            nothing = torch.empty(0, dtype=torch.int8) if self._is_empty_stack() else self.full
            return self._with(nothing.new_empty(*batch, length, layers, top_k))
        full = torch.stack(padded)
        return self._with(full.view(*batch, length, layers, top_k))

    @property
    def is_set(self) -> torch.Tensor:
        """Bool ``[*B, T, L]``: a route is known. Samples of unequal T: :meth:`pad` first, or read each sample."""
        if not self._is_dense():
            raise RouteShapeError(f"is_set needs samples of one length, got {self!r}: pad() first, or index a sample.")
        return self.full[..., 0] != UNSET_EXPERT

    @property
    def nbytes(self) -> int:
        """Bytes of the routes, summed over the samples."""
        return sum(sample.nbytes for sample in self._samples())

    def coverage(self, layout: RoutingLayout | None = None) -> float:
        """Share of rows whose route is known: all tokens, the MoE layers (without ``layout``: those with a route)."""
        first_columns = [sample[..., 0] for sample in self._samples()]
        if not first_columns:
            return 0.0
        known = torch.cat(first_columns) != UNSET_EXPERT
        known = known[:, list(layout.moe_layers) if layout else known.any(0)]
        return float(known.sum()) / known.numel() if known.numel() else 0.0

    def route_table(self, tokens: Sequence[str] | None = None, max_rows: int = 32) -> str:
        """One sample as text: a line per token, a column per layer in which a route is known.

        Args:
            tokens: one string per token, shown quoted.
            max_rows: lines shown; of a longer sample, its first and its last tokens.

        Raises:
            RouteShapeError: not one sample, or ``tokens`` of another length.

        >>> print(RoutedExperts(full=torch.tensor([[[-1, -1], [5, 3]], [[-1, -1], [-1, -1]]])).route_table(["a", "b"]))
        token       layer 1
            0  'a'      5,3
            1  'b'        ·
        """
        dims = self._dims()
        if len(dims) != 3:
            raise RouteShapeError(f"route_table shows one sample, got {self!r}: index it, routes[0].route_table().")
        if tokens is not None:
            _checks.check_rows("tokens", len(tokens), dims[0], hint="Give a string per row of the routes.")
        routes: list[list[list[int]]] = self.full.tolist()
        layers = [i for i in range(dims[1]) if any(row[i][0] != UNSET_EXPERT for row in routes)]
        if not layers:
            return f"no route known in {len(routes)} rows"
        # Of a long sample the first and the last rows are shown.
        max_rows = max(2, max_rows)
        head, hidden = (max_rows + 1) // 2, max(0, len(routes) - max_rows)
        shown = [*range(head), *range(head + hidden, len(routes))] if hidden else range(len(routes))
        columns = [["token", *map(str, shown)]]
        if tokens is not None:
            width = max(len(repr(tokens[t])) for t in shown)
            columns.append(["", *(repr(tokens[t]).ljust(width) for t in shown)])
        for i in layers:
            rows = [routes[t][i] for t in shown]
            texts = ("·" if row[0] == UNSET_EXPERT else ",".join(map(str, row)) for row in rows)
            columns.append([f"layer {i}", *texts])
        widths = [max(map(len, column)) for column in columns]
        text = ["  ".join(map(str.rjust, line, widths)) for line in zip(*columns, strict=True)]
        if hidden:
            text.insert(1 + head, f"… {hidden} more tokens")
        return "\n".join(text)

    def _dims(self) -> tuple[int, ...]:
        """Shape of ``full``; -1 where samples differ, 0 where a lazy stack has none."""
        if self._is_empty_stack():
            return (*self.batch_size, 0, 0, 0)
        dims = tuple(self.get_item_shape("full"))
        _checks.check_shape("routed_experts", dims, (..., "T", "L", "K"), error=RouteShapeError)
        return dims

    def _is_dense(self) -> bool:
        return -1 not in self._dims()

    def _samples(self) -> list[torch.Tensor]:
        """One ``[T, L, K]`` per sample, in the order of the flattened batch."""
        if self._is_empty_stack():
            return []
        if self._is_dense():
            full = self.full
            return [full] if full.ndim == 3 else list(full.flatten(0, -4))
        return [sample for part in self.unbind(0) for sample in part._samples()]

    def _is_empty_stack(self) -> bool:
        """Whether it is a slice of a lazy stack without samples, which has no fields."""
        return 0 in self.batch_size and "full" not in self.keys()

    def _with(self, full: torch.Tensor) -> RoutedExperts:
        return type(self)(full=full, batch_size=self.batch_size, device=self.device)

    def _summary(self) -> str:
        """The repr, one line. A TensorDict that is printed calls it, so it must not raise."""
        dims = tuple(self.get_item_shape("full")) if "full" in self.keys() else ()
        if len(dims) < 3 or 0 in dims[-2:]:
            return f"RoutedExperts(shape={list(dims)})"
        samples = self._samples()
        first = samples[0] if samples else self.full
        lengths = [len(sample) for sample in samples] or [dims[-3]]
        rows = f"{min(lengths)}..{max(lengths)}" if min(lengths) < max(lengths) else str(lengths[0])
        shape = ", ".join([*map(str, dims[:-3]), f"T={rows}", f"L={dims[-2]}", f"K={dims[-1]}"])
        try:
            known = f"coverage={self.coverage():.1%}, "
        except RuntimeError:  # meta, fake and vmapped tensors have no values to read
            known = ""
        return f"RoutedExperts(shape=[{shape}], dtype={str(first.dtype)[6:]}, {known}nbytes={self.nbytes})"


def refuse_casts(kind: type, name: str, error: type[ValueError]) -> None:
    """Make a TensorClass of ids raise where a cast, of it or of a tensordict around it, would change them.

    Args:
        kind: the class, whose methods are wrapped. tensordict calls ``_apply_nest`` for what it finds inside.
        name: of the entry in messages.
        error: the class to raise.
    """

    def checked(method: Callable[Concatenate[TensorDictBase, P], T]) -> Callable[Concatenate[TensorDictBase, P], T]:
        @wraps(method)
        def call(self: TensorDictBase, /, *args: P.args, **kwargs: P.kwargs) -> T:
            after = method(self, *args, **kwargs)
            _check_cast(self, after, name, error)
            return after

        return call

    # What tensordict calls to cast, on the class itself and on one inside of a tensordict.
    for method in ("_apply_nest", "to", "type", "half", "bfloat16", "float", "double", "int"):
        setattr(kind, method, checked(getattr(kind, method)))


def _check_cast(before: TensorDictBase, after: TensorDictBase | None, name: str, error: type[ValueError]) -> None:
    if after is None or before.batch_size != after.batch_size or 0 in before.batch_size:
        return
    # Samples of unequal length cannot be read at once; all have the dtype of the first.
    if before.batch_dims:
        _check_cast(before[0], after[0], name, error)
        return
    for key, ids in before.items():
        cast = after.get(key, None)
        if cast is None or cast.shape != ids.shape or cast.dtype in (ids.dtype, torch.bool):
            # Not a cast, but a reduction or a comparison.
            continue
        if cast.is_floating_point() or cast.is_complex() or torch.promote_types(cast.dtype, ids.dtype) != cast.dtype:
            raise error(
                f"{name}.{key} holds ids, {ids.dtype}, and a cast to {cast.dtype} may change them: cast other entries, "
                "td.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)"
            )


# TensorClass writes its own __doc__ and __repr__ into a class after the body has run.
_CLASS: Any = RoutedExperts
_CLASS.__doc__, _CLASS.__repr__ = _CLASS._own_doc, _CLASS._summary
refuse_casts(_CLASS, "routed_experts", RouteValueError)


def _split_mask(attention_mask: MaskRows, names: _checks.RowNames) -> list[torch.Tensor]:
    """One bool ``[T]`` per sample."""
    masks = [_checks.as_mask("attention_mask", mask) for mask in _mask_rows(attention_mask)]
    _checks.check_rows("attention_mask", len(masks), len(names.lengths), hint="Give it a row per sample.")
    for i, length in enumerate(names.lengths):
        name = names.of("attention_mask", i)
        _checks.check_shape(name, masks[i].shape, (length,), error=RouteShapeError, hint="Give it a value per token.")
    return masks


def _mask_rows(mask: MaskRows) -> list[torch.Tensor]:
    if isinstance(mask, torch.Tensor):
        return list(mask.flatten(0, -2)) if mask.ndim > 1 else [mask]
    return [row for part in mask for row in _mask_rows(part)]
