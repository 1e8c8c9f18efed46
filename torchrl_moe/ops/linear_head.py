"""Log-prob and entropy of chosen tokens behind a linear head, tile by tile: the logits never exist as a whole.

The maths without autograd and checks; :mod:`torchrl_moe.ops.log_probs` has both. A tile is some rows times
some columns, which are token ids. Forward, a running log-sum-exp joins the tiles of a row (arXiv 1805.02867); backward,
each tile is computed again. Columns are the outer loop: the gradient of a tile's weights is then complete before the
next tile, in float32 without a float32 copy of the weight.

Letters: N rows, V token ids, H hidden size, i the parts that add up to the logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf, isqrt
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from torchrl_moe import _checks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True)
class RowVocabularies:
    """The token ids that each row's softmax runs over: ``sizes[n]`` of ``ids`` belong to row n, earlier rows first.

    ``sizes[n] > 0``: the row has these; ``< 0``: all but these (its absolute value counts them); 0: all. An id that a
    row lists twice counts once. ``ids`` are signed integers ``[M]``, ``sizes`` ``[N]``. The lists are as short as
    sampling made them (the k of a top_k, the bans) and stay lists: no mask ``[N, V]`` exists.

    >>> kept = RowVocabularies(torch.tensor([2, 0, 1]), torch.tensor([0, -1, 2]))
    >>> kept.select(torch.tensor([True, False, True]))
    RowVocabularies(ids=tensor([0, 1]), sizes=tensor([0, 2]))
    """

    ids: Tensor
    sizes: Tensor

    def check_shapes(self, rows: int) -> None:
        """Refuse what can be refused without reading values, which waits for a GPU."""
        _checks.check_rank("ids of kept", self.ids, 1)
        _checks.check_integer("ids of kept", self.ids, signed=True)
        _checks.check_integer("sizes of kept", self.sizes, signed=True)
        _checks.check_shape("sizes of kept", self.sizes.shape, (rows,), hint="There is a size for each row.")

    def check_values(self, tokens: Tensor, vocabulary: int) -> None:
        """Check the ids against the sizes, and that each row has its token ``[N]``."""
        total = int(self.sizes.long().abs().sum())
        if total != len(self.ids):
            raise ValueError(f"the sizes of kept say {total} ids, and there are {len(self.ids)}.")
        rows, ids = self.rows(), self.ids.long()
        # How often each row lists its token: it must be in a list of kept ids, and not in one of removed ids.
        outside = (ids < 0) | (ids >= vocabulary)
        named = torch.zeros(len(tokens), dtype=torch.long, device=tokens.device)
        named.index_add_(0, rows, (ids == tokens[rows]).long())
        wrong = torch.where(self.sizes > 0, named == 0, (self.sizes < 0) & (named > 0))
        if not bool(outside.any() | wrong.any()):  # one wait for the device
            return
        if bool(outside.any()):
            place = int(outside.nonzero()[0, 0])
            raise ValueError(
                f"ids of kept must be in 0..{vocabulary - 1}, row {int(rows[place])} has {int(ids[place])}."
            )
        row = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"row {row}: token {int(tokens[row])} is not among the ids that kept gives this row. Pass size 0 for rows"
            " whose token was not sampled."
        )

    def rows(self) -> Tensor:
        """Return the row of each id, int64 ``[M]``."""
        every = torch.arange(len(self.sizes), device=self.sizes.device)
        return every.repeat_interleave(self.sizes.long().abs(), output_size=len(self.ids))

    def select(self, wanted: Tensor) -> RowVocabularies:
        """Return the ids of some rows, bool ``[N]``."""
        return RowVocabularies(self.ids[wanted[self.rows()]], self.sizes[wanted])

    def tiled(self, height: int, width: int, vocabulary: int, first: int = 0) -> LeftOut:
        """Sort the ids by the tiles ``[height, width]`` in which they lie.

        ``vocabulary`` ids are scored here, from ``first`` on; those of other ranks lie in no tile.
        """
        # How many tiles there are, and the ids that lie in one of them.
        down, across = (-(-size // step) for size, step in ((len(self.sizes), height), (vocabulary, width)))
        rows, ids = self.rows(), self.ids.long() - first
        here = (ids >= 0) & (ids < vocabulary)
        rows, ids = rows[here], ids[here]
        # One number for tile, row and column, sorted: then a tile's ids are a slice, found without a loop over rows.
        tiles = ids.div(width, rounding_mode="floor") * down + rows.div(height, rounding_mode="floor")
        places = (tiles.mul_(height * width) + rows.remainder_(height) * width + ids % width).sort().values
        starts = torch.arange(down * across + 1, device=places.device) * (height * width)
        return LeftOut(self.sizes > 0, places, torch.searchsorted(places, starts).tolist(), height, width, down)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Fills the places of a tile that are left out; made by :meth:`RowVocabularies.tiled`.

    Tiles are numbered down each column of tiles first. ``places`` are int64 ``[M]``, sorted: tile, row in the tile and
    column in the tile as one number. Those of tile t lie in ``places[ends[t]:ends[t + 1]]``. ``only`` is bool ``[N]``:
    the row lists the ids it has, not those it lacks.
    """

    only: Tensor
    places: Tensor
    ends: list[int]
    height: int
    width: int
    down: int

    def fill_(self, tile: Tensor, columns: slice, rows: slice, value: float) -> Tensor:
        """Write ``value`` where an id is left out of a row, in place.

        >>> kept = RowVocabularies(torch.tensor([0, 1, 2]), torch.tensor([0, -1, 2]))
        >>> kept.tiled(3, 4, 4).fill_(torch.ones(3, 4), slice(0, 4), slice(0, 3), 0)
        tensor([[1., 1., 1., 1.],
                [0., 1., 1., 1.],
                [0., 1., 1., 0.]])
        """
        number = columns.start // self.width * self.down + rows.start // self.height
        places = self.places[self.ends[number] : self.ends[number + 1]] - number * self.height * self.width
        row, column = places.div(self.width, rounding_mode="floor"), places % self.width
        # A row of kept ids loses all others, so their values are saved first; a row of removed ids loses those only.
        only = self.only[rows]
        listed = torch.where(only[row], tile[row, column], value)
        tile.masked_fill_(only[:, None], value)
        tile[row, column] = listed
        return tile


