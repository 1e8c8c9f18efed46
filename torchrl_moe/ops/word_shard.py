"""A head whose vocabulary is sharded over ranks: combines what each rank scores over its own words.

Each rank has the same rows and a part of the vocabulary, as under tensor parallelism. Three numbers per row are sent in
forward, and the gradient of the hidden states is summed in backward; logits stay where they are.

Letters: N rows, V words of all ranks, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torchrl_moe.ops.linear_head import RowScores

__all__ = ["WordShard", "join", "own_part"]


@dataclass(frozen=True, slots=True)
class WordShard:
    """The words of this rank: of V words those from ``first`` on, as many as its part of the weight has rows.

    ``mesh`` is the DTensor's, of one dimension.
    """

    mesh: Any
    first: int
    words: int

    @classmethod
    def of(cls, weight: Tensor) -> WordShard | None:
        """Return the shard of a weight ``[V, H]``; ``None`` if it is not a DTensor.

        Raises:
            ValueError: a DTensor that is not sharded by words, or that leaves a rank without any.
        """
        mesh: Any = getattr(weight, "device_mesh", None)
        if mesh is None:
            return None
        placements = weight.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1 or not placements[0].is_shard(0):
            raise ValueError(f"weight must be cut by words, [Shard(0)] on a mesh of one dimension, got {placements}.")
        each = -(-len(weight) // mesh.size())  # as DTensor cuts it
        if each * (mesh.size() - 1) >= len(weight):
            raise ValueError(f"weight has {len(weight)} words, too few for {mesh.size()} ranks: one would have none.")
        return cls(mesh, min(mesh.get_local_rank() * each, len(weight)), len(weight))

    @property
    def group(self) -> str:
        """The name of the ranks' process group."""
        return str(self.mesh.get_group().group_name)

    def enter(self, hidden: Tensor) -> Tensor:
        """Return hidden states unchanged; in backward, the ranks' parts of their gradient are summed.

        Raises:
            ValueError: they are a DTensor.
        """
        if hasattr(hidden, "device_mesh"):
            raise ValueError("hidden states must be whole and local where weight is cut by words, got a DTensor.")
        from torch.distributed.tensor import DTensor, Partial, Replicate

        whole = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; return any other tensor unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def join(own: RowScores, group: str) -> RowScores:
    """Return the scores over all words, from those over each rank's own; a collective.

    With s the log-sum-exp of a rank, S that of all, and H the entropy over a rank's words, the entropy over all is
    ``S - sum_r e^(s_r - S) (s_r - H_r)``.

    Args:
        own: where another rank has the token, ``chosen`` is 0.
        group: the name of the ranks' process group.
    """
    has_entropy = len(own.entropy) > 0
    parts = torch.stack([own.chosen, own.log_sum, *([own.entropy] if has_entropy else [])])
    find = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    ranks: dist.ProcessGroup = find(dist.GroupName(group))  # an operator's arguments are numbers and strings
    gathered = [torch.empty_like(parts) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(gathered, parts, group=ranks)
    chosen, log_sums, *entropies = torch.stack(gathered).unbind(1)
    log_sum = log_sums.logsumexp(0)
    if not has_entropy:
        return RowScores(chosen.sum(0), log_sum, own.entropy)
    spread = log_sum - ((log_sums - log_sum).exp() * (log_sums - entropies[0])).sum(0)
    return RowScores(chosen.sum(0), log_sum, spread)
