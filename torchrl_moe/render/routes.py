"""The experts of rollouts: maps per layer, agreement, loads, heat maps, numbers of kept tokens.

Functions named ``*_figure`` return a matplotlib figure; without matplotlib they raise an ImportError that names the
extra. Letters: N rows (tokens of all samples), L decoder layers, K experts per token, E experts.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from torchrl_moe import _checks

__all__ = [
    "KEPT_LABELS",
    "agreement_figure",
    "expert_agreement",
    "expert_figure",
    "expert_load",
    "kept_counts",
    "kept_figure",
    "kept_label",
    "kept_rows",
    "layer_agreement",
    "load_figure",
    "routes_figure",
]


if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Routes: TypeAlias = "npt.NDArray[np.integer[Any]]"
LAYERS = 4
"""How many are drawn if none are named."""


def routes_figure(
    routes: npt.ArrayLike, layers: Sequence[int] | None = None, *, prompt: int | None = None, title: str = ""
) -> Figure:
    """Draw which experts each token of a rollout was routed to: tokens from left to right, experts from the bottom up.

    Args:
        routes: integers ``[T, L, K]``, -1 where no route is known: ``td[0]["routed_experts", "full"]``. Tokens without
            a route are grey.
        layers: those that are drawn, each in a panel; default: up to four of those with routes, evenly apart.
        prompt: tokens of the prompt; a line is drawn after them.
        title: of the figure.

    Raises:
        ValueError: routes of another shape, no integers, or a layer that there is not.
    """
    from torchrl_moe.render.figures import NotebookFigure, whole_ticks

    rows = np.asarray(routes)
    _checks.check_rank("routes", rows, 3, hint="It is [T, L, K], of one rollout: index the batch first.")
    _checks.check_integer("routes", rows, signed=True)
    if layers is None:
        known = np.flatnonzero((rows[..., 0] >= 0).any(0)) if rows.size else np.zeros(0, int)
        count = min(LAYERS, len(known))  # evenly apart
        layers = [int(known[round(at * (len(known) - 1) / max(1, count - 1))]) for at in range(count)]
    drawn = list(layers)
    for layer in drawn:
        if not 0 <= layer < rows.shape[1]:
            raise ValueError(f"layers must be in 0..{rows.shape[1] - 1}, got {layer}")
    figure = NotebookFigure(figsize=(9, 1.0 + 1.6 * max(1, len(drawn))), layout="constrained")
    panels = figure.subplots(max(1, len(drawn)), sharex=True, squeeze=False)[:, 0]
    experts = int(rows.max(initial=0)) + 1
    for axes, layer in zip(panels, drawn, strict=False):
        axes.set_facecolor("lightgrey")
        # one column for each token: 1 for its experts, 0 for others, grey where no route is known
        image = np.where(rows[:, layer, 0] >= 0, np.zeros((experts, 1)), np.nan)  # nan is drawn as nothing
        token, place = (rows[:, layer] >= 0).nonzero()
        image[rows[token, layer, place], token] = 1.0
        axes.imshow(image, aspect="auto", interpolation="nearest", origin="lower", vmin=0.0, vmax=1.0, cmap="viridis")
        axes.set_ylabel(f"layer {layer}\nexpert")
        whole_ticks(axes.xaxis)
        whole_ticks(axes.yaxis, 4)
        if prompt is not None:
            axes.axvline(prompt - 0.5, color="C1", linestyle="--", linewidth=1.5)
    if not drawn:
        panels[0].text(0.5, 0.5, "no route is known", ha="center", va="center", transform=panels[0].transAxes)
    what = "token, the response after the dashed line" if prompt is not None else "token"
    panels[-1].set_xlabel(f"{what}; bright: routed there, grey: no route known")
    figure.suptitle(title or f"experts of {len(rows)} tokens")
    return figure


def layer_agreement(recorded: npt.ArrayLike, live: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Return, for each layer, the share of rows in which both sides choose the same set: float64 ``[L]``.

    It is NaN in layers without a row.

    Args:
        recorded: integers ``[..., L, K]``, the engine's choice.
        live: of the same shape, the trainer's. Rows in which either is -1 do not count.

    >>> layer_agreement(np.array([[[0, 1]], [[0, 2]]]), np.array([[[1, 0]], [[2, 3]]]))
    array([0.5])
    """
    recorded, live = np.asarray(recorded), np.asarray(live)
    _checks.check_same_shape({"recorded": recorded, "live": live})
    for name, values in (("recorded", recorded), ("live", live)):
        _checks.check_integer(name, values, signed=True)
        _checks.check_shape(name, values.shape, (..., "L", "K"))
    # as sets: the order of a row's experts depends on the kernel
    theirs, ours = (np.sort(values.reshape(-1, *values.shape[-2:]), axis=-1) for values in (recorded, live))
    known = (theirs[..., -1] >= 0) & (ours[..., -1] >= 0)
    same = known & (theirs == ours).all(-1)
    rows = known.sum(0)
    return np.divide(same.sum(0), rows, out=np.full(len(rows), np.nan), where=rows > 0)


