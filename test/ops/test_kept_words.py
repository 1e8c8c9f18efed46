"""Lists of token ids are filled into tiles as a dense mask says; invalid values are refused."""

from __future__ import annotations

import pytest
import torch

from torchrl_moe.ops.linear_head import RowVocabularies

IDS, SIZES = torch.tensor([4, 0, 3, 3, 1], dtype=torch.int32), torch.tensor([2, 0, -1, 0, 2], dtype=torch.int8)
KEPT = RowVocabularies(IDS, SIZES)
MASK = torch.tensor([[1, 0, 0, 0, 1], [1, 1, 1, 1, 1], [1, 1, 1, 0, 1], [1, 1, 1, 1, 1], [0, 1, 0, 1, 0]])


@pytest.mark.parametrize("height", [1, 2, 3, 5])
@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_tiles_are_filled_as_the_mask_says(height: int, width: int) -> None:
    left_out = KEPT.tiled(height, width, 5)
    whole = torch.ones_like(MASK)
    for top in range(0, 5, height):
        for left in range(0, 5, width):
            rows, columns = slice(top, min(top + height, 5)), slice(left, min(left + width, 5))
            tile = whole[rows, columns].clone()
            assert left_out.fill_(tile, columns, rows, 0) is tile
            whole[rows, columns] = tile
    assert torch.equal(whole, MASK)


def test_an_id_that_stands_twice_counts_once() -> None:
    kept = RowVocabularies(torch.tensor([1, 1, 0, 0]), torch.tensor([2, -2]))
    kept.check_values(torch.tensor([1, 1]), 2)
    filled = kept.tiled(2, 2, 2).fill_(torch.ones(2, 2), slice(0, 2), slice(0, 2), 0)
    assert filled.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    kept = RowVocabularies(torch.arange(128), torch.tensor([-128], dtype=torch.int8))
    kept.check_values(torch.tensor([128]), 129)
    assert kept.rows().tolist() == [0] * 128


def test_rows_and_their_ids_are_selected_together() -> None:
    assert KEPT.rows().tolist() == [0, 0, 2, 4, 4]
    part = KEPT.select(torch.tensor([False, True, True, False, True]))
    assert (part.ids.tolist(), part.sizes.tolist()) == ([3, 3, 1], [0, -1, 2])
    none = KEPT.select(torch.zeros(5, dtype=torch.bool))
    assert none.tiled(1, 5, 5).ends == [0]


@pytest.mark.parametrize(
    ("ids", "tokens", "message"),
    [
        ([4, 0, 3, 3], [0, 1, 2, 3, 1], "the sizes of kept say 5 ids, and there are 4"),
        ([4, 0, 3, 3, 1, 0], [0, 1, 2, 3, 1], "the sizes of kept say 5 ids, and there are 6"),
        ([4, 0, 5, 3, 1], [0, 1, 2, 3, 1], r"ids of kept must be in 0\.\.4, row 2 has 5"),
        ([4, 0, 3, 3, -1], [0, 1, 2, 3, 3], r"ids of kept must be in 0\.\.4, row 4 has -1"),
        ([4, 0, 3, 3, 1], [2, 1, 2, 3, 1], "row 0: token 2 is not among the ids that kept gives this row"),
        ([4, 0, 3, 3, 1], [0, 1, 3, 3, 1], "row 2: token 3 is not among the ids"),
        ([4, 0, 3, 3, 1], [0, 1, 2, 3, 4], "row 4: token 4 is not among the ids"),
    ],
)
def test_values_that_do_not_fit_are_refused(ids: list[int], tokens: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RowVocabularies(torch.tensor(ids), SIZES).check_values(torch.tensor(tokens), 5)
    KEPT.check_values(torch.tensor([0, 1, 2, 3, 1]), 5)
    RowVocabularies(IDS[:0], 0 * SIZES).check_values(torch.tensor([0, 1, 2, 3, 4]), 5)
    RowVocabularies(IDS[:0], SIZES[:0]).check_values(torch.zeros(0, dtype=torch.long), 5)
