"""Answers of any lengths in one batch: they join and leave between two steps, and each step gives each a token.

The batch is padded on the left, so that the newest token of every answer is in the last column; keys and values are
those of transformers' own ``DynamicCache``, and whatever is padded is masked. Nothing here is fast.

Letters: R answers of the batch, J that join, S columns, V words, L decoder layers, K experts per token.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from torchrl_moe._compat_transformers import cache_argument
from torchrl_moe.data.kept_tokens import dense_mask, select_rows
from torchrl_moe.modules.backends.replica import Scoring
from torchrl_moe.modules.backends.transformers.answer import Answer, Rows
from torchrl_moe.modules.backends.transformers.sampler import Sampler
from torchrl_moe.modules.replay.binding import UNSET, Recording
from torchrl_moe.modules.replay.router_replay import RouterReplay

__all__ = ["BatchDecoder"]

SCORED_TOKENS = 256  # whose logits exist at a time
CHECKED = (4, 6)  # tokens of the sequences that the model is tested with
TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-3}  # of the logits' standard deviation
COARSE = 0.1  # the same for other dtypes


class BatchDecoder:
    """Decodes with one model, which no other thread may use at the same time.

    Args:
        model: a causal language model of transformers, in eval mode.
        replay: of the model, to record its routes; ``None``: none are.
        sampler: draws the tokens.

    Attributes:
        answers: the running ones, in the order of the batch's rows.
        token_bytes: bytes of keys and values per column of a row.

    Raises:
        ValueError: the model cannot be decoded this way: it keeps more than keys and values, or pads change its logits.
    """

    def __init__(self, model: Any, replay: RouterReplay | None, sampler: Sampler) -> None:
        self.model, self.replay, self.sampler = model, replay, sampler
        self.answers: list[Answer] = []
        self._takes = set(inspect.signature(model.forward).parameters)
        self._cache_argument = cache_argument(self._takes)
        self._cache: Any = None
        self._mask = torch.empty(0)  # bool [R, S]
        self.token_bytes = self._check()

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        device: torch.device = self.model.device
        return device

    @property
    def columns(self) -> int:
        """S: as many as the longest answer has tokens, or a few more."""
        return self._mask.shape[1] if self.answers else 0

    # -- the batch --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, joining: Sequence[Answer], version: int) -> None:
        """Read what joins, and give each answer a token.

        Args:
            joining: answers to add; all of their tokens are read.
            version: of the weights.
        """
        logits = [self._advance()] if self.answers else []
        if joining:
            logits.append(self._read(joining))
            self.answers += joining
        for answer, draw in zip(self.answers, self.sampler(torch.cat(logits), self.answers), strict=True):
            answer.add(draw, version)

    def leave(self, gone: Sequence[Answer]) -> None:
        """Drop answers, and the columns that only they had."""
        stays = [row for row, answer in enumerate(self.answers) if answer not in gone]
        if len(stays) == len(self.answers):
            return
        self.answers = [self.answers[row] for row in stays]
        if not stays:
            self._cache = None
            return
        self._mask = self._mask[stays]
        empty = int((~self._mask.any(0)).long().cumprod(0).sum())
        self._mask = self._mask[:, empty:]
        for layer in self._cache.layers:
            layer.keys, layer.values = layer.keys[stays, :, empty:], layer.values[stays, :, empty:]

    def empty(self) -> list[Answer]:
        """Drop all answers with their keys and values, and return them: they may join again, and are then read again.

        One that has just got a token that was not read yet has a row for each other one.
        """
        gone = self.answers
        self.answers, self._cache = [], None
        return gone

    def _advance(self) -> Tensor:
        """Read the newest token of each answer; return logits ``[R, V]``."""
        ids = torch.tensor([[answer.tokens[-1]] for answer in self.answers], device=self.device)
        self._mask = nn.functional.pad(self._mask, (0, 1), value=True)
        logits, rows = self._forward(ids, self._mask, self._cache)
        if rows is not None:
            for answer, row in zip(self.answers, rows, strict=True):
                answer.add_rows(row)
        return logits[:, -1]

    def _read(self, joining: Sequence[Answer]) -> Tensor:
        """Read all tokens of answers, equal ones once; return logits ``[J, V]``."""
        followed = [answer.rows_to_follow() for answer in joining]
        places: dict[Any, int] = {}
        unique: list[tuple[list[int], Rows | None]] = []
        index = []
        for answer, rows in zip(joining, followed, strict=True):
            key = (*answer.ids, None if rows is None else rows.tobytes())
            if key not in places:
                places[key] = len(unique)
                unique.append((answer.ids, rows))
            index.append(places[key])
        ids, mask = _padded([ids for ids, _ in unique], self.device)
        cache = DynamicCache()
        logits, routes = self._forward(ids, mask, cache, self._laid_out([rows for _, rows in unique], ids))
        cache.batch_select_indices(torch.tensor(index, device=self.device))
        self._merge(cache, mask[index])
        for answer, place in zip(joining, index, strict=True):
            answer.note_read()
            if routes is not None:
                answer.add_rows(routes[place, ids.shape[1] - len(answer.ids) :])
        return logits[index, -1]

    def _laid_out(self, rows: Sequence[Rows | None], ids: Tensor) -> Tensor | None:
        """Return rows to follow as the batch is laid out, ``[J, S, L, K]``; ``None`` if there are none."""
        if self.replay is None or all(one is None for one in rows):
            return None
        routes = torch.full((*ids.shape, self.replay.num_layers, self.replay.top_k), UNSET, dtype=torch.int16)
        for row, one in enumerate(rows):
            if one is not None:
                routes[row, ids.shape[1] - len(one) :] = torch.from_numpy(one.astype(np.int16))
        return routes

    def _merge(self, cache: Any, mask: Tensor) -> None:
        """Add rows below those of the batch; the narrower ones are padded on the left."""
        if self._cache is None:
            self._cache, self._mask = cache, mask
            return
        width = max(self._mask.shape[1], mask.shape[1])
        self._mask = torch.cat([_widened(self._mask, width), _widened(mask, width)])
        for ours, theirs in zip(self._cache.layers, cache.layers, strict=True):
            ours.keys = torch.cat([_wider(ours.keys, width), _wider(theirs.keys, width)])
            ours.values = torch.cat([_wider(ours.values, width), _wider(theirs.values, width)])

    # -- the model --------------------------------------------------------------------------------------------------

    def _forward(
        self, ids: Tensor, mask: Tensor, cache: Any, followed: Tensor | None = None, keep: int = 1
    ) -> tuple[Tensor, Rows | None]:
        """Run the model on tokens.

        Args:
            ids: ``[R, T]``, the newest tokens.
            mask: bool ``[R, S]``, of all tokens so far.
            cache: keys and values of the tokens before.
            followed: experts of these tokens, ``[R, T, L, K]``.
            keep: for how many of the last tokens logits are wanted.

        Returns:
            Logits ``[R, keep, V]``, and the experts that were used, ``[R, T, L, K]``.
        """
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        wanted = {"position_ids": positions, "logits_to_keep": keep}
        given = {name: value for name, value in wanted.items() if name in self._takes}
        with self._routing(followed, mask[:, -ids.shape[1] :]) as recording:
            out = self.model(
                input_ids=ids,
                attention_mask=mask.long(),
                use_cache=True,
                **{self._cache_argument: cache},
                **given,
            )
        return out.logits[:, -keep:], None if recording is None else recording.routed_experts.cpu().numpy()

    @contextmanager
    def _routing(self, followed: Tensor | None, mask: Tensor) -> Iterator[Recording | None]:
        if self.replay is None:
            yield None
        elif followed is None:
            with self.replay.record() as recording:
                yield recording
        else:
            with self.replay.replay(followed, attention_mask=mask, record=True) as used:
                yield used

    @torch.no_grad()
    def score(self, ids: Sequence[int], scoring: Scoring, followed: Rows | None = None) -> NDArray[np.float32]:
        """Return the log-probs of a sequence's tokens, float32 ``[T]``, NaN for the first.

        Args:
            ids: ``[T]``.
            scoring: the temperature, and the words that each token was drawn from.
            followed: the experts of the first tokens, ``[rows, L, K]``, -1 where the model routes.
        """
        tokens = torch.tensor([list(ids)], device=self.device)
        routes = self._laid_out([_filled(followed, len(ids))], tokens)
        scores = np.full(len(ids), np.nan, np.float32)
        cache, mask = DynamicCache(), torch.ones_like(tokens, dtype=torch.bool)
        for start in range(0, len(ids) - 1, SCORED_TOKENS):
            stop = min(start + SCORED_TOKENS, len(ids) - 1)
            part = None if routes is None else routes[:, start:stop]
            logits, _ = self._forward(tokens[:, start:stop], mask[:, :stop], cache, part, stop - start)
            log_probs = _drawn_by(logits[0].float(), scoring, start).log_softmax(-1)
            chosen = log_probs.gather(-1, tokens[0, start + 1 : stop + 1, None])[:, 0]
            scores[start + 1 : stop + 1] = chosen.cpu().numpy()
        return scores

    # -- whether it can be done -------------------------------------------------------------------------------------

    @torch.no_grad()
    def _check(self) -> int:
        """Compare a padded batch, read in two parts, with each sequence by itself; return the bytes of a token."""
        kind = type(self.model).__name__
        alone = [torch.arange(1, count + 1, device=self.device)[None] for count in CHECKED]
        found = [self._forward(ids, torch.ones_like(ids).bool(), DynamicCache()) for ids in alone]
        ids, mask = _padded([one[0, :-1].tolist() for one in alone], self.device)
        routes = [None if rows is None else rows[0] for _, rows in found]
        cache: Any = DynamicCache()
        self._forward(ids, mask, cache, self._laid_out([None if one is None else one[:-1] for one in routes], ids))
        if any(type(layer) is not DynamicLayer for layer in cache.layers):
            raise ValueError(f"engine='transformers' cannot serve {kind}: it keeps more than keys and values; try vLLM")
        last = torch.cat([one[:, -1:] for one in alone])
        mask = nn.functional.pad(mask, (0, 1), value=True)
        logits, _ = self._forward(
            last, mask, cache, self._laid_out([None if one is None else one[-1:] for one in routes], last)
        )
        wanted = torch.cat([logits for logits, _ in found])
        worst = (logits - wanted).abs().max().item() / max(wanted.float().std().item(), 1e-6)
        if not worst <= TOLERANCE.get(wanted.dtype, COARSE):
            raise ValueError(
                f"engine='transformers' cannot serve {kind}: in a padded batch its logits are off by {worst:.1e} of "
                "their standard deviation; try vLLM"
            )
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        return int(held // (len(CHECKED) * max(CHECKED)))


def _padded(sequences: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return ids ``[J, S]``, padded on the left with their own first tokens, and the mask of what is not a pad."""
    width = max(map(len, sequences))
    ids = torch.tensor([[one[0]] * (width - len(one)) + list(one) for one in sequences])
    mask = torch.tensor([[False] * (width - len(one)) + [True] * len(one) for one in sequences])
    return ids.to(device), mask.to(device)


