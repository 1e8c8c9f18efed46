"""The words (token ids of the vocabulary) that each row's softmax runs over, and their places in the tiles of a head.

The lists are as short as sampling made them (the k of a top_k, the bans) and stay lists: no mask ``[N, V]`` exists.

Letters: N rows, V words, M ids of all rows together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchrl_moe import _checks

__all__ = ["KeptWords", "LeftOut"]


@dataclass(frozen=True, slots=True)
class KeptWords:
    """``sizes[n]`` ids of ``ids`` belong to row n, those of earlier rows first.

    ``sizes[n] > 0``: the row's words are these; ``< 0``: all but these (its absolute value counts them); 0: all. An id
    that a row lists twice counts once.

    ``ids`` are signed integers ``[M]``, ``sizes`` ``[N]``.

    >>> kept = KeptWords(torch.tensor([2, 0, 1]), torch.tensor([0, -1, 2]))
    >>> kept.select(torch.tensor([True, False, True]))
    KeptWords(ids=tensor([0, 1]), sizes=tensor([0, 2]))
    """

    ids: Tensor
    sizes: Tensor

    def check_shapes(self, rows: int) -> None:
        """Check what needs no values.

        Raises:
            ValueError: wrong rank or number of sizes, or not signed integers.
        """
        _checks.check_rank("ids of kept", self.ids, 1)
        _checks.check_integer("ids of kept", self.ids, signed=True)
        _checks.check_integer("sizes of kept", self.sizes, signed=True)
        _checks.check_shape("sizes of kept", self.sizes.shape, (rows,), hint="There is a size for each row.")

    def check_values(self, tokens: Tensor, vocabulary: int) -> None:
        """Check the ids against the sizes and the tokens ``[N]`` that were chosen.

        Raises:
            ValueError: another number of ids than the sizes say, an id out of range, or a token that is not among the
                words of its row.
        """
        total = int(self.sizes.long().abs().sum())
        if total != len(self.ids):
            raise ValueError(f"the sizes of kept say {total} ids, and there are {len(self.ids)}.")
        rows, ids = self.rows(), self.ids.long()
        outside = (ids < 0) | (ids >= vocabulary)
        named = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        named.index_add_(0, rows, (ids == tokens[rows]).long())
        wrong = torch.where(self.sizes > 0, named == 0, (self.sizes < 0) & (named > 0))
        if not bool(outside.any() | wrong.any()):
            return
        if bool(outside.any()):
            place = int(outside.nonzero()[0, 0])
            row, word = int(rows[place]), int(ids[place])
            raise ValueError(f"ids of kept must be in 0..{vocabulary - 1}, row {row} has {word}.")
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"row {row}: token {int(tokens[row])} is not among the words that kept gives this row. Pass size 0 for rows"
            " whose token was not sampled."
        )

    def rows(self) -> Tensor:
        """Return the row of each id, int64 ``[M]``."""
        every = torch.arange(len(self.sizes), device=self.sizes.device)
        return every.repeat_interleave(self.sizes.long().abs(), output_size=len(self.ids))

    def select(self, wanted: Tensor) -> KeptWords:
        """Return the words of some rows, bool ``[N]``."""
        return KeptWords(self.ids[wanted[self.rows()]], self.sizes[wanted])

    def tiled(self, height: int, width: int, vocabulary: int, first: int = 0) -> LeftOut:
        """Sort the ids by the tiles in which they lie.

        Args:
            height: rows of a tile; the last one of a column of tiles may have fewer.
            width: words of a tile; likewise.
            vocabulary: V, or how many words there are here, of which ``first`` is the first.
            first: ids before it, and those after the last word, lie in no tile.
        """
        down, across = (-(-size // step) for size, step in ((len(self.sizes), height), (vocabulary, width)))
        rows, ids = self.rows(), self.ids.long() - first
        here = (ids >= 0) & (ids < vocabulary)
        rows, ids = rows[here], ids[here]
        tiles = ids.div(width, rounding_mode="floor") * down + rows.div(height, rounding_mode="floor")
        places = (tiles.mul_(height * width) + rows.remainder_(height) * width + ids % width).sort().values
        starts = torch.arange(down * across + 1, device=places.device) * (height * width)
        return LeftOut(self.sizes > 0, places, torch.searchsorted(places, starts).tolist(), height, width, down)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Fills a tile's words that are left out; made by :meth:`KeptWords.tiled`.

    Tiles are numbered down each column of tiles first. ``places`` are int64 ``[M]``, sorted: tile, row in the tile and
    word in the tile as one number. Those of tile t lie in ``places[ends[t]:ends[t + 1]]``. ``only`` is bool ``[N]``:
    the row lists its words, not those it lacks.
    """

    only: Tensor
    places: Tensor
    ends: list[int]
    height: int
    width: int
    down: int

    def fill_(self, tile: Tensor, words: slice, rows: slice, value: Any) -> Tensor:
        """Write ``value`` where a word is left out of a row, in place.

        >>> kept = KeptWords(torch.tensor([0, 1, 2]), torch.tensor([0, -1, 2]))
        >>> kept.tiled(3, 4, 4).fill_(torch.ones(3, 4), slice(0, 4), slice(0, 3), 0)
        tensor([[1., 1., 1., 1.],
                [0., 1., 1., 1.],
                [0., 1., 1., 0.]])
        """
        number = words.start // self.width * self.down + rows.start // self.height
        places = self.places[self.ends[number] : self.ends[number + 1]] - number * self.height * self.width
        row, column = places.div(self.width, rounding_mode="floor"), places % self.width
        only = self.only[rows]
        listed = torch.where(only[row], tile[row, column], value)
        tile.masked_fill_(only[:, None], value)
        tile[row, column] = listed
        return tile
