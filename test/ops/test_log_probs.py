"""Equal to dense in value and gradient, under autocast and compiled too; invalid values are refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torchrl_moe.ops import LogitTransform, selected_log_probs

ROWS, VOCAB, SIZE = 9, 31, 6
TOKENS = torch.tensor([0, 30, 4, 17, 17, 8, 29, 1, 15])
TILE = 1200  # bytes: several tiles of rows and of columns
PLAIN = LogitTransform()
ALL = LogitTransform(scale=0.5, soft_cap=3.0, temperature=0.7)


@pytest.fixture(autouse=True)
def generator() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def inputs(dtype: torch.dtype = torch.float64, bias: bool = True) -> list[Tensor]:
    """Hidden states, weight, and bias."""
    shapes = [(ROWS, SIZE), (VOCAB, SIZE), (VOCAB,)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes[: 2 + bias]]


def dense(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    transform: LogitTransform = PLAIN,
    mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The textbook's, in float64, spelled out; ``mask`` says which ids are kept."""
    y = hidden.double() @ weight.double().T
    y = (y if bias is None else y + bias.double()) * transform.scale
    y = y if transform.soft_cap is None else transform.soft_cap * torch.tanh(y / transform.soft_cap)
    y = y / transform.temperature
    log_p = (y if mask is None else y.masked_fill(~mask, -math.inf)).log_softmax(-1)
    entropy = -(log_p.exp() * torch.where(log_p > -math.inf, log_p, 0)).sum(-1)
    return log_p[torch.arange(ROWS), TOKENS], entropy


def kept_tokens(kind: str) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """What sampling kept, as lists and as a dense mask: by a top_k of 4, by bans, or each of it in turn and all."""
    ids, sizes, mask = [], [], torch.ones(ROWS, VOCAB, dtype=torch.bool)
    for n, token in enumerate(TOKENS.tolist()):
        others = [int(other) for other in torch.randperm(VOCAB) if other != token]
        which = ["top_k", "bans", "all"][n % 3] if kind == "mixed" else kind
        listed = {"top_k": [*others[:2], token, others[2]], "bans": others[: 3 + n], "all": []}[which]
        ids += listed
        sizes.append(-len(listed) if which == "bans" else len(listed))
        mask[n] = which != "top_k"
        mask[n, listed] = which == "top_k"
    return (torch.tensor(ids, dtype=torch.int32), torch.tensor(sizes, dtype=torch.int32)), mask


def weighted(scores: Any) -> Tensor:
    """Any scalar that each score enters with another weight."""
    log_probs, entropy = scores
    return (log_probs * torch.linspace(-1, 1, ROWS)).sum() + (entropy * torch.linspace(0.2, 1, ROWS)).sum()


def check_same(got: Any, wanted: Any, leaves: list[Tensor]) -> None:
    """Values, and gradients of any scalar of them."""
    torch.testing.assert_close(got, wanted)
    ours, theirs = (torch.autograd.grad(weighted(scores), leaves, retain_graph=True) for scores in (got, wanted))
    torch.testing.assert_close(ours, theirs)