_FLOOR = -1e4  # its exponential is 0 in every dtype
_FAINT = -80.0  # its exponential vanishes beside 1, and is quick to compute: one of 0 takes ten times longer on a CPU


@dataclass(frozen=True, slots=True)
class LinearHead:
    """``y = sum_i hidden_i @ weight_i.T + bias``, and the logits ``outer * y``, or ``outer * tanh(inner * y)``.

    ``hiddens`` are ``[N, H_i]``, ``weights`` ``[V, H_i]``, ``bias`` ``[V]``; ``inner`` is 0 where there is no tanh.
    ``kept`` has the ids that each row's softmax runs over; ``None``: all. ``first`` is the lowest id scored here.
    """

    hiddens: list[Tensor]
    weights: list[Tensor]
    bias: Tensor | None
    outer: float
    inner: float
    kept: RowVocabularies | None = None
    first: int = 0

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of sums: float32 at least."""
        return torch.promote_types(self.hiddens[0].dtype, torch.float32)

    def columns(self, tile: slice) -> LinearHead:
        """Return the head of some columns."""
        bias = None if self.bias is None else self.bias[tile].to(self.dtype)
        return replace(self, weights=[_operand(w[tile]) for w in self.weights], bias=bias)

    def logits(self, rows: slice) -> Tensor:
        """Return ``[rows, V]``, those of ids that are left out too."""
        total: Tensor | None = None
        for hidden, weight in zip(self.hiddens, self.weights, strict=True):
            product = _matmul(hidden[rows], weight.T)
            total = product if total is None else total.add_(product)
        assert total is not None
        if self.bias is not None:
            total += self.bias
        if self.inner:
            total.mul_(self.inner).tanh_()
        return total.mul_(self.outer) if self.outer != 1 else total

    def floored(self, log_weights: Tensor) -> Tensor:
        """Return logarithms of which the product with their exponential is finite, in place: 0 (-inf) is 0 then.

        What lies below the floor has the exponential 0 with or without it. Only a bias makes a logit -inf, as on a
        vocabulary that is filled up.
        """
        return log_weights if self.bias is None else log_weights.clamp_(min=_FLOOR)

    def slope(self, logits: Tensor) -> Tensor | float:
        """Return the derivative of the logits by y."""
        if not self.inner:
            return self.outer
        return (logits / self.outer).square_().neg_().add_(1).mul_(self.inner * self.outer)


@dataclass(frozen=True, slots=True)
class RowScores:
    """Of each row, ``[N]``: the logit of its token, the log-sum-exp of all, and the entropy (``[0]`` if not asked)."""

    chosen: Tensor
    log_sum: Tensor
    entropy: Tensor


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the head's parts; ``None`` where not needed."""

    hiddens: list[Tensor | None]
    weights: list[Tensor | None]
    bias: Tensor | None


