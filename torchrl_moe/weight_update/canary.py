"""The canary: the trainer's log-probs of a fixed prompt, which an engine with its weights must reproduce.

It proves what digests cannot: that the bytes were loaded into the right places. In half precision a router may choose
another expert where two are close, so there only gross errors can be distinguished from rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["canary_of"]

PROMPT_TOKENS = 16
TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
HALF_TOLERANCE = 1.0


@torch.no_grad()
def canary_of(model: nn.Module, engine_dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Return ``token_ids`` of a prompt, ``log_probs`` of its tokens from the second on, and the ``tolerance``.

    Args:
        model: a causal language model of transformers; evaluated in eval mode, then set back to its own mode.
        engine_dtype: the engine's dtype; the coarser of the engine's and the model's sets the tolerance (nats, per
            token).
    """
    vocabulary = int(model.config.get_text_config().vocab_size)  # type: ignore[operator, union-attr]
    ids = [(7 * position + 3) % vocabulary for position in range(PROMPT_TOKENS)]
    parameter = next(model.parameters())
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        logits = model(torch.tensor([ids], device=parameter.device)).logits[0, :-1].float()
    finally:
        for module, training in modes:
            module.training = training
    wanted = torch.tensor(ids[1:], device=logits.device)
    log_probs = logits.log_softmax(-1).gather(1, wanted[:, None])[:, 0]
    tolerance = max(
        TOLERANCE.get(dtype, HALF_TOLERANCE) for dtype in (parameter.dtype, engine_dtype or parameter.dtype)
    )
    return {"token_ids": ids, "log_probs": log_probs.tolist(), "tolerance": tolerance}