def agreement_figure(agreements: Mapping[str, npt.ArrayLike], title: str = "") -> Figure:
    """Draw the share of rows with the same experts over the layers; with and without replay, say.

    Args:
        agreements: by label, ``[L]`` in 0..1: of :func:`layer_agreement`, or one sample's ``("routing", "agreement")``;
            NaN, a layer without a router, is left out.
        title: of the figure.

    Raises:
        ValueError: values of another rank, or outside of 0..1.
    """
    from torchrl_moe.render.figures import NotebookFigure, legend_above, whole_ticks

    columns = {label: np.asarray(values, dtype=np.float64) for label, values in agreements.items()}
    for label, values in columns.items():
        _checks.check_rank(label, values, 1, hint="It is [L], a share for each layer.")
        known = values[np.isfinite(values)]
        if known.size and not 0 <= known.min() <= known.max() <= 1:
            raise ValueError(f"{label}: shares must be in 0..1, got {known.min():g}..{known.max():g}")
    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for number, (label, values) in enumerate(columns.items()):
        layers = np.isfinite(values).nonzero()[0]
        mean = f", mean {values[layers].mean():.1%}" if len(layers) else ""
        # markers, since lines at 1.0 lie over each other
        axes.plot(layers, values[layers], "os^Dv"[number % 5] + "-", label=f"{label}{mean}")
    axes.set(xlabel="layer", ylabel="share of rows with the same experts", ylim=(-0.02, 1.02))
    whole_ticks(axes.xaxis)
    axes.grid(alpha=0.3)
    legend_above(axes, title or "agreement of trainer and engine")
    return figure


KEPT = (1, 4, 16, 64)
KEPT_LABELS = ("1 entry", "2 to 4 entries", "5 to 16 entries", "17 to 64 entries", "more", "all but some", "all")


def kept_label(size: int) -> str:
    """Return the label of a size of ``KeptTokens``: n token ids, ``-n`` for all but n, 0 for the whole vocabulary.

    >>> [kept_label(size) for size in (1, 2, 4, 5, 100, -3, 0)]
    ['1 entry', '2 to 4 entries', '2 to 4 entries', '5 to 16 entries', 'more', 'all but some', 'all']
    """
    if size <= 0:
        return KEPT_LABELS[-1 if size == 0 else -2]
    return KEPT_LABELS[bisect_right(KEPT, size - 1)]


def kept_rows(sizes: npt.ArrayLike) -> list[tuple[str, str]]:
    """Return how many tokens have sizes of each label, as rows of a table; integers of any shape, see above."""
    counts: Counter[str] = Counter()
    for size, count in zip(*np.unique(np.asarray(sizes), return_counts=True), strict=True):
        counts[kept_label(int(size))] += int(count)
    return [(label, f"{counts[label]:,}") for label in KEPT_LABELS if counts[label]]


def kept_counts(sizes: npt.ArrayLike, sampled: npt.ArrayLike, vocabulary: int) -> npt.NDArray[np.int64]:
    """Return how many token ids each sampled token was sampled from: int64 ``[N]``.

    Args:
        sizes: integers of any shape, ``KeptTokens.sizes``: n ids, ``-n`` for all but n, 0 for all.
        sampled: bool of the same shape: the tokens that count, ``("masks", "all_assistant_mask")``.
        vocabulary: token ids that there are.

    Raises:
        ValueError: two shapes, or a size beyond the vocabulary.

    >>> kept_counts(np.array([0, 2, -1, 0]), np.array([False, True, True, True]), vocabulary=9)
    array([2, 8, 9])
    """
    sizes, sampled = np.asarray(sizes), np.asarray(sampled).astype(bool)
    _checks.check_same_shape({"sizes": sizes, "sampled": sampled})
    _checks.check_integer("sizes", sizes)
    counts = sizes[sampled].astype(np.int64)
    if counts.size and abs(counts).max() > vocabulary:
        raise ValueError(f"a token was sampled from {abs(counts).max()} token ids, and there are {vocabulary}")
    return np.where(counts > 0, counts, vocabulary + counts)


