"""What the color of a token means: a label for each, and a color for each label."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torchrl_moe.render.kept_numbers import KEPT_LABELS, kept_label
from torchrl_moe.render.palette import HUES, OTHERS, Fill, shades
from torchrl_moe.render.token_sample import ShownToken, TokenSample

__all__ = ["Color", "Scale", "make_scale"]

Color = Literal["versions", "experts", "kept", "log_probs"]
LIKELY = (0.9, 0.5, 0.1, 0.01)
LIKELY_LABELS = ("p ≥ 0.9", "p 0.5 to 0.9", "p 0.1 to 0.5", "p 0.01 to 0.1", "p < 0.01")


@dataclass(frozen=True, slots=True)
class Scale:
    """Labels of tokens.

    Attributes:
        title: what the labels are.
        fills: label -> its color, in the order of a legend.
        label: of a token; ``None`` if it has none.
    """

    title: str
    fills: Mapping[str, Fill]
    label: Callable[[ShownToken], str | None]

    def fill(self, token: ShownToken) -> Fill | None:
        """Return the color of a token; ``None`` if it has none."""
        label = self.label(token)
        return None if label is None else self.fills[label]


def make_scale(samples: Sequence[TokenSample], color: Color = "versions", layer: int | None = None) -> Scale:
    """Return what colors mean in some samples; the same in all of them.

    Args:
        samples: that are shown.
        color: ``"versions"`` of the weights that sampled a token; ``"experts"``: the one that stands first in a layer;
            ``"kept"``: how many words a token was sampled from; ``"log_probs"``: of the policy that sampled it.
        layer: of the experts; by default the first that has routes.

    Raises:
        ValueError: another color, or a layer without routes.
    """
    if color not in get_args(Color):
        raise ValueError(f"color must be one of {', '.join(map(repr, get_args(Color)))}, got {color!r}")
    tokens = [token for sample in samples for token in sample.shown]
    if color == "versions":
        return _of_versions(tokens)
    if color == "experts":
        return _of_experts(tokens, layer)
    labels, label = (KEPT_LABELS, _kept) if color == "kept" else (LIKELY_LABELS, _likely)
    fills = dict(zip(labels, shades(len(labels))[:: -1 if color == "kept" else 1], strict=True))
    title = "words that a token was sampled from" if color == "kept" else "probability of a sampled token"
    seen = {found for token in tokens if (found := label(token)) is not None}
    return Scale(title, {name: fill for name, fill in fills.items() if name in seen}, label)


def _of_versions(tokens: Sequence[ShownToken]) -> Scale:
    versions = sorted({token.version for token in tokens if token.version is not None})
    named = versions if len(versions) <= len(HUES) else versions[-len(HUES) :]
    fills = {"older": OTHERS} if len(named) < len(versions) else {}
    by_number = len({version % len(HUES) for version in named}) == len(named)
    for place, version in enumerate(named):  # by its number, if it can be: the next batch then has the same colors
        fills[f"version {version}"] = HUES[version % len(HUES) if by_number else place]

    def label(token: ShownToken) -> str | None:
        if token.version is None:
            return None
        return f"version {token.version}" if token.version in named else "older"

    return Scale("version of the weights that sampled a token", fills, label)


def _of_experts(tokens: Sequence[ShownToken], layer: int | None) -> Scale:
    layers = sorted({known for token in tokens for known in token.experts})
    at = layer if layer is not None else layers[0] if layers else 0
    if layers and at not in layers:
        raise ValueError(f"layer {at} has no routes in these samples: take one of {', '.join(map(str, layers))}")
    counts = Counter(token.experts[at][0] for token in tokens if at in token.experts)
    most = len(HUES) + (len(counts) == len(HUES) + 1)  # eight experts need no grey for others
    common = [expert for expert, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]]
    fills = {f"expert {expert}": fill for expert, fill in zip(sorted(common), (*HUES, OTHERS), strict=False)}
    if len(counts) > len(common):
        fills["another expert"] = OTHERS

    def label(token: ShownToken) -> str | None:
        if at not in token.experts:
            return None
        first = token.experts[at][0]
        return f"expert {first}" if first in common else "another expert"

    return Scale(f"expert that stands first in layer {at}", fills, label)


def _likely(token: ShownToken) -> str | None:
    if token.log_prob is None:
        return None
    probability = math.exp(min(token.log_prob, 0.0))
    return LIKELY_LABELS[sum(probability < bound for bound in LIKELY)]


def _kept(token: ShownToken) -> str | None:
    return None if token.kept is None else kept_label(token.kept)
