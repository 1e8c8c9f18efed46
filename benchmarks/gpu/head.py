"""The head: log-probs of chosen words from hidden states, forward and backward; ours, torch's and kernel libraries'."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import torch
from torch import Tensor

from benchmarks.gpu.measuring import Device
from benchmarks.gpu.sizes import Sizes
from benchmarks.report import Row
from torchrl_moe.ops import selected_log_probs

__all__ = ["KERNELS", "head_rows"]

Head = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From hidden ``[N, H]``, weight ``[V, H]`` and words ``[N]`` to the sum of the words' log-probs."""


def ours(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """The head, as losses without an entropy bonus call it."""
    return selected_log_probs(hidden, weight, words, entropy=False)[0].sum()


def with_entropy(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """The head, as losses with an entropy bonus call it; the kernel libraries compute no entropy."""
    log_probs, entropy = selected_log_probs(hidden, weight, words)
    assert entropy is not None
    return log_probs.sum() + 0.01 * entropy.sum()


def dense(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """All logits at once."""
    return -torch.nn.functional.cross_entropy((hidden @ weight.T).float(), words, reduction="sum")


def liger(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """``liger-kernel``'s; its backward pass is correct for sums only."""
    fused = import_module("liger_kernel.transformers.functional").liger_fused_linear_cross_entropy
    result: Tensor = fused(hidden, weight, words, reduction="sum")
    return -result


def cut(hidden: Tensor, weight: Tensor, words: Tensor) -> Tensor:
    """Of ``cut-cross-entropy``."""
    result: Tensor = import_module("cut_cross_entropy").linear_cross_entropy(hidden, weight, words, reduction="none")
    return -result.sum()


KERNELS: dict[str, Head] = {"liger": liger, "cut-cross-entropy": cut}


def head_rows(device: Device, sizes: Sizes, peak: float, kernel: str | None) -> list[Row]:
    """Measure the head at its size in the model.

    Args:
        device: to run on.
        sizes: N tokens, H, V.
        peak: greatest FLOP/s of the device.
        kernel: a library of :data:`KERNELS` to compare with.
    """
    like = {"device": device.device, "dtype": torch.bfloat16}
    hidden = torch.randn(sizes.tokens, sizes.hidden, **like).requires_grad_()  # type: ignore[arg-type]
    weight = torch.randn(sizes.vocabulary, sizes.hidden, **like).mul_(sizes.hidden**-0.5).requires_grad_()  # type: ignore[arg-type]
    words = torch.randint(sizes.vocabulary, (sizes.tokens,), device=device.device)
    eighth = hidden.detach()[: sizes.tokens // 8].requires_grad_()

    def step(head: Head, rows: Tensor) -> Callable[[], None]:
        def run() -> None:
            head(rows, weight, words[: len(rows)]).backward()
            rows.grad = weight.grad = None

        return run

    heads: dict[str, tuple[Head, Tensor]] = {
        "tiles": (ours, hidden),
        "tiles, with entropy": (with_entropy, hidden),
        "all logits, an eighth of the tokens": (dense, eighth),
        **({} if kernel is None else {kernel: (KERNELS[kernel], hidden)}),
    }
    costs = device.measure(*(step(*head) for head in heads.values()))
    claim = f"head, {sizes.tokens} tokens, V={sizes.vocabulary}, forward and backward"
    rows = [Row(claim=f"{claim}: {name}", value=str(cost)) for name, cost in zip(heads, costs, strict=True)]
    share = sizes.head_flops / peak / costs[0].time
    rows.append(Row(claim=f"{claim}: tiles, time at the device's peak product over measured", value=f"{share:.2f}"))
    if kernel is not None:
        gap = difference(KERNELS[kernel], eighth.detach(), weight.detach(), words[: len(eighth)])
        rows.append(Row(claim=f"head: {kernel}, mean log-prob, difference from tiles", value=f"{gap:.1e}"))
        rows.append(Row(claim=f"head: time of {kernel} over tiles", value=f"{costs[-1].time / costs[0].time:.2f}"))
    return rows


@torch.no_grad()
def difference(head: Head, hidden: Tensor, weight: Tensor, words: Tensor) -> float:
    """Return how far the mean log-prob of a kernel library is from ours."""
    return float((head(hidden, weight, words) - ours(hidden, weight, words)).abs() / len(words))
