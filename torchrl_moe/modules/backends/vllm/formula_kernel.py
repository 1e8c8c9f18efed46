"""Weights of followed experts on a GPU: one Triton kernel per layer and step, which reads a row and mostly returns.

The same in torch is fifteen kernels, which a CUDA graph replays in every step, whether a request follows or not.
"""

from __future__ import annotations

from torch import Tensor
from vllm.triton_utils import tl, triton


@triton.jit  # type: ignore[untyped-decorator]
def _follow_rows_kernel(  # type: ignore[no-untyped-def]  # Triton reads annotations
    out_weights,
    out_ids,
    weights,
    ids,
    rows,
    logits,
    weights_stride,
    ids_stride,
    rows_stride,
    logits_stride,
    scale,
    E,
    K: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCORE: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    there = k < K
    own = tl.load(ids + t * ids_stride + k, mask=there, other=0)
    value = tl.load(weights + t * weights_stride + k, mask=there, other=0.0)
    row = tl.load(rows + t * rows_stride + k, mask=there, other=0).to(own.dtype)
    follows = tl.load(rows + t * rows_stride) >= 0
    differs = tl.sum(((own != row) & there).to(tl.int32), 0) > 0
    if follows & differs:  # a token's own choice keeps its own weights, bit by bit
        x = tl.load(logits + t * logits_stride + row, mask=there, other=0.0).to(tl.float32)
        if SCORE == "softmax":
            e = tl.arange(0, BLOCK_E)
            every = tl.load(logits + t * logits_stride + e, mask=e < E, other=float("-inf")).to(tl.float32)
            most = tl.max(every, 0)
            score = tl.exp(x - most) / tl.sum(tl.exp(every - most), 0)
        elif SCORE == "sigmoid":
            score = 1.0 / (1.0 + tl.exp(-x))
        else:
            y = tl.exp(x)
            u = 1.0 + y  # log(1 + y), exact for small y
            score = tl.sqrt(tl.where(x > 20.0, x, tl.where(u == 1.0, y, tl.log(u) * y / (u - 1.0))))
        score = tl.where(there, score, 0.0)
        if NORMALISE:
            score = score / tl.sum(score, 0)
        value = (score * scale).to(value.dtype)
        own = row
    tl.store(out_weights + t * K + k, value, mask=there)
    tl.store(out_ids + t * K + k, own, mask=there)


def follow_rows(
    weights: Tensor, ids: Tensor, rows: Tensor, logits: Tensor, score: str, normalise: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Return a router's weights and experts ``[N, K]``, in rows that are not -1 those of the experts to follow."""
    count, width = ids.shape
    out = weights.new_empty(ids.shape), ids.new_empty(ids.shape)
    if count:
        tensors = [one if one.stride(-1) == 1 else one.contiguous() for one in (weights, ids, rows, logits)]
        _follow_rows_kernel[(count,)](
            *out,
            *tensors,
            *(one.stride(0) for one in tensors),
            scale,
            logits.shape[1],
            K=width,
            BLOCK_E=triton.next_power_of_2(logits.shape[1]),
            BLOCK_K=triton.next_power_of_2(width),
            SCORE=score,
            NORMALISE=normalise,
            num_warps=1,
        )
    return out
