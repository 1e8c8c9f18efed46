"""Rollouts token by token as HTML: no script, no colors of text, and a hover title on each token."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from torchrl_moe.render.token_sample import ShownToken, TokenSample
from torchrl_moe.render.token_scale import Scale

__all__ = ["samples_html"]

BLOCK = "color:inherit;background:transparent;font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;"
LABEL = "font-size:smaller;font-weight:bold;opacity:0.8;"
MARKER = "outline:1px solid rgba(128,128,128,0.8);"
OBSERVED = "border-bottom:1px dashed rgba(128,128,128,0.9);"
SHOWN_LAYERS = 8
"""Layers of which a hover title names the experts."""


def samples_html(samples: Sequence[TokenSample], scale: Scale, layer: int | None = None) -> str:
    """Return rollouts as HTML; every text is escaped.

    Args:
        samples: that are shown.
        scale: what colors mean.
        layer: whose experts stand in the hover titles; by default the first eight that have routes.
    """
    body = "\n".join(_sample(sample, scale, layer) for sample in samples)
    return f'<div style="color:inherit;background:transparent;">{_legend(samples, scale)}\n{body}</div>'


def _legend(samples: Sequence[TokenSample], scale: Scale) -> str:
    labels = [scale.label(token) for sample in samples for token in sample.shown]
    entries = [
        f'<span style="background:{fill.css};padding:0 0.4em;">{escape(label)}</span> ({labels.count(label)})'
        for label, fill in scale.fills.items()
    ]
    marks = (
        f'<span style="{MARKER}padding:0 0.4em;">special token</span> '
        f'<span style="{OBSERVED}padding:0 0.4em;">not sampled, after the prompt</span>'
    )
    return f"<div>{escape(scale.title)}: {' '.join(entries) or 'not known'} &nbsp; {marks}</div>"


def _sample(sample: TokenSample, scale: Scale, layer: int | None) -> str:
    pieces, part, last = [], "", ""
    for token in sample.tokens:
        if isinstance(token, int):
            pieces.append(f'<span style="{LABEL}">… {token} more tokens … </span>')
            continue
        if token.part != part:
            broken = "" if not part or last.endswith("\n") else "<br>"
            part = token.part
            pieces.append(f'{broken}<span style="{LABEL}">[{part}] </span>')
        pieces.append(_token(token, scale, layer))
        last = token.text
    title = f'<div style="margin-top:0.6em;"><b>{escape(sample.title)}</b></div>'
    return f'{title}<div style="{BLOCK}">{"".join(pieces)}</div>'


def _token(token: ShownToken, scale: Scale, layer: int | None) -> str:
    fill = scale.fill(token)
    style = f"background:{fill.css};" if fill is not None and fill.alpha else ""
    style += (MARKER if token.special else "") + (OBSERVED if token.part == "observation" else "")
    title = escape(describe(token, layer)).replace("\n", "&#10;")
    return f'<span title="{title}"{f" style={chr(34)}{style}{chr(34)}" if style else ""}>{escape(token.text)}</span>'


def describe(token: ShownToken, layer: int | None = None) -> str:
    """Return all that is known of a token, in lines."""
    lines = [f"token {token.position}, id {token.id}: {token.text.rstrip(chr(10))}"]
    if token.log_prob is not None:
        lines.append(f"log-prob {token.log_prob:.4g}")
    if token.version is not None:
        lines.append(f"version {token.version}")
    if token.kept is not None:
        words = "all words" if not token.kept else f"{token.kept} words" if token.kept > 0 else f"all but {-token.kept}"
        lines.append(f"sampled from {words}")
    layers = [known for known in token.experts if layer is None or known == layer]
    lines += [f"layer {at}: experts {', '.join(map(str, token.experts[at]))}" for at in layers[:SHOWN_LAYERS]]
    hidden = len(layers) - SHOWN_LAYERS
    return "\n".join([*lines, *([f"and {hidden} more layers"] if hidden > 0 else [])])
