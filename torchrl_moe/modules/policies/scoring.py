"""The tensors of a scoring pass: token sequences laid out as a batch, run through a model, and read back.

A batch is padded on the left, as TorchRL's losses read it. The model's input may have the same layout, or several
sequences per row with little padding; both give the same log-probs. Nothing here depends on which experts are used.

Letters: B sequences, T tokens of the longest, N tokens to score, V vocabulary; R rows of W tokens in a model's input.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import torch
from tensordict import LazyStackedTensorDict, NestedKey, TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.functional import log_softmax

from torchrl_moe import _checks
from torchrl_moe.data import UNSET_EXPERT, RoutedExperts
from torchrl_moe.data.routing_layout import routes_dtype
from torchrl_moe.errors import ReplayError, RouteShapeError, RouteValueError, RoutingError
from torchrl_moe.modules.replay.router_replay import OnBadRoutes


@dataclass(frozen=True, slots=True)
class ScoringBatch:
    """Tokens of a batch. ``ids`` int64 ``[B, T]``, ``mask`` bool ``[B, T]``; padding may be on both sides.

    ``lengths`` counts the rows of each sample, its own padding included; the rows to the left of them were added here.
    """

    ids: Tensor
    mask: Tensor
    lengths: tuple[int, ...]

    def to(self, device: torch.device) -> ScoringBatch:
        """Return the batch on ``device``."""
        return ScoringBatch(self.ids.to(device), self.mask.to(device), self.lengths)

    def split(self, values: Tensor) -> list[Tensor]:
        """Return ``[B, T, ...]`` as one tensor per sample, as long as the sample's own rows."""
        return [row[len(row) - length :] for row, length in zip(values, self.lengths, strict=True)]

    @property
    def scored(self) -> Tensor:
        """bool ``[B, T]``: tokens that have a token before them."""
        before = torch.zeros_like(self.mask)
        before[:, 1:] = self.mask[:, :-1]
        return self.mask & before

    def padded(self, masked: bool = True, width: int | None = None) -> Layout:
        """Return the layout with a row for each sequence, padded on the right to the longest, or to ``width`` tokens.

        Padding on the left would come before the tokens, where linear and sparse attention would not ignore it.
        """
        # a batch without any token still needs a column, for the model runs on every rank
        longest = max(1, int(self.mask.sum(-1).max()))
        if width is not None and longest > width:
            raise ValueError(f"a sequence has {longest} tokens, and pad_model_input={width} is the width of its row")
        width = longest if width is None else width
        places = (self.mask.cumsum(-1) - 1).clamp(min=0)
        first = torch.arange(len(self.ids), device=self.ids.device)[:, None] * width
        index = (first + places).masked_fill(~self.mask, 0)
        columns = torch.arange(width, device=self.ids.device).expand(len(self.ids), -1)
        ids = columns.new_zeros(columns.shape)
        ids.view(-1)[index[self.mask]] = self.ids[self.mask]
        inputs = {"input_ids": ids, "position_ids": columns}
        if masked:
            inputs["attention_mask"] = (columns < self.mask.sum(-1, keepdim=True)).long()
        return Layout(inputs, index, self.mask)

    def packed(self, width: int | None = None) -> Layout:
        """Return a layout with several sequences in a row, separated by positions that restart at 0."""
        lengths = self.mask.sum(-1).tolist()
        width = max(1, sum(lengths)) if width is None else width
        starts, used = _first_fit(lengths, width)
        device = self.ids.device
        places = self.mask.cumsum(-1) - 1
        index = (torch.tensor(starts, device=device)[:, None] + places).masked_fill(~self.mask, 0)
        # the padding at the end of a row is a separate sequence
        positions = (torch.arange(width, device=device) - torch.tensor(used, device=device)[:, None]).clamp(min=0)
        ids = torch.zeros_like(positions)
        ids.view(-1)[index[self.mask]] = self.ids[self.mask]
        positions.view(-1)[index[self.mask]] = places[self.mask]
        return Layout({"input_ids": ids, "position_ids": positions}, index, self.mask)