def kept_figure(counts: Mapping[str, npt.ArrayLike], vocabulary: int, title: str = "") -> Figure:
    """Draw what share of the tokens was sampled from how many token ids, on a log scale from 1 to the vocabulary.

    Args:
        counts: by label (``"top_p=0.9"``, say), numbers of token ids of any shape, see :func:`kept_counts`.
        vocabulary: token ids that there are.
        title: of the figure.

    Raises:
        ValueError: a count is not in 1..vocabulary.
    """
    from torchrl_moe.render.figures import NotebookFigure, legend_above

    flat = {label: np.asarray(values).reshape(-1) for label, values in counts.items()}
    for label, values in flat.items():
        if values.size and not 1 <= values.min() <= values.max() <= vocabulary:
            raise ValueError(f"{label}: counts must be in 1..{vocabulary}, got {values.min()}..{values.max()}")
    # edges of bins between whole numbers, each about twice as wide as the one before
    powers = [2**power for power in range(max(1, vocabulary).bit_length())]
    edges = np.array([*(power - 0.5 for power in powers), vocabulary + 0.5])
    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in flat.items():
        shares = np.histogram(values, edges)[0] / max(1, len(values))
        median = f", median {int(np.median(values))}" if len(values) else ""
        axes.stairs(shares, edges, label=f"{label}, {len(values)} tokens{median}")
    axes.axvline(vocabulary, linestyle=":", color="grey", label=f"the vocabulary, {vocabulary}")
    axes.set_xscale("log", base=2)
    axes.set(xlabel="token ids that a token was sampled from", ylabel="share of tokens")
    axes.grid(alpha=0.3)
    legend_above(axes, title or "kept tokens per token")
    return figure


def expert_load(routes: npt.ArrayLike, num_experts: int) -> npt.NDArray[np.float64]:
    """Return each expert's load over an even share of its layer's: float64 ``[L, E]``, 1 if even, NaN without a row.

    Args:
        routes: integers ``[..., L, K]``, -1 where no expert is known: ``("routed_experts", "full")``.
        num_experts: E.

    >>> expert_load(np.array([[[0, 1]], [[0, 2]]]), num_experts=4)
    array([[2., 1., 1., 0.]])
    """
    rows = _rows(routes, num_experts)
    counts = _count(rows, rows >= 0, num_experts)
    total = counts.sum(-1, keepdims=True)
    return np.divide(counts * num_experts, total, out=np.full_like(counts, np.nan), where=total > 0)


def expert_agreement(recorded: npt.ArrayLike, live: npt.ArrayLike, num_experts: int) -> npt.NDArray[np.float64]:
    """Return, of the rows that one side sent to an expert, the share that the other sent there too: float64 ``[L, E]``.

    It is NaN for experts that no row was sent to.

    Args:
        recorded: integers ``[..., L, K]``, the engine's choice.
        live: of the same shape, the trainer's: what ``TransformersWrapper(replay="R2")`` or ``RouterReplay.record``
            writes. Rows in which either is -1 do not count.
        num_experts: E.

    >>> expert_agreement(np.array([[[0, 1]], [[0, 2]]]), np.array([[[1, 0]], [[2, 3]]]), num_experts=4)
    array([[0.5, 1. , 1. , nan]])
    """
    _checks.check_same_shape({"recorded": np.asarray(recorded), "live": np.asarray(live)})
    theirs, ours = _rows(recorded, num_experts), _rows(live, num_experts)
    known = (theirs >= 0) & (ours[..., :1] >= 0)
    # each expert of theirs against all of ours: [N, L, K, K]
    both = known & (theirs[..., :, None] == ours[..., None, :]).any(-1)
    sent = _count(theirs, known, num_experts)
    return np.divide(_count(theirs, both, num_experts), sent, out=np.full_like(sent, np.nan), where=sent > 0)


def expert_figure(load: npt.ArrayLike, agreement: npt.ArrayLike | None = None, title: str = "") -> Figure:
    """Draw the load of every expert, and its agreement beside it; what is NaN is grey.

    Args:
        load: ``[L, E]`` over an even share, see :func:`expert_load`.
        agreement: ``[L, E]`` in 0..1, see :func:`expert_agreement`.
        title: of the figure.

    Raises:
        ValueError: another rank, or two shapes.
    """
    from torchrl_moe.render.figures import NotebookFigure, whole_ticks

    panels = {"load, 1 = even": np.asarray(load, dtype=np.float64)}
    if agreement is not None:
        panels["agreement of trainer and engine"] = np.asarray(agreement, dtype=np.float64)
    for name, values in panels.items():
        _checks.check_rank(name, values, 2, hint="It is [L, E], layers x experts.")
    _checks.check_same_shape(panels)
    figure = NotebookFigure(figsize=(6 * len(panels), 4), layout="constrained")
    row = figure.subplots(1, len(panels), squeeze=False)[0]
    tops, maps = (None, 1.0), ("viridis", "magma")
    for axes, (name, values), top, colors in zip(row, panels.items(), tops, maps, strict=False):
        axes.set_facecolor("lightgrey")
        image = axes.imshow(values, aspect="auto", interpolation="nearest", vmin=0.0, vmax=top, cmap=colors)
        axes.set(title=name, xlabel="expert", ylabel="layer")
        whole_ticks(axes.xaxis)
        whole_ticks(axes.yaxis)
        figure.colorbar(image, ax=axes)
    figure.suptitle(title)
    return figure


