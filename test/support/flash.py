"""Flash attention's two kernels on a CPU, for models of transformers: they count, and compute plain attention."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers.modeling_flash_attention_utils as flash
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


def _attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    """Causal, of ``[B, T, heads, size]``."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True).transpose(1, 2)


@contextmanager
def flash_attention(model: nn.Module) -> Iterator[list[Any]]:
    """Run ``model`` with flash attention 2, as transformers calls it; yield the calls of its kernels.

    A call is the borders of the sequences in its one row, or ``"dense"`` for the kernel that knows none.
    """
    calls: list[Any] = []

    def dense(q: Tensor, k: Tensor, v: Tensor, causal: bool = False, softmax_scale: float | None = None) -> Tensor:
        assert causal
        calls.append("dense")
        return _attention(q, k, v, softmax_scale)

    def varlen(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        causal: bool = False,
        softmax_scale: float | None = None,
    ) -> Tensor:
        assert causal
        borders = cu_seqlens_q.tolist()
        assert borders == cu_seqlens_k.tolist()
        assert max_seqlen_q == max_seqlen_k == cu_seqlens_q.diff().max()
        calls.append(borders)
        parts = [slice(*ends) for ends in pairwise(borders)]
        return torch.cat([_attention(q[None, i], k[None, i], v[None, i], softmax_scale)[0] for i in parts])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            flash, "_lazy_imports", lambda *_, **__: (dense, varlen, None, flash._pad_input, flash._unpad_input)
        )
        patch.setattr(flash, "_loaded_implementation", None)
        patch.setattr(model.config, "_attn_implementation_internal", "flash_attention_2")
        yield calls
