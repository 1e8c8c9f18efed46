"""Small rollouts, and two actors without a transformer: what the tests of this folder train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn

VOCABULARY = 11
PAD = 7  # a token like any other, so that a pad that is read shows


class BigramActor(nn.Module):
    """Scores token t by the token before it. Keeps the contract of a scoring actor, and no more."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.logits = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY, generator=generator, dtype=torch.float64))
        self.calls: list[dict[str, bool]] = []

    def score(
        self, td: TensorDictBase, router_logits: bool = False, entropy: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        self.calls.append({"router_logits": router_logits, "entropy": entropy})
        left: dict[str, Any] = {"as_padded_tensor": True, "padding_side": "left"}
        ids = td.get(("tokens", "full"), padding_value=PAD, **left)
        attended = td.get(("masks", "all_attention_mask"), padding_value=False, **left)
        scored = attended[:, 1:] & attended[:, :-1]
        rows = self.logits.log_softmax(-1)[ids[:, :-1]]
        log_probs = rows.gather(-1, ids[:, 1:, None])[..., 0].masked_fill(~scored, 0)
        first = log_probs.new_zeros(len(ids), 1)
        spread = -(rows.exp() * rows).sum(-1).masked_fill(~scored, 0)
        return torch.cat([first, log_probs], 1), torch.cat([first, spread], 1) if entropy else None, None


class GivenActor(nn.Module):
    """Returns the log-probs and entropies it was given."""

    def __init__(self, log_probs: Tensor, entropy: Tensor | None = None) -> None:
        super().__init__()
        self.log_probs, self.entropy = nn.Parameter(log_probs), entropy

    def score(self, td: TensorDictBase, entropy: bool = True) -> tuple[Tensor, Tensor | None, None]:
        return self.log_probs, self.entropy, None


def sample(prompt: int, response: int, seed: int = 0, advantage: Tensor | None = None) -> TensorDict:
    """One rollout, ragged: TorchRL's keys, the prompt's log-probs NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = prompt + response
    full = torch.randint(0, VOCABULARY, (total,), generator=generator)
    answered = torch.arange(total) >= prompt
    log_probs = -1.5 - 1.5 * torch.rand(total, generator=generator, dtype=torch.float64)
    reference = -1.5 - 1.5 * torch.rand(total, generator=generator, dtype=torch.float64)
    given = torch.randn(1, 1, generator=generator, dtype=torch.float64)
    return TensorDict(
        {
            "tokens": {"prompt": full[:prompt], "response": full[prompt:], "full": full},
            "masks": {"all_attention_mask": torch.ones(total, dtype=torch.bool), "all_assistant_mask": answered},
            "log_probs": {"full": log_probs.masked_fill(~answered, float("nan"))},
            "next": {"ref_log_probs": {"full": reference}},
            "advantage": given if advantage is None else advantage,
        }
    )


def samples(shapes: Sequence[tuple[int, int]], seed: int = 0) -> list[TensorDict]:
    return [sample(*shape, seed=seed + i) for i, shape in enumerate(shapes)]


def ragged(rollouts: Sequence[TensorDictBase]) -> TensorDictBase:
    return lazy_stack([rollout.clone() for rollout in rollouts])


def dense(rollouts: Sequence[TensorDictBase], left: int = 0, right: int = 0) -> TensorDict:
    """The rollouts with pads on both sides, prompts ending in one column, and more pads besides."""
    prompts = [len(rollout["tokens", "prompt"]) for rollout in rollouts]
    totals = [len(rollout["tokens", "full"]) for rollout in rollouts]
    before = [max(prompts) - prompt + left for prompt in prompts]
    width = max(pad + total for pad, total in zip(before, totals, strict=True)) + right

    def pad(key: Any, value: Any) -> Tensor:
        rows = [rollout[key] for rollout in rollouts]
        out = rows[0].new_full((len(rows), width, *rows[0].shape[1:]), value)
        for i, row in enumerate(rows):
            out[i, before[i] : before[i] + len(row)] = row
        return out

    per_token = rollouts[0]["advantage"].shape != (1, 1)
    return TensorDict(
        {
            "tokens": {
                "full": pad(("tokens", "full"), PAD),
                "prompt": pad(("tokens", "full"), PAD)[:, : max(prompts) + left],
            },
            "masks": {
                key: pad(("masks", key), False)  # the assistant mask has no pads either
                for key in ("all_attention_mask", "all_assistant_mask")
            },
            "log_probs": {"full": pad(("log_probs", "full"), 0.0)},
            "next": {"ref_log_probs": {"full": pad(("next", "ref_log_probs", "full"), 0.0)}},
            "advantage": pad("advantage", 0.0) if per_token else torch.stack([r["advantage"] for r in rollouts]),
        },
        batch_size=[len(rollouts)],
    )
