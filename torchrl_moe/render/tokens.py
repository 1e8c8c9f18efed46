"""Rollouts token by token, in a notebook or a terminal, each token colored by what is known of it."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from torchrl_moe._checks import check_number, renamed
from torchrl_moe.render.curves import HUES, OTHERS, Fill, shades
from torchrl_moe.render.routes import KEPT_LABELS, kept_label
from torchrl_moe.render.tables import in_notebook, show_html

if TYPE_CHECKING:
    from rich.text import Text
    from tensordict import TensorDictBase
    from torch import Tensor

Array: TypeAlias = "npt.NDArray[Any]"

SEEN = {"\n": "↵\n", "\t": "→\t", "\r": "␍"}
"""What stands for a character that would not be seen; a line break breaks the line besides."""

MOST_PARTS = 4
"""Tokens that one character, at most four bytes, is made of."""
OUTSIDE = (IndexError, KeyError, OverflowError, TypeError, ValueError)
"""What tokenizers raise at an id that is not in their vocabulary."""


class Tokenizer(Protocol):
    """What is asked of a tokenizer; ``all_special_ids`` and names of tokens are used if it has them."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        """Return the text of token ids."""
        ...


class TokenTexts:
    """Printable texts of tokens, each decoded once: line breaks, bytes and markers are seen.

    >>> TokenTexts(None).of([12, 7])
    ['12 ', '7 ']
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._texts: dict[tuple[int, ...], str | None] = {}

    def is_special(self, token: int) -> bool:
        """Whether a token is a marker, such as the end of a turn."""
        return token in self._special

    def of(self, tokens: Sequence[int]) -> list[str]:
        """Return a text for each of some tokens that follow one another.

        Of a character that several tokens make up, the first has it, and the others are a ``·``.
        """
        texts: list[str] = []
        while len(texts) < len(tokens):
            at = len(texts)
            # the fewest tokens that make whole characters; if not even four do, the first one is shown by its name
            whole = next((n for n in range(1, MOST_PARTS + 1) if self._decoded(tuple(tokens[at : at + n]))), 1)
            text = self._decoded(tuple(tokens[at : at + whole]))
            texts += [self._name(tokens[at]) if text is None else "".join(map(_seen, text)), *["·"] * (whole - 1)]
        return texts[: len(tokens)]

    def _decoded(self, tokens: tuple[int, ...]) -> str | None:
        """Return the text of tokens that make whole characters, otherwise ``None``."""
        if self._tokenizer is None:
            return "".join(f"{token} " for token in tokens)
        if tokens not in self._texts:
            try:
                text = str(self._tokenizer.decode(list(tokens), skip_special_tokens=False))
            except OUTSIDE:
                text = ""
            self._texts[tokens] = None if not text or "\ufffd" in text else text
        return self._texts[tokens]

    def _name(self, token: int) -> str:
        """Return what the tokenizer calls a token that is no character."""
        try:
            name = self._tokenizer.convert_ids_to_tokens(token)  # type: ignore[union-attr]
        except (*OUTSIDE, AttributeError):
            name = None
        return f"⟨{token}⟩" if name is None else "".join(map(_seen, str(name)))


def _seen(char: str) -> str:
    return SEEN.get(char) or (char if char.isprintable() else char.encode("unicode_escape").decode("ascii"))


# A rollout as plain data: ``read_samples`` finds the tokens in a tensordict by its keys.


Part = Literal["prompt", "response", "observation"]
"""``response`` was sampled, ``observation`` is neither, after the first sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token, and what is known of it."""

    position: int
    id: int
    text: str
    part: Part
    special: bool = False
    log_prob: float | None = None
    version: int | None = None
    experts: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    kept: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSample:
    """One rollout; in ``tokens`` an integer stands for so many that are not shown."""

    index: int
    tokens: Sequence[ShownToken | int]
    counts: Mapping[Part, int]
    reward: float | None = None

    @property
    def shown(self) -> list[ShownToken]:
        return [token for token in self.tokens if isinstance(token, ShownToken)]

    @property
    def title(self) -> str:
        """One line on it."""
        counts = ", ".join(f"{count} {part}" for part, count in self.counts.items() if count)
        reward = "" if self.reward is None else f", reward {self.reward:.4g}"
        return f"sample {self.index}: {counts or 'no'} tokens{reward}"


