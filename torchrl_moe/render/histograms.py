"""The distribution of log-ratios between two policies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from torchrl_moe.render.legends import legend_above

__all__ = ["log_ratio_figure"]


def log_ratio_figure(log_ratios: Mapping[str, Any], tau: float = 2.0, bins: int = 81, title: str = "") -> Any:
    """Draw what share of the tokens has which ``log π - log μ``, on a log scale: the tails are what matters.

    Args:
        log_ratios: by label (with and without replay, say), numbers of any shape; what is not finite is left out.
        tau: lines are drawn at ``±log τ``; F(τ), arXiv 2510.11370, is the share of tokens beyond them.
        bins: their number, the same for all labels.
        title: of the figure.

    Returns:
        A matplotlib figure.
    """
    from torchrl_moe.render.figures import NotebookFigure

    if not tau > 1:
        raise ValueError(f"tau must be greater than 1, got {tau}: it bounds a ratio that is 1 where policies agree.")
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}.")
    flat = {label: np.asarray(values, dtype=np.float64).reshape(-1) for label, values in log_ratios.items()}
    flat = {label: values[np.isfinite(values)] for label, values in flat.items()}
    widest = max((abs(values).max() for values in flat.values() if len(values)), default=0.0)
    edges = np.linspace(-1, 1, bins + 1) * (widest or 1.0)
    figure = NotebookFigure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in flat.items():
        shares = np.histogram(values, edges)[0] / max(1, len(values))
        axes.stairs(shares, edges, label=f"{label}, {len(values)} tokens")
    for bound in (-math.log(tau), math.log(tau)):
        axes.axvline(bound, linestyle=":", color="grey")
    if widest:
        axes.set_yscale("log")
    axes.set(xlabel="log-prob, trainer - engine", ylabel="share of tokens")
    axes.grid(alpha=0.3)
    legend_above(axes, title)
    return figure
