"""Rollouts of bytes, every entry set by hand, as the display of tokens reads them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict

from torchrl_moe.data import KeptTokens
from torchrl_moe.render.tokens import ShownToken, TokenSample
from torchrl_moe.testing import ByteTokenizer

TOKENIZER = ByteTokenizer()
LAYERS = 3


def rollout(prompt: str, answer: str, versions: list[int] | None = None) -> TensorDict:
    """One rollout, ragged. Layer 0 is dense; token t is routed to experts t % 8 and (t + 1) % 8 in the others.

    Every sampled token has a log-prob of -0.5 and was sampled from 3 words.
    """
    ids = torch.tensor(TOKENIZER.encode(prompt) + TOKENIZER.encode(answer))
    total, asked = len(ids), len(TOKENIZER.encode(prompt))
    sampled = torch.arange(total) >= asked
    at = torch.arange(total)[:, None, None]
    routes = ((at + torch.arange(2)) % 8).expand(total, LAYERS, 2).to(torch.int8).clone()
    routes[:, 0], routes[-1] = -1, -1
    known = torch.full((total,), -1, dtype=torch.int32)
    known[asked:] = torch.tensor(versions if versions is not None else [0] * (total - asked), dtype=torch.int32)
    sizes = torch.where(sampled, 3, 0).int()
    kept = KeptTokens(ids=torch.arange(3, dtype=torch.int32).repeat(total - asked), sizes=sizes)
    attended = torch.ones(total, dtype=torch.bool)
    found = {
        "tokens": {"full": ids, "prompt": ids[:asked], "response": ids[asked:]},
        "masks": {"all_attention_mask": attended, "all_assistant_mask": sampled},
        "log_probs": {"full": torch.where(sampled, -0.5, float("nan"))},
        "policy_versions": {"full": known},
        "routed_experts": {"full": routes},
        "sampling": {"kept": kept},
    }
    return TensorDict(found)


def token(text: str = "a", **fields: Any) -> ShownToken:
    """One token of a response."""
    return ShownToken(**{"position": 0, "id": 97, "text": text, "part": "response", **fields})


def sample(*tokens: ShownToken | int) -> TokenSample:
    """A rollout of these tokens."""
    return TokenSample(index=0, tokens=tokens, counts={"response": len(tokens)})