def rows_of(batch: TensorDictBase) -> list[TensorDictBase]:
    """Return the rows of a tensordict of any batch size, in order, each of batch size ``[]``."""
    if not batch.ndim:
        return [batch]
    parts = list(batch.unbind(0))
    return parts if batch.ndim == 1 else [row for part in parts for row in rows_of(part)]


def read_samples(
    td: TensorDictBase, n: int, most: int, *, policy: object = None, tokenizer: Tokenizer | None = None
) -> list[TokenSample]:
    """Return the last ``n`` rollouts of a batch, with at most ``most`` tokens of each."""
    for name, value in (("n", n), ("tokens", most)):
        check_number(name, value, 1, whole=True)
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer must be a tokenizer of transformers, with decode(), got {tokenizer!r}")
    rows = rows_of(td)
    names = ("tokens", "masks", "log_probs", "routed_experts")
    keys = {name: getattr(policy, f"{name}_key", None) or name for name in names}
    texts = TokenTexts(getattr(policy, "tokenizer", None) if tokenizer is None else tokenizer)
    first = max(0, len(rows) - n)
    return [_read(index, row, keys, most, texts) for index, row in enumerate(rows[first:], first)]


def _read(index: int, row: TensorDictBase, keys: Mapping[str, str], most: int, texts: TokenTexts) -> TokenSample:
    if (found := row.get((keys["tokens"], "full"), None)) is None:
        raise ValueError(
            f"there are no tokens at {(keys['tokens'], 'full')!r}: show_samples takes rollouts, of vLLMWrapper or a "
            "collector; of another policy, pass policy=, which names its keys"
        )
    ids = _array(found)
    # pads are left out of every entry
    mask = row.get((keys["masks"], "all_attention_mask"), None)
    real = np.ones(len(ids), bool) if mask is None or len(mask) != len(ids) else _array(mask).astype(bool)

    def entry(*key: str) -> Array | None:
        if (values := row.get(key, None)) is None:
            return None
        if len(values) != len(ids):
            raise ValueError(f"{key!r} has {len(values)} rows, and there are {len(ids)} tokens")
        return _array(values)[real]

    versions, log_probs = entry("policy_versions", "full"), entry(keys["log_probs"], "full")
    routes, assistant = entry(keys["routed_experts"], "full"), entry(keys["masks"], "all_assistant_mask")
    kept = row.get(("sampling", "kept"), None)
    sizes = None if kept is None else _array(kept.sizes)[real]
    prompt = row.get((keys["tokens"], "prompt"), None)
    prompts = 0 if prompt is None else int(real[: len(prompt)].sum())
    # which part each token is of, then which tokens are shown, then what is known of those
    sampled = _sampled(int(real.sum()), versions, assistant, log_probs, prompts)
    start = int(sampled.argmax()) if sampled.any() else len(sampled)
    parts: list[Part] = [
        "response" if is_sampled else "prompt" if at < start else "observation" for at, is_sampled in enumerate(sampled)
    ]
    real_ids = ids[real].tolist()
    shown = _shown(parts, most)
    written = iter(texts.of([real_ids[at] for at in shown if at >= 0]))
    tokens: list[ShownToken | int] = []
    for at in shown:
        if at < 0:
            tokens.append(-at)
            continue
        experts = {} if routes is None else dict(enumerate(routes[at].tolist()))
        token = ShownToken(
            position=at,
            id=real_ids[at],
            text=next(written),
            special=texts.is_special(real_ids[at]),
            part=parts[at],
            log_prob=float(log_probs[at]) if log_probs is not None and math.isfinite(log_probs[at]) else None,
            version=int(versions[at]) if versions is not None and versions[at] >= 0 else None,
            experts={layer: tuple(e for e in chosen if e >= 0) for layer, chosen in experts.items() if chosen[0] >= 0},
            kept=None if not sampled[at] else 0 if sizes is None else int(sizes[at]),
        )
        tokens.append(token)
    reward = row.get(("next", "reward"), None)
    return TokenSample(
        index=index,
        tokens=tokens,
        counts={part: parts.count(part) for part in get_args(Part)},
        reward=None if reward is None else float(_array(reward).sum()),
    )