def forward_tiles(head: LinearHead, tokens: Tensor, entropy: bool, elements: int) -> RowScores:
    """Score rows by tiles of at most ``elements`` numbers.

    ``tokens`` (int64 ``[N]``) count from the head's first id; ``chosen`` is 0 where the token is none of the head's.
    """
    count, vocabulary = len(tokens), len(head.weights[0])
    head = replace(head, hiddens=[_operand(h) for h in head.hiddens])
    # Per row so far: the largest logit z, the token's, Σ e^(z - largest), and that sum weighted by z - largest.
    largest = torch.full((count,), torch.finfo(head.dtype).min, dtype=head.dtype, device=tokens.device)
    chosen, total, weighted = (torch.zeros_like(largest) for _ in range(3))
    left_out = _left_out(head, elements)
    for columns, row_tiles in _tiles(count, vocabulary, elements):
        part = head.columns(columns)
        for rows in row_tiles:
            logits = part.logits(rows)
            if left_out is not None:
                left_out.fill_(logits, columns, rows, -inf)
            inside, column = _columns(tokens[rows], columns)
            chosen[rows] += torch.where(inside, logits.gather(1, column)[:, 0], 0)
            # The sums so far are relative to the old maximum: shrink them to the new one.
            top = torch.maximum(largest[rows], logits.amax(1))
            shift = largest[rows] - top
            shrink = shift.exp()
            logits.sub_(top[:, None])
            # -inf times its exponential would be NaN in the entropy.
            logits = part.floored(logits) if left_out is None else logits.clamp_(min=_FAINT)
            exponentials = logits.exp()
            if entropy:  # sum_j e^(z_j - top) (z_j - top)
                old = shrink * (weighted[rows] + shift * total[rows])
                weighted[rows] = logits.mul_(exponentials).sum(1).add_(old)
            total[rows] = exponentials.sum(1).add_(shrink * total[rows])
            largest[rows] = top
    log_total = total.log()
    spread = log_total - weighted / total if entropy else log_total.new_zeros(0)
    return RowScores(chosen, largest + log_total, spread)