def _rows(routes: npt.ArrayLike, num_experts: int) -> Routes:
    """Return ``[N, L, K]`` int64, checked."""
    rows = np.asarray(routes)
    _checks.check_integer("routes", rows, signed=True)
    _checks.check_shape("routes", rows.shape, (..., "L", "K"))
    if rows.size and not -1 <= rows.min() <= rows.max() < num_experts:
        raise ValueError(f"routes must be in -1..{num_experts - 1}, got {rows.min()}..{rows.max()}: check num_experts.")
    # int64, since numbers of experts are multiplied
    return rows.reshape(-1, *rows.shape[-2:]).astype(np.int64)


def _count(rows: Routes, chosen: npt.NDArray[np.bool_], num_experts: int) -> npt.NDArray[np.float64]:
    """Return how often each expert stands among the ``chosen`` entries of ``rows``, float64 ``[L, E]``."""
    # layer by layer in one count: expert e of layer l is number l E + e
    layers = rows.shape[1]
    experts = (rows + num_experts * np.arange(layers)[:, None])[chosen]
    return np.bincount(experts, minlength=layers * num_experts).reshape(layers, num_experts).astype(np.float64)


ROW = 0.07
"""Of the height of the axes, for a row of labels."""
MOST_ROWS = 8
GAP = 6.0
"""Pixels between two labels of a row."""


def load_figure(
    loads: Mapping[str, Sequence[tuple[float, float]]],
    events: Sequence[tuple[float, str]] = (),
    title: str = "",
    quantity: str = "requests in flight",
) -> Figure:
    """Draw the load of each replica as a line of steps, and a line across them for each event.

    Args:
        loads: by replica, seconds and load from there to the next entry.
        events: seconds, and what happened (``"replica 1 died"``, say).
        title: of the figure.
        quantity: what the load is, with its unit.

    Raises:
        ValueError: seconds that go back.
    """
    from torchrl_moe.render.figures import NotebookFigure, legend_above

    for name, samples in loads.items():
        times = [at for at, _ in samples]
        if times != sorted(times):
            raise ValueError(f"the seconds of {name} go back")
    end = max([0.0, *(samples[-1][0] for samples in loads.values() if samples), *(at for at, _ in events)])
    figure = NotebookFigure(figsize=(9, 4), layout="constrained")
    axes = figure.subplots()
    for number, (name, samples) in enumerate(loads.items()):
        times = [at for at, _ in samples] + ([end] if samples else [])
        counts = [count for _, count in samples] + ([samples[-1][1]] if samples else [])
        axes.step(times, counts, where="post", linestyle=("-", "--", "-.", ":")[number % 4], label=name)
    axes.set(xlabel="seconds", ylabel=quantity)
    # room above the lines for the labels of events
    rows = _draw_events(axes, events)
    highest = max([1.0, *(count for samples in loads.values() for _, count in samples)])
    axes.set_ylim(0, 1.05 * highest / (1 - ROW * rows))
    axes.grid(alpha=0.3)
    legend_above(axes, title or "load of the replicas")
    return figure


def _draw_events(axes: Axes, events: Sequence[tuple[float, str]]) -> int:
    """Draw a line and a label for each event, labels in rows from the top, none over another; return how many rows."""
    for at, _ in events:
        axes.axvline(at, color="grey", linestyle=":")
    ends: list[float] = []  # of the last label of each row
    behind = {"facecolor": axes.get_facecolor(), "edgecolor": "none", "pad": 0.5}  # or lines would strike it through
    for at, what in sorted(events):
        label = axes.annotate(
            what, (at, 1), xycoords=axes.get_xaxis_transform(), xytext=(3, -3), textcoords="offset points", va="top",
            fontsize="small", bbox=behind,
        )  # fmt: skip
        # the first row in which the last label has ended; if there are too many, the row that ends first
        begin = axes.transData.transform((at, 0))[0]
        row = next((row for row, end in enumerate(ends) if end <= begin), len(ends))
        if row == MOST_ROWS:
            row = ends.index(min(ends))
        label.xy = (at, 1 - ROW * row)
        ends[row : row + 1] = [begin + label.get_window_extent().width + GAP]
    return len(ends)