BOUNDS = {torch.float64: (1e-12, 1e-11), torch.float32: (1e-6, 4e-6), torch.bfloat16: (1e-6, 2e-2)}
"""Absolute, of values and of gradients; bfloat16 rounds only the gradients."""


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("transform", [PLAIN, ALL])
@pytest.mark.parametrize(
    ("kind", "bias"), [(None, True), (None, False), ("top_k", True), ("bans", True), ("mixed", True)]
)
@pytest.mark.parametrize("tile_bytes", [120, TILE, None])
def test_equal_to_dense(
    dtype: torch.dtype, transform: LogitTransform, kind: str | None, bias: bool, tile_bytes: int | None
) -> None:
    """Over all ids, or over those that were kept."""
    kept, mask = kept_tokens(kind) if kind else (None, None)
    tensors = [(0.5 * t.detach()).requires_grad_() for t in inputs(dtype, bias)]
    given: dict[str, Any] = {"kept": kept, "bias": tensors[2] if bias else None}
    got = selected_log_probs(*tensors[:2], TOKENS, transform=transform, tile_bytes=tile_bytes, **given)
    wanted = dense(*tensors, transform=transform, mask=mask)
    values, gradients = BOUNDS[dtype]
    for ours, theirs in zip(got, wanted, strict=True):
        assert ours.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(ours.double(), theirs, atol=values, rtol=1e-6 if dtype != torch.float64 else 0)
    ours_grads = torch.autograd.grad(weighted(got), tensors)
    for ours, theirs in zip(ours_grads, torch.autograd.grad(weighted(wanted), tensors), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs, atol=gradients, rtol=gradients)
    if mask is not None:
        everywhere_out = ~mask.any(0)
        assert everywhere_out.any() == (kind == "top_k")
        assert not any(grad[everywhere_out].any() for grad in ours_grads[1:])


@pytest.mark.parametrize("kind", [None, "mixed"])
def test_parts_add_up(kind: str | None) -> None:
    """LoRA: two parts are the head with its merged weight, and a frozen head gets no gradient."""
    kept, mask = kept_tokens(kind) if kind else (None, None)
    hidden, weight, *bias = inputs(bias=kind is not None)
    weight.requires_grad_(kind is not None)
    down, up = torch.randn(2, SIZE).double(), torch.randn(VOCAB, 2).double().requires_grad_()
    how: dict[str, Any] = {"transform": ALL, "tile_bytes": TILE, "kept": kept, "bias": bias[0] if bias else None}
    got = selected_log_probs([hidden, hidden @ down.T * 3], [weight, up], TOKENS, **how)
    wanted = dense(hidden, weight + 3 * up @ down, how["bias"], ALL, mask)
    leaves = [hidden, up, *bias, *([weight] if bias else [])]
    check_same(got, wanted, leaves)
    for one, other in zip(got, wanted, strict=True):  # a loss may read only one of the two
        ours, theirs = (torch.autograd.grad(scores.sum(), leaves, retain_graph=True) for scores in (one, other))
        torch.testing.assert_close(ours, theirs)
    with torch.no_grad():
        assert not any(score.requires_grad for score in selected_log_probs(hidden, up @ down, TOKENS))


@pytest.mark.parametrize("kind", [None, "mixed", "all"])
@pytest.mark.parametrize("transform", [PLAIN, LogitTransform(temperature=0.7)])
def test_words_of_a_bias_of_minus_infinity_have_probability_zero(kind: str | None, transform: LogitTransform) -> None:
    """With lists too, of which those of "all" leave no word out."""
    kept, mask = kept_tokens(kind) if kind else (None, None)
    hidden, weight, bias = inputs()
    with torch.no_grad():
        bias[[2, 5, 20]] = -math.inf
    how: dict[str, Any] = {"bias": bias, "transform": transform, "tile_bytes": TILE, "kept": kept}
    wanted = dense(hidden, weight, bias, transform, mask)
    check_same(selected_log_probs(hidden, weight, TOKENS, **how), wanted, [hidden, weight, bias])
    log_probs, entropy = selected_log_probs(hidden, weight, TOKENS, entropy=False, **how)
    assert entropy is None
    zero = torch.zeros(ROWS)
    check_same((log_probs, zero), (wanted[0], zero), [hidden, weight, bias])


@pytest.mark.parametrize("kind", [None, "mixed"])
def test_rows_that_a_loss_masks_do_not_reach_the_gradients(kind: str | None) -> None:
    """Not even if their hidden states are NaN: 0 x NaN is not computed."""
    kept, mask = kept_tokens(kind) if kind else (None, None)
    hidden, weight = inputs(bias=False)
    keep = torch.tensor([True, True, False, True, False, True, True, False, True])
    broken = hidden.detach().masked_fill(~keep[:, None], torch.nan).requires_grad_()
    log_probs, entropy = selected_log_probs(broken, weight, TOKENS, tile_bytes=TILE, kept=kept)
    assert log_probs.isnan().tolist() == entropy.isnan().tolist() == (~keep).tolist()
    ours = torch.autograd.grad(torch.where(keep, log_probs + entropy, 0).sum(), [broken, weight])
    wanted = dense(hidden, weight, mask=mask)
    theirs = torch.autograd.grad((wanted[0] + wanted[1])[keep].sum(), [hidden, weight])
    torch.testing.assert_close(ours, theirs)


