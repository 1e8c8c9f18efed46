"""``selected_log_probs``: log-prob and entropy of chosen tokens from hidden states and head, without their logits.

The logits ``[N, V]`` are by far the largest tensor of a loss: 4 096 rows of 151 936 token ids take 2.5 GB in float32,
and a dense log-prob and entropy keep several of them. Here a tile of them exists at a time, forward and backward, and
two numbers per row are kept. (The idea of arXiv 2411.09009, with entropy.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from torchrl_moe import _checks
from torchrl_moe.ops.linear_head import (
    LinearHead,
    RowScores,
    RowVocabularies,
    VocabShard,
    backward_tiles,
    forward_tiles,
    join,
    own_part,
)

# Memory of the tiles of one step: on a CPU they fit into the cache, on a GPU they keep it busy.
TILE_BYTES = {"cpu": 1 << 24, "cuda": 1 << 28}
TILES = 3  # that exist at the same time: logits, probabilities, and a gradient or their product


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitTransform:
    """The transform of ``y = hidden @ weight.T + bias`` before the softmax: ``cap tanh(scale y / cap) / temperature``.

    Args:
        scale: of the logits (Cohere's ``logit_scale``, the inverse of Granite's ``logits_scaling``).
        soft_cap: of the logits (Gemma's ``final_logit_softcapping``); ``None`` for no tanh.
        temperature: of sampling.

    Raises:
        ValueError: a number that is not positive and finite.

    >>> LogitTransform(soft_cap=30.0).apply(torch.tensor([0.0, 30.0, 3000.0]))
    tensor([ 0.0000, 22.8478, 30.0000])
    """

    scale: float = 1.0
    soft_cap: float | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number, got {value}: it multiplies or divides logits.")

    def apply(self, logits: Tensor) -> Tensor:
        """Transform dense logits."""
        logits = logits * self.scale
        if self.soft_cap is not None:
            logits = (logits / self.soft_cap).tanh() * self.soft_cap
        return logits / self.temperature

    @property
    def factors(self) -> list[float]:
        """``outer`` and ``inner`` of :class:`~torchrl_moe.ops.linear_head.LinearHead`."""
        if self.soft_cap is None:
            return [self.scale / self.temperature, 0.0]
        return [self.soft_cap / self.temperature, self.scale / self.soft_cap]


def selected_log_probs(
    hidden: Tensor | Sequence[Tensor],
    weight: Tensor | Sequence[Tensor],
    tokens: Tensor,
    *,
    bias: Tensor | None = None,
    transform: LogitTransform | None = None,
    entropy: bool = True,
    tile_bytes: int | None = None,
    kept: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return the log-prob of one chosen token per row, and the entropy of the row's distribution.

    Nothing of size ``[N, V]`` is made. Sums run in float32 at least, those of the weight's gradient too. Backward
    computes the tiles again; rows whose gradient is 0 are left out. Works under autocast and ``torch.compile``.

    Args:
        hidden: ``[N, H]``, floating point. With ``weight``, also a sequence of equal length: the products add up, so
            ``([h, s * h @ A.T], [W, B])`` is a head with LoRA.
        weight: ``[V, H]``, floating point. A DTensor sharded over the vocabulary, as tensor parallelism shards a head,
            on ranks that have the same rows: each rank scores its own part, a collective. Logits are not sent;
            gradients are those of one process where each rank computes the same loss. ``bias`` is then cut likewise.
        tokens: integer ``[N]``, in ``0..V-1``.
        bias: ``[V]``.
        transform: of the logits; default: none.
        entropy: whether to compute entropies.
        tile_bytes: most memory that tiles take at a time; default 16 MiB on CPU, 256 MiB on CUDA.
        kept: ids ``[M]`` and sizes ``[N]``, signed integers: the token ids that each row's distribution runs over, as
            an engine kept them (top_p, bans, grammars). ``sizes[n] > 0``: the next ``sizes[n]`` ids are those of row n;
            ``< 0``: all but the next ``-sizes[n]`` ids; 0: all ids. The others have probability 0 and gradient 0. An id
            takes some 50 bytes temporarily. Default: all ids in each row.

    Returns:
        ``[N]`` each, float32 (float64 for float64 input), with gradients to hidden states, weights and bias; ``None``
        without ``entropy``.

    Raises:
        ValueError: shapes or dtypes that do not fit; a token or an id out of range; a token that is not among the ids
            of its row; another number of ids than the sizes say.

    >>> hidden, weight = torch.eye(2), torch.tensor([[0.0, 1.0], [0.0, 1.0], [0.0, 0.0]])
    >>> log_probs, entropy = selected_log_probs(hidden, weight, torch.tensor([0, 2]))
    >>> log_probs.exp(), entropy
    (tensor([0.3333, 0.1554]), tensor([1.0986, 1.0174]))

    Row 0 was sampled from ids 0 and 1, row 1 from all but id 1:

    >>> kept = torch.tensor([0, 1, 1]), torch.tensor([2, -1])
    >>> log_probs, entropy = selected_log_probs(hidden, weight, torch.tensor([0, 2]), kept=kept)
    >>> log_probs.exp(), entropy
    (tensor([0.5000, 0.2689]), tensor([0.6931, 0.5822]))
    """
    hiddens = [hidden] if isinstance(hidden, Tensor) else list(hidden)
    weights = [weight] if isinstance(weight, Tensor) else list(weight)
    _check(hiddens, weights, tokens, bias)
    shard = VocabShard.of(weights[0])
    if shard is not None:
        if len(weights) > 1:
            raise ValueError(f"a weight that is sharded over the vocabulary must be the only one, got {len(weights)}.")
        hiddens = [shard.enter(hiddens[0])]
    if kept is not None:
        RowVocabularies(*kept).check_shapes(len(tokens))
    # The dtype of the products: autocast's, or the widest of the inputs.
    device = tokens.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    dtype = dtype or reduce(torch.promote_types, (tensor.dtype for tensor in (*hiddens, *weights)))
    size = TILE_BYTES.get(device, TILE_BYTES["cuda"]) if tile_bytes is None else tile_bytes
    number = torch.promote_types(dtype, torch.float32).itemsize
    if size < TILES * number:
        raise ValueError(f"tile_bytes must hold at least {TILES} numbers of {number} bytes, got {size}.")
    log_probs, spread, _ = _selected_log_probs(
        [h.to(dtype) for h in hiddens],
        [own_part(w).to(dtype) for w in weights],
        [tokens.long(), *(kept or ())],
        None if bias is None else own_part(bias),
        (transform or LogitTransform()).factors,
        entropy,
        [size // (TILES * number), *((shard.first, shard.vocabulary) if shard else (0, len(weights[0])))],
        shard.group if shard else "",
    )
    return log_probs, spread if entropy else None


def _check(hiddens: list[Tensor], weights: list[Tensor], tokens: Tensor, bias: Tensor | None) -> None:
    if not hiddens or len(hiddens) != len(weights):
        raise ValueError(f"there must be a weight for each hidden, got {len(hiddens)} and {len(weights)}.")
    _checks.check_rank("tokens", tokens, 1)
    _checks.check_integer("tokens", tokens)
    _checks.check_rank("weight", weights[0], 2)
    for hidden, weight in zip(hiddens, weights, strict=True):
        _checks.check_shape("hidden", hidden.shape, (len(tokens), "H"), hint="It has a row for each token.")
        _checks.check_shape("weight", weight.shape, (len(weights[0]), hidden.shape[1]), hint="It is [V, H].")
        _checks.check_floating("hidden", hidden)
        _checks.check_floating("weight", weight)
    if bias is not None:
        _checks.check_shape("bias", bias.shape, (len(weights[0]),), hint="It has a number for each token id.")
        _checks.check_floating("bias", bias)


# -- autograd. Custom operators: a compiled graph holds them whole, however many tiles there are --------------------


@torch.library.custom_op(
    "torchrl_moe::selected_log_probs",
    mutates_args=(),
    schema="(Tensor[] hiddens, Tensor[] weights, Tensor[] targets, Tensor? bias, float[] factors, bool entropy, "
    "int[] sizes, str group) -> (Tensor, Tensor, Tensor)",
)
def _selected_log_probs(
    hiddens: list[Tensor],
    weights: list[Tensor],
    targets: list[Tensor],
    bias: Tensor | None,
    factors: list[float],
    entropy: bool,
    sizes: list[int],
    group: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probs, entropies (``[0]`` if not asked) and log-sum-exps.

    ``targets`` are the tokens, and ``kept`` if there is one. ``sizes`` are the elements of a tile, the first id here,
    and V; all ids are here if ``group`` is empty.
    """
    tokens, *lists = targets
    kept = RowVocabularies(*lists) if lists else None
    elements, first, vocabulary = sizes
    outside = (tokens < 0) | (tokens >= vocabulary)
    if bool(outside.any()):
        raise ValueError(
            f"tokens must be in 0..{vocabulary - 1}, got {int(tokens[outside][0])}: leave rows out that have no token."
        )
    if kept is not None:
        kept.check_values(tokens, vocabulary)
    head = LinearHead(hiddens, weights, bias, factors[0], factors[1], kept, first)
    with torch.autocast(tokens.device.type, enabled=False):
        scores = forward_tiles(head, tokens - first, entropy, elements)
    if group:
        scores = join(scores, group)
    return scores.chosen - scores.log_sum, scores.entropy, scores.log_sum


@_selected_log_probs.register_fake
def _(
    hiddens: list[Tensor], _: object, targets: list[Tensor], __: object, ___: object, entropy: bool, *____: object
) -> tuple[Tensor, Tensor, Tensor]:
    out = torch.empty_like(targets[0], dtype=torch.promote_types(hiddens[0].dtype, torch.float32))
    return out, torch.empty_like(out) if entropy else out.new_empty(0), torch.empty_like(out)


@torch.library.custom_op(
    "torchrl_moe::selected_log_probs_backward",
    mutates_args=(),
    schema="(Tensor[] hiddens, Tensor[] weights, Tensor[] targets, Tensor? bias, float[] factors, Tensor[] rows, "
    "bool[] needs, int[] sizes) -> Tensor[]",
)
def _selected_log_probs_backward(
    hiddens: list[Tensor],
    weights: list[Tensor],
    targets: list[Tensor],
    bias: Tensor | None,
    factors: list[float],
    rows: list[Tensor],
    needs: list[bool],
    sizes: list[int],
) -> list[Tensor]:
    """Return a gradient for each hidden, each weight and the bias, ``[0]`` where none is needed.

    ``rows`` are log-sum-exps, entropies and the gradients of log-probs and entropies.
    """
    tokens, *lists = targets
    kept = RowVocabularies(*lists) if lists else None
    elements, first, _ = sizes
    log_sum, spread, grad_log_prob, grad_entropy = rows
    # Rows that a mask leaves out have a gradient of 0: they are dropped before the tiles. NaN is not 0, and stays.
    live = (grad_log_prob != 0) | (grad_entropy != 0)
    every = bool(live.all())
    wanted = slice(None) if every else live
    kept = kept if kept is None or every else kept.select(live)
    head = LinearHead([h[wanted] for h in hiddens], weights, bias, factors[0], factors[1], kept, first)
    scores = RowScores(log_sum[wanted], log_sum[wanted], spread[wanted] if len(spread) else spread)
    given = (grad_log_prob[wanted], grad_entropy[wanted])
    with torch.autocast(tokens.device.type, enabled=False):
        grads = backward_tiles(head, tokens[wanted] - first, scores, given, needs, elements)
    of_hiddens = grads.hiddens
    if not every:
        of_hiddens = [None if g is None else g.new_zeros(len(live), g.shape[1]) for g in grads.hiddens]
        for whole, part in zip(of_hiddens, grads.hiddens, strict=True):
            if whole is not None and part is not None:
                whole[live] = part
    return [log_sum.new_empty(0) if g is None else g for g in (*of_hiddens, *grads.weights, grads.bias)]


@_selected_log_probs_backward.register_fake
def _(
    hiddens: list[Tensor],
    weights: list[Tensor],
    _: object,
    bias: Tensor | None,
    __: object,
    rows: list[Tensor],
    needs: list[bool],
    ___: object,
) -> list[Tensor]:
    tensors = (*hiddens, *weights, bias)
    pairs = zip(tensors, needs, strict=True)
    return [rows[0].new_empty(0) if t is None or not needed else torch.empty_like(t) for t, needed in pairs]


# What backward needs: the inputs and two numbers per row, never a tile.
def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    hiddens, weights, targets, bias, ctx.factors, _, ctx.sizes, _ = inputs
    _, spread, log_sum = output
    ctx.mark_non_differentiable(log_sum)
    ctx.parts = len(hiddens)
    ctx.needs = [t is not None and t.requires_grad for t in (*hiddens, *weights, bias)]
    ctx.save_for_backward(*hiddens, *weights, bias, log_sum, spread, *targets)


def _backward(ctx: Any, grad_log_prob: Tensor, grad_entropy: Tensor, _: object) -> tuple[object, ...]:
    hiddens, weights = ctx.saved_tensors[: ctx.parts], ctx.saved_tensors[ctx.parts : 2 * ctx.parts]
    bias, log_sum, spread, *targets = ctx.saved_tensors[2 * ctx.parts :]
    # Without entropies autograd may still pass a gradient for the empty output.
    if not len(spread):
        grad_entropy = torch.zeros_like(grad_log_prob)
    rows = [log_sum, spread, grad_log_prob, grad_entropy]
    grads = _selected_log_probs_backward(hiddens, weights, targets, bias, ctx.factors, rows, ctx.needs, ctx.sizes)
    found = [grad if needed else None for grad, needed in zip(grads, ctx.needs, strict=True)]
    return found[: ctx.parts], found[ctx.parts : -1], [None] * len(targets), found[-1], None, None, None, None


_selected_log_probs.register_autograd(_backward, setup_context=_setup_context)
