"""A rollout token by token, as plain data: what a figure of it, or a text, is made from.

``read_samples`` finds the tokens in a tensordict by its keys; it imports neither tensordict nor an engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from torchrl_moe.render.token_text import TokenTexts

__all__ = ["Part", "ShownToken", "TokenSample", "read_samples", "rows_of"]

Part = str
"""``prompt``, ``response`` (sampled), or ``observation``: neither, after the first sampled token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownToken:
    """One token.

    Attributes:
        position: in its sequence, pads not counted.
        id: in the vocabulary.
        text: of it alone, printable.
        part: of the rollout it stands in.
        special: whether it is a marker and no text.
        log_prob: of the policy that sampled it; ``None`` if there is none.
        version: of the weights that sampled it; ``None`` if nothing did.
        experts: by layer, those that it was routed to; layers without a route are left out.
        kept: how many words it was sampled from; ``-n``: all but n; 0: all; ``None``: it was not sampled.
    """

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
    """One rollout.

    Attributes:
        index: its row in the batch, all batch dimensions flattened.
        tokens: those that are shown, in order; a number stands for so many that are not.
        counts: tokens by part, those that are not shown too.
        reward: the sum over the rollout; ``None`` if it has none.
    """

    index: int
    tokens: Sequence[ShownToken | int]
    counts: Mapping[Part, int]
    reward: float | None = None

    @property
    def shown(self) -> list[ShownToken]:
        """The tokens that are shown."""
        return [token for token in self.tokens if isinstance(token, ShownToken)]

    @property
    def title(self) -> str:
        """One line on it."""
        counts = ", ".join(f"{count} {part}" for part, count in self.counts.items() if count)
        reward = "" if self.reward is None else f", reward {self.reward:.4g}"
        return f"sample {self.index}: {counts or 'no'} tokens{reward}"


def rows_of(batch: Any) -> list[Any]:
    """Return the rows of a tensordict of any batch size, in order, each of batch size ``[]``."""
    if not batch.ndim:
        return [batch]
    parts = list(batch.unbind(0))
    return parts if batch.ndim == 1 else [row for part in parts for row in rows_of(part)]


def read_samples(td: Any, n: int, most: int, *, policy: Any = None, tokenizer: Any = None) -> list[TokenSample]:
    """Return the last rollouts of a batch.

    Args:
        td: rollouts with ``("tokens", "full")``, of any batch size, padded or not.
        n: how many.
        most: tokens of each that are shown; of a longer one the end of the prompt, and both ends of what follows.
        policy: names the keys (``tokens_key``, ``masks_key``, ``log_probs_key``), and has the tokenizer.
        tokenizer: gives tokens their texts; without one they are shown as numbers.

    Raises:
        ValueError: ``n`` or ``most`` is below 1, there are no tokens, or an entry has not one value per token.
        TypeError: ``tokenizer`` is no tokenizer.
    """
    for name, value in (("n", n), ("tokens", most)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    if tokenizer is not None and not hasattr(tokenizer, "decode"):
        raise TypeError(f"tokenizer must be a tokenizer of transformers, with decode(), got {tokenizer!r}")
    rows = rows_of(td)
    keys = {name: getattr(policy, f"{name}_key", None) or name for name in ("tokens", "masks", "log_probs")}
    texts = TokenTexts(getattr(policy, "tokenizer", None) if tokenizer is None else tokenizer)
    first = max(0, len(rows) - n)
    return [_read(index, row, keys, most, texts) for index, row in enumerate(rows[first:], first)]


def _read(index: int, row: Any, keys: Mapping[str, str], most: int, texts: TokenTexts) -> TokenSample:
    ids = _array(row.get((keys["tokens"], "full"), None))
    if ids is None:
        raise ValueError(
            f"there are no tokens at {(keys['tokens'], 'full')!r}: show_samples takes rollouts, of vLLMWrapper or a "
            "collector; of another policy, pass policy=, which names its keys"
        )
    real = _array(row.get((keys["masks"], "all_attention_mask"), None))
    real = np.ones(len(ids), bool) if real is None or len(real) != len(ids) else real.astype(bool)

    def entry(key: Any) -> Any:
        values = _array(row.get(key, None))
        if values is not None and len(values) != len(ids):
            raise ValueError(f"{key!r} has {len(values)} rows, and there are {len(ids)} tokens")
        return None if values is None else values[real]

    versions, log_probs = entry(("policy_versions", "full")), entry((keys["log_probs"], "full"))
    routes, assistant = entry(("routed_experts", "full")), entry((keys["masks"], "all_assistant_mask"))
    kept = row.get(("sampling", "kept"), None)
    sizes = None if kept is None else _array(kept.sizes)[real]
    prompt = _array(row.get((keys["tokens"], "prompt"), None))
    prompts = 0 if prompt is None else int(real[: len(prompt)].sum())
    sampled = _sampled(int(real.sum()), versions, assistant, log_probs, prompts)
    parts = _parts(sampled)

    real_ids = ids[real].tolist()
    shown = _shown(parts, most)
    written = dict(
        zip((at for at in shown if at >= 0), texts.of([real_ids[at] for at in shown if at >= 0]), strict=True)
    )

    def token(at: int, token_id: int) -> ShownToken:
        return ShownToken(
            position=at,
            id=token_id,
            text=written[at],
            special=texts.is_special(token_id),
            part=parts[at],
            log_prob=float(log_probs[at]) if log_probs is not None and math.isfinite(log_probs[at]) else None,
            version=int(versions[at]) if versions is not None and versions[at] >= 0 else None,
            experts={} if routes is None else _experts(routes[at]),
            kept=None if not sampled[at] else 0 if sizes is None else int(sizes[at]),
        )

    reward = row.get(("next", "reward"), None)
    return TokenSample(
        index=index,
        tokens=[-at if at < 0 else token(at, real_ids[at]) for at in shown],
        counts={part: parts.count(part) for part in ("prompt", "response", "observation")},
        reward=None if reward is None else float(_array(reward).sum()),
    )


def _array(value: Any) -> Any:
    """Return a tensor as numpy, wherever it is; bfloat16, which numpy lacks, as float32."""
    if value is None:
        return None
    value = value.detach().cpu()
    return (value.float() if value.is_floating_point() else value).numpy()


def _sampled(count: int, versions: Any, assistant: Any, log_probs: Any, prompts: int) -> Any:
    """Say which tokens were sampled, bool ``[T]``, by the entry that knows it best."""
    for known in (None if versions is None else versions >= 0, assistant):
        if known is not None and known.any():
            return known.astype(bool)
    after = np.arange(count) >= prompts
    return after if prompts or log_probs is None else np.isfinite(log_probs)


def _parts(sampled: Any) -> list[Part]:
    first = int(sampled.argmax()) if sampled.any() else len(sampled)
    return [
        "response" if is_sampled else "prompt" if at < first else "observation" for at, is_sampled in enumerate(sampled)
    ]


def _shown(parts: Sequence[Part], most: int) -> list[int]:
    """Return the positions that are shown; ``-n`` stands for n that are not."""
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


def _experts(row: Any) -> dict[int, tuple[int, ...]]:
    return {layer: tuple(e for e in experts if e >= 0) for layer, experts in enumerate(row.tolist()) if experts[0] >= 0}