def test_no_rows_give_no_scores_and_gradients_of_zero() -> None:
    hidden, weight, bias = inputs()
    log_probs, entropy = selected_log_probs(hidden[:0], weight, TOKENS[:0], bias=bias)
    assert log_probs.shape == entropy.shape == (0,)
    (log_probs.sum() + entropy.sum()).backward()
    assert all(t.grad is not None and not t.grad.any() for t in (hidden, weight, bias))


@pytest.mark.parametrize("kind", [None, "mixed"])
def test_autocast_sets_the_operands_and_not_the_sums(kind: str | None) -> None:
    kept, mask = kept_tokens(kind) if kind else (None, None)
    hidden, weight = (t.detach().float().requires_grad_() for t in inputs(bias=False))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        scores = selected_log_probs(hidden, weight, TOKENS, kept=kept)
        weighted(scores).backward()
    wanted = dense(hidden.detach().bfloat16(), weight.detach().bfloat16(), mask=mask)
    for ours, theirs in zip(scores, wanted, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), theirs, atol=2e-6, rtol=0)
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


@pytest.mark.parametrize("kind", [None, "mixed"])
def test_a_compiled_graph_holds_it_whole(kind: str | None) -> None:
    tensors = [t.detach().float().requires_grad_() for t in inputs()]
    kept = kept_tokens(kind)[0] if kind else None

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return weighted(selected_log_probs(2 * hidden, weight, TOKENS, bias=bias, tile_bytes=TILE, kept=kept))

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    ours, theirs = (torch.autograd.grad(f(*tensors), tensors) for f in (compiled, loss))
    torch.testing.assert_close(ours, theirs)


def test_tiles_whose_sides_are_rounded_leave_nothing_out() -> None:
    """[257, 385] in tiles of at most [128, 128], those at the edges of one row and of one column."""
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, SIZE, generator=random).double().requires_grad_() for n in (257, 385))
    tokens = torch.randint(385, (257,), generator=random)
    log_probs, entropy = selected_log_probs(hidden, weight, tokens, tile_bytes=3 * 8 * 128 * 129)
    log_p = (hidden @ weight.T).log_softmax(-1)
    wanted = log_p[torch.arange(257), tokens], -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close((log_probs, entropy), wanted)
    ours, theirs = (
        torch.autograd.grad(a.sum() + 0.1 * (b * b).sum(), [hidden, weight], retain_graph=True)
        for a, b in ((log_probs, entropy), wanted)
    )
    torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [None, "mixed"])
def test_on_a_gpu(dtype: torch.dtype, kind: str | None) -> None:
    (ids, sizes), mask = kept_tokens(kind or "all")
    kept = (ids.cuda(), sizes.cuda()) if kind else None
    tensors = [t.detach().to("cuda", dtype).requires_grad_() for t in inputs()]
    tokens = TOKENS.cuda()
    log_probs, entropy = selected_log_probs(tensors[0], tensors[1], tokens, bias=tensors[2], tile_bytes=TILE, kept=kept)
    (log_probs.sum() + entropy.sum()).backward()
    copies = [t.detach().cpu().requires_grad_() for t in tensors]
    wanted = dense(*copies, mask=mask)
    (wanted[0].sum() + wanted[1].sum()).backward()
    torch.testing.assert_close(log_probs.cpu().double(), wanted[0], atol=1e-4, rtol=0)
    torch.testing.assert_close(entropy.cpu().double(), wanted[1], atol=1e-4, rtol=0)
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    for ours, theirs in zip(tensors, copies, strict=True):
        torch.testing.assert_close(ours.grad.cpu(), theirs.grad, atol=bound, rtol=bound)


