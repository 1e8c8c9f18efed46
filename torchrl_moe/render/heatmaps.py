"""Layers x experts: how the load lies on the experts, and where trainer and engine choose the same ones.

Letters: N rows (tokens of all samples), L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

from torchrl_moe import _checks

__all__ = ["expert_agreement", "expert_figure", "expert_load"]

Array: TypeAlias = "np.ndarray[Any, Any]"


def expert_load(routes: Any, num_experts: int) -> Array:
    """Return how much of its layer's load each expert has, over an even share: float64 ``[L, E]``, 1 if even.

    Args:
        routes: integers ``[..., L, K]``, -1 where no expert is known: ``("routed_experts", "full")``.
        num_experts: E.

    Returns:
        NaN in layers without a row.

    >>> expert_load(np.array([[[0, 1]], [[0, 2]]]), num_experts=4)
    array([[2., 1., 1., 0.]])
    """
    rows = _rows(routes, num_experts)
    counts = _count(rows, rows >= 0, num_experts)
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts * num_experts, total, out=np.full_like(counts, np.nan), where=total > 0)


def expert_agreement(recorded: Any, live: Any, num_experts: int) -> Array:
    """Return, of the rows that one side sent to an expert, the share that the other sent there too: ``[L, E]``.

    Args:
        recorded: integers ``[..., L, K]``, the engine's choice.
        live: of the same shape, the trainer's: what ``TransformersWrapper(replay="R2")`` or ``RouterReplay.record``
            writes. Rows in which either is -1 do not count.
        num_experts: E.

    Returns:
        float64, NaN for experts that no row was sent to.

    >>> expert_agreement(np.array([[[0, 1]], [[0, 2]]]), np.array([[[1, 0]], [[2, 3]]]), num_experts=4)
    array([[0.5, 1. , 1. , nan]])
    """
    _checks.check_same_shape({"recorded": np.asarray(recorded), "live": np.asarray(live)})
    theirs, ours = _rows(recorded, num_experts), _rows(live, num_experts)
    known = (theirs >= 0) & (ours[..., :1] >= 0)
    both = known & (theirs[..., :, None] == ours[..., None, :]).any(-1)
    sent = _count(theirs, known, num_experts)
    return np.divide(_count(theirs, both, num_experts), sent, out=np.full_like(sent, np.nan), where=sent > 0)


def expert_figure(load: Any, agreement: Any | None = None, title: str = "") -> Any:
    """Draw the load of every expert, and its agreement beside it; what is NaN is grey.

    Args:
        load: ``[L, E]`` over an even share, see :func:`expert_load`.
        agreement: ``[L, E]`` in 0..1, see :func:`expert_agreement`.
        title: of the figure.

    Returns:
        A matplotlib figure.

    Raises:
        ValueError: another rank, or two shapes.
    """
    from torchrl_moe.render.figures import NotebookFigure

    panels: dict[str, tuple[Array, float | None, str]] = {}
    panels["load, 1 = even"] = (np.asarray(load, dtype=np.float64), None, "viridis")
    if agreement is not None:
        panels["agreement of trainer and engine"] = (np.asarray(agreement, dtype=np.float64), 1.0, "magma")
    for name, (values, _, _) in panels.items():
        _checks.check_rank(name, values, 2, hint="It is [L, E], layers x experts.")
    _checks.check_same_shape({name: values for name, (values, _, _) in panels.items()})
    figure = NotebookFigure(figsize=(6 * len(panels), 4), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (name, (values, top, colors)) in zip(row, panels.items(), strict=True):
        axes.set_facecolor("lightgrey")
        image = axes.imshow(values, aspect="auto", interpolation="nearest", vmin=0.0, vmax=top, cmap=colors)
        axes.set(title=name, xlabel="expert", ylabel="layer")
        figure.colorbar(image, ax=axes)
    figure.suptitle(title)
    return figure


def _rows(routes: Any, num_experts: int) -> Array:
    """Return ``[N, L, K]`` int64, checked."""
    routes = np.asarray(routes)
    _checks.check_integer("routes", routes, signed=True)
    _checks.check_shape("routes", routes.shape, (..., "L", "K"))
    if routes.size and not -1 <= routes.min() <= routes.max() < num_experts:
        raise ValueError(
            f"routes must be in -1..{num_experts - 1}, got {routes.min()}..{routes.max()}: check num_experts."
        )
    return routes.reshape(-1, *routes.shape[-2:]).astype(np.int64)


def _count(rows: Array, chosen: Array, num_experts: int) -> Array:
    """Return how often each expert stands among the ``chosen`` entries of ``rows``, float64 ``[L, E]``."""
    layers = rows.shape[1]
    experts = (rows + num_experts * np.arange(layers)[:, None])[chosen]
    return np.bincount(experts, minlength=layers * num_experts).reshape(layers, num_experts).astype(np.float64)
