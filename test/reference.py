"""What a stock transformers model makes of a sequence: its log-probs, and the experts that its own routers chose.

The reference of the parity tests; it uses nothing of torchrl_moe.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

ROUTERS = {
    "qwen3_moe": ("mlp.gate", 2),
    "mixtral": ("mlp.gate", 2),
    "olmoe": ("mlp.gate", 2),
    "deepseek_v3": ("mlp.gate", 2),
}
"""Family -> where a decoder layer has its router, and which of the router's outputs is the indices ``[T, K]``."""


class Reference:
    """A saved model, run teacher-forced on one sequence at a time.

    Args:
        folder: of the model.
        dtype: of its weights.
    """

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
        path, self._place = ROUTERS[self.model.config.model_type]
        self._seen: dict[int, Tensor] = {}
        for layer, block in enumerate(self.model.model.layers):
            routers = [module for name, module in block.named_modules() if name == path and hasattr(module, "weight")]
            for router in routers:
                if "Router" in type(router).__name__:  # a dense layer's gate is a projection
                    router.register_forward_hook(self._keep(layer))
        self.num_layers = self.model.config.num_hidden_layers

    def _keep(self, layer: int) -> Callable[..., None]:
        def hook(_module: object, _arguments: object, out: tuple[Tensor, ...]) -> None:
            self._seen[layer] = out[self._place]

        return hook

    @torch.no_grad()
    def __call__(self, ids: Tensor | Sequence[int], temperature: float = 1.0) -> tuple[Tensor, dict[int, Tensor]]:
        """Return log-probs ``[T]``, those of token t given the tokens before it (NaN for the first), and routes.

        Routes are ``[T, K]`` by layer; dense layers are absent.
        """
        row = torch.as_tensor(ids).view(1, -1)
        self._seen.clear()
        logits = self.model(row).logits[0].float() / temperature
        log_probs = logits.log_softmax(-1)[:-1].gather(1, row[0, 1:, None])[:, 0]
        return torch.cat([log_probs.new_full((1,), float("nan")), log_probs]), dict(self._seen)


def route_mismatches(routes: Tensor, reference: dict[int, Tensor], rows: slice = slice(None)) -> tuple[int, int]:
    """Count rows ``[T, L, K]`` that name other experts than the reference, as sets, and the rows compared.

    A row that is unset is a mismatch; only rows of layers that have a router are compared.
    """
    wrong = total = 0
    for layer, expected in reference.items():
        got = routes[: len(expected), layer].long().sort(-1).values[rows]
        wrong += int((got != expected.sort(-1).values[rows]).any(-1).sum())
        total += len(got)
    return wrong, total