def backward_tiles(
    head: LinearHead, tokens: Tensor, scores: RowScores, grads: tuple[Tensor, Tensor], needs: list[bool], elements: int
) -> Gradients:
    """Return the gradients of hidden states, weights and bias, each if it ``needs`` one, from those of the scores.

    With p the probabilities, H the entropy and g the gradients ``[N]`` of both, that of logit j is
    ``g_log_prob (1[j is chosen] - p_j) - g_entropy p_j (log p_j + H)``: 0 if j is left out.
    """
    parts, dtype = len(head.weights), head.dtype
    whole = replace(head, hiddens=[_operand(h) for h in head.hiddens])
    left_out = _left_out(head, elements)
    grad_hiddens = [torch.zeros_like(h, dtype=dtype) if n else None for h, n in zip(head.hiddens, needs, strict=False)]
    grad_weights = [torch.empty_like(w) if n else None for w, n in zip(head.weights, needs[parts:], strict=False)]
    grad_bias = torch.empty_like(head.bias) if head.bias is not None and needs[-1] else None
    for columns, row_tiles in _tiles(len(tokens), len(head.weights[0]), elements):
        part = whole.columns(columns)
        # These columns' gradients are complete after their last tile, so only they exist in float32.
        sums = [None if g is None else torch.zeros_like(g[columns], dtype=dtype) for g in (*grad_weights, grad_bias)]
        for rows in row_tiles:
            grad = _logit_gradient(part, tokens, scores, grads, columns, rows, left_out)
            grad = grad.to(whole.hiddens[0].dtype)
            for i, grad_hidden in enumerate(grad_hiddens):
                if grad_hidden is not None:
                    grad_hidden[rows] += _matmul(grad, part.weights[i])
            for i, total in enumerate(sums[:-1]):
                if total is not None:
                    total += _matmul(grad.T, whole.hiddens[i][rows])
            if sums[-1] is not None:
                sums[-1] += grad.sum(0, dtype=dtype)
        for target, total in zip((*grad_weights, grad_bias), sums, strict=True):
            if target is not None and total is not None:
                target[columns] = total
    hiddens = [None if g is None else g.to(h.dtype) for g, h in zip(grad_hiddens, head.hiddens, strict=True)]
    return Gradients(hiddens, grad_weights, grad_bias)


def _logit_gradient(
    part: LinearHead,
    tokens: Tensor,
    scores: RowScores,
    grads: tuple[Tensor, Tensor],
    columns: slice,
    rows: slice,
    left_out: LeftOut | None,
) -> Tensor:
    """Return the gradient ``[rows, columns]`` of y."""
    grad_log_prob, grad_entropy = (grad[rows].to(part.dtype) for grad in grads)
    logits = part.logits(rows)
    slope = part.slope(logits)
    # log p is stored as the log-sum-exp of forward; the tile's logits are computed again.
    log_p = part.floored(logits.sub_(scores.log_sum[rows][:, None]))
    probabilities = log_p.exp()
    if len(scores.entropy):
        constant = -(grad_log_prob + grad_entropy * scores.entropy[rows])
        grad = torch.addcmul(constant[:, None], log_p, grad_entropy[:, None], value=-1).mul_(probabilities)
    else:
        grad = probabilities.mul_(-grad_log_prob[:, None])
    # The one-hot part, where the token lies in this tile.
    inside, column = _columns(tokens[rows], columns)
    grad.scatter_add_(1, column, torch.where(inside, grad_log_prob, 0)[:, None])
    grad = grad.mul_(slope) if isinstance(slope, Tensor) or slope != 1 else grad
    # What is left out has no gradient; its p may have overflowed.
    return grad if left_out is None else left_out.fill_(grad, columns, rows, 0)


