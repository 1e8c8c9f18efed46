"""Rollouts shown token by token, in a notebook or a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrl_moe._checks import renamed
from torchrl_moe.render.notebooks import in_notebook, show_html
from torchrl_moe.render.token_html import samples_html
from torchrl_moe.render.token_runs import print_samples, samples_text
from torchrl_moe.render.token_sample import TokenSample, read_samples
from torchrl_moe.render.token_scale import Color, make_scale

__all__ = ["MOST_TOKENS", "show_samples", "show_token_samples"]

MOST_TOKENS = 256


@renamed(colour="color")
def show_samples(
    td: Any,
    n: int = 4,
    color: Color = "versions",
    layer: int | None = None,
    *,
    tokenizer: Any = None,
    policy: Any = None,
    tokens: int = MOST_TOKENS,
) -> None:
    """Show the last rollouts of a batch token by token, colored by what is known of each token.

    In a notebook a hover title says of a token its id, text, log-prob, version, number of kept words, and experts. In
    a terminal it is rich that colors, and without rich, or in a file, each run of one label is a line.

    Args:
        td: rollouts of any batch size, of ``vLLMWrapper`` or a collector, padded or not; it is not changed.
        n: how many.
        color: ``"versions"`` of the weights that sampled a token; ``"experts"``: the one that stands first in
            ``layer``; ``"kept"``: how many words a token was sampled from; ``"log_probs"``: of what sampled it.
        layer: of the experts; by default the first that has routes.
        tokenizer: gives tokens their texts; default: the policy's. Without one they are shown as numbers.
        policy: a wrapper that names the keys, if they are not TorchRL's.
        tokens: of each rollout that are shown; of a longer one the end of the prompt, and both ends of what follows.

    Raises:
        ValueError: there are no rollouts or no tokens, ``n`` or ``tokens`` is below 1, another color, or a layer
            without routes.
        TypeError: ``tokenizer`` is no tokenizer.
    """
    samples = read_samples(td, n, tokens, policy=policy, tokenizer=tokenizer)
    if not samples:
        raise ValueError("there are no rollouts to show: the batch is empty")
    show_token_samples(samples, color, layer)


def show_token_samples(samples: Sequence[TokenSample], color: Color = "versions", layer: int | None = None) -> None:
    """Show rollouts that were read before, by another process, say; arguments as in :func:`show_samples`."""
    scale = make_scale(samples, color, layer)
    if in_notebook():
        show_html(samples_html(samples, scale, layer), samples_text(samples, scale))
    else:
        print_samples(samples, scale)
