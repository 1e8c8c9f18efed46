"""Two ranks with a part of the vocabulary each score as one with all of them, in value and gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from support.ranks import run_as_ranks
from torchrl_moe.ops import LogitTransform, selected_log_probs
from torchrl_moe.ops.linear_head import VocabShard

ROWS, VOCAB, SIZE, CUT = 7, 31, 6, 16  # DTensor cuts 31 rows so
TOKENS = torch.tensor([0, 30, 15, 20, 4, 4, 25])
TRANSFORM = LogitTransform(scale=0.5, soft_cap=3.0, temperature=0.7)
KEPT: dict[str, list[tuple[int, list[int]]]] = {
    "all ids": [],
    # of the first rank, of the second, ..., all, none of the first rank's
    "some": [
        (1, [3, 0]), (1, [30, 25, 22]), (1, [15, 5, 21]), (-1, [1, 15, 21]), (1, [4]), (1, []), (-1, list(range(CUT))),
    ],
}  # fmt: skip
"""By row, the ids that are kept, or with -1 those that are left out."""


def kept_of(name: str) -> tuple[Tensor, Tensor] | None:
    if not KEPT[name]:
        return None
    ids = [token for _, row in KEPT[name] for token in row]
    return torch.tensor(ids), torch.tensor([sign * len(row) for sign, row in KEPT[name]])


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, and what each score weighs in the loss ``[2, N]``; row 4 weighs nothing."""
    generator = torch.Generator().manual_seed(0)
    shapes = (ROWS, SIZE), (VOCAB, SIZE), (VOCAB,), (2, ROWS)
    drawn = [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]
    drawn[3][:, 4] = 0
    return tuple(drawn)  # type: ignore[return-value]


def scored(mesh: DeviceMesh | None, name: str, dtype: torch.dtype, entropy: bool) -> dict[str, Tensor]:
    """Scores and gradients; on a mesh, the weight is sharded over the vocabulary."""
    hidden, weight, bias, weighing = tensors(dtype)
    cut = (weight, bias) if mesh is None else [distribute_tensor(t, mesh, [Shard(0)]) for t in (weight, bias)]
    leaves = [leaf.requires_grad_() for leaf in (hidden, *cut)]
    how: dict[str, Any] = {"transform": TRANSFORM, "entropy": entropy, "kept": kept_of(name), "tile_bytes": 600}
    log_probs, spread = selected_log_probs(leaves[0], leaves[1], TOKENS, bias=leaves[2], **how)
    loss = (weighing[0] * log_probs).sum()
    if spread is not None:
        loss = loss + (weighing[1] * spread).sum()
    grads = torch.autograd.grad(loss, leaves)
    whole = [grad.full_tensor() if isinstance(grad, DTensor) else grad for grad in grads]
    out = dict(zip(("hidden", "weight", "bias"), whole, strict=True), log_probs=log_probs.detach())
    return out if spread is None else {**out, "entropy": spread.detach()}


CASES = [
    (name, dtype, entropy) for name in KEPT for dtype in (torch.float64, torch.bfloat16) for entropy in (True, False)
]


def score_shards() -> list[dict[str, Any]]:
    """This rank's scores and gradients, by case."""
    mesh = init_device_mesh("cpu", (2,))
    weight = distribute_tensor(torch.ones(31, 2), mesh, [Shard(0)])
    assert weight.to_local().shape[0] == (CUT if dist.get_rank() == 0 else VOCAB - CUT)
    with pytest.raises(ValueError, match=r"tokens must be in 0\.\.30, got 31"):
        selected_log_probs(torch.ones(1, 2), weight, torch.tensor([31]))
    with pytest.raises(ValueError, match="sharded over the vocabulary must be the only one, got 2"):
        selected_log_probs([torch.ones(1, 2)] * 2, [weight] * 2, torch.tensor([1]))
    with pytest.raises(ValueError, match="hidden states must be whole and local"):
        selected_log_probs(distribute_tensor(torch.ones(1, 2), mesh, [Replicate()]), weight, torch.tensor([1]))
    got = [scored(mesh, *case) for case in CASES]
    return [{key: value.float().numpy() for key, value in one.items()} for one in got]


def test_words_on_two_ranks() -> None:
    whole = [scored(None, *case) for case in CASES]  # first: what it imports lazily, forks need not
    for case, wanted, *ranks in zip(CASES, whole, *run_as_ranks(score_shards), strict=True):
        bound = 2e-6 if torch.float64 in case else 2e-2
        for key, value in wanted.items():
            for rank in ranks:
                got = torch.from_numpy(rank[key])
                torch.testing.assert_close(got, value.float(), atol=bound, rtol=bound, msg=f"{case} {key}")


@pytest.mark.parametrize("placements", [[Shard(1)], [Replicate()], [Shard(0), Shard(0)]])
def test_another_cut_is_refused(placements: list[Any]) -> None:
    ranks = torch.arange(2 ** len(placements)).view([2] * len(placements))
    mesh = DeviceMesh("cpu", ranks, _init_backend=False, _rank=0)
    with pytest.raises(ValueError, match=r"weight must be sharded over the vocabulary, \[Shard\(0\)\] on a mesh of"):
        VocabShard.of(DTensor.from_local(torch.ones(4, 4), mesh, placements, run_check=False))
    assert VocabShard.of(torch.ones(4, 4)) is None


@pytest.mark.parametrize(("vocabulary", "ranks"), [(1, 2), (2, 3), (4, 3)])  # DTensor cuts four rows into 2, 2 and none
def test_a_rank_without_any_token_id_is_refused(vocabulary: int, ranks: int) -> None:
    mesh = DeviceMesh("cpu", torch.arange(ranks), _init_backend=False, _rank=0)
    each = -(-vocabulary // ranks)
    weight = DTensor.from_local(
        torch.ones(each, 4), mesh, [Shard(0)], run_check=False, shape=torch.Size([vocabulary, 4]), stride=(4, 1)
    )
    with pytest.raises(ValueError, match=f"weight has {vocabulary} rows, too few for {ranks} ranks: one would have"):
        VocabShard.of(weight)