NO_IDS, NO_SIZES = torch.zeros(0).int(), torch.zeros(ROWS).int()
FEW = torch.tensor([2, 0, -1, 0, 2, 0, 0, 0, 0], dtype=torch.int8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": TOKENS[1:]}, r"hidden must have shape \[8, H\], got \[9, 6\]"),
        ({"tokens": TOKENS[None]}, "tokens must have 1 dimension, got 2"),
        ({"tokens": TOKENS.float()}, "tokens must have an integer dtype"),
        ({"tokens": TOKENS - 1}, r"tokens must be in 0..30, got -1: leave rows out"),
        ({"tokens": TOKENS + 1}, r"tokens must be in 0..30, got 31"),
        ({"weight": torch.zeros(VOCAB, 5)}, r"weight must have shape \[31, 6\], got \[31, 5\]"),
        ({"weight": torch.zeros(VOCAB, SIZE).long()}, "weight must have a floating point dtype"),
        ({"weight": [torch.zeros(VOCAB, SIZE)] * 2}, "a weight for each hidden, got 1 and 2"),
        ({"bias": torch.zeros(5)}, r"bias must have shape \[31\], got \[5\]"),
        ({"kept": (torch.zeros(1, 1).int(), NO_SIZES)}, "ids of kept must have 1 dimension, got 2"),
        ({"kept": (torch.zeros(0), NO_SIZES)}, "ids of kept must have a signed integer dtype"),
        ({"kept": (NO_IDS, NO_SIZES.float())}, "sizes of kept must have a signed integer"),
        ({"kept": (NO_IDS, NO_SIZES.to(torch.uint8))}, "sizes of kept must have a signed integer"),
        ({"kept": (NO_IDS, NO_SIZES[1:])}, r"sizes of kept must have shape \[9\], got \[8\]"),
        # rows 0 to 4 have the ids 4 and 0, all, all but 3, all, and 17 and 1
        ({"kept": (torch.tensor([4, 0, 3, 17]), FEW)}, "the sizes of kept say 5 ids, and there are 4"),
        ({"kept": (torch.tensor([4, 0, 3, 17, 1, 0]), FEW)}, "the sizes of kept say 5 ids, and there are 6"),
        ({"kept": (torch.tensor([4, 0, 31, 17, 1]), FEW)}, r"ids of kept must be in 0\.\.30, row 2 has 31"),
        ({"kept": (torch.tensor([4, 0, 3, 17, -1]), FEW)}, r"ids of kept must be in 0\.\.30, row 4 has -1"),
        ({"kept": (torch.tensor([4, 2, 3, 17, 1]), FEW)}, "row 0: token 0 is not among the ids that kept gives this"),
        ({"kept": (torch.tensor([4, 0, 4, 17, 1]), FEW)}, "row 2: token 4 is not among the ids"),
        ({"kept": (torch.tensor([4, 0, 3, 16, 1]), FEW)}, "row 4: token 17 is not among the ids"),
        ({"tile_bytes": 11}, "tile_bytes must hold at least 3 numbers of 4 bytes, got 11"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    arguments = {"hidden": torch.zeros(ROWS, SIZE), "weight": torch.zeros(VOCAB, SIZE), "tokens": TOKENS, **change}
    with pytest.raises(ValueError, match=message):
        selected_log_probs(**arguments)


@pytest.mark.parametrize("name", ["scale", "soft_cap", "temperature"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_a_transform_has_positive_numbers(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a positive number, got {value}"):
        LogitTransform(**{name: value})


def test_a_transform_by_hand() -> None:
    logits = torch.tensor([0.0, 4.0])
    assert LogitTransform(scale=2.0, temperature=4.0).apply(logits).tolist() == [0.0, 2.0]
    capped = LogitTransform(soft_cap=4.0).apply(logits)
    torch.testing.assert_close(capped, torch.tensor([0.0, 4 * 0.7615942]))