@dataclass(frozen=True, slots=True)
class Layout:
    """The positions of a batch's tokens in a model's input.

    ``inputs`` has ``input_ids`` ``[R, W]`` and related inputs; ``index`` int64 ``[B, T]`` is a token's position in the
    flattened input, and is undefined where ``mask`` is False.
    """

    inputs: dict[str, Tensor]
    index: Tensor
    mask: Tensor

    @property
    def shape(self) -> torch.Size:
        """``[R, W]``."""
        return self.inputs["input_ids"].shape

    def read(self, values: Tensor) -> Tensor:
        """Return values ``[R * W, ...]`` of the flat input as ``[B, T, ...]``, zero on pads."""
        mask = self.mask.view(*self.mask.shape, *[1] * (values.ndim - 1))
        return values[self.index].masked_fill(~mask, 0)


def _first_fit(lengths: Sequence[int], width: int) -> tuple[list[int], list[int]]:
    """Pack sequences into rows, longest first; return each one's start in the flat input, and each row's length."""
    used: list[int] = []
    starts = [0] * len(lengths)
    # in one row the order is kept; in several the longest come first, as they are the hardest to place
    order = range(len(lengths)) if sum(lengths) <= width else sorted(range(len(lengths)), key=lambda i: -lengths[i])
    for i in order:
        row = next((r for r, taken in enumerate(used) if taken + lengths[i] <= width), len(used))
        if row == len(used):
            used.append(0)
        starts[i] = row * width + used[row]
        used[row] += lengths[i]
    return starts, used


def row_width(pad_model_input: bool | int | None) -> int | None:
    """Tokens of the row that each sequence has for itself; ``None``: a batch is laid out in another way."""
    return None if isinstance(pad_model_input, bool) else pad_model_input


def pad_left(rows: Sequence[Tensor], value: float) -> Tensor:
    """Stack ``[T, ...]`` rows to ``[B, T, ...]``, padded on the left."""
    longest = max(len(row) for row in rows)
    out = rows[0].new_full((len(rows), longest, *rows[0].shape[1:]), value)
    for i, row in enumerate(rows):
        out[i, longest - len(row) :] = row
    return out


def samples_of(td: TensorDictBase, key: NestedKey) -> Sequence[Tensor | None] | None:
    """Return an entry of a dense, a lazily stacked or a nested batch, sample by sample; ``None`` if it is missing."""
    rows = td.get(key, None, as_list=True)
    if isinstance(rows, Tensor) and rows.is_nested:
        return list(rows.unbind())
    return rows


def read_rows(
    td: TensorDictBase,
    key: NestedKey,
    value: float,
    lengths: Sequence[int] | None = None,
) -> Tensor | None:
    """Read a per-token entry of a dense, a lazily stacked or a nested batch as ``[B, T, ...]``."""
    rows = _all_samples(td, key)
    if rows is None:
        return None
    for i, (row, length) in enumerate(zip(rows, lengths or map(len, rows), strict=True)):
        if len(row) != length:
            raise ValueError(
                f"{key!r} of sample {i} has {len(row)} rows, its tokens are {length}: both must have been cut or "
                "padded alike"
            )
    return pad_left(rows, value)


def _all_samples(td: TensorDictBase, key: NestedKey) -> list[Tensor] | None:
    samples = samples_of(td, key)
    rows = [] if samples is None else [row for row in samples if row is not None]
    return rows if len(rows) == len(td) else None