def _array(value: Tensor) -> Array:
    """Return a tensor as numpy, wherever it is; bfloat16, which numpy lacks, as float32."""
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _sampled(
    count: int, versions: Array | None, assistant: Array | None, log_probs: Array | None, prompts: int
) -> Array:
    """Say which tokens were sampled, bool ``[T]``, by the entry that knows it best."""
    # versions know turns and observations, masks may; without both, what follows the prompt was sampled
    for known in (None if versions is None else versions >= 0, assistant):
        if known is not None and known.any():
            return known.astype(bool)
    after = np.arange(count) >= prompts
    return after if prompts or log_probs is None else np.isfinite(log_probs)


def _shown(parts: Sequence[Part], most: int) -> list[int]:
    """Return the positions that are shown; ``-n`` stands for n that are not."""
    # a quarter for the prompt, more if the rest needs less; then both ends of what follows
    prompts, after = parts.count("prompt"), len(parts) - parts.count("prompt")
    before = min(prompts, max(most // 4, most - after))
    room = most - before
    head = after if after <= room else (room + 1) // 2
    tail = 0 if after <= room else room - head
    hidden = prompts - before, after - head - tail
    return [
        *([-hidden[0]] if hidden[0] else []),
        *range(hidden[0], prompts + head),
        *([-hidden[1]] if hidden[1] else []),
        *range(len(parts) - tail, len(parts)),
    ]


# -- what colors mean -------------------------------------------------------------------------------------------------


Color = Literal["versions", "experts", "kept", "log_probs"]
LIKELY = (0.9, 0.5, 0.1, 0.01)
LIKELY_LABELS = ("p ≥ 0.9", "p 0.5 to 0.9", "p 0.1 to 0.5", "p 0.01 to 0.1", "p < 0.01")


@dataclass(frozen=True, slots=True)
class Scale:
    """What the color of a token means: a label for each token, and a color for each label."""

    title: str
    fills: Mapping[str, Fill]
    label: Callable[[ShownToken], str | None]

    def fill(self, token: ShownToken) -> Fill | None:
        """Return the color of a token; ``None`` if it has none."""
        label = self.label(token)
        return None if label is None else self.fills[label]


def make_scale(samples: Sequence[TokenSample], color: Color = "versions", layer: int | None = None) -> Scale:
    """Return what colors mean in some samples; the same in all of them."""
    if color not in get_args(Color):
        raise ValueError(f"color must be one of {', '.join(map(repr, get_args(Color)))}, got {color!r}")
    tokens = [token for sample in samples for token in sample.shown]
    if color == "versions":
        return _of_versions(tokens)
    if color == "experts":
        return _of_experts(tokens, layer)
    # both have an order: the rarer a token was, the stronger its color
    labels, label = (KEPT_LABELS, _kept) if color == "kept" else (LIKELY_LABELS, _likely)
    fills = dict(zip(labels, shades(len(labels))[:: -1 if color == "kept" else 1], strict=True))
    title = "vocabulary entries that a token was sampled from" if color == "kept" else "probability of a sampled token"
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


# -- in a terminal ----------------------------------------------------------------------------------------------------


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

    def head(token: ShownToken | int) -> str:
        if isinstance(token, int):
            return "…"
        label = scale.label(token)
        return token.part if label is None else f"{token.part}, {label}"

    lines = [f"{scale.title}: {', '.join(scale.fills) or 'not known'}"]
    for sample in samples:
        lines.append(sample.title)
        rows = []
        for name, run in groupby(sample.tokens, key=head):
            texts = [f"{token} more tokens" if isinstance(token, int) else token.text for token in run]
            rows.append((name, "".join(texts).replace("\n", "")))  # a line break is seen: ↵
        width = max((len(name) for name, _ in rows), default=0)
        lines += [f"  {name.ljust(width)}  {text}" for name, text in rows]
    return "\n".join(lines)


def _colored(samples: Sequence[TokenSample], scale: Scale) -> Iterator[Text]:
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
            # black text, since a terminal's background may be dark
            seen = scale.fill(token)
            styles = [f"black on {seen.on_white}"] if seen is not None and seen.alpha else []
            styles += ["underline"] * (token.part == "observation") + ["bold"] * token.special
            line.append(token.text, " ".join(styles))
        yield line


# -- in a notebook ----------------------------------------------------------------------------------------------------


BLOCK = "color:inherit;background:transparent;font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere;"
LABEL = "font-size:smaller;font-weight:bold;opacity:0.8;"
MARKER = "outline:1px solid rgba(128,128,128,0.8);"
OBSERVED = "border-bottom:1px dashed rgba(128,128,128,0.9);"
SHOWN_LAYERS = 8
"""Layers of which a hover title names the experts."""


def samples_html(samples: Sequence[TokenSample], scale: Scale, layer: int | None = None) -> str:
    """Return rollouts as HTML, with a hover title on each token: no script, no color of text, every text escaped."""
    labels = [scale.label(token) for sample in samples for token in sample.shown]
    entries = [
        f'<span style="background:{fill.css};padding:0 0.4em;">{escape(label)}</span> ({labels.count(label)})'
        for label, fill in scale.fills.items()
    ]
    marks = (
        f'<span style="{MARKER}padding:0 0.4em;">special token</span> '
        f'<span style="{OBSERVED}padding:0 0.4em;">not sampled, after the prompt</span>'
    )
    legend = f"<div>{escape(scale.title)}: {' '.join(entries) or 'not known'} &nbsp; {marks}</div>"
    body = "\n".join(_sample(sample, scale, layer) for sample in samples)
    return f'<div style="color:inherit;background:transparent;">{legend}\n{body}</div>'


def _sample(sample: TokenSample, scale: Scale, layer: int | None) -> str:
    pieces, part, last = [], "", ""
    for token in sample.tokens:
        if isinstance(token, int):
            pieces.append(f'<span style="{LABEL}">… {token} more tokens … </span>')
            continue
        if token.part != part:
            # a part begins a line
            broken = "" if not part or last.endswith("\n") else "<br>"
            part = token.part
            pieces.append(f'{broken}<span style="{LABEL}">[{part}] </span>')
        last = token.text
        fill = scale.fill(token)
        style = f"background:{fill.css};" if fill is not None and fill.alpha else ""
        style += (MARKER if token.special else "") + (OBSERVED if token.part == "observation" else "")
        styled = f' style="{style}"' if style else ""
        hover = escape(describe(token, layer)).replace("\n", "&#10;")
        pieces.append(f'<span title="{hover}"{styled}>{escape(last)}</span>')
    title = f'<div style="margin-top:0.6em;"><b>{escape(sample.title)}</b></div>'
    return f'{title}<div style="{BLOCK}">{"".join(pieces)}</div>'


def describe(token: ShownToken, layer: int | None = None) -> str:
    """Return all that is known of a token, in lines."""
    lines = [f"token {token.position}, id {token.id}: {token.text.rstrip(chr(10))}"]
    if token.log_prob is not None:
        lines.append(f"log-prob {token.log_prob:.4g}")
    if token.version is not None:
        lines.append(f"version {token.version}")
    if token.kept is not None:
        kept = "all" if not token.kept else token.kept if token.kept > 0 else f"all but {-token.kept}"
        lines.append(f"sampled from {kept} vocabulary {'entry' if token.kept in (1, -1) else 'entries'}")
    layers = [known for known in token.experts if layer is None or known == layer]
    lines += [f"layer {at}: experts {', '.join(map(str, token.experts[at]))}" for at in layers[:SHOWN_LAYERS]]
    hidden = len(layers) - SHOWN_LAYERS
    return "\n".join([*lines, *([f"and {hidden} more layers"] if hidden > 0 else [])])


MOST_TOKENS = 256


@renamed(colour="color")
def show_samples(
    td: TensorDictBase,
    n: int = 4,
    color: Color = "versions",
    layer: int | None = None,
    *,
    tokenizer: Tokenizer | None = None,
    policy: object = None,
    tokens: int = MOST_TOKENS,
) -> None:
    """Show the last rollouts of a batch token by token, colored by what is known of each token.

    In a notebook a hover title says all that is known. In a terminal rich colors; without it, or in a file, each run of
    one label is a line.

    Args:
        td: rollouts of any batch size, of ``vLLMWrapper`` or a collector, padded or not; it is not changed.
        n: how many.
        color: ``"versions"`` of the weights that sampled a token; ``"experts"``: the one that stands first in
            ``layer``; ``"kept"``: from how many ids a token was sampled; ``"log_probs"``: of what sampled it.
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
