"""The model that engines are compared with takes their side where experts tie, and nowhere else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.reference import TIE, Reference, route_mismatches, side_at_ties
from torchrl_moe.testing.tiny_moe import save_tiny_moe

# 1 and 2 tie for the second place; nearly, and not near enough; all tie; near enough
SCORES = torch.tensor([[4.0, 3, 3, 1], [4, 3, 3 - 2 * TIE, 1], [2, 2, 2, 2], [4, 3, 3 - TIE / 2, 1]])
OURS = torch.tensor([[0, 1]] * 4)


@pytest.mark.parametrize(
    ("theirs", "expected"),
    [
        pytest.param([[2, 0], [0, 2], [1, 0], [0, 2]], [[0, 2], [0, 1], [0, 1], [0, 2]], id="one differs"),
        pytest.param([[0, 3], [1, 3], [2, 3], [2, 3]], [[0, 1]] * 4, id="another, or two differ"),
        pytest.param([[0, -1], [-1, -1]], [[0, 1]] * 4, id="none"),
        pytest.param([[1, 2]], [[0, 1]] * 4, id="the one that does not tie differs"),
    ],
)
def test_only_a_tie_is_decided_by_the_other_side(theirs: list[list[int]], expected: list[list[int]]) -> None:
    assert side_at_ties(OURS, SCORES, torch.tensor(theirs)).tolist() == expected


def exchange(routes: Tensor, one: int, other: int) -> tuple[Tensor, Tensor]:
    """Put one expert in the place of the other where only one of the two was chosen; and say where."""
    has = [(routes == expert).any(-1) for expert in (one, other)]
    rows = has[0] ^ has[1]
    table = torch.arange(int(routes.max()) + 1)
    table[one], table[other] = other, one
    return torch.where(rows[:, None], table[routes], routes), rows


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_a_sequence_goes_the_way_of_the_engine_at_a_tie_and_nowhere_else(family: str, tmp_path: Path) -> None:
    reference = Reference(save_tiny_moe(tmp_path, family))
    router = reference.model.model.layers[2].mlp.gate
    twins = {"weight": router.weight.data, "bias": getattr(router, "e_score_correction_bias", torch.zeros(16))}
    for values in twins.values():
        values[5] = values[3]
    ids = torch.randint(0, 256, (200,), generator=torch.Generator().manual_seed(0))
    log_probs, routes = reference(ids)
    swapped, tied = exchange(routes[2], 3, 5)
    assert 3 < tied.sum() < 190
    theirs = -torch.ones(200, reference.num_layers, routes[2].shape[-1], dtype=torch.int64)
    for layer, rows in routes.items():
        theirs[:, layer] = rows
    theirs[:, 2] = swapped
    sided, followed = reference(ids, routes=theirs)
    reference.model(ids[None, :7])  # another caller of the model takes no side
    assert torch.equal(followed[2].sort(-1).values, swapped.sort(-1).values)
    first = int(tied.nonzero()[0])
    torch.testing.assert_close(sided[1 : first + 1], log_probs[1 : first + 1], atol=1e-5, rtol=0)
    assert (sided - log_probs)[first + 1 :].abs().max() > 1e-3
    ties = {row for row, layer, _ in reference.ties(ids, theirs) if layer == 2}
    assert set(tied.nonzero()[:, 0].tolist()) <= ties < set(range(200))

    theirs[:, 2] = (routes[2] + 1) % 16  # an engine that is wrong stays wrong
    wrong, total = route_mismatches(theirs[:, 2:3], {0: reference(ids, routes=theirs)[1][2]})
    assert wrong > 0.9 * total