def read_batch(td: TensorDictBase, tokens_key: NestedKey, mask_key: NestedKey) -> ScoringBatch:
    """Read the tokens to score; without a mask all are real."""
    if td.batch_dims != 1 or not len(td):
        raise ValueError(
            f"scoring takes a batch of sequences, batch size [B] with B >= 1, got {list(td.batch_size)}: use "
            "td.reshape(-1) on a batch of more dimensions, and td.unsqueeze(0) on a single sample"
        )
    # tokens, then the mask, both padded on the left
    rows = _all_samples(td, tokens_key)
    if rows is None:
        raise missing(td, tokens_key)
    for i, row in enumerate(rows):
        _checks.check_integer(f"{tokens_key!r} of sample {i}", row)
    lengths = tuple(len(row) for row in rows)
    mask = read_rows(td, mask_key, False, lengths)
    if mask is None:
        mask = pad_left([torch.ones_like(row, dtype=torch.bool) for row in rows], False)
    batch = ScoringBatch(pad_left(rows, 0).long(), _checks.as_mask(repr(mask_key), mask), lengths)
    # a real token after a pad, other than a first one, would count with a log-prob that no policy sampled it with
    behind = batch.mask & ~batch.scored & (batch.mask.cumsum(-1) > 1)
    if bool(behind.any()):
        sample, column = behind.nonzero()[0].tolist()
        token = column - (batch.mask.shape[1] - batch.lengths[sample])
        raise ValueError(
            f"{mask_key!r} of sample {sample} has a gap before token {token} ({int(behind.sum())} gaps in the batch): "
            "pads stand before the tokens of a sample or after them. Cut them out of the tokens, and of all that is "
            "laid out as they are."
        )
    return batch


def missing(td: TensorDictBase, key: NestedKey) -> KeyError:
    """Return the error for an entry that some sample does not have."""
    return KeyError(f"no {key!r} in every sample; the first one has {sorted(map(str, td[0].keys(True, True)))}")