def _tile_shape(rows: int, columns: int, elements: int) -> tuple[int, int]:
    """Return the rows and the columns of a tile: as near to square as the sizes allow.

    >>> _tile_shape(16384, 151936, 22_369_621), _tile_shape(200, 151936, 22_369_621), _tile_shape(9, 31, 40)
    ((4736, 4608), (200, 111744), (6, 6))
    """

    def side(size: int, whole: int) -> int:
        # a multiple of 128: products of matrices whose rows begin anywhere take six times longer on a GPU
        return size if size == whole or size < 128 else size - size % 128

    width = side(min(columns, isqrt(elements)), columns)
    height = side(max(1, min(rows, elements // width)), rows)
    return height, side(max(1, min(columns, elements // height)), columns)


def _left_out(head: LinearHead, elements: int) -> LeftOut | None:
    """Return what masks the tiles where ids are left out."""
    if head.kept is None:
        return None
    rows, columns = len(head.hiddens[0]), len(head.weights[0])
    return head.kept.tiled(*_tile_shape(rows, columns, elements), columns, head.first)


def _tiles(rows: int, columns: int, elements: int) -> Iterator[tuple[slice, list[slice]]]:
    """Yield the columns of tiles, each with its tiles of rows."""
    height, width = _tile_shape(rows, columns, elements)
    row_tiles = [slice(start, min(start + height, rows)) for start in range(0, rows, height)]
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns)), row_tiles


def _columns(tokens: Tensor, columns: slice) -> tuple[Tensor, Tensor]:
    """Return which tokens lie in a tile, and in which of its columns ``[N, 1]``; 0 for the others."""
    inside = (tokens >= columns.start) & (tokens < columns.stop)
    return inside, torch.where(inside, tokens - columns.start, 0)[:, None]


def _operand(tensor: Tensor) -> Tensor:
    """Return a factor of a product: as it is on CUDA, whose products sum in float32, else in float32 at least."""
    return tensor if tensor.is_cuda else tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The token ids of this rank: of all those from ``first`` on, as many as its part of the weight has rows.

    Each rank has the same rows and a part of the vocabulary, as under tensor parallelism. Three numbers per row are
    sent in forward, and the gradient of the hidden states is summed in backward; logits stay where they are. ``mesh``
    is the DTensor's, of one dimension.
    """

    mesh: DeviceMesh
    first: int
    vocabulary: int

    @classmethod
    def of(cls, weight: Tensor) -> VocabShard | None:
        """Return the shard of a weight ``[V, H]``; ``None`` if it is not a DTensor."""
        mesh: DeviceMesh | None = getattr(weight, "device_mesh", None)
        if mesh is None:
            return None
        placements = weight.placements  # type: ignore[attr-defined]
        if mesh.ndim != 1 or not placements[0].is_shard(0):
            raise ValueError(
                f"weight must be sharded over the vocabulary, [Shard(0)] on a mesh of one dimension, got {placements}."
            )
        # DTensor gives every rank ceil(V / ranks) rows, and the last ones what is left.
        each = -(-len(weight) // mesh.size())
        if each * (mesh.size() - 1) >= len(weight):
            raise ValueError(f"weight has {len(weight)} rows, too few for {mesh.size()} ranks: one would have none.")
        return cls(mesh, min(mesh.get_local_rank() * each, len(weight)), len(weight))

    @property
    def group(self) -> str:
        """The name of the ranks' process group."""
        return str(self.mesh.get_group().group_name)

    def enter(self, hidden: Tensor) -> Tensor:
        """Return hidden states unchanged; in backward, the ranks' parts of their gradient are summed."""
        if hasattr(hidden, "device_mesh"):
            raise ValueError(
                "hidden states must be whole and local where weight is sharded over the vocabulary, got a DTensor."
            )
        from torch.distributed.tensor import DTensor, Partial, Replicate

        whole = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return whole.to_local(grad_placements=[Partial()])


def own_part(tensor: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, differentiably; return any other tensor unchanged."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def join(own: RowScores, group: str) -> RowScores:
    """Return the scores over all ids, from those over each rank's own, in a collective of a process group's name.

    With s the log-sum-exp of a rank, S that of all, and H the entropy over a rank's ids, the entropy over all is
    ``S - sum_r e^(s_r - S) (s_r - H_r)``. Where another rank has the token, ``chosen`` is 0.
    """
    has_entropy = len(own.entropy) > 0
    parts = torch.stack([own.chosen, own.log_sum, *([own.entropy] if has_entropy else [])])
    # A group comes by its name, because an operator's arguments are numbers and strings.
    find = distributed_c10d._resolve_process_group  # type: ignore[attr-defined]
    ranks: dist.ProcessGroup = find(dist.GroupName(group))
    gathered = [torch.empty_like(parts) for _ in range(dist.get_world_size(ranks))]
    dist.all_gather(gathered, parts, group=ranks)
    chosen, log_sums, *entropies = torch.stack(gathered).unbind(1)
    log_sum = log_sums.logsumexp(0)
    if not has_entropy:
        return RowScores(chosen.sum(0), log_sum, own.entropy)
    spread = log_sum - ((log_sums - log_sum).exp() * (log_sums - entropies[0])).sum(0)
    return RowScores(chosen.sum(0), log_sum, spread)