def _widened(mask: Tensor, width: int) -> Tensor:
    return nn.functional.pad(mask, (width - mask.shape[1], 0), value=False)


def _wider(states: Tensor, width: int) -> Tensor:
    return nn.functional.pad(states, (0, 0, width - states.shape[2], 0))


def _filled(rows: Rows | None, tokens: int) -> Rows | None:
    """Return rows for all tokens, -1 where none are given."""
    if rows is None:
        return None
    known = np.full((tokens, *rows.shape[1:]), UNSET, rows.dtype)
    known[: len(rows)] = rows
    return known


def _drawn_by(logits: Tensor, scoring: Scoring, start: int) -> Tensor:
    """Return the logits ``[N, V]`` from which the tokens ``start + 1`` to ``start + N`` were drawn."""
    logits = logits / scoring.temperature
    if scoring.kept is None:
        return logits
    sizes, ids = torch.from_numpy(scoring.kept.sizes.copy()), torch.from_numpy(scoring.kept.ids.copy())
    wanted = torch.zeros(len(sizes), dtype=torch.bool)
    wanted[start + 1 : start + 1 + len(logits)] = True
    mask = dense_mask(*select_rows(ids, sizes, wanted), logits.shape[1])
    return logits.masked_fill(~mask.to(logits.device), float("-inf"))
