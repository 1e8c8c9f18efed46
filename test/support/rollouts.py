"""Small rollouts, and two actors without a transformer: what the tests of objectives train on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn

VOCABULARY = 11
CURRENT_VERSION = 4
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
        return self.log_probs.clone(), self.entropy, None


def sample(prompt: int, response: int, seed: int = 0, advantage: Tensor | None = None) -> TensorDict:
    """One rollout, ragged: TorchRL's keys, the prompt's log-probs NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = prompt + response
    full = torch.randint(0, VOCABULARY, (total,), generator=generator)
    answered = torch.arange(total) >= prompt
    log_probs = -1.5 - 1.5 * torch.rand(total, generator=generator, dtype=torch.float64)
    reference = -1.5 - 1.5 * torch.rand(total, generator=generator, dtype=torch.float64)
    given = torch.randn(1, 1, generator=generator, dtype=torch.float64)
    proximal = log_probs + 0.4 * torch.randn(total, generator=generator, dtype=torch.float64)
    versions = torch.randint(0, CURRENT_VERSION + 1, (total,), generator=generator, dtype=torch.int32)
    return TensorDict(
        {
            "tokens": {"prompt": full[:prompt], "response": full[prompt:], "full": full},
            "masks": {"all_attention_mask": torch.ones(total, dtype=torch.bool), "all_assistant_mask": answered},
            "log_probs": {"full": log_probs.masked_fill(~answered, float("nan"))},
            "next": {"ref_log_probs": {"full": reference}},
            "prox_log_prob": proximal.masked_fill(~answered, float("nan")),
            "policy_versions": {"full": versions.masked_fill(~answered, -1)},
            "current_version": torch.tensor(CURRENT_VERSION),
            "sampling": {"temperature": torch.tensor(1.0)},
            "advantage": given if advantage is None else advantage,
        }
    )


def byte_row(prompt: int, answer: int, seed: int) -> dict[str, Any]:
    """Random bytes as tokens, and their masks, for a model of bytes; the rest is the caller's."""
    total = prompt + answer
    ids = torch.randint(0, 256, (total,), generator=torch.Generator().manual_seed(seed))
    attended, answered = torch.ones(total, dtype=torch.bool), torch.arange(total) >= prompt
    masks = {"all_attention_mask": attended, "all_assistant_mask": answered}
    tokens = {"full": ids, "prompt": ids[:prompt], "response": ids[prompt:]}
    return {"tokens": tokens, "masks": masks, "sampling": {"temperature": torch.tensor(1.0)}}


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

    full = pad(("tokens", "full"), PAD)
    per_token = rollouts[0]["advantage"].shape != (1, 1)
    return TensorDict(
        {
            "tokens": {"full": full, "prompt": full[:, : max(prompts) + left]},
            "masks": {key: pad(("masks", key), False) for key in ("all_attention_mask", "all_assistant_mask")},
            "log_probs": {"full": pad(("log_probs", "full"), 0.0)},
            "next": {"ref_log_probs": {"full": pad(("next", "ref_log_probs", "full"), 0.0)}},
            "prox_log_prob": pad("prox_log_prob", 0.0),
            "policy_versions": {"full": pad(("policy_versions", "full"), -1)},
            "current_version": torch.full((len(rollouts),), CURRENT_VERSION),
            "sampling": {"temperature": torch.ones(len(rollouts))},
            "advantage": pad("advantage", 0.0) if per_token else torch.stack([r["advantage"] for r in rollouts]),
        },
        batch_size=[len(rollouts)],
    )


def by_hand() -> tuple[TensorDictBase, GivenActor]:
    """Tokens that μ gave 0.4. Ratios 1.5 and 1 with advantage 2, ratio 0.5 with advantage -1; to the reference 1, 2, 4.

    To the proximal policy 0.75, 1 and 1, which to μ is 2, 1 and 0.5. Sampled 2, 1 and 4 updates ago.
    """
    double: dict[str, Any] = {"dtype": torch.float64}
    advantages = torch.tensor([2.0, -1.0], **double)
    td = ragged([sample(1, 2 - i, advantage=advantages[i].view(1, 1)) for i in range(2)])
    ratios, references, proximals, versions = [[1.5, 1], [0.5]], [[1, 2], [4]], [[2, 1], [0.5]], [[2, 3], [0]]
    log_probs = torch.full((2, 3), 0.4, **double).log()
    for i in range(2):
        answer = torch.tensor([0.4] * len(ratios[i]), **double)
        unknown = torch.tensor([float("nan")], **double)
        trained = answer * torch.tensor(ratios[i], **double)
        log_probs[i, 3 - len(answer) :] = trained.log()
        td[i]["log_probs", "full"] = torch.cat([unknown, answer.log()])
        td[i]["prox_log_prob"] = torch.cat([unknown, (answer * torch.tensor(proximals[i], **double)).log()])
        td[i]["next", "ref_log_probs", "full"] = torch.cat([unknown, (trained / torch.tensor(references[i])).log()])
        td[i]["policy_versions", "full"] = torch.tensor([-1, *versions[i]], dtype=torch.int32)
    return td, GivenActor(log_probs, torch.tensor([[9.0, 1, 2], [9, 9, 3]]))


def total(out: Any) -> Tensor:
    """The loss to be minimised."""
    return sum(value for key, value in out.items() if key.startswith("loss_"))  # type: ignore[return-value]


def numbers(out: Any) -> dict[str, float]:
    return {key: value.detach().item() for key, value in out.items()}


NAN, INF = float("nan"), float("inf")
Run = Callable[[Callable[..., Any]], Callable[..., Any]]


def row(*values: float) -> Tensor:
    """One sequence, float64."""
    return torch.tensor([values], dtype=torch.float64)


def every(width: int) -> Tensor:
    """A mask of one sequence that selects all tokens."""
    return torch.ones(1, width, dtype=torch.bool)
