"""Rollouts token by token in a terminal: in colors by rich, or as lines of text, one for each run of one label."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from torchrl_moe.render.token_sample import ShownToken, TokenSample
from torchrl_moe.render.token_scale import Scale

__all__ = ["print_samples", "samples_text"]


def print_samples(samples: Sequence[TokenSample], scale: Scale) -> None:
    """Print rollouts: in colors on a terminal if rich is installed, otherwise as :func:`samples_text`."""
    try:
        from rich.console import Console
    except ImportError:
        print(samples_text(samples, scale))
        return
    console = Console()
    if not console.is_terminal or console.no_color or not console.color_system:
        print(samples_text(samples, scale), file=sys.stdout)
        return
    for line in _colored(samples, scale):
        console.print(line, soft_wrap=True)


def samples_text(samples: Sequence[TokenSample], scale: Scale) -> str:
    """Return rollouts as lines of text: the part and the label of a run of tokens, and what it says."""
    legend = ", ".join(scale.fills) or "not known"
    lines = [f"{scale.title}: {legend}"]
    for sample in samples:
        lines.append(sample.title)
        rows = list(_runs(sample, scale))
        width = max((len(head) for head, _ in rows), default=0)
        lines += [f"  {head.ljust(width)}  {text}" for head, text in rows]
    return "\n".join(lines)


def _runs(sample: TokenSample, scale: Scale) -> Iterator[tuple[str, str]]:
    def head(token: ShownToken | int) -> str:
        if isinstance(token, int):
            return "…"
        label = scale.label(token)
        return token.part if label is None else f"{token.part}, {label}"

    for name, run in groupby(sample.tokens, key=head):
        tokens = list(run)
        texts = [f"{token} more tokens" if isinstance(token, int) else token.text for token in tokens]
        yield name, "".join(texts).replace("\n", "")  # a line break is seen: ↵


def _colored(samples: Sequence[TokenSample], scale: Scale) -> Iterator[Any]:
    from rich.text import Text

    legend = Text(f"{scale.title}: ")
    for label, fill in scale.fills.items():
        legend.append(f" {label} ", f"black on {fill.on_white}").append(" ")
    yield legend
    for sample in samples:
        yield Text(sample.title, "bold")
        line, part = Text(), ""
        for token in sample.tokens:
            if isinstance(token, int):
                line.append(f" … {token} more tokens … ", "italic")
                continue
            if token.part != part:
                part = token.part
                line.append(f"[{part}] ", "bold")
            seen = scale.fill(token)
            styles = [f"black on {seen.on_white}"] if seen is not None and seen.alpha else []
            styles += ["underline"] * (token.part == "observation") + ["bold"] * token.special
            line.append(token.text, " ".join(styles))
        yield line