def align(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return a model's logits ``[B, T, V]`` shifted by one, so that row t is token t's own distribution; float32.

    Row 0 is zero: nothing comes before a first token. ``temperature`` is ``[B]``.
    """
    # the model's row t is the distribution of token t + 1
    moved = torch.cat([torch.zeros_like(logits[:, :1]), logits[:, :-1]], 1).float()
    return moved / temperature.to(moved.device)[:, None, None]


def token_scores(
    logits: Tensor,
    tokens: Tensor,
    temperature: float | Tensor,
    entropy: bool,
    kept: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Return log-probs and entropies of tokens from the dense logits of their own distributions."""
    logits = logits.float() / (temperature[:, None] if isinstance(temperature, Tensor) else temperature)
    if kept is not None:
        logits = logits.masked_fill(~kept, torch.finfo(logits.dtype).min)  # not -inf: its product with 0 is NaN
    log_probs = log_softmax(logits, -1)
    chosen = log_probs.gather(-1, tokens[:, None])[:, 0]
    if not entropy:
        return chosen, None
    # the log-prob of an excluded id is so large that its product with a gradient above 1 overflows
    logs = log_probs if kept is None else log_probs.masked_fill(~kept, 0.0)
    return chosen, -(log_probs.exp() * logs).sum(-1)


# The routes of a scoring pass: read sample by sample for a replay, counted, and written back after a recording.
#
# Letters: B sequences, T tokens of the longest, N all tokens, L decoder layers, K experts per token.


RECORDED = "train_routed_experts"
UNUSED = (
    "the batch has the experts that an engine recorded, and replay='none' trains on those of the live router: pass "
    "replay='R3' to follow them, or record none, vLLMWrapper(return_routed_experts=False)"
)
REMEDIES = {
    "R3": "start the engine with route capture and keep the routes (vLLMWrapper(return_routed_experts=True)), or pass "
    "replay='none'",
    "R2": "score the batch once under torch.no_grad() to record it",
}
NO_ROUTES = UNSET_EXPERT - 1  # for routes that do not fit a sample: the check of ids refuses it


def read_routes(
    td: TensorDictBase,
    key: NestedKey,
    batch: ScoringBatch,
    tail: tuple[int, int],
    on_bad_routes: OnBadRoutes,
    replay: Literal["R3", "R2"] = "R3",
) -> Tensor:
    """Read the routes of a dense, a lazily stacked or a nested batch as ``[B, T, L, K]``, -1 where rows were added."""
    rows = samples_of(td, key)
    if rows is None and on_bad_routes == "live":  # a stack has no entry that one sample lacks
        rows = [sample.get(key, None) for sample in td.unbind(0)]
    known = [] if rows is None else [row for row in rows if row is not None]
    if rows is None or not known or (on_bad_routes == "raise" and len(known) < len(rows)):
        raise ReplayError(
            f"replay={replay!r} needs {key!r} in every sample, and the input lacks it: {REMEDIES[replay]}"
        )
    # sample by sample, so that one that does not fit may run live
    fitting: list[Tensor] = []
    for i, (row, length) in enumerate(zip(rows, batch.lengths, strict=True)):
        try:
            fitting.append(_checked(f"{key!r} of sample {i}", row, length, tail))
        except RoutingError:
            if on_bad_routes == "raise":
                raise
            fitting.append(torch.full((length, *tail), NO_ROUTES, dtype=torch.int8))
    dtype = reduce(torch.promote_types, (row.dtype for row in fitting))  # samples may be int8 or int16
    return pad_left([row.to(batch.ids.device, dtype) for row in fitting], UNSET_EXPERT)


def _checked(name: str, row: Tensor | None, length: int, tail: tuple[int, int]) -> Tensor:
    if row is None:
        raise ReplayError(f"{name} is missing")
    if len(row) != length:
        raise ReplayError(
            f"{name} has {len(row)} rows, its tokens are {length}: both must have been cut or padded alike"
        )
    hint = "L counts all decoder layers of the replaying model, dense ones too."
    _checks.check_shape(name, row.shape, ("T", *tail), error=RouteShapeError, hint=hint)
    _checks.check_integer(name, row, signed=True, error=RouteValueError)
    return row


def note_routing(
    td: TensorDictBase,
    batch: ScoringBatch,
    routes: Tensor,
    report: Mapping[int, Mapping[str, float | None]],
    refused: Collection[int],
) -> None:
    """Write how many tokens ran on live routing, and in which share of rows the live router agrees."""
    # a token counts once, however many of its layers ran live
    live = (routes[:, :, list(report), 0] < 0).any(-1)
    live[list(refused)] = True
    agreement = torch.full((len(routes), routes.shape[2]), float("nan"))
    for layer, figures in report.items():
        if figures["agreement"] is not None:
            agreement[:, layer] = figures["agreement"]
    td.set(("routing", "fallback"), (live & batch.mask).sum(-1).to(td.device or "cpu"))
    td.set(("routing", "agreement"), agreement.to(td.device or "cpu"))


def has_recorded(td: TensorDictBase) -> bool:
    """Return whether the samples have routes that an earlier pass recorded."""
    rows = samples_of(td, (RECORDED, "full"))
    if rows is None and isinstance(td, LazyStackedTensorDict):  # a stack has no entry that one sample lacks
        rows = [sample.get((RECORDED, "full"), None) for sample in td.unbind(0)]
    missing = [i for i, row in enumerate(rows or ()) if row is None]
    if missing and rows is not None and len(missing) < len(rows):
        raise ReplayError(
            f"samples {missing[:8]} have no {RECORDED!r}, and others have: score the two apart, or pass rerecord=True"
        )
    return rows is not None and not missing


def write_recorded(td: TensorDictBase, batch: ScoringBatch, routes: Tensor, num_experts: int) -> None:
    """Write recorded routes ``[B, T, L, K]``, row by row as long as each sample's own tokens; -1 on its pads."""
    routes = routes.masked_fill(~batch.mask[..., None, None], UNSET_EXPERT)
    routes = routes.to(td.device or "cpu", routes_dtype(num_experts))  # as an engine's
    td.set(RECORDED, lazy_stack([RoutedExperts(full=row) for row in batch.split(routes)]))
